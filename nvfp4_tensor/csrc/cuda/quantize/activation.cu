// The rows that a decoding step quantizes, amax included, each thread a block of 16 in its registers.
//
// Few blocks need one kernel: one cluster covers all of x, and its thread blocks tell one another their largest
// magnitudes. More take two: the first leaves the largest magnitude of each of its thread blocks in memory, the second
// is there when it ends. Neither needs memory that holds zero. (The second one loading x before it waits for the first:
// no gain.)
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "cuda/host/launch.h"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace {

constexpr int kActivationThreads = 512;  // of a cluster's blocks
// Of 16 elements, beyond which two kernels take less. H200, 14336 x 8192, us more than the product alone at M = 8, 16,
// 32, 64 and 128: 2.0, 4.3, 4.1, 4.0, 3.8 (single products), 2.5, 3.4, 3.5, 4.0, 3.6 (in a chain). With two kernels at
// M = 8 3.3; where a thread of the cluster had two blocks, M = 16 4.8; with a memset, a kernel that raises an amax from
// zero, and fake_quantize 6.1 to 6.7 from M = 32 on.
constexpr int64_t kMostBlocksByCluster = kMostBlocksInCluster * kActivationThreads;
// 512 x 8192: 4 us more than the product, with those three kernels 7. Nothing larger was measured.
constexpr int64_t kMostActivationBlocks = 1 << 18;

// The largest v of the cluster; magnitudes order like their bits.
__device__ __forceinline__ float cluster_max(float v, int blocks) {
  __shared__ float of_block;
  v = __uint_as_float(block_max(__float_as_uint(v)));
  if (threadIdx.x == 0) of_block = v;
  if (blocks == 1) {
    __syncthreads();
    return of_block;
  }
  cluster_sync();
  float most = 0.0f;
  for (int rank = 0; rank < blocks; ++rank) most = fmaxf(most, load_from_rank(&of_block, rank));
  return most;
}

// The largest of so many maxima, for each warp.
__device__ __forceinline__ float largest_of(const Amax& maxima) {
  float most = 0.0f;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kFewBlocks; i += 32) most = fmaxf(most, i < maxima.maxima ? maxima.at[i] : 0.0f);
  return __uint_as_float(warp_max(__float_as_uint(most)));
}

// A block a thread; maxima: where not by one cluster.
template <typename T, bool by_cluster>
__global__ void __launch_bounds__(by_cluster ? kActivationThreads : kThreads)
    quantize_activation(Matrix x, QuantizeSpec spec, Amax maxima, float* factor, T* out) {
  griddepcontrol_wait();
  // Not before: what begins then may rely on all kernels but this one, as Inductor's do.
  if constexpr (by_cluster) griddepcontrol_launch_dependents();
  const auto block = block_at<T>(x, Walk(x.rows, x.blocks()));
  const uint32_t own = blockIdx.x * blockDim.x + threadIdx.x;
  float amax;
  if constexpr (by_cluster) {
    amax = cluster_max(Elements<T, kBlock>::magnitude_of(finite_amax_bits(block)), gridDim.x);
  } else {
    amax = largest_of(maxima);
    if (gridDim.x <= kFewBlocks) griddepcontrol_launch_dependents();
  }
  const TensorScale tensor = TensorScale::of(amax, spec.scale_ceiling);
  if (own == 0) *factor = per_tensor_scale(amax, spec.scale_ceiling);
  if (own < x.rows * x.blocks()) {
    const uint8_t s_bits = scale_from_bits<T>(block.amax_bits(), tensor.sixth, spec.scale_rounding);
    const float s_b = e4m3_value(s_bits);
    const uint2 codes = encode16<Fast::kNearestEven>(block, s_bits, tensor.block_encode(s_b), DrawSource{}, 0);
    float v[2][8];
    decode8(codes.x, s_b, v[0]), decode8(codes.y, s_b, v[1]);
    T* to = out + static_cast<int64_t>(own) * kBlock;
    store8(to, v[0]), store8(to + 8, v[1]);
  }
  if (by_cluster && gridDim.x > 1) cluster_wait_all();
}

}  // namespace

bool fits_quantize_activation(const Matrix& x, const QuantizeSpec& spec) {
  const int64_t blocks = x.rows * x.blocks();
  return this_machine().capability >= 90 && blocks > 0 && blocks <= kMostActivationBlocks && x.whole_blocks() &&
         spec.round_mode == RoundingMode::kNearestEven && spec.hadamard_sign < 0 &&
         spec.four_over_six == FourOverSix::kNone && spec.scale_search == ScaleSearch::kNone && spec.block_rows == 1;
}

void launch_quantize_activation(const Matrix& x, const QuantizeSpec& spec, float* factor, void* out,
                                const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  const int64_t blocks = x.rows * x.blocks();
  unsigned cluster = 1;
  while (cluster < kMostBlocksInCluster && cluster * kActivationThreads < blocks) cluster *= 2;
  const bool by_cluster = blocks <= kMostBlocksByCluster;
  const Amax maxima = by_cluster ? Amax{} : launch_few_maxima(x, scratch, stream);
  const int threads = by_cluster ? kActivationThreads : kThreads;
  const Launch launch(dim3(static_cast<unsigned>(by_cluster ? cluster : ceil_div(blocks, kThreads))),
                      by_cluster ? cluster : 1, threads, 0, stream, Begins::kBeforePreviousEnds);
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = by_cluster ? quantize_activation<T, true> : quantize_activation<T, false>;
    cudaLaunchKernelEx(&launch.config, kernel, x, spec, maxima, factor, static_cast<T*>(out));
  });
}

}  // namespace nvfp4
