// An amax as maxima of parts of a tensor, one of each thread block of the kernel that looks for it: the kernel that
// quantizes takes the largest, so that no kernel has to clear an amax first.
#pragma once

#include <functional>

#include "cuda/host/kernels.h"

namespace nvfp4 {

// Of x, and, for a pair, of its transpose after it.
struct Maxima {
  const float* rows;
  int count;
  const float* columns() const { return rows + count; }
};

// scratch gives the memory; neither takes an empty matrix. fits: contiguous and aligned.
bool fits_maxima(const Matrix& x);
Maxima launch_maxima(const Matrix& x, const std::function<void*(int64_t)>& scratch, cudaStream_t stream);
// bfloat16, whole blocks; the transpose is Hadamard-transformed.
Maxima launch_maxima_of_pair(const Matrix& x, int hadamard_sign, const std::function<void*(int64_t)>& scratch,
                             cudaStream_t stream);

// As in kernels.h, from so many maxima at how.amax (one is an amax, whose sign is left out).
void launch_quantize_tiles(const Matrix& x, const Quantization& how, int maxima, const Codes& out, cudaStream_t stream);
void launch_quantize_pair_values(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                                 int maxima, void* values, void* values_transposed, const Codes& codes_transposed,
                                 cudaStream_t stream);

#ifdef __CUDACC__

// The amax of a tensor. All threads of the thread block, of whole warps, come here together.
__device__ __forceinline__ float largest_amax(const Quantization& how, int maxima) {
  if (maxima == 1) return fabsf(*how.amax);
  __shared__ float of_warp[32];
  float most = 0.0f;
  for (int i = threadIdx.x; i < maxima; i += blockDim.x) most = fmaxf(most, how.amax[i]);
  most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
  __syncthreads();  // what an earlier call left has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; ++i) most = fmaxf(most, of_warp[i]);
  return most;
}

#endif  // __CUDACC__

}  // namespace nvfp4
