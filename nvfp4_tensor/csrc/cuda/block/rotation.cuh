// EDEN's rotation: eight neighbouring lanes have the 128 columns of one, 16 each. Four of the seven distances of its
// butterflies lie within a lane, three between lanes.
#pragma once

#include "cuda/block/block.cuh"
#include "numerics/eden.h"

namespace nvfp4 {

// A warp's four rotations at a time, row by row. The step is a multiple of a row's rotations where the grid is so
// large: the signs then stay as they are.
struct RotationWalk {
  Walk at;
  uint32_t block;  // this lane's in the rotation

  __device__ __forceinline__ explicit RotationWalk(int64_t rows, int64_t groups)
      : at(rows, groups, 0, 0), block(threadIdx.x % kRotationBlocks) {
    const uint32_t lanes = gridDim.x * blockDim.x / kRotationBlocks;
    const uint32_t width = max(at.width, 1u), step = lanes < width ? lanes : lanes / width * width;
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / kRotationBlocks;
    at = Walk(first < step ? rows : 0, groups, first, step);
  }

  __device__ __forceinline__ bool any() const { return __any_sync(0xFFFFFFFFu, at.inside()); }
};

// What this lane's 16 elements of a rotation are multiplied by, +-2^-3.5.
struct RotationSigns {
  RandomKey key;
  int64_t first_group;
  uint32_t group = 0xFFFFFFFFu;
  float factor[kBlock];

  __device__ __forceinline__ RotationSigns(const int64_t* rng_state, int64_t first)
      : key(RandomKey::of(rng_state[0], rng_state[1], kSignStream)), first_group(first) {}

  __device__ __forceinline__ void move_to(uint32_t next, uint32_t block) {
    if (next == group) return;
    group = next;
    const uint32_t bits = bits_of_block(key.block_words(static_cast<uint64_t>(first_group + next)), block);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) factor[i] = bits >> i & 1u ? -kRotationFactor : kRotationFactor;
  }
};

// Over all 128; all lanes of the warp come here together.
__device__ __forceinline__ void butterflies(float (&x)[kBlock], uint32_t block) {
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (i & distance) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = add(low, high);
      x[i + distance] = sub(low, high);
    }
  }
#pragma unroll
  for (int apart = 1; apart < kRotationBlocks; apart *= 2) {
    const float sign = block & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(0xFFFFFFFFu, x[i], apart));
  }
}

// The columns of this lane's block, zeros past the end; whole: whole blocks that 16-byte loads take.
template <typename T, bool whole>
__device__ __forceinline__ void load_rotation(const Matrix& x, const RotationWalk& walk, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = 0.0f;
  const uint32_t block = walk.at.column * kRotationBlocks + walk.block;
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
                                             float (&v)[kBlock]) {
  load_rotation<T, whole>(x, walk, v);
  signs.move_to(walk.at.column, walk.block);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = mul(v[i], signs.factor[i]);
  butterflies(v, walk.block);
}

// The largest magnitude; NaN where there is one.
__device__ __forceinline__ float magnitude_or_nan(const float (&v)[kBlock]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v[i])));
  return most;
}

// Whether any lane of this one's rotation has something that is not finite.
__device__ __forceinline__ bool is_broken(float most) {
  const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, !is_finite(most));
  return lanes >> (threadIdx.x % 32 & ~(kRotationBlocks - 1)) & ((1u << kRotationBlocks) - 1);
}

// In halves over the blocks of a rotation: i + i+4, then +2, +1.
__device__ __forceinline__ float rotation_sum(float v) {
#pragma unroll
  for (int half = kRotationBlocks / 2; half; half /= 2) v = add(v, __shfl_xor_sync(0xFFFFFFFFu, v, half));
  return v;
}

// Launches a kernel of a RotationWalk over x.
template <auto kernel, int waves = 6, typename... Arguments>
void launch_rotations(const Matrix& x, cudaStream_t stream, Arguments... arguments) {
  launch_walk<kernel, waves>(x.rows * ceil_div(x.columns, kRotation) * kRotationBlocks, stream, x, arguments...);
}

}  // namespace nvfp4
