// nvfp4.adamw_step_vector: a thread an element. Norms and biases are small; what counts is that a step is one launch.
#include "cuda/block/block.cuh"
#include "cuda/optimizer/kernels.h"
#include "numerics/adamw.h"

namespace nvfp4 {
namespace {

__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ float value_of(uint16_t bits) { return from_bfloat16(bits); }

template <typename G, typename W>
__global__ void __launch_bounds__(kThreads) adamw_vector(const VectorStep a) {
  const float* h = a.hyper;
  const AdamwNumbers numbers = {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
  const RandomKey key = RandomKey::of(a.rng_state[0], a.rng_state[1], 0);
  W* weight = static_cast<W*>(a.weight);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.count; i += stride) {
    float m = a.m[i], v = a.v[i];
    const float next = stepped_exactly(value_of(weight[i]), value_of(static_cast<const G*>(a.grad)[i]), m, v, numbers);
    a.m[i] = m, a.v[i] = v;
    if constexpr (sizeof(W) == 4) {
      weight[i] = next;
    } else {
      weight[i] = stochastic_bfloat16(next, random16(key.block_words(static_cast<uint64_t>(a.first_block + i)), 0));
    }
  }
}

template <typename G>
void launch_with(const VectorStep& a, cudaStream_t stream) {
  if (a.weight_dtype == Dtype::kFloat) {
    launch_walk<adamw_vector<G, float>>(a.count, stream, a);
  } else {
    launch_walk<adamw_vector<G, uint16_t>>(a.count, stream, a);
  }
}

}  // namespace

void launch_adamw_vector(const VectorStep& a, cudaStream_t stream) {
  if (a.count == 0) return;
  a.grad_dtype == Dtype::kFloat ? launch_with<float>(a, stream) : launch_with<uint16_t>(a, stream);
}

}  // namespace nvfp4
