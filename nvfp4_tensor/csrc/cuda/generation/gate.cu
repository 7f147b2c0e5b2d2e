// The gate of a feed-forward: activation(gate) * up, each step rounded as torch's operators round it.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "cuda/generation/gate.cuh"
#include "cuda/generation/step.h"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {
namespace {

constexpr int kThreads = 256;

// Eight elements a thread, or, unaligned, one.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) gated_kernel(const __grid_constant__ Gated p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x;
  const int at = (blockIdx.y * kThreads + threadIdx.x) * (kAligned ? 8 : 1);
  if (at >= p.columns) return;
  const T* from = static_cast<const T*>(p.gate_up) + row * p.columns * 2 + (p.interleaved ? 2 * at : at);
  T* const out = static_cast<T*>(p.out) + row * p.columns + at;
  const auto gated = [&](float gate, float up) { return gate_of<T>(gate, up, p.activation, p.limit, p.alpha); };
  if constexpr (kAligned) {
    const auto first = Elements<T, 8>::template load<Read::kAfterWait>(from);
    const auto second = Elements<T, 8>::template load<Read::kAfterWait>(from + (p.interleaved ? 8 : p.columns));
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto& half = i < 4 ? first : second;
      const float even = half.value(2 * i % 8), odd = half.value((2 * i + 1) % 8);
      v[i] = gated(p.interleaved ? even : first.value(i), p.interleaved ? odd : second.value(i));
    }
    store8(out, v);
  } else {
    *out = from_float<T>(gated(to_float(*from), to_float(from[p.interleaved ? 1 : p.columns])));
  }
}

}  // namespace

void launch_gated(const Gated& p, cudaStream_t stream) {
  const bool is_aligned = p.columns % 8 == 0 && on_16_bytes(p.gate_up);
  const int each = kThreads * (is_aligned ? 8 : 1);
  const dim3 grid(static_cast<unsigned>(p.rows), (p.columns + each - 1) / each);
  const Launch launch(grid, 1, kThreads, 0, stream, Begins::kBeforePreviousEnds);
  for_16_bits(p.dtype, [&](auto type) {
    for_flag(is_aligned,
             [&](auto aligned) { cudaLaunchKernelEx(&launch.config, gated_kernel<decltype(type), aligned.value>, p); });
  });
}

}  // namespace step
}  // namespace nvfp4
