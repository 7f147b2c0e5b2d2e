// Which shape of Hopper's many-rows kernel serves a problem, and the tensor maps that it copies by.
#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <utility>

#include "launch.h"
#include "matmul_many_rows_sm90.cuh"
#include "tensor_map.h"

namespace nvfp4 {
namespace many_rows {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kTokenGroup = 4;  // token tiles whose blocks run together

// Cycles that cutting tiles costs: waiting, and sums written once and read once for each run of a tile but the first.
// (H200, whole and cut: 4096 x 4096, M = 1024 and 4096: 49 and 55 us, 181 and 191; 14336 x 8192, M = 1024: 327, 306.)
constexpr int kWaitCycles = 3000, kSumsPerCycle = 6;

// That the sums of a cluster's blocks meet. Against cutting, us, alone and in a chain of products (H200): 1024 x 4096,
// M = 24, 64 and 128: 15.1 and 13.1, 15.4 and 13.2, 15.0 and 12.6 became 12.7 and 9.2, 12.7 and 9.9, 14.2 and 10.4;
// 4096 x 4096, M = 24 and 64: 15.0 and 12.7, 16.8 and 14.4 became 14.7 and 11.1, 17.4 and 13.2.
constexpr int kMeetCycles = 1500;

struct Plan {
  int rows, tokens;  // of a tile
  int row_tiles, token_tiles, steps, tiles;
  int blocks, cluster = 1;             // of the grid; of them, those that have a tile together
  int whole_tiles = 0, cut_tiles = 0;  // where blocks do not form clusters
  int64_t cost;                        // cycles
  int cut_cost = 0;                    // stages

  Plan(const Problem& p, int rows, int tokens) : rows(rows), tokens(tokens) {
    const int bands = p.N % kBand == 0 ? p.N / kBand : ceil_div(p.N, kBand) + (p.experts > 1);
    row_tiles = ceil_div(bands * kBand, rows), steps = ceil_div(p.Kp, kStageK);
    token_tiles = p.offs ? most_token_tiles(p, tokens) : ceil_div(p.M, tokens);
    tiles = (p.offs ? 1 : p.experts) * row_tiles * token_tiles;
  }

  // A cluster of so many blocks for each tile, so many clusters at a time.
  static Plan of_clusters(const Problem& p, int rows, int tokens, int cluster, int resident, int stage_cycles) {
    Plan plan(p, rows, tokens);
    plan.cluster = cluster, plan.blocks = plan.tiles * cluster;
    const int64_t rounds = ceil_div(plan.tiles, resident);
    plan.cost = rounds * (ceil_div(plan.steps, cluster) * stage_cycles + kMeetCycles);
    return plan;
  }

  // Tiles whole where that takes no longer than cutting them, for at most so many blocks at a time.
  static Plan of_blocks(const Problem& p, int rows, int tokens, int most_blocks, int stage_cycles) {
    Plan plan(p, rows, tokens);
    const int tiles = plan.tiles, rounds = ceil_div(tiles, most_blocks);
    const int64_t stages = static_cast<int64_t>(tiles) * plan.steps;
    int runs = static_cast<int>(std::min<int64_t>(most_blocks, std::max<int64_t>(stages / kFewestSteps, 1)));
    if (runs > tiles && runs % tiles * 8 < runs) runs -= runs % tiles;  // all tiles alike
    const int64_t whole_cost = static_cast<int64_t>(rounds) * plan.steps * stage_cycles;
    const int wait_and_sums = kWaitCycles + (1 + ceil_div(runs, tiles)) * (rows * tokens / kSumsPerCycle);
    const int64_t cut_cost = stages * stage_cycles / runs + wait_and_sums;
    const bool whole = whole_cost <= cut_cost || stages * runs >= INT32_MAX;
    plan.blocks = whole ? ceil_div(tiles, rounds) : runs;
    plan.whole_tiles = whole ? tiles : std::max(tiles / runs - 1, 0) * runs;
    plan.cut_tiles = tiles - plan.whole_tiles;
    plan.cost = whole ? whole_cost : cut_cost;
    plan.cut_cost = wait_and_sums / stage_cycles;
    if (p.offs) {  // the device counts tiles, and cuts some or none
      plan.blocks = std::min(most_blocks, tiles), plan.cut_tiles = 1;
    }
    return plan;
  }

