// Which shape of Hopper's many-rows kernel serves a problem, and the tensor maps that it copies by.
#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <utility>

#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/matmul/many_rows_sm90/kernel.cuh"
#include "cuda/matmul/many_rows_sm90/plan.h"

namespace nvfp4 {
namespace many_rows {
namespace {

// Unlike anything that memory holds by chance, and never the same twice.
uint64_t launch_number() {
  static std::atomic<uint64_t> launches{static_cast<uint64_t>(std::random_device{}()) << 32};
  uint64_t n = (launches += 1) * 0x9E3779B97F4A7C15;  // splitmix64, one-to-one
  n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9;
  n = (n ^ n >> 27) * 0x94D049BB133111EB;
  return n ^ n >> 31;
}

// Of `count` weights, at most kCount.
template <typename T, typename S, bool kGrouped, int kCount>
void launch(const Problem* sets, int count, const Plan& plan, uint8_t* scratch, cudaStream_t stream) {
  auto kernel = many_rows::kernel<T, S, kGrouped, kCount>;
  resident_clusters<many_rows::kernel<T, S, kGrouped, kCount>>(1, S::kThreads, S::kSharedBytes);  // lets it have that
  const Problem& p = sets[0];
  const auto x_type = p.x_dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  using u64 = cuuint64_t;
  constexpr auto kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUtensorMap x = tensor_map<2>(p.x, x_type, {static_cast<u64>(p.K), static_cast<u64>(p.rows)},
                                      {static_cast<u64>(p.x_row) * 2}, {64, S::kTokens}, CU_TENSOR_MAP_SWIZZLE_128B,
                                      kLines);
  Weights<kCount> weights;
  for (int i = 0, first = 0; i < kCount; ++i) {
    const Problem& p = sets[i < count ? i : 0];
    weights.p[i] = p, weights.first[i] = i < count ? first : INT32_MAX;
    first += p.N / S::kRows;
    weights.codes[i] = tensor_map<2>(
        p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8,
        {static_cast<u64>(p.Kp / 2), static_cast<u64>(static_cast<int64_t>(p.experts) * p.N)},
        {static_cast<u64>(p.code_row)}, {64, S::kRows}, CU_TENSOR_MAP_SWIZZLE_64B, kLines);
    weights.y[i] = x;  // not used where the warps write y
    const bool is_aligned = p.N % 8 == 0 && on_16_bytes(p.y, p.y_row * 2);
    weights.plain[i] = is_aligned && p.y_dtype == p.x_dtype && !(p.bias && p.bias_row);
    if (!S::kShared && weights.plain[i]) {
      weights.y[i] = tensor_map<2>(p.y, x_type, {static_cast<u64>(p.N), static_cast<u64>(p.rows)},
                                   {static_cast<u64>(p.y_row) * 2}, {64, S::kTokens}, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_NONE);
    }
  }
  Work work;
  work.row_tiles = plan.tiling.row_tiles, work.token_tiles = size_of(p).token_tiles(S::kTokens);
  work.token_group = p.offs ? kTokenGroup : plan.tiling.token_group;
  work.steps = plan.tiling.steps, work.whole_tiles = plan.whole_tiles, work.cut_tiles = plan.cut_tiles;
  work.cut_cost = plan.cut_cost;
  work.slots = plan.slots();
  work.ready = reinterpret_cast<uint64_t*>(scratch);
  work.sums = reinterpret_cast<float4*>(scratch + plan.flags_bytes());
  work.launch = launch_number();
  work.sharers = plan.sharers, work.runs = plan.blocks;
  work.most_finishers = plan.most_finishers(this_machine().multiprocessors);
  work.prepare();
  // In a chain of products 1 us less each than beginning after the kernel before.
  const Launch launch(dim3(plan.blocks), 1, S::kThreads, S::kSharedBytes, stream, Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, kernel, weights, x, work);
}

using LaunchOf = void (*)(const Problem*, int, const Plan&, uint8_t*, cudaStream_t);
using Launches = std::array<LaunchOf, 2>;  // of bfloat16, of float16

template <bool kGrouped, int kCount, int kKernel>
constexpr Launches launches() {
  constexpr costs::ManyRowsKernel k = costs::kManyRowsKernels[kKernel];
  if constexpr (kGrouped && !k.for_groups) {
    return {};
  } else {
    using S = Shape<k.tokens, k.rows / 64, k.stages, k.x, k.tiles>;
    return {many_rows::launch<__nv_bfloat16, S, kGrouped, kCount>, many_rows::launch<__half, S, kGrouped, kCount>};
  }
}

// Of all kernels, by whose index in the costs a plan names its own.
template <bool kGrouped, int kCount, int... kKernels>
constexpr std::array<Launches, sizeof...(kKernels)> all_launches(std::integer_sequence<int, kKernels...>) {
  return {launches<kGrouped, kCount, kKernels>()...};
}
constexpr auto kIndices = std::make_integer_sequence<int, costs::kManyRowsKernelCount>();
constexpr auto kLaunches = all_launches<false, 1>(kIndices), kLaunchesOfGroups = all_launches<true, 1>(kIndices),
               kLaunchesOfSets = all_launches<false, kMostSets>(kIndices);

}  // namespace
}  // namespace many_rows

bool fits_matmul_many_rows(const Problem& p) {
  return this_machine().capability == 90 && on_16_bytes(p.codes, p.code_row) && on_16_bytes(p.scales, p.scale_band) &&
         tensor_map_encoder() != nullptr;
}

bool fits_matmul_sets_many_rows(const Problem* sets, int count) {
  if (count < 2 || count > kMostSets) return false;
  return std::all_of(sets, sets + count, [&](const Problem& p) {
    return fits_matmul_many_rows(p) && many_rows::fits_sets(size_of(p)) && p.K == sets[0].K && p.y_dtype == p.x_dtype;
  });
}

void launch_matmul_many_rows(const Problem& p, const many_rows::PlannedKernel& planned,
                             const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  launch_matmul_sets_many_rows(&p, 1, planned, scratch, stream);
}

void launch_matmul_sets_many_rows(const Problem* given, int count, const many_rows::PlannedKernel& planned,
                                  const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  using namespace many_rows;
  const Plan& plan = planned.plan;
  const X x_order = planned.its().x;
  std::array<Problem, kMostSets> sets;
  std::copy(given, given + count, sets.begin());
  Problem& p = sets[0];
  const int columns = ceil_quotient(p.K, kStageK) * kStageK;
  const bool before = x_order == X::kPermutedBefore, in_copy = x_order == X::kPermutedInCopy;
  const bool moves_x = before || !on_16_bytes(p.x, p.x_row * 2) || (in_copy && p.K % 8 != 0);
  uint8_t* const at = static_cast<uint8_t*>(
      scratch(plan.x_at() + (moves_x ? static_cast<int64_t>(p.rows) * columns * 2 : 0)));
  if (moves_x) {
    uint4* x = reinterpret_cast<uint4*>(at + plan.x_at());
    if (before) {
      const Launch launch(dim3(p.rows, ceil_quotient(p.K, kPermuteK)), 1, kPermuteThreads, kPermuteSpare, stream,
                          Begins::kBeforePreviousEnds);
      cudaLaunchKernelEx(&launch.config, permute_x, p, x);
    } else {
      align_x<<<dim3(p.rows, ceil_quotient(columns, 128 * 8)), 128, 0, stream>>>(p, x);
    }
    for (Problem& each : sets) each.x = x, each.x_row = columns, each.K = columns;
  }
  const auto& launches = p.offs ? kLaunchesOfGroups : count > 1 ? kLaunchesOfSets : kLaunches;
  launches[planned.kernel][p.x_dtype == Dtype::kFp16](sets.data(), count, plan, at, stream);
}

}  // namespace nvfp4
