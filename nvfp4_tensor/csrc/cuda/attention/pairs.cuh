// Pairs of 16-bit floats in a register, and bytes of memory as words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/block/elements.cuh"
#include "cuda/ptx/lanes.cuh"
#include "numerics/platform.h"

namespace nvfp4 {
namespace attention {

using Bf16 = __nv_bfloat16;

__device__ __forceinline__ float exp2_of(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// Two packed elements.
template <typename T>
struct Pair {
  uint32_t bits;
  __device__ __forceinline__ explicit Pair(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ float low() const {
    if constexpr (std::is_same_v<T, Bf16>) return bits_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
  __device__ __forceinline__ float high() const {
    if constexpr (std::is_same_v<T, Bf16>) return bits_float(bits & 0xFFFF0000u);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits >> 16)));
  }
};

// Bytes to words: what is not a whole word has zeros above.
template <int kBytes, int kWords>
__device__ __forceinline__ void load_bytes(const uint8_t* from, uint32_t (&to)[kWords]) {
  if constexpr (kBytes == 1) {
    to[0] = *from;
  } else if constexpr (kBytes == 2) {
    to[0] = *reinterpret_cast<const uint16_t*>(from);
  } else if constexpr (kBytes == 4) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
}

// A query times H, over the largest power of two that divides a head. A lane has kEach elements, side by side where
// they are an even number, else 32 apart.
template <int kEach>
__device__ __forceinline__ void rotate_query(float (&v)[kEach], int lane) {
#pragma unroll
  for (int distance = 1; kEach % 2 == 0 && distance < kEach; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i & distance) continue;
      const float a = v[i], b = v[i + distance];
      v[i] = a + b, v[i + distance] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const bool second = lane & distance;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
      v[i] = second ? other - v[i] : v[i] + other;
    }
  }
}

}  // namespace attention
}  // namespace nvfp4
