// From codes to values: four instructions an element.
#pragma once

#include "cuda/block/elements.cuh"
#include "numerics/e2m1.h"

namespace nvfp4 {

// The magnitude of a code is the top of a float32's own encoding, subnormals included, once the exponent's bias is
// that of E2M1: (code << 22) times 2^126, which is exact.
constexpr float kCodeBias = 8.507059173023462e37f;  // 2^126

// A float32 with the sign and the code of element i (0..7) of eight packed ones, still to be times 2^126: the nibble
// goes to the top, and an arithmetic shift spreads its sign over the bits between sign and code.
__device__ __forceinline__ float biased_value(uint32_t codes, int i) {
  const int32_t top = static_cast<int32_t>(codes << (28 - 4 * i));
  return bits_float(static_cast<uint32_t>(top >> 6) & 0x81C00000u);
}

// The values of eight packed codes, times the scale of their block and perhaps further factors.
template <typename... Factors>
__device__ __forceinline__ void decode8(uint32_t codes, float s_b, float (&v)[8], Factors... factors) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = mul(mul(biased_value(codes, i), kCodeBias), s_b);
    ((v[i] = mul(v[i], factors)), ...);
  }
}

// Eight values of T, 16 or 32 bytes, to memory.
template <typename T>
__device__ __forceinline__ void store8(T* to, const float (&v)[8]) {
  if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    Elements<T, 8>::of(v).store(reinterpret_cast<uint4*>(to));
  }
}

}  // namespace nvfp4
