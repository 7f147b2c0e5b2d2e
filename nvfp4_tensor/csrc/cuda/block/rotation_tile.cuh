// A tile of 128 x 128 bfloat16 in shared memory whose rows, and whose columns, are EDEN's rotations.
//
// Four lanes have a rotation, two neighbouring blocks of it each: five of the seven distances of its butterflies lie
// within a lane, two between lanes. A lane reads its 32 elements of a row by four 16-byte loads; those of a column come
// from ldmatrix, transposed, which takes any eight rows: of each of the four lanes the same two. Both ways a lane has
// its elements in order, two a word.
//
// 16-byte chunk c of row r lies at chunk c ^ (r / 32 * 2 + r % 2): the eight rows that one ldmatrix, or eight lanes,
// read at a time then fall into different banks.
#pragma once

#include "cuda/block/eden.cuh"
#include "cuda/block/pair_tile.cuh"
#include "cuda/block/rotation.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {

constexpr int kLaneBlocks = 2;                                      // of a rotation, in a lane
constexpr int kLaneElements = kLaneBlocks * kBlock;                 // 32
constexpr int kLaneWords = kLaneElements / 2;                       // of two bfloat16
constexpr int kLaneChunks = kLaneElements * 2 / 16;                 // of 16 bytes
constexpr int kSignWords = kRotation / 2;                           // masks with the sign bits of two elements
constexpr int kTurns = kTile * kTile / (kThreads * kLaneElements);  // in which the threads read a tile once

__device__ __forceinline__ uint32_t rotation_swizzle(uint32_t row) { return row / 32 * 2 + row % 2; }

struct RotationTile {
  uint4 chunk[kTile][kChunks];

  // As load_tile, in this tile's order.
  __device__ __forceinline__ void load(const Matrix& x, uint32_t row0, uint32_t column0) {
    load_tile(x, row0, column0, chunk, [](uint32_t first, int i) { return first / 32 * 2 + i % 2; });
  }
};

// What rows and columns have in common. `apart`: lanes between neighbouring parts of a rotation.
template <int apart_>
struct RotationLane {
  static constexpr int apart = apart_;
  uint32_t line;  // the tile's row or column, in the first turn
  uint32_t part;  // of the rotation: elements 32 * part on
};

// Lane 8 * part + 2 * a + b of warp w has row 32 * a + 2 * (8 * turn + w) + b.
struct RowLane : RotationLane<8> {
  static constexpr int kLinesATurn = 16;
  uint32_t from[kLaneChunks];  // where the chunks lie in the first turn, in bytes

  __device__ __forceinline__ RowLane() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    line = lane % 8 / 2 * 32 + warp * 2 + lane % 2, part = lane / 8;
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      from[k] = (line * kChunks + ((part * kLaneChunks + k) ^ rotation_swizzle(line))) * 16;
    }
  }

  // Of chunk k in shared memory, where the tile begins at `tile`.
  __device__ __forceinline__ uint32_t address(uint32_t tile, int turn, int k) const {
    return tile + from[k] + turn * kLinesATurn * kChunks * 16;
  }

  __device__ __forceinline__ void load(uint32_t tile, int turn, uint32_t (&word)[kLaneWords]) const {
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      const uint4 v = load_shared_16(address(tile, turn, k));
      word[4 * k] = v.x, word[4 * k + 1] = v.y, word[4 * k + 2] = v.z, word[4 * k + 3] = v.w;
    }
  }
};

// Lane 4 * a + part of warp w has column 8 * (8 * turn + w) + a.
struct ColumnLane : RotationLane<1> {
  static constexpr int kLinesATurn = kTile / kTurns;
  uint32_t from;  // where this lane's row of the first ldmatrix lies in the first turn, in bytes

  __device__ __forceinline__ ColumnLane() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = lane % 8;
    line = warp * 8 + lane / 4, part = lane % 4;
    const uint32_t row = i / 2 * 32 + i % 2 + lane / 8 * 2;
    from = (row * kChunks + (warp ^ rotation_swizzle(row))) * 16;
  }

  __device__ __forceinline__ void load(uint32_t tile, int turn, uint32_t (&word)[kLaneWords]) const {
#pragma unroll
    for (int k = 0; k < kLaneWords / 4; ++k) {  // eight rows on
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word[4 * k]), "=r"(word[4 * k + 1]), "=r"(word[4 * k + 2]), "=r"(word[4 * k + 3])
                   : "r"(tile + from + turn * (kChunks / kTurns) * 16 + k * 8 * kChunks * 16)
                   : "memory");
    }
  }
};

