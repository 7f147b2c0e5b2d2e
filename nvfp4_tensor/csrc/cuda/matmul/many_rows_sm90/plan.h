// How a product is best divided among the blocks of a kernel, by which kernel, and what that costs. Without CUDA
// headers, as runs.h: a test walks through the plans of many products.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/matmul/many_rows_sm90/costs.h"
#include "cuda/matmul/many_rows_sm90/runs.h"
#include "cuda/matmul/size.h"

namespace nvfp4 {
namespace many_rows {

constexpr int kRowBytesOfStage = kStageK * 2;  // of x
constexpr int kTokenGroup = 4;                 // token tiles whose blocks run together

// y in tiles of `rows` rows of w by `tokens` rows of x, and K in `steps` stages of so many cycles each.
struct Tiling {
  int rows, tokens, tiles, steps, stage_cycles;
  int row_tiles, token_group;  // as in Work

  int64_t stages() const { return static_cast<int64_t>(tiles) * steps; }
  int write_cycles() const { return static_cast<int>(costs::kWriteCycles * tokens); }

  // What runs of cut tiles wait for memory. A tile's stage s is computed at an offset in its run that depends on the
  // tile; row_tiles tiles read the same x, every token_group-th in their order.
  int64_t miss_cycles(int cut_tiles, int runs) const {
    const int64_t x_bytes = static_cast<int64_t>(cut_tiles) * tokens * steps * kRowBytesOfStage / row_tiles;
    if (x_bytes <= costs::kCacheBytes) return 0;
    const int places = std::min(row_tiles, cut_tiles / std::gcd(cut_tiles, token_group * runs));
    return (places - 1) * (x_bytes - costs::kCacheBytes) / costs::kMissedPerCycle;
  }
};

struct Plan {
  Tiling tiling;
  int blocks, sharers = 1;             // of the grid; of them, those that share a tile
  int whole_tiles = 0, cut_tiles = 0;  // where they do not
  int64_t cost;                        // cycles
  int cut_cost = 0;                    // stages

  // As many blocks for each tile as is best, one where it has a single stage: these kernels may permute x as they copy
  // it, without a kernel before. A cost beyond all others where there are too many tiles.
  static Plan of_sharers(const Tiling& tiling, int most_blocks) {
    Plan plan{tiling};
    plan.cost = INT64_MAX / 2;
    const int most = std::min({most_sharers(most_blocks), tiling.steps, most_blocks / tiling.tiles});
    for (int sharers = tiling.steps == 1 ? 1 : 2; sharers <= most; ++sharers) {
      const int left = tiling.rows * tiling.tokens / sharers * (sharers - 1);
      const int sums_cycles = static_cast<int>(left * tiling.rows / 128 / costs::kSharedSumsPerCycle);
      const int end_cycles = sharers > 1 ? costs::kShareCycles + sums_cycles : tiling.write_cycles();
      const int64_t cost = static_cast<int64_t>(ceil_quotient(tiling.steps, sharers)) * tiling.stage_cycles +
                           end_cycles;
      if (cost < plan.cost) plan.cost = cost, plan.sharers = sharers;
    }
    plan.blocks = tiling.tiles * plan.sharers;
    plan.whole_tiles = plan.sharers > 1 ? 0 : tiling.tiles;
    return plan;
  }

  // Whole tiles in waves, as many as let each run have one or two more, and these cut into so many runs.
  static Plan of_cut_tiles(const Tiling& tiling, int runs) {
    Plan plan{tiling};
    plan.blocks = runs;
    const int waves = std::max(tiling.tiles / runs - 1, 0);
    plan.whole_tiles = waves * runs, plan.cut_tiles = tiling.tiles - plan.whole_tiles;
    const int tile_sums = tiling.rows * tiling.tokens, sums_of_a_tile = 1 + ceil_quotient(runs, tiling.tiles);
    const int wait_and_sums = costs::kWaitCycles + sums_of_a_tile * static_cast<int>(tile_sums / costs::kSumsPerCycle);
    plan.cost = tiling.stages() * tiling.stage_cycles / runs + static_cast<int64_t>(waves) * tiling.write_cycles() +
                wait_and_sums + tiling.miss_cycles(plan.cut_tiles, runs);
    plan.cut_cost = wait_and_sums / tiling.stage_cycles;
    return plan;
  }

  // Tiles whole where that takes no longer than cutting them, for at most so many blocks at a time.
  static Plan of_runs(const Tiling& tiling, int most_blocks) {
    const int tiles = tiling.tiles, rounds = ceil_quotient(tiles, most_blocks);
    int runs = static_cast<int>(std::clamp<int64_t>(tiling.stages() / kFewestSteps, 1, most_blocks));
    if (runs > tiles && runs % tiles * 8 < runs) runs -= runs % tiles;  // all tiles alike
    Plan plan = of_cut_tiles(tiling, runs);
    for (int fewer = runs - 1; fewer >= runs * 7 / 8 && tiling.miss_cycles(plan.cut_tiles, plan.blocks) > 0; --fewer) {
      const Plan other = of_cut_tiles(tiling, fewer);
      if (other.cost < plan.cost) plan = other;
    }
    const int64_t whole_cost = rounds *
                               (static_cast<int64_t>(tiling.steps) * tiling.stage_cycles + tiling.write_cycles());
    if (whole_cost <= plan.cost || tiling.stages() * plan.blocks >= INT32_MAX) {
      plan.blocks = ceil_quotient(tiles, rounds), plan.whole_tiles = tiles, plan.cut_tiles = 0, plan.cost = whole_cost;
    }
    return plan;
  }

