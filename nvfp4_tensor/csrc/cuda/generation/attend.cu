// How attention of one token per row divides the machine.
#include <algorithm>
#include <type_traits>

#include "cuda/generation/attend.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/machine.h"

namespace nvfp4 {
namespace step {
namespace {

// Tokens of a block from which on another kernel that combines pays, where that fills the machine and clusters do not.
constexpr int kLongShare = 1024;

template <typename T, int kDim>
void launch_dim(const Attend& p, cudaStream_t stream) {
  constexpr int kShared = sizeof(AttendShared<kDim>);
  const dim3 grid(p.splits, p.kv_heads * p.passes, p.batch);
  if (p.partial) {
    resident_clusters<attend_kernel<T, kDim, true>>(1, kAttendThreads, kShared);  // lets it have its shared memory
    const Launch parts(grid, 1, kAttendThreads, kShared, stream, Begins::kBeforePreviousEnds);
    cudaLaunchKernelEx(&parts.config, attend_kernel<T, kDim, true>, p);
    const Launch whole(dim3(p.heads, p.batch), 1, kDim, 0, stream, Begins::kBeforePreviousEnds);
    cudaLaunchKernelEx(&whole.config, combine_kernel<T, kDim>, p);
  } else {
    resident_clusters<attend_kernel<T, kDim, false>>(p.splits, kAttendThreads, kShared);
    const Launch one(grid, p.splits, kAttendThreads, kShared, stream, Begins::kBeforePreviousEnds);
    cudaLaunchKernelEx(&one.config, attend_kernel<T, kDim, false>, p);
  }
}

// The floats of scratch.
template <typename T, int kDim>
int64_t plan_dim(Attend& p) {
  const Machine& machine = this_machine();
  const int context = p.window > 0 ? std::min(p.window, p.length) : p.length;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.kv_heads * p.passes;
  const int64_t useful = (context + kTile - 1) / kTile;  // blocks, with one tile each
  int cluster = 1;
  while (machine.capability >= 90 && cluster < std::min<int64_t>(kMostBlocksInCluster, useful)) {
    const int next = 2 * cluster;
    // what is not resident at once would come a whole turn later
    if (rows > resident_clusters<attend_kernel<T, kDim, false>>(next, kAttendThreads, sizeof(AttendShared<kDim>)))
      break;
    cluster = next;
  }
  const int64_t filling = std::max<int64_t>(machine.multiprocessors / rows, 1);
  const bool is_long = context / cluster > kLongShare && filling > cluster;
  p.splits = is_long ? static_cast<int>(filling) : cluster;
  return is_long ? rows * p.splits * static_cast<int64_t>(sizeof(Partial<kDim>) / 4) : 0;
}

// does(type, dim): for the dtype and the padded dimension of a head.
template <typename Does>
auto for_kernel(const Attend& p, Does does) {
  const auto for_dim = [&](auto type) {
    if (p.dim <= 64) return does(type, std::integral_constant<int, 64>{});
    if (p.dim <= 96) return does(type, std::integral_constant<int, 96>{});
    if (p.dim <= 128) return does(type, std::integral_constant<int, 128>{});
    return does(type, std::integral_constant<int, kMostHeadDim>{});
  };
  return p.dtype == Dtype::kBf16 ? for_dim(__nv_bfloat16{}) : for_dim(__half{});
}

}  // namespace

int64_t plan_attend(Attend& p) {
  p.group = p.heads / p.kv_heads;
  p.passes = (p.group + kHeads - 1) / kHeads;
  return for_kernel(p, [&](auto type, auto dim) { return plan_dim<decltype(type), dim.value>(p); });
}

void launch_attend(const Attend& p, cudaStream_t stream) {
  for_kernel(p, [&](auto type, auto dim) { launch_dim<decltype(type), dim.value>(p, stream); });
}

}  // namespace step
}  // namespace nvfp4