  // In the scratch: flags, sums of cut tiles, x where it is not aligned.
  int64_t flags_bytes() const { return cut_tiles > 0 ? ceil_div(blocks * (rows / 64), 32) * 256 : 0; }
  int64_t x_at() const {
    return flags_bytes() + (cut_tiles > 0 ? static_cast<int64_t>(blocks) * rows * tokens * 4 : 0);
  }
};

bool x_is_aligned(const Problem& p) { return (reinterpret_cast<uintptr_t>(p.x) | (p.x_row * 2)) % 16 == 0; }

// Unlike anything that memory holds by chance, and never the same twice.
uint64_t launch_number() {
  static std::atomic<uint64_t> launches{static_cast<uint64_t>(std::random_device{}()) << 32};
  uint64_t n = (launches += 1) * 0x9E3779B97F4A7C15;  // splitmix64, one-to-one
  n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9;
  n = (n ^ n >> 27) * 0x94D049BB133111EB;
  return n ^ n >> 31;
}

template <typename T, typename S, bool kGrouped>
int resident(int cluster) {
  return resident_clusters<many_rows::kernel<T, S, kGrouped>>(cluster, S::kThreads, S::kSharedBytes);
}

template <typename T, typename S, bool kGrouped>
void launch(const Problem& p, const Plan& plan, uint8_t* scratch, cudaStream_t stream) {
  auto kernel = many_rows::kernel<T, S, kGrouped>;
  resident<T, S, kGrouped>(plan.cluster);  // lets it have its shared memory
  const auto x_type = p.x_dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t rows = static_cast<int64_t>(p.experts) * p.N;
  using u64 = cuuint64_t;
  constexpr auto kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUtensorMap x =
      tensor_map<2>(p.x, x_type, {static_cast<u64>(p.K), static_cast<u64>(p.rows)}, {static_cast<u64>(p.x_row) * 2},
                    {64, S::kTokens}, CU_TENSOR_MAP_SWIZZLE_128B, kLines);
  const CUtensorMap codes = tensor_map<2>(
      p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, {static_cast<u64>(p.Kp / 2), static_cast<u64>(rows)},
      {static_cast<u64>(p.code_row)}, {64, S::kRows}, CU_TENSOR_MAP_SWIZZLE_64B, kLines);
  Work work;
  work.row_tiles = plan.row_tiles, work.token_tiles = plan.token_tiles;
  work.token_group = p.offs ? kTokenGroup : std::min(kTokenGroup, plan.token_tiles);
  work.steps = plan.steps, work.whole_tiles = plan.whole_tiles, work.cut_tiles = plan.cut_tiles;
  work.cut_cost = plan.cut_cost;
  work.ready = reinterpret_cast<uint64_t*>(scratch);
  work.sums = reinterpret_cast<float4*>(scratch + plan.flags_bytes());
  work.launch = launch_number();
  work.cluster = plan.cluster, work.runs = plan.blocks;
  // In a chain of products 1 us less each than beginning after the kernel before. (permute_x so too: 1.5 us more.)
  const Launch launch(dim3(plan.blocks), plan.cluster, S::kThreads, S::kSharedBytes, stream,
                      Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, kernel, p, x, codes, work);
}

struct Kernel {
  int rows, tokens;
  bool permuted;
  int meeting;                                                                // most blocks of a cluster for a tile
  int stage_cycles;                                                           // of a multiprocessor, on an H200
  int (*resident)(int cluster);                                               // where clusters have tiles
  void (*launch[2][2])(const Problem&, const Plan&, uint8_t*, cudaStream_t);  // of groups or not; bf16, fp16

