// How attention of one token per row divides the machine.
#include <algorithm>
#include <type_traits>

#include "cuda/generation/attend.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/machine.h"

namespace nvfp4 {
namespace step {
namespace {

// Stages of a warp's ring, in so much shared memory.
template <int kDim>
int stages_in(int bytes) {
  const int each = attend_shared_bytes<kDim>(2) - attend_shared_bytes<kDim>(1);
  return std::clamp((bytes - attend_shared_bytes<kDim>(1)) / each + 1, 1, kMostStages);
}

// Clusters that run at a time, each block with all the stages that it may have.
template <typename T, int kDim>
int resident(int cluster) {
  const int most = stages_in<kDim>(this_machine().shared_bytes);
  return resident_clusters<attend_kernel<T, kDim>>(cluster, attend_warps(kDim) * 32, attend_shared_bytes<kDim>(most));
}

template <typename T, int kDim>
void launch_dim(const Attend& p, cudaStream_t stream) {
  resident<T, kDim>(1);  // lets it have its shared memory
  const dim3 grid(p.splits, p.kv_heads * p.passes, p.batch);
  const int cluster = p.partial ? 1 : p.splits;
  const Launch parts(grid, cluster, attend_warps(kDim) * 32, attend_shared_bytes<kDim>(p.stages), stream,
                     Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&parts.config, attend_kernel<T, kDim>, p);
  if (p.partial) {
    attention::launch_combine({partials_of<kDim>(p), p.group, p.dim, p.dtype, p.out}, p.kv_heads, p.batch, stream);
  }
}

// The floats of scratch.
template <typename T, int kDim>
int64_t plan_dim(Attend& p) {
  const Machine& machine = this_machine();
  const int context = p.window > 0 ? std::min(p.window, p.length) : p.length;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.kv_heads * p.passes;
  int cluster = 1;
  while (machine.capability >= 90 && cluster < kMostBlocksInCluster) {
    const int next = 2 * cluster;
    if (rows > resident<T, kDim>(next)) break;  // what is not resident at once would come a whole turn later
    cluster = next;
  }
  const int64_t filling = std::max<int64_t>(machine.multiprocessors / rows, 1);
  p.few_splits = cluster;
  const bool is_long = p.is_long(context) && filling > cluster;
  p.splits = is_long ? static_cast<int>(filling) : cluster;
  // where blocks come in turns, two of them share a multiprocessor
  const int blocks = rows * p.splits > machine.multiprocessors ? 2 : 1;
  p.stages = stages_in<kDim>(machine.shared_bytes / blocks);
  return is_long ? rows * p.splits * partials_of<kDim>(p).floats() : 0;
}

// does(type, dim): for the dtype and the padded dimension of a head.
template <typename Does>
auto for_kernel(const Attend& p, Does does) {
  return for_16_bits(p.dtype, [&](auto type) {
    if (p.dim <= 64) return does(type, std::integral_constant<int, 64>{});
    if (p.dim <= 96) return does(type, std::integral_constant<int, 96>{});
    if (p.dim <= 128) return does(type, std::integral_constant<int, 128>{});
    return does(type, std::integral_constant<int, kMostHeadDim>{});
  });
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
