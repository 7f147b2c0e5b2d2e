// The random Hadamard transform of 16 elements (numerics contract, section 7).
#pragma once

#include "platform.h"

namespace nvfp4 {

// x @ (diag(sign) @ H16 * 0.25), float32, added in the order of the fast transform: distances 1, 2, 4, 8.
NVFP4_HD void hadamard16(float (&x)[kBlock], uint32_t sign) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < kBlock; ++i) x[i] = mul(x[i], sign >> i & 1u ? -0.25f : 0.25f);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int distance = 1; distance < kBlock; distance *= 2) {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kBlock; ++i) {
      if (i & distance) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = add(low, high);
      x[i + distance] = sub(low, high);
    }
  }
}

}  // namespace nvfp4