  // Of groups of rows: the device counts the tiles, at most as many as here, and cuts some or none.
  static Plan of_groups(const Tiling& tiling, int most_blocks) {
    Plan plan = of_cut_tiles(tiling, most_blocks);
    plan.blocks = std::min(most_blocks, tiling.tiles), plan.cut_tiles = 1;
    return plan;
  }

  // A tile has no more parts to finish than units of 16 tokens.
  int most_finishers(int most_blocks) const {
    const int units = tiling.tokens / 16;
    if (sharers > 1) return std::min(sharers, units);
    if (cut_tiles == 0) return 1;
    return finish_together(tiling.tokens) ? std::min(most_sharers(most_blocks), units) : 1;
  }

  // In the scratch: flags, sums of tiles that several blocks have, x where a kernel wants it moved. A block has two
  // slots for sums where runs may lie within tiles.
  int slots() const {
    if (sharers > 1) return blocks;
    return cut_tiles == 0 ? 0 : finish_together(tiling.tokens) && cut_tiles < blocks ? 2 * blocks : blocks;
  }
  int64_t flags_bytes() const { return ceil_quotient(slots() * (tiling.rows / 64) * kMostSharers, 32) * 256; }
  int64_t x_at() const { return flags_bytes() + int64_t{4} * slots() * tiling.rows * tiling.tokens; }
};

inline int row_tiles(const ProductSize& size, int rows) {
  const int bands = size.N % kBand == 0 ? size.N / kBand : ceil_quotient(size.N, kBand) + (size.experts > 1);
  return ceil_quotient(bands * kBand, rows);
}

// A product's best division by this kernel.
inline Plan plan_of(const ProductSize& size, const costs::ManyRowsKernel& kernel, int multiprocessors) {
  const int rows = row_tiles(size, kernel.rows), tokens = size.token_tiles(kernel.tokens);
  const Tiling tiling = {kernel.rows,
                         kernel.tokens,
                         (size.grouped ? 1 : size.experts) * rows * tokens,
                         ceil_quotient(size.K, kStageK),
                         kernel.stage_cycles,
                         rows,
                         std::min(kTokenGroup, tokens)};
  const auto of = size.grouped ? Plan::of_groups : kernel.tiles == Tiles::kShared ? Plan::of_sharers : Plan::of_runs;
  Plan plan = of(tiling, multiprocessors);
  if (kernel.x == X::kPermutedBefore) {
    plan.cost += costs::kPermuteCycles + static_cast<int64_t>(size.rows) * size.K / costs::kPermutedPerCycle;
  }
  return plan;
}

// The tile for groups, whose sizes only the device knows, by their mean. H200, us, 8 experts of 14336 x 4096 and 64 of
// 2048 x 7168, tokens x rows of w:   32 x 256  64 x 256  128 x 128  192 x 128  256 x 128
//   mean 16                            113, 209  135, 254
//   mean 64                            238, 510  181, 396   198, 403   278, 519   391, 651
//   mean 128                           443, 948  323, 663   336, 601   260, 562   331, 696
//   mean 1024 and 512                                          -, 2003 1527, 1751 1477, 1924
inline bool is_for_groups(const costs::ManyRowsKernel& kernel, const ProductSize& size) {
  const int mean = size.rows / size.experts, tokens = mean <= 24 ? 32 : mean <= 96 ? 64 : mean <= 768 ? 192 : 256;
  return kernel.for_groups && kernel.tokens == tokens;
}

// Weights that share x in one launch: their tiles follow one another, so each has whole ones.
constexpr int kRowsOfSets = 256;  // a divisor of those of w
inline bool fits_sets(const ProductSize& size) {
  return !size.grouped && size.experts == 1 && size.N % kRowsOfSets == 0;
}

struct PlannedKernel {
  Plan plan;
  int kernel;  // of costs::kManyRowsKernels

  const costs::ManyRowsKernel& its() const { return costs::kManyRowsKernels[kernel]; }
};

// By the kernel whose plan costs least, the first of equals.
inline PlannedKernel best_plan(const ProductSize& size, int multiprocessors) {
  PlannedKernel best{{}, -1};
  for (int i = 0; i < costs::kManyRowsKernelCount; ++i) {
    const costs::ManyRowsKernel& kernel = costs::kManyRowsKernels[i];
    if (size.grouped && !is_for_groups(kernel, size)) continue;
    const Plan plan = plan_of(size, kernel, multiprocessors);
    if (best.kernel < 0 || plan.cost < best.plan.cost) best = {plan, i};
  }
  return best;
}

}  // namespace many_rows
}  // namespace nvfp4
