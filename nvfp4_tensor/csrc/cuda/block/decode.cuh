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

// Eight values of T, 16 or 32 bytes, to memory.
template <typename T>
__device__ __forceinline__ void store8(T* to, const float (&v)[8]) {
  if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        memcpy(&word[i], &pair, 4);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        memcpy(&word[i], &pair, 4);
      }
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace nvfp4
