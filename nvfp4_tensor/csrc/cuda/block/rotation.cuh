// EDEN's rotation among lanes, and that of matrices: eight neighbouring lanes have the 128 columns of one, 16 each.
// Four of the seven distances of its butterflies lie within a lane then, three between lanes.
#pragma once

#include "cuda/block/block.cuh"
#include "numerics/eden.h"

namespace nvfp4 {

// How lanes have a rotation: so many neighbouring blocks each, the next ones `apart` lanes away.
template <int blocks, int apart>
struct RotationLane {
  static constexpr int kBlocks = blocks, kApart = apart, kLanes = kRotationBlocks / blocks;
  static constexpr int kElements = blocks * kBlock;
  uint32_t part;  // of the rotation: blocks kBlocks * part on

  // Over all 128; all lanes of the warp come here together, as below.
  __device__ __forceinline__ void butterflies(float (&x)[kBlocks][kBlock]) const {
#pragma unroll
    for (int distance = 1; distance < kElements; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i & distance) continue;
        float &low = x[i / kBlock][i % kBlock], &high = x[(i + distance) / kBlock][(i + distance) % kBlock];
        const float sum = add(low, high);
        high = sub(low, high), low = sum;
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      const float sign = part & lanes ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        float& v = x[i / kBlock][i % kBlock];
        v = __fmaf_rn(v, sign, __shfl_xor_sync(0xFFFFFFFFu, v, lanes * kApart));
      }
    }
  }

  // Whether any lane of this one's rotation has something that is not finite.
  __device__ __forceinline__ static bool is_broken(bool finite) {
    static_assert(kApart == 1 || kApart == 32 / kLanes);
    const uint32_t broken = __ballot_sync(0xFFFFFFFFu, !finite), lane = threadIdx.x % 32;
    if constexpr (kApart == 1) return broken >> (lane & ~(kLanes - 1)) & ((1u << kLanes) - 1);
    return broken >> lane % kApart & 0xFFFFFFFFu / ((1u << kApart) - 1);
  }

  // In halves over the blocks of a rotation: i + i+4, then +2, +1.
  __device__ __forceinline__ static float sum(float (&v)[kBlocks]) {
#pragma unroll
    for (int lanes = kLanes / 2; lanes; lanes /= 2) {
#pragma unroll
      for (float& of_block : v) of_block = add(of_block, __shfl_xor_sync(0xFFFFFFFFu, of_block, lanes * kApart));
    }
    return kBlocks == 1 ? v[0] : add(v[0], v[kBlocks - 1]);
  }
};

// A warp's four rotations at a time, row by row. The step is a multiple of a row's rotations where the grid is so
// large: the signs then stay as they are.
struct RotationWalk : RotationLane<1, 1> {
  Walk at;

  __device__ __forceinline__ explicit RotationWalk(const Matrix& x)
      : RotationWalk(x.rows, ceil_div(x.columns, kRotation)) {}

  __device__ __forceinline__ RotationWalk(int64_t rows, int64_t groups)
      : RotationLane{threadIdx.x % kRotationBlocks}, at(rows, groups, 0, 0) {
    const uint32_t lanes = gridDim.x * blockDim.x / kRotationBlocks;
    const uint32_t width = max(at.width, 1u), step = lanes < width ? lanes : lanes / width * width;
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / kRotationBlocks;
    at = Walk(first < step ? rows : 0, groups, first, step);
  }

  __device__ __forceinline__ bool any() const { return __any_sync(0xFFFFFFFFu, at.inside()); }
  __device__ __forceinline__ uint32_t block() const { return at.column * kRotationBlocks + part; }  // in the row
  // Among all blocks of what is rotated.
  __device__ __forceinline__ int64_t number() const {
    return (static_cast<int64_t>(at.row) * at.width + at.column) * kRotationBlocks + part;
  }
};

// What this lane's 16 elements of a rotation are multiplied by, +-2^-3.5.
struct RotationSigns {
  RandomKey key;
  int64_t first_group;
  uint32_t group = 0xFFFFFFFFu;
  float factor[kBlock];

  __device__ __forceinline__ explicit RotationSigns(const Rotation& rotation)
      : key(RandomKey::of(rotation.rng_state[0], rotation.rng_state[1], kSignStream)),
        first_group(rotation.first_group) {}

  __device__ __forceinline__ void apply(const RotationWalk& walk, float (&x)[kBlock]) {
    if (walk.at.column != group) {
      group = walk.at.column;
      const uint32_t bits = bits_of_block(key.block_words(static_cast<uint64_t>(first_group + group)), walk.part);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) factor[i] = bits >> i & 1u ? -kRotationFactor : kRotationFactor;
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = mul(x[i], factor[i]);
  }
};

// The columns of this lane's block, zeros past the end; whole: whole blocks that 16-byte loads take.
template <typename T, bool whole>
__device__ __forceinline__ void load_rotation(const Matrix& x, const RotationWalk& walk, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = 0.0f;
  const uint32_t block = walk.block();
  if (!walk.at.inside() || block * kBlock >= x.columns) return;
  if constexpr (whole) {
    const auto elements = Elements<T, kBlock>::load(element_at<T>(x, walk.at.row, block * kBlock));
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = elements.value(i);
  } else {
    load_block<T>(x, walk.at.row, block, v);
  }
}

template <typename T, bool whole>
__device__ __forceinline__ void load_rotated(const Matrix& x, const RotationWalk& walk, RotationSigns& signs,
                                             float (&v)[1][kBlock]) {
  load_rotation<T, whole>(x, walk, v[0]);
  signs.apply(walk, v[0]);
  walk.butterflies(v);
}

// The largest magnitude; NaN where there is one.
__device__ __forceinline__ float magnitude_or_nan(const float (&v)[kBlock]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v[i])));
  return most;
}

// Launches a kernel of a RotationWalk over x.
template <auto kernel, typename... Arguments>
void launch_rotations(const Matrix& x, cudaStream_t stream, Arguments... arguments) {
  launch_walk<kernel, 6>(x.rows * ceil_div(x.columns, kRotation) * kRotationBlocks, stream, x, arguments...);
}

}  // namespace nvfp4