  template <typename S>
  static constexpr Kernel of(int stage_cycles) {
    using Bf16 = __nv_bfloat16;
    if constexpr (S::kMeeting > 0) {
      return {S::kRows, S::kTokens, S::kPermuted, S::kMeeting, stage_cycles, many_rows::resident<Bf16, S, false>,
              {{many_rows::launch<Bf16, S, false>, many_rows::launch<__half, S, false>}, {}}};
    } else {
      return {S::kRows, S::kTokens, S::kPermuted, 0, stage_cycles, nullptr,
              {{many_rows::launch<Bf16, S, false>, many_rows::launch<__half, S, false>},
               {many_rows::launch<Bf16, S, true>, many_rows::launch<__half, S, true>}}};
    }
  }
};

constexpr Kernel kKernels[] = {
    Kernel::of<Shape<32, 2, 10, X::kPermuted>>(860),
    Kernel::of<Shape<32, 4, 7, X::kPermuted>>(1560),
    Kernel::of<Shape<64, 2, 8, X::kPermuted>>(965),
    Kernel::of<Shape<64, 4, 6, X::kPermuted>>(1740),
    Kernel::of<Shape<128, 2, 5, X::kPermuted>>(1230),
    Kernel::of<Shape<192, 2, 3, X::kAsItLies>>(1640),
    Kernel::of<Shape<256, 2, 3, X::kAsItLies>>(2065),
    Kernel::of<Shape<32, 2, 9, X::kAsItLies, 4, 2>>(900),  // permuted by warps of the kernel: no faster
};

// The tile for groups, whose sizes only the device knows, by their mean. H200, us, 8 experts of 14336 x 4096 and 64 of
// 2048 x 7168, tokens x rows of w:   32 x 256  64 x 256  128 x 128  192 x 128  256 x 128
//   mean 16                            113, 209  135, 254
//   mean 64                            238, 510  181, 396   198, 403   278, 519   391, 651
//   mean 128                           443, 948  323, 663   336, 601   260, 562   331, 696
//   mean 1024 and 512                                          -, 2003 1527, 1751 1477, 1924
bool is_for_groups(const Kernel& k, const Problem& p) {
  const int mean = p.rows / p.experts, tokens = mean <= 24 ? 32 : mean <= 96 ? 64 : mean <= 768 ? 192 : 256;
  return k.meeting == 0 && k.tokens == tokens && k.rows == (tokens <= 64 ? 256 : 128);
}

std::pair<Plan, const Kernel*> best_plan(const Problem& p) {
  std::optional<Plan> best;
  const Kernel* kernel = nullptr;
  const auto consider = [&](const Kernel& k, const Plan& plan) {
    if (!best || plan.cost < best->cost) best = plan, kernel = &k;
  };
  for (const Kernel& k : kKernels) {
    if (p.offs && !is_for_groups(k, p)) continue;
    if (k.meeting == 0) {
      consider(k, Plan::of_blocks(p, k.rows, k.tokens, this_machine().multiprocessors, k.stage_cycles));
    }
    for (int cluster = 2; cluster <= k.meeting; ++cluster) {
      consider(k, Plan::of_clusters(p, k.rows, k.tokens, cluster, k.resident(cluster), k.stage_cycles));
    }
  }
  return {*best, kernel};
}

}  // namespace
}  // namespace many_rows

bool fits_matmul_many_rows(const Problem& p) {
  const auto aligned = [](const void* data, int64_t row_bytes) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_bytes)) % 16 == 0;
  };
  return this_machine().capability == 90 && aligned(p.codes, p.code_row) && aligned(p.scales, p.scale_band) &&
         tensor_map_encoder() != nullptr;
}

int64_t matmul_many_rows_scratch(const Problem& p) {
  using namespace many_rows;
  const auto [plan, kernel] = best_plan(p);
  const int64_t x_bytes = static_cast<int64_t>(p.rows) * ceil_div(p.K, kStageK) * kStageK * 2;
  return plan.x_at() + (kernel->permuted || !x_is_aligned(p) ? x_bytes : 0);
}

void launch_matmul_many_rows(const Problem& given, void* scratch, cudaStream_t stream) {
  using namespace many_rows;
  const auto [plan, kernel] = best_plan(given);
  Problem p = given;
  if (kernel->permuted || !x_is_aligned(p)) {
    uint4* x = reinterpret_cast<uint4*>(static_cast<uint8_t*>(scratch) + plan.x_at());
    const int columns = ceil_div(p.K, kStageK) * kStageK;
    if (kernel->permuted) {
      permute_x<<<dim3(p.rows, ceil_div(p.K, kPermuteK)), kPermuteThreads, 0, stream>>>(p, x);
    } else {
      align_x<<<dim3(p.rows, ceil_div(columns, 128 * 8)), 128, 0, stream>>>(p, x);
    }
    p.x = x, p.x_row = columns, p.K = columns;
  }
  kernel->launch[p.offs != nullptr][p.x_dtype == Dtype::kFp16](p, plan, static_cast<uint8_t*>(scratch), stream);
}

}  // namespace nvfp4
