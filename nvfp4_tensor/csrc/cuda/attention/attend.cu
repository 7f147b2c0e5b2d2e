// How attention to codes divides the machine, its plain kernel, and the combination of what blocks leave.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/attention/codes.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/machine.h"

namespace nvfp4 {
namespace attention {
namespace {

constexpr int kPlainThreads = 256;
constexpr int kCombineThreads = 512;
constexpr int kAtOnce = 9;  // partial results that a thread loads before the first is used
constexpr int kMostSplits = 256;
constexpr int kMostWaves = 16;
constexpr int kBlockCost = 32;  // of a block, beside its tiles

// Any dtype and size. Grid (splits, heads of keys x passes, batch).
__global__ void __launch_bounds__(kPlainThreads) attend_plain_kernel(const __grid_constant__ AttendCodes p) {
  extern __shared__ __align__(16) float memory[];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Place at(p);
  const Sight sight(p, at.b);
  const TileShare share(p, sight.seen(p.front, sight.length));
  PlainUnit unit(p, at, sight, memory);
  unit.dense(share);
  if (p.is_rotated) unit.rotate();
  unit.codes(share);
  unit.leave();
}

// Partial results of a row and one element of its values.
struct Partial {
  float most, total, sum;

  __device__ __forceinline__ static Partial none() { return {kNothing, 0, 0}; }
  __device__ __forceinline__ void add(float weight, const Partial& other) {
    total = __fmaf_rn(weight, other.total, total);
    sum = __fmaf_rn(weight, other.sum, sum);
  }
};

// What blocks left, in one order: a group of threads, one an element, has every groups-th run of kAtOnce blocks, and
// the first group adds up what groups have. So the first few blocks are added one by one, as those of a cluster are,
// and blocks behind them that have nothing change no bit. Grid (heads x tokens, batch), blocks of (threads of a group,
// groups).
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Combine p) {
  __shared__ Partial of_group[kCombineThreads];
  const Partials& of = p.partials;
  const int64_t all_rows = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;  // rows of a head are neighbours
  // In 32 bits: a division of 64 is a call, ahead of the wait.
  const int rows = p.rows, x = static_cast<int>(blockIdx.x), heads = static_cast<int>(gridDim.x) / rows;
  const int row = x % rows, mine = row % of.rows, blocks = of.splits;
  const int d = threadIdx.x, groups = blockDim.y, size = of.floats();
  const bool inside = d < p.size;
  const float* const begin = of.of(static_cast<int64_t>(blockIdx.y) * heads + x / rows, row / of.rows, 0);
  const float* const most_of = begin + of.most() + mine;
  const float* const sum_of = begin + mine * of.size + (inside ? d : 0);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Partial all = Partial::none();
  for (int first = threadIdx.y * kAtOnce; first < blocks; first += kAtOnce * groups) {
    Partial each[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      each[i] = Partial::none();
      const int block = first + i;
      if (block < blocks) {
        const int64_t at = static_cast<int64_t>(block) * size;
        each[i].most = most_of[at], each[i].total = most_of[at + of.rows], each[i].sum = sum_of[at];
      }
    }
    Partial next = {all.most, 0, 0};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) next.most = fmaxf(next.most, each[i].most);
    next.add(exp2f(all.most - next.most), all);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) next.add(exp2f(each[i].most - next.most), each[i]);
    all = next;
  }
  of_group[threadIdx.y * blockDim.x + d] = all;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
  Partial whole = Partial::none();
  for (int group = 0; group < groups; ++group) whole.most = fmaxf(whole.most, of_group[group * blockDim.x + d].most);
  for (int group = 0; group < groups; ++group) {
    const Partial& part = of_group[group * blockDim.x + d];
    whole.add(exp2f(part.most - whole.most), part);
  }
  store_element(p.out, p.dtype, all_rows * p.size + d, whole.total == 0.0f ? 0.0f : whole.sum / whole.total);
}

// Blocks of a kernel that a multiprocessor holds. The first call on a device lets it have its shared memory.
template <auto kKernel>
int resident_blocks(int threads, int shared_bytes) {
  thread_local int known_device = -1, known_bytes = -1, count = 0;
  int device = 0;
  cudaGetDevice(&device);
  if (known_device != device || known_bytes < shared_bytes) {
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kKernel, threads, shared_bytes);
    known_device = device, known_bytes = shared_bytes, count = std::max(count, 1);
  }
  return count;
}

template <int kDim, int kTiles>
int shared_bytes(const AttendCodes& p) {
  if constexpr (kDim == 0) return plain_shared(p.block_rows, p.key_size, p.value_size) * 4;
  else return sizeof(CodesShared<kDim, kTiles>);
}

template <int n>
constexpr std::integral_constant<int, n> kInt;

