// The largest finite magnitude of elements in registers.
#pragma once

#include "cuda/block/elements.cuh"

namespace nvfp4 {

// As bits of T's width. Only a group that shows a NaN or Inf is looked through element by element.
template <typename T, int N>
__device__ __forceinline__ uint32_t finite_amax_bits(const Elements<T, N>& x) {
  const uint32_t most = x.amax_bits();
  if (most < kInfinity<T>) return most;
  uint32_t finite = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = Elements<T, N>::kPacked ? x.word[i / 2] >> (i % 2 * 16) & 0x7FFFu : x.word[i] & 0x7FFFFFFFu;
    if (bits < kInfinity<T>) finite = max(finite, bits);
  }
  return finite;
}

}  // namespace nvfp4
