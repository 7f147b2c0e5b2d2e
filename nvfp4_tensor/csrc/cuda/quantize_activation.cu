// The few rows that a decoding step quantizes, amax included, in one kernel: quantized and decoded in registers.
//
// One cluster of blocks covers all of x, so that the amax needs no second kernel: each thread loads its blocks of 16,
// the blocks of threads tell one another their largest magnitudes, and every thread goes on with what it holds.
#include "block.cuh"
#include "decode.cuh"
#include "finite.cuh"
#include "launch.h"
#include "shared.cuh"

namespace nvfp4 {
namespace {

constexpr int kActivationThreads = 512;
// Blocks of 16 that a thread holds at most. Beyond, a kernel for the amax and another one on all multiprocessors take
// no longer. H200, 14336 x 8192, us more than the product alone at M = 8, 16, 32, 64: 2.8, 5.6, 6.9, 12.6, where a
// thread had 1, 2, 4 and 8; with two kernels 5.8, 6.1, 5.7, 6.2.
constexpr int kHeld = 2;

__device__ __forceinline__ float cluster_max(float v, int blocks) {
  __shared__ float of_warp[kActivationThreads / 32], of_block;
  v = __uint_as_float(warp_max(__float_as_uint(v)));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < kActivationThreads / 32 ? of_warp[threadIdx.x] : 0.0f;
    v = __uint_as_float(warp_max(__float_as_uint(v)));
    if (threadIdx.x == 0) of_block = v;
  }
  if (blocks == 1) {
    __syncthreads();
    return of_block;
  }
  cluster_sync();
  float most = 0.0f;
  for (int rank = 0; rank < blocks; ++rank) most = fmaxf(most, load_from_rank(&of_block, rank));
  return most;
}

template <typename T>
__device__ __forceinline__ void write_block(T* to, const Elements<T, kBlock>& block, const TensorScale& tensor,
                                            ScaleRounding rounding) {
  const uint8_t s_bits = scale_from_bits<T>(block.amax_bits(), tensor.sixth, rounding);
  const float s_b = e4m3_value(s_bits);
  const uint2 codes = encode16<Fast::kNearestEven>(block, s_bits, tensor.block_encode(s_b), DrawSource{}, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(mul(biased_value(half ? codes.y : codes.x, i), kCodeBias), s_b);
    store8(to + half * 8, v);
  }
}

template <typename T>
__global__ void __launch_bounds__(kActivationThreads) quantize_activation(Matrix x, QuantizeSpec spec, float* factor,
                                                                          T* out) {
  wait_for_previous_kernel();
  let_next_kernel_begin();  // not before: what begins then may rely on all kernels but this one, as Inductor's do
  const uint32_t first = blockIdx.x * kActivationThreads + threadIdx.x, step = gridDim.x * kActivationThreads;
  Elements<T, kBlock> held[kHeld];
  Walk at(x.rows, x.blocks(), first, step);
#pragma unroll
  for (int i = 0; i < kHeld; ++i, at.step()) {
    held[i] = at.inside() ? Elements<T, kBlock>::load(element_at<T>(x, at.row, at.column * kBlock))
                          : Elements<T, kBlock>::zero();
  }
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most = max(most, finite_amax_bits(held[i]));
  const float amax = cluster_max(Elements<T, kBlock>::magnitude_of(most), gridDim.x);
  const TensorScale tensor = TensorScale::of(amax, spec.scale_ceiling);
  if (first == 0) *factor = per_tensor_scale(amax, spec.scale_ceiling);

  const uint32_t blocks = x.rows * x.blocks();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t own = first + i * step;
    if (own < blocks) write_block(out + static_cast<int64_t>(own) * kBlock, held[i], tensor, spec.scale_rounding);
  }
  if (gridDim.x > 1) cluster_wait_all();
}

}  // namespace

bool fits_quantize_activation(const Matrix& x, const QuantizeSpec& spec) {
  const int64_t blocks = x.rows * x.blocks();
  return this_machine().capability >= 90 && blocks > 0 && blocks <= kMostBlocksInCluster * kActivationThreads * kHeld &&
         x.whole_blocks() && spec.round_mode == RoundingMode::kNearestEven && spec.hadamard_sign < 0 &&
         spec.four_over_six == FourOverSix::kNone && spec.block_rows == 1;
}

void launch_quantize_activation(const Matrix& x, const QuantizeSpec& spec, float* factor, void* out,
                                cudaStream_t stream) {
  const int64_t blocks = x.rows * x.blocks();
  unsigned grid = 1;  // a block of threads while it holds all of x, then a power of two of them
  while (grid < kMostBlocksInCluster && grid * kActivationThreads < blocks) grid *= 2;
  const Launch launch(dim3(grid), grid, kActivationThreads, 0, stream, Begins::kBeforePreviousEnds);
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    cudaLaunchKernelEx(&launch.config, quantize_activation<T>, x, spec, factor, static_cast<T*>(out));
  });
}

}  // namespace nvfp4
