// Few rows of x: x @ w^T with every row of the weight read once, in the vocabulary of matmul_impl.h.
//
// Codes become numbers by one table lookup; the block scales, which would cost a multiplication for each, are applied
// to the sums over a chunk instead: a lane holds elements of one block only.
#pragma once

#include "cpu/matmul_impl.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kFewDepth = 64;  // chunks, shared by the rows of a group of x, which so stay in the first-level cache
constexpr int kFewUnit = 32;  // rows of the weight

template <class Math>
struct Few {
  using Value = typename Math::Value;
  static constexpr int kVectors = Math::kFewVectors, kVectorValues = kChunk / kVectors;

  static_assert(Math::kMostFewRows <= kMostFewRows);

  static int64_t row_values(const Product& p) { return chunks_of(p.columns) * kChunk; }
  static int64_t packed_words(const Product& p) {
    return p.batches * p.x_rows * row_values(p) * int64_t(sizeof(Value)) / int64_t(sizeof(float));
  }
  static int64_t pack_units(const Product& p) { return p.batches * p.x_rows; }

  // Rows of x go in groups of kFewX, those of a group chunk by chunk beside each other.
  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    unsigned range = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t in_group = row % p.x_rows % kFewX, group = row - in_group;
      const int64_t group_rows = least(kFewX, p.x_rows - group % p.x_rows);
      Value* out = reinterpret_cast<Value*>(packed) + group * row_values(p) + in_group * kChunk;
      for (int64_t first = 0; first < row_values(p); first += kChunk, out += group_rows * kChunk) {
        Value values[kChunk];
        range |= load_x(p, row, first, values);
        for (int v = 0; v < kVectors; ++v) {
          for (int i = 0; i < kVectorValues; ++i) out[v * kVectorValues + i] = values[i * kVectors + v];
        }
      }
    }
    return range;
  }

  static int64_t row_units(const Product& p) { return ceil_div(p.rows, kFewUnit); }
  static int64_t units(const Product& p) { return p.batches * row_units(p); }

  // The sums over a chunk of each row, times the scales, to sums[row][x].
  template <int kRows, int kX>
  static __attribute__((always_inline)) inline void add_chunks(const Chunk* chunks, const Value* x, F (*sums)[kX]) {
    F parts[kRows][kX];
    each<kRows>([&](auto r) {
      each<kX>([&](auto m) { parts[r][m] = set(0.0f); });
    });
    each<kVectors>([&](auto v) {
      F w[kRows];
      each<kRows>([&](auto r) { w[r] = Math::template codes<v>(chunks[r]); });
      each<kX>([&](auto m) {
        const F xs = load(reinterpret_cast<const float*>(x + m * kChunk + v * kVectorValues));
        each<kRows>([&](auto r) { parts[r][m] = Math::dot(parts[r][m], w[r], xs); });
      });
    });
    each<kRows>([&](auto r) {
      const F scales = chunks[r].scales;
      each<kX>([&](auto m) { sums[r][m] = multiply_add(parts[r][m], scales, sums[r][m]); });
    });
  }

  // Chunks [begin, end) of rows first, first + 1, .. of the weight with a group of x, to partial sums of whole
  // registers, (kRows, kX, kLanes), which start from zero where `begin` is 0.
  template <int kRows, int kX>
  static void multiply_rows(const Product& p, int64_t first, int64_t begin, int64_t end, const Value* x,
                            float* partial) {
    const int64_t whole = least(end, p.blocks / kChunkBlocks);
    WeightRow rows[kRows];
    F sums[kRows][kX];  // GCC keeps them in registers where each<> unrolls, not where a loop does: 2.5 times faster
    each<kRows>([&](auto r) {
      rows[r] = WeightRow(p, first + r);
      each<kX>([&](auto m) { sums[r][m] = begin ? load(partial + (r * kX + m) * kLanes) : set(0.0f); });
    });
    for (int64_t chunk = begin; chunk < whole; ++chunk) {
      // The next rows: the hardware's own prefetching leaves one thread at 0.55 ms, this at 0.38 (4096^2, M = 1).
      const uint8_t* scales = rows[0].scales + chunk * 2 * kTileBytes + kRows * kTileBytes / 32;
      __builtin_prefetch(scales);
      __builtin_prefetch(scales + kTileBytes);
      Chunk chunks[kRows];
      each<kRows>([&](auto r) {
        __builtin_prefetch(rows[r].codes + chunk * kChunkBytes + kRows * p.blocks * (kBlock / 2));
        chunks[r] = Chunk::whole(rows[r], chunk);
      });
      add_chunks<kRows, kX>(chunks, x + chunk * kX * kChunk, sums);
    }
    if (whole < end) {
      Chunk chunks[kRows];
      each<kRows>([&](auto r) { chunks[r] = Chunk::last(rows[r], whole); });
      add_chunks<kRows, kX>(chunks, x + whole * kX * kChunk, sums);
    }
    each<kRows>([&](auto r) {
      each<kX>([&](auto m) { store(partial + (r * kX + m) * kLanes, sums[r][m]); });
    });
  }

  // Rows [first, first + count) of the weight with a group of kX rows of x: sums[m * kFewUnit + r].
  template <int kX>
  static void multiply_group(const Product& p, int64_t first, int64_t count, const Value* x, float* partial,
                             float* sums) {
    constexpr int rows = few_rows(kX);
    constexpr int64_t part = kFewDepth / kX;
    for (int64_t begin = 0; begin < chunks_of(p.columns) || begin == 0; begin += part) {
      const int64_t end = least(begin + part, chunks_of(p.columns));
      int64_t r = 0;
      for (; r + rows <= count; r += rows) {
        multiply_rows<rows, kX>(p, first + r, begin, end, x, partial + r * kX * kLanes);
      }
      for (; r < count; ++r) multiply_rows<1, kX>(p, first + r, begin, end, x, partial + r * kX * kLanes);
    }
    for (int64_t r = 0; r < count; ++r) {
      for (int m = 0; m < kX; ++m) sums[m * kFewUnit + r] = sum(load(partial + (r * kX + m) * kLanes));
    }
  }

  template <int kX>
  static void multiply_groups(const Product& p, int64_t first, int64_t count, const Value* x, int64_t x_rows,
                              float* partial, float* sums) {
    for (; x_rows >= kX; x_rows -= kX, x += kX * row_values(p), sums += kX * kFewUnit) {
      multiply_group<kX>(p, first, count, x, partial, sums);
    }
    if constexpr (kX > 1) {
      if (x_rows) multiply_groups<kX - 1>(p, first, count, x, x_rows, partial, sums);
    }
  }

  static constexpr int64_t kSumWords = kMostFewRows * kFewUnit;
  static constexpr int64_t kScratchWords = kSumWords + kFewUnit * kFewX * kLanes;

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / row_units(p), row = unit % row_units(p) * kFewUnit;
      const int64_t count = least(kFewUnit, p.rows - row);
      const Value* x = reinterpret_cast<const Value*>(packed) + batch * p.x_rows * row_values(p);
      multiply_groups<kFewX>(p, batch * p.rows + row, count, x, p.x_rows, scratch + kSumWords, scratch);
      for (int64_t m = 0; m < p.x_rows; ++m) finish(p, batch, m, row, count, scratch + m * kFewUnit);
    }
  }

  static constexpr ProductWay way() {
    return {Math::kRefusedByFew, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
