// Numbers of a warp's lanes, together: sums and maxima in one order, and 8x8 matrices.
#pragma once

#include <cstdint>

namespace nvfp4 {

// Of each kLanes neighbours, for all of them.
template <int kLanes = 32>
__device__ __forceinline__ float sum_of_lanes(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// NaN is dropped.
template <int kLanes = 32>
__device__ __forceinline__ float most_of_lanes(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  return v;
}

// Of pairs of 16-bit numbers.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

}  // namespace nvfp4
