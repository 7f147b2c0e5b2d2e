// How a product is best divided among the blocks of a kernel, and what that costs. Without CUDA headers, as
// runs.h: a test walks through the plans of many products.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/matmul/many_rows_sm90/runs.h"

namespace nvfp4 {
namespace many_rows {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a plan costs, in cycles. These figures and the kernels' stage_cycles are fitted to all plans of 240 products (on
// an H200, 20 weights of published models, 24 to 1024 rows of x, single and in chains), and, for tiles that blocks
// share, again to 168 of up to 256 rows: what is chosen by them takes 0.2 % longer than the best plan in the mean of
// these, 0.6 % in that of the 80 of more rows, 6 % at most.
constexpr int kWaitCycles = 5000;  // of cut tiles, whose sums are written once and read for each run
constexpr double kSumsPerCycle = 5.5;
// Where cut tiles read more of x than the cache keeps, it is read again for each place of K at which blocks are at a
// time: 576 x 7168 by 4096 rows, 80 tiles, takes 89 us in 132 runs and 63 in 120, 3584 x 18944 by 4096 882, in 128 795.
constexpr int64_t kCacheBytes = 28 << 20;
constexpr int kMissedPerCycle = 3800;
constexpr int kRowBytesOfStage = 256;  // of x
constexpr int kShareCycles = 3000;
constexpr double kSharedSumsPerCycle = 1.85;  // of 128 rows of w; half as many of 256, whose warps have fewer registers
constexpr int kPermuteCycles = 500, kPermutedPerCycle = 1000;  // elements of x
constexpr double kWriteCycles = 7.7;                            // a token of a whole tile

// What decoding w and then cuBLASLt would take: tiles in waves, of the best of a few sizes, each with what its size
// makes it slower than the tensor cores (one more multiplication of a row of w by a row of x takes 1 / 2048 cycles, for
// each of K). Of 8 products of weights of 1.8 to 4.2 million elements and 512 to 8192 rows (H200, in chains: matmul.cu)
// 6 are faster so, by 1 to 23 %; this chooses them, and one that takes 4 % longer so.
constexpr int64_t kDecodeCycles = 7000, kDecodedPerKilocycle = 940'000;  // elements of w
constexpr struct { int rows, tokens; double factor; } kDenseTiles[] = {
    {128, 256, 1.0},  {256, 128, 1.0}, {128, 192, 1.0}, {192, 128, 1.0},
    {128, 128, 1.03}, {128, 64, 1.1},  {64, 128, 1.1},  {64, 64, 1.3}};

inline int64_t decoded_cost(int64_t M, int64_t N, int64_t K, int multiprocessors) {
  double least = 1e18;
  for (const auto& tile : kDenseTiles) {
    const int64_t tiles = (N + tile.rows - 1) / tile.rows * ((M + tile.tokens - 1) / tile.tokens);
    const int64_t waves = (tiles + multiprocessors - 1) / multiprocessors;
    least = std::min(least, waves * tile.factor * K * tile.rows * tile.tokens / 2048);
  }
  return static_cast<int64_t>(least) + kDecodeCycles + N * K * 1000 / kDecodedPerKilocycle;
}

// What the few-rows kernel takes for 9 to 16 rows of x, in the same cycles, by how it divides them: a warp has a slice
// of K, and tiles of rows of w. Fitted to 20 weights by 9, 12 and 16 rows (H200): what is chosen by it is 0.2 % slower
// than the faster of the two in the mean, 5 % at most.
constexpr int kFewCycles = 2500, kFewTileCycles = 2900, kFewXPerKilocycle = 62'000;
constexpr int kFewSlice = 256, kFewWarps = 16, kFewTileRows = 16;

inline int64_t few_rows_cost(int64_t M, int64_t N, int64_t K, int experts, int multiprocessors) {
  const int slices = ceil_div(static_cast<int>(K), kFewSlice), cluster = ceil_div(slices, kFewWarps);
  const int tiles_at_a_time = kFewWarps / ceil_div(slices, cluster) * std::max(multiprocessors / cluster, 1);
  const int64_t turns = (N / kFewTileRows * experts + tiles_at_a_time - 1) / tiles_at_a_time;
  return kFewCycles + turns * kFewTileCycles + M * K * 1000 / kFewXPerKilocycle;
}

// y in tiles of `rows` rows of w by `tokens` rows of x, and K in `steps` stages of so many cycles each.
struct Tiling {
  int rows, tokens, tiles, steps, stage_cycles;
  int row_tiles, token_group;  // as in Work

