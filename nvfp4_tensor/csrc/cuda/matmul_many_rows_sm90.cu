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

// What a plan costs, in cycles. These figures and the stage_cycles below are fitted to all plans of 480 products (on an
// H200, 20 weights of published models, 20 to 4096 rows of x, single and in chains): what is chosen by them takes 0.6 %
// longer than the best plan in the mean, 24 % at most.
constexpr int kWaitCycles = 3200, kSumsPerCycle = 6;  // of cut tiles, whose sums are written once and read for each run
constexpr int kShareCycles = 3200;
constexpr double kSharedSumsPerCycle = 2.6;
constexpr int kPermuteCycles = 1300, kPermutedPerCycle = 1700;  // elements of x
constexpr double kWriteCycles = 7.7;                            // a token of a whole tile

struct Plan {
  int rows, tokens;  // of a tile
  int row_tiles, token_tiles, steps, tiles;
  int blocks, sharers = 1;             // of the grid; of them, those that share a tile
  int whole_tiles = 0, cut_tiles = 0;  // where they do not
  int64_t cost;                        // cycles
  int cut_cost = 0;                    // stages

  Plan(const Problem& p, int rows, int tokens) : rows(rows), tokens(tokens) {
    const int bands = p.N % kBand == 0 ? p.N / kBand : ceil_div(p.N, kBand) + (p.experts > 1);
    row_tiles = ceil_div(bands * kBand, rows), steps = ceil_div(p.Kp, kStageK);
    token_tiles = p.offs ? most_token_tiles(p, tokens) : ceil_div(p.M, tokens);
    tiles = (p.offs ? 1 : p.experts) * row_tiles * token_tiles;
  }

  // As many blocks for each tile as is best; a cost beyond all others where there are too many tiles.
  static Plan of_sharers(const Problem& p, int rows, int tokens, int most_blocks, int stage_cycles) {
    Plan plan(p, rows, tokens);
    plan.cost = INT64_MAX / 2;
    const int most = std::min({kMostSharers, plan.steps, most_blocks / plan.tiles});
    for (int sharers = 2; sharers <= most; ++sharers) {
      const int left = rows * tokens / sharers * (sharers - 1);
      const int share_cycles = kShareCycles + static_cast<int>(left / kSharedSumsPerCycle);
      const int64_t cost = static_cast<int64_t>(ceil_div(plan.steps, sharers)) * stage_cycles + share_cycles;
      if (cost < plan.cost) plan.cost = cost, plan.sharers = sharers;
    }
    plan.blocks = plan.tiles * plan.sharers;
    return plan;
  }

  // Tiles whole where that takes no longer than cutting them, for at most so many blocks at a time.
  static Plan of_blocks(const Problem& p, int rows, int tokens, int most_blocks, int stage_cycles) {
    Plan plan(p, rows, tokens);
    const int tiles = plan.tiles, rounds = ceil_div(tiles, most_blocks);
    const int64_t stages = static_cast<int64_t>(tiles) * plan.steps;
    int runs = static_cast<int>(std::min<int64_t>(most_blocks, std::max<int64_t>(stages / kFewestSteps, 1)));
    if (runs > tiles && runs % tiles * 8 < runs) runs -= runs % tiles;  // all tiles alike
    const int write_cycles = static_cast<int>(kWriteCycles * tokens);
    const int64_t whole_cost = static_cast<int64_t>(rounds) * (plan.steps * stage_cycles + write_cycles);
    const int wait_and_sums = kWaitCycles + (1 + ceil_div(runs, tiles)) * (rows * tokens / kSumsPerCycle);
    const int waves = std::max(tiles / runs - 1, 0);
    const int64_t cut_cost = stages * stage_cycles / runs + waves * write_cycles + wait_and_sums;
    const bool whole = whole_cost <= cut_cost || stages * runs >= INT32_MAX;
    plan.blocks = whole ? ceil_div(tiles, rounds) : runs;
    plan.whole_tiles = whole ? tiles : waves * runs;
    plan.cut_tiles = tiles - plan.whole_tiles;
    plan.cost = whole ? whole_cost : cut_cost;
    plan.cut_cost = wait_and_sums / stage_cycles;
    if (p.offs) {  // the device counts tiles, and cuts some or none
      plan.blocks = std::min(most_blocks, tiles), plan.cut_tiles = 1;
    }
    return plan;
  }

