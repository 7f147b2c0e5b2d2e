// Keys and values to codes, in one kernel.
#include "cuda/attention/append.cuh"

namespace nvfp4 {
namespace attention {
namespace {

constexpr int kAppendThreads = 128;

// Grid (threads, keys and values).
template <typename T>
__global__ void __launch_bounds__(kAppendThreads) append_codes_kernel(const __grid_constant__ AppendCodes p) {
  __shared__ AppendShared shared;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  shared.fill(p.spec);
  append_codes<T>(p, blockIdx.y, static_cast<int64_t>(blockIdx.x) * kAppendThreads + threadIdx.x, shared);
}

}  // namespace

void launch_append_codes(const AppendCodes& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(append_threads(p), kAppendThreads)), 2);
  for_dtype(p.dtype, [&](auto type) {
    const Launch launch(grid, 1, kAppendThreads, 0, stream, Begins::kBeforePreviousEnds);
    cudaLaunchKernelEx(&launch.config, append_codes_kernel<decltype(type)>, p);
  });
}

}  // namespace attention
}  // namespace nvfp4
