// The gate of a feed-forward: activation(gate) * up, each step rounded as torch's operators round it.
#include "cuda/block/elements.cuh"
#include "cuda/generation/gate.cuh"
#include "cuda/generation/step.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {
namespace {

constexpr int kThreads = 256;

// Eight elements per thread, aligned.
template <typename T>
__global__ void __launch_bounds__(kThreads) gated_kernel(const __grid_constant__ Gated p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x;
  const int at = (blockIdx.y * kThreads + threadIdx.x) * 8;
  if (at >= p.columns) return;
  const T* from = static_cast<const T*>(p.gate_up) + row * p.columns * 2;
  const auto first = Elements<T, 8>::template load<Read::kAfterWait>(from + (p.interleaved ? 2 * at : at));
  const auto second = Elements<T, 8>::template load<Read::kAfterWait>(from +
                                                                      (p.interleaved ? 2 * at + 8 : p.columns + at));
  T out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float even = i < 4 ? first.value(2 * i % 8) : second.value(2 * i % 8);
    const float odd = i < 4 ? first.value((2 * i + 1) % 8) : second.value((2 * i + 1) % 8);
    const float gate = p.interleaved ? even : first.value(i), up = p.interleaved ? odd : second.value(i);
    out[i] = from_float<T>(gate_of<T>(gate, up, p.activation, p.limit, p.alpha));
  }
  uint4 packed;
  memcpy(&packed, out, 16);
  *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + row * p.columns + at) = packed;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gated_any_kernel(const __grid_constant__ Gated p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x;
  const int at = blockIdx.y * kThreads + threadIdx.x;
  if (at >= p.columns) return;
  const T* from = static_cast<const T*>(p.gate_up) + row * p.columns * 2;
  const float gate = to_float(from[p.interleaved ? 2 * at : at]);
  const float up = to_float(from[p.interleaved ? 2 * at + 1 : p.columns + at]);
  static_cast<T*>(p.out)[row * p.columns + at] = from_float<T>(gate_of<T>(gate, up, p.activation, p.limit, p.alpha));
}

template <typename T>
void launch(const Gated& p, cudaStream_t stream) {
  const bool aligned = p.columns % 8 == 0 && on_16_bytes(p.gate_up);
  const int each = kThreads * (aligned ? 8 : 1);
  const dim3 grid(static_cast<unsigned>(p.rows), (p.columns + each - 1) / each);
  const Launch launch(grid, 1, kThreads, 0, stream, Begins::kBeforePreviousEnds);
  aligned ? cudaLaunchKernelEx(&launch.config, gated_kernel<T>, p)
          : cudaLaunchKernelEx(&launch.config, gated_any_kernel<T>, p);
}

}  // namespace

void launch_gated(const Gated& p, cudaStream_t stream) {
  p.dtype == Dtype::kBf16 ? launch<__nv_bfloat16>(p, stream) : launch<__half>(p, stream);
}

}  // namespace step
}  // namespace nvfp4
