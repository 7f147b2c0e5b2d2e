// How a product is best divided among the blocks of a kernel, and what that costs. Without CUDA headers, as
// matmul_many_rows_runs.h: a test walks through the plans of many products.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matmul_many_rows_runs.h"

namespace nvfp4 {
namespace many_rows {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a plan costs, in cycles. These figures and the kernels' stage_cycles are fitted to all plans of 480 products (on
// an H200, 20 weights of published models, 20 to 4096 rows of x, single and in chains): what is chosen by them takes
// 0.5 % longer than the best plan in the mean, 24 % at most.
constexpr int kWaitCycles = 3200, kSumsPerCycle = 6;  // of cut tiles, whose sums are written once and read for each run
// Blocks at different places of K share less of the cache, the more so the longer K is: 8192 x 28672 by 1536 rows takes
// 11 % longer cut than whole, 4096 x 14336 by 4096 9 %, where by the rest of the costs it would be the faster way.
constexpr int kStepsApart = 5000;
constexpr int kShareCycles = 3200;
constexpr double kSharedSumsPerCycle = 2.6;
constexpr int kPlacesOfSharer = 16;  // multiprocessors for each: half-started kernels must not fill a part of a GPU
constexpr int kPermuteCycles = 1300, kPermutedPerCycle = 1700;  // elements of x
constexpr double kWriteCycles = 7.7;                            // a token of a whole tile

// y in tiles of `rows` rows of w by `tokens` rows of x, and K in `steps` stages of so many cycles each.
struct Tiling {
  int rows, tokens, tiles, steps, stage_cycles;
};

struct Plan {
  Tiling tiling;
  int blocks, sharers = 1;             // of the grid; of them, those that share a tile
  int whole_tiles = 0, cut_tiles = 0;  // where they do not
  int64_t cost;                        // cycles
  int cut_cost = 0;                    // stages

  // As many blocks for each tile as is best; a cost beyond all others where there are too many tiles.
  static Plan of_sharers(const Tiling& tiling, int most_blocks) {
    Plan plan{tiling};
    plan.cost = INT64_MAX / 2;
    const int most = std::min({kMostSharers, tiling.steps, most_blocks / tiling.tiles, most_blocks / kPlacesOfSharer});
    for (int sharers = 2; sharers <= most; ++sharers) {
      const int left = tiling.rows * tiling.tokens / sharers * (sharers - 1);
      const int share_cycles = kShareCycles + static_cast<int>(left / kSharedSumsPerCycle);
      const int64_t cost = static_cast<int64_t>(ceil_div(tiling.steps, sharers)) * tiling.stage_cycles + share_cycles;
      if (cost < plan.cost) plan.cost = cost, plan.sharers = sharers;
    }
    plan.blocks = tiling.tiles * plan.sharers;
    return plan;
  }

  // Tiles whole where that takes no longer than cutting them, for at most so many blocks at a time.
  static Plan of_runs(const Tiling& tiling, int most_blocks) {
    Plan plan{tiling};
    const int tiles = tiling.tiles, rounds = ceil_div(tiles, most_blocks);
    const int64_t stages = static_cast<int64_t>(tiles) * tiling.steps;
    int runs = static_cast<int>(std::min<int64_t>(most_blocks, std::max<int64_t>(stages / kFewestSteps, 1)));
    if (runs > tiles && runs % tiles * 8 < runs) runs -= runs % tiles;  // all tiles alike
    const int write_cycles = static_cast<int>(kWriteCycles * tiling.tokens);
    const int64_t stage_cycles = tiling.stage_cycles;
    const int64_t whole_cost = rounds * (tiling.steps * stage_cycles + write_cycles);
    const int wait_and_sums = kWaitCycles + (1 + ceil_div(runs, tiles)) * (tiling.rows * tiling.tokens / kSumsPerCycle);
    const int waves = std::max(tiles / runs - 1, 0);
    int64_t cut_cost = stages * stage_cycles / runs + static_cast<int64_t>(waves) * write_cycles + wait_and_sums;
    cut_cost += cut_cost * tiling.steps / kStepsApart;
    const bool whole = whole_cost <= cut_cost || stages * runs >= INT32_MAX;
    plan.blocks = whole ? ceil_div(tiles, rounds) : runs;
    plan.whole_tiles = whole ? tiles : waves * runs;
    plan.cut_tiles = tiles - plan.whole_tiles;
    plan.cost = whole ? whole_cost : cut_cost;
    plan.cut_cost = wait_and_sums / tiling.stage_cycles;
    return plan;
  }

  // Of groups of rows: the device counts the tiles, at most as many as here, and cuts some or none.
  static Plan of_groups(const Tiling& tiling, int most_blocks) {
    Plan plan = of_runs(tiling, most_blocks);
    plan.blocks = std::min(most_blocks, tiling.tiles), plan.cut_tiles = 1;
    return plan;
  }

  // In the scratch: flags, sums of tiles that several blocks have, x where a kernel wants it moved.
  bool leaves_sums() const { return cut_tiles > 0 || sharers > 1; }
  int64_t flags_bytes() const {
    const int flags = blocks * (tiling.rows / 64) * (sharers > 1 ? kMostSharers : 1);
    return leaves_sums() ? ceil_div(flags, 32) * 256 : 0;
  }
  int64_t x_at() const {
    const int64_t sums = static_cast<int64_t>(blocks) * tiling.rows * tiling.tokens;
    return flags_bytes() + (leaves_sums() ? sums * 4 : 0);
  }
};

}  // namespace many_rows
}  // namespace nvfp4
