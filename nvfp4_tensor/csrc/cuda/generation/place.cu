// What comes before the attention of one token per row to codes, in one kernel: norms and the rotation, the token into
// a ring, and the oldest token of the ring to codes, which depends on earlier steps only.
#include "cuda/attention/append.cuh"
#include "cuda/generation/head_row.cuh"
#include "cuda/host/launch.h"

namespace nvfp4 {
namespace step {
namespace {

// A warp has a head of queries or of keys of a sequence.
template <typename T, int kDim>
__device__ __forceinline__ void place_token(const Attend& p) {
  __shared__ uint16_t prepared[kAttendWarps][kDim];
  __shared__ float squares[kAttendWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
  const int head = blockIdx.x * kAttendWarps + warp, kv_head = head - p.heads;
  const T* const q_row = static_cast<const T*>(p.qkv) + static_cast<int64_t>(row) * (p.heads + 2 * p.kv_heads) * p.dim;
  const T* const k_row = q_row + p.heads * p.dim;
  float q_unit = 0, k_unit = 0;
  if (p.q_joint) q_unit = joint_unit<kAttendThreads>(q_row, p.heads * p.dim, p.norm.eps, squares);
  if (p.k_joint) k_unit = joint_unit<kAttendThreads>(k_row, p.kv_heads * p.dim, p.norm.eps, squares);
  if (kv_head >= p.kv_heads) return;
  const bool is_key = kv_head >= 0;
  HeadRow<T, kDim> its(p, q_row + head * p.dim, static_cast<int64_t>(row) * p.angle_step, lane);  // keys lie behind
  const void* const weight = is_key ? norm_of_head(p, p.k_norm, p.k_joint, kv_head)
                                    : norm_of_head(p, p.q_norm, p.q_joint, head);
  its.prepare(p, weight, is_key ? k_unit : q_unit, prepared[warp], lane);
  __syncwarp();
  const T* const from = reinterpret_cast<const T*>(prepared[warp]);
  if (!is_key) {
    T* const out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + head) * p.dim;
    for (int d = lane; d < p.dim; d += 32) out[d] = from[d];
    return;
  }
  const int64_t position = p.position[static_cast<int64_t>(row) * p.position_step];
  const int64_t of_row = static_cast<int64_t>(row) * p.kv_heads + kv_head, ring = of_row * p.length;
  const int64_t slot = (position % p.length + p.length) % p.length;
  const T* const value = k_row + (p.kv_heads + kv_head) * p.dim;
  T *const keys = static_cast<T*>(p.keys) + ring * p.dim, *const values = static_cast<T*>(p.values) + ring * p.dim;
  for (int d = lane; d < p.dim; d += 32) keys[slot * p.dim + d] = from[d], values[slot * p.dim + d] = value[d];
}

// Grid (blocks that place: heads of queries and of keys, 8 a block; as many that append keys as values; batch). Those
// that append are of all sequences.
template <typename T, int kDim>
__global__ void __launch_bounds__(kAttendThreads) place_kernel(const __grid_constant__ PlaceOne place, int appending) {
  __shared__ attention::AppendShared shared;
  const int placing = gridDim.x - 2 * appending, block = blockIdx.x - placing;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (block < 0) return place_token<T, kDim>(place.of);
  if (blockIdx.y > 0) return;
  shared.fill(place.append.spec);
  const int64_t thread = static_cast<int64_t>(block % appending) * kAttendThreads + threadIdx.x;
  attention::append_codes<T>(place.append, block / appending, thread, shared);
}

template <typename T, int kDim>
void launch_dim(const PlaceOne& p, cudaStream_t stream) {
  const int heads = p.of.heads + p.of.kv_heads;
  const int appending = static_cast<int>(ceil_div(attention::append_threads(p.append), kAttendThreads));
  const dim3 grid(ceil_div(heads, kAttendWarps) + 2 * appending, p.of.batch);
  const Launch launch(grid, 1, kAttendThreads, 0, stream, Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, place_kernel<T, kDim>, p, appending);
}

}  // namespace

void launch_place_one(const PlaceOne& p, cudaStream_t stream) {
  for_16_bits(p.of.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.of.dim <= 64) return launch_dim<T, 64>(p, stream);
    if (p.of.dim <= 128) return launch_dim<T, 128>(p, stream);
    launch_dim<T, kMostHeadDim>(p, stream);
  });
}

}  // namespace step
}  // namespace nvfp4
