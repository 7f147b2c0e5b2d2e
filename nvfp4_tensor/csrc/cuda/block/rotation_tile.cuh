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

struct RotationOrder {
  __device__ __forceinline__ static uint32_t swizzle(uint32_t row) { return row / 32 * 2 + row % 2; }
};

// Lanes by row and by column have in common `line`: the tile's row or column, in the first turn.

// Lane 8 * part + 2 * a + b of warp w has row 32 * a + 2 * (8 * turn + w) + b.
struct RowLane : RotationLane<kLaneBlocks, 8> {
  static constexpr int kLinesATurn = 16;
  uint32_t line;
  uint32_t from[kLaneChunks];  // where the chunks lie in the first turn, in bytes

  __device__ __forceinline__ RowLane() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    line = lane % 8 / 2 * 32 + warp * 2 + lane % 2, part = lane / 8;
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      from[k] = (line * kChunks + ((part * kLaneChunks + k) ^ RotationOrder::swizzle(line))) * 16;
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
struct ColumnLane : RotationLane<kLaneBlocks, 1> {
  static constexpr int kLinesATurn = kTile / kTurns;
  uint32_t line;
  uint32_t from;  // where this lane's row of the first ldmatrix lies in the first turn, in bytes

  __device__ __forceinline__ ColumnLane() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = lane % 8;
    line = warp * 8 + lane / 4, part = lane % 4;
    const uint32_t row = i / 2 * 32 + i % 2 + lane / 8 * 2;
    from = (row * kChunks + (warp ^ RotationOrder::swizzle(row))) * 16;
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
  lane.butterflies(y);
}

// A thread's blocks of a tile for ValueRows (pair_rows.cuh), eight rows apart.
struct RotationRows : RotationOrder {
  static constexpr int kStep = 8;
  uint32_t block, first;

  __device__ __forceinline__ RotationRows() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    block = lane % 4 + 4 * (warp % 2), first = warp / 2 * 32 + lane / 8 * 2 + lane / 4 % 2;
  }
};

// Mask `thread` (0..63) of a rotation's signs.
__device__ __forceinline__ void write_sign_masks(const RandomKey& key, uint64_t group, uint32_t thread,
                                                 uint32_t* masks) {
  const uint32_t bits = bits_of_block(key.block_words(group), thread / 8) >> (thread % 8 * 2);
  masks[thread] = (bits & 1u) << 15 | (bits & 2u) << 30;
}

}  // namespace nvfp4