// does(dim, tiles): of the kernel that serves; 0: the plain one.
template <typename Does>
auto for_kernel(const AttendCodes& p, Does does) {
  const int rows = p.rows();
  if (!p.is_fast) return does(kInt<0>, kInt<2>);
  if (p.key_size == 64) {
    if (rows <= 4) return does(kInt<64>, kInt<1>);
    if (rows <= 8) return does(kInt<64>, kInt<2>);
    return does(kInt<64>, kInt<4>);
  }
  if (p.key_size == 96) {
    if (rows <= 4) return does(kInt<96>, kInt<1>);
    return does(kInt<96>, kInt<2>);
  }
  if (p.key_size == 128) {
    if (rows <= 4) return does(kInt<128>, kInt<1>);
    return does(kInt<128>, kInt<2>);
  }
  return does(kInt<256>, kInt<1>);
}

template <int kDim, int kTiles>
int warps_of() {
  if constexpr (kDim == 0) return kPlainThreads / 32;
  else return Shape<kDim, kTiles>::kWarps;
}

// Shares that fill one wave of blocks or more, each from where on it takes less time than the one before.
ShareCounts share_counts(int64_t units, int64_t slots, int at_once) {
  ShareCounts counts{{}, {}, at_once};
  int64_t waves = ceil_div(units, slots);
  const auto shares_of = [&](int64_t w) { return static_cast<int>(std::min<int64_t>(w * slots / units, kMostSplits)); };
  std::fill_n(counts.from, ShareCounts::kMost, INT_MAX);
  std::fill_n(counts.shares, ShareCounts::kMost, shares_of(waves));
  int known = 1;
  for (int64_t next = waves + 1; next <= kMostWaves && known < ShareCounts::kMost; ++next) {
    const int before = counts.shares[known - 1], shares = shares_of(next);
    const double gained = static_cast<double>(waves) / before - static_cast<double>(next) / shares;  // of a tile
    if (gained <= 0) continue;
    counts.from[known] = static_cast<int>(std::min(kBlockCost * (next - waves) / gained, 1e9));
    counts.shares[known++] = shares, waves = next;
  }
  return counts;
}

template <int kDim, int kTiles>
void plan(AttendCodes& p) {
  p.block_rows = std::min(4 * kTiles, p.rows());
  p.passes = static_cast<int>(ceil_div(p.rows(), p.block_rows));
  const int warps = warps_of<kDim, kTiles>(), bytes = shared_bytes<kDim, kTiles>(p);
  int resident = 1;
  if constexpr (kDim == 0) resident = resident_blocks<attend_plain_kernel>(warps * 32, bytes);
  else resident = resident_blocks<attend_codes_kernel<kDim, kTiles>>(warps * 32, bytes);
  const int64_t units = static_cast<int64_t>(p.batch) * p.kv_heads * p.passes;
  const int64_t slots = static_cast<int64_t>(this_machine().multiprocessors) * resident;
  int64_t tiles = ceil_div(p.capacity, kCodeTile);
  if (p.window) tiles = std::min(tiles, (p.window + p.tokens) / kCodeTile + 2);
  tiles += kDenseCost * (ceil_div(p.latest, kCodeTile) + ceil_div(p.front, kCodeTile));
  const int at_once = kDim == 0 ? kPlainTile / kCodeTile : warps;  // tiles
  p.counts = share_counts(units, slots, at_once);
  p.splits = p.counts.of(static_cast<int>(tiles));
}

template <int kDim, int kTiles>
void launch(const AttendCodes& p, cudaStream_t stream) {
  const dim3 grid(p.splits, p.kv_heads * p.passes, p.batch);
  const int threads = warps_of<kDim, kTiles>() * 32, bytes = shared_bytes<kDim, kTiles>(p);
  const Launch parts(grid, 1, threads, bytes, stream, Begins::kBeforePreviousEnds);
  if constexpr (kDim == 0) {
    cudaLaunchKernelEx(&parts.config, attend_plain_kernel, p);
  } else {
    cudaLaunchKernelEx(&parts.config, attend_codes_kernel<kDim, kTiles>, p);
  }
  launch_combine({p.partials(), p.rows(), p.value_size, p.dtype, p.out}, p.kv_heads, p.batch, stream);
}

}  // namespace

void launch_combine(const Combine& p, int kv_heads, int batch, cudaStream_t stream) {
  const int width = (p.size + 31) / 32 * 32;
  Launch launch(dim3(kv_heads * p.rows, batch), 1, width, 0, stream, Begins::kBeforePreviousEnds);
  launch.config.blockDim.y = std::min<unsigned>(kCombineThreads / width, ceil_div(p.partials.splits, kAtOnce));
  cudaLaunchKernelEx(&launch.config, combine_kernel, p);
}

int64_t plan_attend_codes(AttendCodes& p) {
  p.is_fast = p.dtype != Dtype::kFloat && p.key_size == p.value_size &&
              (p.key_size == 64 || p.key_size == 96 || p.key_size == 128 || p.key_size == 256);
  for_kernel(p, [&](auto dim, auto tiles) { plan<dim.value, tiles.value>(p); });
  return static_cast<int64_t>(p.batch) * p.kv_heads * p.passes * p.splits * p.partials().floats();
}

void launch_attend_codes(const AttendCodes& p, cudaStream_t stream) {
  for_kernel(p, [&](auto dim, auto tiles) { launch<dim.value, tiles.value>(p, stream); });
}

}  // namespace attention
}  // namespace nvfp4