  // In the scratch: flags, sums of cut tiles, x where it is not aligned.
  bool leaves_sums() const { return cut_tiles > 0 || sharers > 1; }
  int64_t flags_bytes() const {
    return leaves_sums() ? ceil_div(blocks * (rows / 64) * (sharers > 1 ? kMostSharers : 1), 32) * 256 : 0;
  }
  int64_t x_at() const {
    return flags_bytes() + (leaves_sums() ? static_cast<int64_t>(blocks) * rows * tokens * 4 : 0);
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
void launch(const Problem& p, const Plan& plan, uint8_t* scratch, cudaStream_t stream) {
  auto kernel = many_rows::kernel<T, S, kGrouped>;
  resident_clusters<many_rows::kernel<T, S, kGrouped>>(1, S::kThreads, S::kSharedBytes);  // lets it have that memory
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
  work.sharers = plan.sharers, work.runs = plan.blocks;
  // In a chain of products 1 us less each than beginning after the kernel before. (permute_x so too: 1.5 us more.)
  const Launch launch(dim3(plan.blocks), 1, S::kThreads, S::kSharedBytes, stream, Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, kernel, p, x, codes, work);
}

enum class Serves { kProducts, kGroupsToo };

struct Kernel {
  int rows, tokens;
  bool permuted, shared;
  int stage_cycles;                                                           // of a multiprocessor, on an H200
  void (*launch[2][2])(const Problem&, const Plan&, uint8_t*, cudaStream_t);  // of groups or not; bf16, fp16

  template <typename S, Serves kServes = Serves::kProducts>
  static constexpr Kernel of(int stage_cycles) {
    using Bf16 = __nv_bfloat16;
    Kernel kernel = {S::kRows, S::kTokens, S::kPermuted, S::kShared, stage_cycles,
                     {{many_rows::launch<Bf16, S, false>, many_rows::launch<__half, S, false>}, {}}};
    if constexpr (kServes == Serves::kGroupsToo) {
      kernel.launch[1][0] = many_rows::launch<Bf16, S, true>;
      kernel.launch[1][1] = many_rows::launch<__half, S, true>;
    }
    return kernel;
  }
};

// A stage takes what decoding does and half of what the tensor cores do, or all of the latter where that is more: 128
// rows by 64 tokens take 640 cycles without products, 600 without decoding and 946; by 256 tokens 2062 without
// decoding, and 2141. So it is also with two warpgroups more, and with products and decoding interleaved any finer.
// Copies alone are 518 and 1670; what two blocks copied together, by multicast, took as long or longer.
constexpr Kernel kKernels[] = {
    Kernel::of<Shape<32, 2, 10, X::kPermuted>>(790),
    Kernel::of<Shape<32, 4, 7, X::kPermuted>, Serves::kGroupsToo>(1260),
    Kernel::of<Shape<64, 4, 6, X::kPermuted>, Serves::kGroupsToo>(1445),
    Kernel::of<Shape<96, 2, 6, X::kPermuted>>(1110),
    Kernel::of<Shape<128, 2, 5, X::kPermuted>>(1250),
    Kernel::of<Shape<160, 2, 4, X::kPermuted>>(1400),
    Kernel::of<Shape<192, 2, 3, X::kAsItLies>, Serves::kGroupsToo>(1885),
    Kernel::of<Shape<256, 2, 3, X::kAsItLies>, Serves::kGroupsToo>(2090),
    Kernel::of<Shape<32, 2, 10, X::kAsItLies, Tiles::kShared>>(995),
    Kernel::of<Shape<64, 2, 8, X::kAsItLies, Tiles::kShared>>(1145),
    Kernel::of<Shape<64, 2, 8, X::kPermuted, Tiles::kShared>>(965),
    Kernel::of<Shape<96, 2, 6, X::kAsItLies, Tiles::kShared>>(1370),
    Kernel::of<Shape<96, 2, 6, X::kPermuted, Tiles::kShared>>(1145),
    Kernel::of<Shape<128, 2, 5, X::kAsItLies, Tiles::kShared>>(1515),
    Kernel::of<Shape<128, 2, 5, X::kPermuted, Tiles::kShared>>(1285),
    Kernel::of<Shape<160, 2, 4, X::kAsItLies, Tiles::kShared>>(1735),
    Kernel::of<Shape<192, 2, 3, X::kAsItLies, Tiles::kShared>>(1925),
    Kernel::of<Shape<256, 2, 3, X::kAsItLies, Tiles::kShared>>(2170),
};

// The tile for groups, whose sizes only the device knows, by their mean. H200, us, 8 experts of 14336 x 4096 and 64 of
// 2048 x 7168, tokens x rows of w:   32 x 256  64 x 256  128 x 128  192 x 128  256 x 128
//   mean 16                            113, 209  135, 254
//   mean 64                            238, 510  181, 396   198, 403   278, 519   391, 651
//   mean 128                           443, 948  323, 663   336, 601   260, 562   331, 696
//   mean 1024 and 512                                          -, 2003 1527, 1751 1477, 1924
bool is_for_groups(const Kernel& k, const Problem& p) {
  const int mean = p.rows / p.experts, tokens = mean <= 24 ? 32 : mean <= 96 ? 64 : mean <= 768 ? 192 : 256;
  return k.launch[1][0] != nullptr && k.tokens == tokens;
}

std::pair<Plan, const Kernel*> best_plan(const Problem& p) {
  std::optional<Plan> best;
  const Kernel* kernel = nullptr;
  const int multiprocessors = this_machine().multiprocessors;
  const auto consider = [&](const Kernel& k, Plan plan) {
    if (k.permuted) plan.cost += kPermuteCycles + static_cast<int64_t>(p.rows) * p.K / kPermutedPerCycle;
    if (!best || plan.cost < best->cost) best = plan, kernel = &k;
  };
  for (const Kernel& k : kKernels) {
    if (p.offs && !is_for_groups(k, p)) continue;
    const auto of = k.shared ? Plan::of_sharers : Plan::of_blocks;
    consider(k, of(p, k.rows, k.tokens, multiprocessors, k.stage_cycles));
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

void launch_matmul_many_rows(const Problem& given, const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  using namespace many_rows;
  const auto [plan, kernel] = best_plan(given);
  Problem p = given;
  const int columns = ceil_div(p.K, kStageK) * kStageK;
  const bool moves_x = kernel->permuted || !x_is_aligned(p);
  uint8_t* const at =
      static_cast<uint8_t*>(scratch(plan.x_at() + (moves_x ? static_cast<int64_t>(p.rows) * columns * 2 : 0)));
  if (moves_x) {
    uint4* x = reinterpret_cast<uint4*>(at + plan.x_at());
    if (kernel->permuted) {
      permute_x<<<dim3(p.rows, ceil_div(p.K, kPermuteK)), kPermuteThreads, 0, stream>>>(p, x);
    } else {
      align_x<<<dim3(p.rows, ceil_div(columns, 128 * 8)), 128, 0, stream>>>(p, x);
    }
    p.x = x, p.x_row = columns, p.K = columns;
  }
  kernel->launch[p.offs != nullptr][p.x_dtype == Dtype::kFp16](p, plan, at, stream);
}

}  // namespace nvfp4