// EDEN's butterflies over a rotation, by the four lanes that have it.
template <typename Lane>
__device__ __forceinline__ void lane_butterflies(const Lane& lane, float (&y)[kLaneBlocks][kBlock]) {
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (i & distance) continue;
      float &low = y[i / kBlock][i % kBlock], &high = y[i / kBlock][i % kBlock + distance];
      const float sum = add(low, high);
      high = sub(low, high), low = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float sum = add(y[0][i], y[1][i]);
    y[1][i] = sub(y[0][i], y[1][i]), y[0][i] = sum;
  }
#pragma unroll
  for (int apart = 1; apart < kRotationBlocks / kLaneBlocks; apart *= 2) {
    const float sign = lane.part & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      float& v = y[i / kBlock][i % kBlock];
      v = __fmaf_rn(v, sign, __shfl_xor_sync(0xFFFFFFFFu, v, apart * Lane::apart));
    }
  }
}

// Four of a lane's masks of signs: those of chunk k. signs: the rotation's in shared memory.
template <typename Lane>
__device__ __forceinline__ uint4 sign_masks(const Lane& lane, uint32_t signs, int k) {
  return load_shared_16(signs + (lane.part * kLaneWords + 4 * k) * 4);
}

// The rotated elements of a lane.
template <typename Lane>
__device__ __forceinline__ void rotate_words(const Lane& lane, const uint32_t (&word)[kLaneWords], uint32_t signs,
                                             float (&y)[kLaneBlocks][kBlock]) {
#pragma unroll
  for (int k = 0; k < kLaneWords / 4; ++k) {
    const uint4 mask = sign_masks(lane, signs, k);
    const uint32_t masks[4] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = word[4 * k + i] ^ masks[i];
      float* to = &y[k / 2][k % 2 * 8 + 2 * i];
      to[0] = mul(bits_float(pair << 16), kRotationFactor);
      to[1] = mul(bits_float(pair & 0xFFFF0000u), kRotationFactor);
    }
  }
  lane_butterflies(lane, y);
}

// Whether any lane of this one's rotation has something that is not finite.
template <typename Lane>
__device__ __forceinline__ bool is_rotation_broken(bool finite) {
  constexpr uint32_t kMask = Lane::apart == 1 ? 0xFu : 0x01010101u;
  const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, !finite), lane = threadIdx.x % 32;
  return lanes >> (Lane::apart == 1 ? lane & ~3u : lane % 8) & kMask;
}

// Over the eight blocks of a rotation, in halves: i + i+4, then +2, +1.
template <typename Lane>
__device__ __forceinline__ float rotation_total(float first, float second) {
#pragma unroll
  for (int apart = kRotationBlocks / kLaneBlocks / 2; apart; apart /= 2) {
    first = add(first, __shfl_xor_sync(0xFFFFFFFFu, first, apart * Lane::apart));
    second = add(second, __shfl_xor_sync(0xFFFFFFFFu, second, apart * Lane::apart));
  }
  return add(first, second);
}

// A thread's blocks of a tile for values_by_rows (tile_values.cuh), eight rows apart.
struct RotationRows {
  static constexpr int kStep = 8;
  uint32_t block, first, swizzle;

  __device__ __forceinline__ RotationRows() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    block = lane % 4 + 4 * (warp % 2);
    first = warp / 2 * 32 + lane / 8 * 2 + lane / 4 % 2, swizzle = rotation_swizzle(first);
  }
};

// Mask `thread` (0..63) of a rotation's signs.
__device__ __forceinline__ void write_sign_masks(const RandomKey& key, uint64_t group, uint32_t thread,
                                                 uint32_t* masks) {
  const uint32_t bits = bits_of_block(key.block_words(group), thread / 8) >> (thread % 8 * 2);
  masks[thread] = (bits & 1u) << 15 | (bits & 2u) << 30;
}

}  // namespace nvfp4
