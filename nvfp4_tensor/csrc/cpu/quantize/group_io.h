// Getting groups of blocks in and out: where a group is not 256 neighbouring elements it passes through a buffer on the
// stack, so that the arithmetic sees only full groups, and tails need no code of their own.
#pragma once

#include <algorithm>

#include "cpu/quantize/block_math.h"
#include "numerics/layout.h"

namespace nvfp4::NVFP4_ISA {

// `count` blocks from (row, block) on, in row-major order.
struct Group {
  int64_t row, block;
  int count;

  static Group at(int64_t index, int64_t rows, int64_t blocks) {
    const int64_t first = index * kGroupBlocks;
    return {first / blocks, first % blocks, int(std::min<int64_t>(kGroupBlocks, rows * blocks - first))};
  }

  // Calls f(lane, row, block) for each block.
  template <typename Function>
  void for_each(int64_t blocks, Function f) const {
    int64_t r = row, b = block;
    for (int lane = 0; lane < count; ++lane) {
      f(lane, r, b);
      if (++b == blocks) {
        b = 0;
        ++r;
      }
    }
  }
};

// Whether a full group is contiguous in rows of `columns` elements at that stride.
inline bool is_contiguous(const Group& group, int64_t columns, int64_t row_stride) {
  return group.count == kGroupBlocks &&
         ((group.block + kGroupBlocks) * kBlock <= columns || (columns % kBlock == 0 && row_stride == columns));
}

// The group's 256 elements: in place, or gathered into the buffer and padded with zeros.
template <typename T>
const T* fetch(const Matrix& x, const Group& group, T* buffer) {
  const T* data = static_cast<const T*>(x.data);
  if (is_contiguous(group, x.columns, x.row_stride)) return data + group.row * x.row_stride + group.block * kBlock;
  std::memset(buffer, 0, sizeof(T) * kGroupElements);
  group.for_each(x.blocks(), [&](int lane, int64_t row, int64_t block) {
    const int64_t count = std::min<int64_t>(kBlock, x.columns - block * kBlock);
    std::memcpy(buffer + lane * kBlock, data + row * x.row_stride + block * kBlock, sizeof(T) * count);
  });
  return buffer;
}

// Where to decode a group to: in place, or the buffer, from which `scatter` takes it.
template <typename T>
T* destination(T* out, const Group& group, int64_t columns, T* buffer) {
  return is_contiguous(group, columns, columns) ? out + group.row * columns + group.block * kBlock : buffer;
}

template <typename T>
void scatter(const T* values, T* out, const Group& group, int64_t columns, int64_t blocks, const T* buffer) {
  if (values != buffer) return;
  group.for_each(blocks, [&](int lane, int64_t row, int64_t block) {
    const int64_t count = std::min<int64_t>(kBlock, columns - block * kBlock);
    std::memcpy(out + row * columns + block * kBlock, values + lane * kBlock, sizeof(T) * count);
  });
}

// Calls f(lane, offset of the lane's scale) for runs of 4 scales (contiguous in memory) where it can, else for single
// scales.
template <typename Function>
inline void for_each_scale(const Group& group, int64_t blocks, int64_t column_tiles, Function f) {
  const bool aligned = group.block % 4 == 0 && group.count % 4 == 0;
  if (aligned && group.block + group.count <= blocks) {  // neighbouring tiles of one row
    const int64_t first = scale_offset(group.row, group.block, column_tiles);
    for (int lane = 0; lane < std::min(group.count, kGroupBlocks); lane += 4) {
      f(lane, first + lane / 4 * kTileBytes, std::integral_constant<int, 4>());
    }
  } else if (aligned && blocks % 4 == 0) {
    int64_t row = group.row, block = group.block;
    for (int lane = 0; lane < std::min(group.count, kGroupBlocks); lane += 4) {
      f(lane, scale_offset(row, block, column_tiles), std::integral_constant<int, 4>());
      if ((block += 4) == blocks) {
        block = 0;
        ++row;
      }
    }
  } else {
    group.for_each(blocks, [&](int lane, int64_t row, int64_t block) {
      f(lane, scale_offset(row, block, column_tiles), std::integral_constant<int, 1>());
    });
  }
}

inline void store_scales(uint8_t* scale, int64_t column_tiles, const Group& group, int64_t blocks, I bytes) {
  alignas(16) uint8_t lane_bytes[16];
  store_bytes(lane_bytes, bytes);
  for_each_scale(group, blocks, column_tiles,
                 [&](int lane, int64_t offset, auto width) { std::memcpy(scale + offset, lane_bytes + lane, width); });
}

inline void load_scales(const uint8_t* scale, int64_t column_tiles, const Group& group, int64_t blocks,
                        uint8_t* lane_bytes) {
  for_each_scale(group, blocks, column_tiles,
                 [&](int lane, int64_t offset, auto width) { std::memcpy(lane_bytes + lane, scale + offset, width); });
}

// Codes of a full group go straight to memory, those of the last, partial group through a buffer.
struct CodeTarget {
  alignas(64) uint8_t buffer[kGroupBytes];
  uint8_t* target;
  int count;

  CodeTarget(uint8_t* target, int count) : target(target), count(count) {}
  uint8_t* data() { return count == kGroupBlocks ? target : buffer; }
  void flush() {
    if (count != kGroupBlocks) std::memcpy(target, buffer, count * 8);
  }
};

}  // namespace nvfp4::NVFP4_ISA