  int64_t stages() const { return static_cast<int64_t>(tiles) * steps; }
  int write_cycles() const { return static_cast<int>(kWriteCycles * tokens); }

  // What runs of cut tiles wait for memory. A tile's stage s is computed at a place of its run that depends on the
  // tile; row_tiles tiles read the same x, every token_group-th in their order.
  int64_t miss_cycles(int cut_tiles, int runs) const {
    const int64_t x_bytes = static_cast<int64_t>(cut_tiles) * tokens * steps * kRowBytesOfStage / row_tiles;
    if (x_bytes <= kCacheBytes) return 0;
    const int places = std::min(row_tiles, cut_tiles / std::gcd(cut_tiles, token_group * runs));
    return (places - 1) * (x_bytes - kCacheBytes) / kMissedPerCycle;
  }
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
    const int most = std::min({most_sharers(most_blocks), tiling.steps, most_blocks / tiling.tiles});
    for (int sharers = 2; sharers <= most; ++sharers) {
      const int left = tiling.rows * tiling.tokens / sharers * (sharers - 1);
      const int share_cycles = kShareCycles + static_cast<int>(left * tiling.rows / 128 / kSharedSumsPerCycle);
      const int64_t cost = static_cast<int64_t>(ceil_div(tiling.steps, sharers)) * tiling.stage_cycles + share_cycles;
      if (cost < plan.cost) plan.cost = cost, plan.sharers = sharers;
    }
    plan.blocks = tiling.tiles * plan.sharers;
    return plan;
  }

  // Whole tiles in waves, as many as let each run have one or two more, and these cut into so many runs.
  static Plan of_cut_tiles(const Tiling& tiling, int runs) {
    Plan plan{tiling};
    plan.blocks = runs;
    const int waves = std::max(tiling.tiles / runs - 1, 0);
    plan.whole_tiles = waves * runs, plan.cut_tiles = tiling.tiles - plan.whole_tiles;
    const int tile_sums = tiling.rows * tiling.tokens, sums_of_a_tile = 1 + ceil_div(runs, tiling.tiles);
    const int wait_and_sums = kWaitCycles + sums_of_a_tile * static_cast<int>(tile_sums / kSumsPerCycle);
    plan.cost = tiling.stages() * tiling.stage_cycles / runs + static_cast<int64_t>(waves) * tiling.write_cycles() +
                wait_and_sums + tiling.miss_cycles(plan.cut_tiles, runs);
    plan.cut_cost = wait_and_sums / tiling.stage_cycles;
    return plan;
  }

  // Tiles whole where that takes no longer than cutting them, for at most so many blocks at a time.
  static Plan of_runs(const Tiling& tiling, int most_blocks) {
    const int tiles = tiling.tiles, rounds = ceil_div(tiles, most_blocks);
    int runs = static_cast<int>(std::clamp<int64_t>(tiling.stages() / kFewestSteps, 1, most_blocks));
    if (runs > tiles && runs % tiles * 8 < runs) runs -= runs % tiles;  // all tiles alike
    Plan plan = of_cut_tiles(tiling, runs);
    for (int fewer = runs - 1; fewer >= runs * 7 / 8 && tiling.miss_cycles(plan.cut_tiles, plan.blocks) > 0; --fewer) {
      const Plan other = of_cut_tiles(tiling, fewer);
      if (other.cost < plan.cost) plan = other;
    }
    const int64_t whole_cost =
        rounds * (static_cast<int64_t>(tiling.steps) * tiling.stage_cycles + tiling.write_cycles());
    if (whole_cost <= plan.cost || tiling.stages() * plan.blocks >= INT32_MAX) {
      plan.blocks = ceil_div(tiles, rounds), plan.whole_tiles = tiles, plan.cut_tiles = 0, plan.cost = whole_cost;
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
    return finish_together(tiling.tokens) ? std::min(most_sharers(most_blocks), units) : 1;
  }

  // In the scratch: flags, sums of tiles that several blocks have, x where a kernel wants it moved. A block has two
  // places for sums where runs may lie within tiles.
  int places() const {
    if (sharers > 1) return blocks;
    return cut_tiles == 0 ? 0 : finish_together(tiling.tokens) && cut_tiles < blocks ? 2 * blocks : blocks;
  }
  int64_t flags_bytes() const { return ceil_div(places() * (tiling.rows / 64) * kMostSharers, 32) * 256; }
  int64_t x_at() const { return flags_bytes() + int64_t{4} * places() * tiling.rows * tiling.tokens; }
};

}  // namespace many_rows
}  // namespace nvfp4
