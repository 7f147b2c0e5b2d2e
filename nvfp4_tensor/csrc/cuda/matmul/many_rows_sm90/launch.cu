// Which shape of Hopper's many-rows kernel serves a problem, and the tensor maps that it copies by.
#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <utility>

#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/matmul/many_rows_sm90/kernel.cuh"
#include "cuda/matmul/many_rows_sm90/plan.h"

namespace nvfp4 {
namespace many_rows {
namespace {

constexpr int kTokenGroup = 4;  // token tiles whose blocks run together

bool x_is_aligned(const Problem& p) { return (reinterpret_cast<uintptr_t>(p.x) | (p.x_row * 2)) % 16 == 0; }

// Unlike anything that memory holds by chance, and never the same twice.
uint64_t launch_number() {
  static std::atomic<uint64_t> launches{static_cast<uint64_t>(std::random_device{}()) << 32};
  uint64_t n = (launches += 1) * 0x9E3779B97F4A7C15;  // splitmix64, one-to-one
  n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9;
  n = (n ^ n >> 27) * 0x94D049BB133111EB;
  return n ^ n >> 31;
}

int row_tiles(const Problem& p, int rows) {
  const int bands = p.N % kBand == 0 ? p.N / kBand : ceil_div(p.N, kBand) + (p.experts > 1);
  return ceil_div(bands * kBand, rows);
}

int token_tiles(const Problem& p, int tokens) {
  return p.offs ? most_token_tiles(p, tokens) : ceil_div(p.M, tokens);
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
  CUtensorMap y = x;  // not used where the warps write y
  if (!S::kShared && p.y_dtype == p.x_dtype && p.N % 8 == 0) {
    y = tensor_map<2>(p.y, x_type, {static_cast<u64>(p.N), static_cast<u64>(p.rows)}, {static_cast<u64>(p.N) * 2},
                      {64, S::kTokens}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  }
  Work work;
  work.row_tiles = plan.tiling.row_tiles, work.token_tiles = token_tiles(p, S::kTokens);
  work.token_group = p.offs ? kTokenGroup : plan.tiling.token_group;
  work.steps = plan.tiling.steps, work.whole_tiles = plan.whole_tiles, work.cut_tiles = plan.cut_tiles;
  work.cut_cost = plan.cut_cost;
  work.places = plan.places();
  work.ready = reinterpret_cast<uint64_t*>(scratch);
  work.sums = reinterpret_cast<float4*>(scratch + plan.flags_bytes());
  work.launch = launch_number();
  work.sharers = plan.sharers, work.runs = plan.blocks;
  work.most_finishers = plan.most_finishers(this_machine().multiprocessors);
  work.prepare();
  // In a chain of products 1 us less each than beginning after the kernel before.
  const Launch launch(dim3(plan.blocks), 1, S::kThreads, S::kSharedBytes, stream, Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, kernel, p, x, codes, y, work);
}

enum class Serves { kProducts, kGroupsToo };

struct Kernel {
  int rows, tokens;
  X x;
  bool shared;
  int stage_cycles;                                                           // of a multiprocessor, on an H200
  void (*launch[2][2])(const Problem&, const Plan&, uint8_t*, cudaStream_t);  // of groups or not; bf16, fp16

  template <typename S, Serves kServes = Serves::kProducts>
  static constexpr Kernel of(int stage_cycles) {
    using Bf16 = __nv_bfloat16;
    Kernel kernel = {S::kRows, S::kTokens, S::kX, S::kShared, stage_cycles,
                     {{many_rows::launch<Bf16, S, false>, many_rows::launch<__half, S, false>}, {}}};
    if constexpr (kServes == Serves::kGroupsToo) {
      kernel.launch[1][0] = many_rows::launch<Bf16, S, true>;
      kernel.launch[1][1] = many_rows::launch<__half, S, true>;
    }
    return kernel;
  }
};

// A stage takes what decoding does and 0.6 of what the tensor cores do, or all of the latter where that is more: 128
// rows by 64 tokens took 640 cycles without products, 600 without decoding and 946 (decoding 8 codes by 17
// instructions, now 15); by 256 tokens 2062 without decoding, and 2137. Copies alone are 518 and 1670; what two blocks
// copied together, by multicast, took as long or longer.
//
// It is the multiprocessor: while wgmma runs, a scheduler issues but one other instruction in five cycles. Loops of
// nothing but wgmma of 64 columns, 512 cycles, and 320 LOP3 of each scheduler, 640, take 979, with 320 FFMA 820;
// likewise with A in shared memory, with one warpgroup or four, with each product between a few of them; 1126 where one
// warpgroup is kept from the one while another does the other. So what counts is instructions: 190 a warp and stage
// where x is permuted, 120 of them to decode, 310 where it lies as it is.
constexpr Kernel kKernels[] = {
    Kernel::of<Shape<32, 2, 10, X::kPermutedBefore>>(790),
    Kernel::of<Shape<32, 4, 7, X::kPermutedBefore>, Serves::kGroupsToo>(1260),
    Kernel::of<Shape<64, 4, 6, X::kPermutedBefore>, Serves::kGroupsToo>(1445),
    Kernel::of<Shape<96, 2, 6, X::kPermutedBefore>>(1110),
    Kernel::of<Shape<128, 2, 5, X::kPermutedBefore>>(1250),
    Kernel::of<Shape<160, 2, 4, X::kPermutedBefore>>(1400),
    Kernel::of<Shape<192, 2, 3, X::kAsItLies>, Serves::kGroupsToo>(1885),
    Kernel::of<Shape<256, 2, 3, X::kAsItLies>, Serves::kGroupsToo>(2090),
    Kernel::of<Shape<16, 2, 12, X::kPermutedInCopy, Tiles::kShared>>(610),
    Kernel::of<Shape<16, 4, 8, X::kPermutedInCopy, Tiles::kShared>>(1150),
    Kernel::of<Shape<32, 2, 12, X::kPermutedInCopy, Tiles::kShared>>(760),
    Kernel::of<Shape<32, 4, 7, X::kPermutedBefore, Tiles::kShared>>(1090),
    Kernel::of<Shape<64, 2, 8, X::kPermutedInCopy, Tiles::kShared>>(1180),
    Kernel::of<Shape<64, 2, 8, X::kPermutedBefore, Tiles::kShared>>(920),
    Kernel::of<Shape<64, 4, 6, X::kPermutedBefore, Tiles::kShared>>(1375),
    Kernel::of<Shape<96, 2, 6, X::kPermutedBefore, Tiles::kShared>>(1150),
    Kernel::of<Shape<128, 2, 5, X::kAsItLies, Tiles::kShared>>(1515),
    Kernel::of<Shape<128, 2, 5, X::kPermutedBefore, Tiles::kShared>>(1290),
    Kernel::of<Shape<160, 2, 4, X::kPermutedBefore, Tiles::kShared>>(1490),
    Kernel::of<Shape<192, 2, 3, X::kAsItLies, Tiles::kShared>>(1925),
    Kernel::of<Shape<256, 2, 3, X::kAsItLies, Tiles::kShared>>(2270),
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
  for (const Kernel& k : kKernels) {
    if (p.offs && !is_for_groups(k, p)) continue;
    const int rows = row_tiles(p, k.rows), tokens = token_tiles(p, k.tokens);
    const Tiling tiling = {k.rows,         k.tokens, (p.offs ? 1 : p.experts) * rows * tokens, ceil_div(p.Kp, kStageK),
                           k.stage_cycles, rows,     std::min(kTokenGroup, tokens)};
    const auto of = p.offs ? Plan::of_groups : k.shared ? Plan::of_sharers : Plan::of_runs;
    Plan plan = of(tiling, multiprocessors);
    if (k.x == X::kPermutedBefore) plan.cost += kPermuteCycles + static_cast<int64_t>(p.rows) * p.K / kPermutedPerCycle;
    if (!best || plan.cost < best->cost) best = plan, kernel = &k;
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

bool is_faster_than_few_rows(const Problem& p) {
  using namespace many_rows;
  const auto [plan, kernel] = best_plan(p);
  const int64_t few_rows = few_rows_cost(p.M, p.N, p.K, p.experts, this_machine().multiprocessors);
  return kernel->tokens == 16 && plan.cost < few_rows;  // of wider tiles it was not compared
}

bool is_faster_decoded(const Problem& p) {
  using namespace many_rows;
  return decoded_cost(p.M, p.N, p.K, this_machine().multiprocessors) < best_plan(p).first.cost;
}

void launch_matmul_many_rows(const Problem& given, const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  using namespace many_rows;
  const auto [plan, kernel] = best_plan(given);
  Problem p = given;
  const int columns = ceil_div(p.K, kStageK) * kStageK;
  const bool before = kernel->x == X::kPermutedBefore, in_copy = kernel->x == X::kPermutedInCopy;
  const bool moves_x = before || !x_is_aligned(p) || (in_copy && p.K % 8 != 0);
  uint8_t* const at =
      static_cast<uint8_t*>(scratch(plan.x_at() + (moves_x ? static_cast<int64_t>(p.rows) * columns * 2 : 0)));
  if (moves_x) {
    uint4* x = reinterpret_cast<uint4*>(at + plan.x_at());
    if (before) {
      const Launch launch(dim3(p.rows, ceil_div(p.K, kPermuteK)), 1, kPermuteThreads, kPermuteSpare, stream,
                          Begins::kBeforePreviousEnds);
      cudaLaunchKernelEx(&launch.config, permute_x, p, x);
    } else {
      align_x<<<dim3(p.rows, ceil_div(columns, 128 * 8)), 128, 0, stream>>>(p, x);
    }
    p.x = x, p.x_row = columns, p.K = columns;
  }
  kernel->launch[p.offs != nullptr][p.x_dtype == Dtype::kFp16](p, plan, at, stream);
}

}  // namespace nvfp4
