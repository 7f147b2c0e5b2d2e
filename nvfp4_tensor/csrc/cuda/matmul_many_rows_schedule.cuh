// Where a tile lies, and how groups of rows, whose tiles only the device counts, are divided; the rest is in
// matmul_many_rows_runs.h.
#pragma once

#include "matmul_groups.cuh"
#include "matmul_many_rows_runs.h"
#include "matmul_problem.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kBand = 128;  // rows of w that share a band of scales

struct Place {
  int expert, token, row;  // the row counted over the batch: down to 127 before the expert's first
  int end;                 // of the expert's tokens
};

// Each block plans again; by one warp.
__device__ __forceinline__ void plan_groups(const Problem& p, const Work& launched, int tokens, Work* work) {
  const int token_tiles = TokenTiles(p, tokens).count();
  const Division division(token_tiles * launched.row_tiles, launched.steps, gridDim.x, launched.cut_cost);
  if (threadIdx.x % 32 == 0) {
    *work = launched;
    work->token_tiles = token_tiles;
    work->whole_tiles = division.whole_tiles, work->cut_tiles = division.cut_tiles, work->runs = division.runs;
  }
}

// The one place that knows where a tile lies: tiles go down the rows of w, token_group tiles of tokens wide.
template <typename S, bool kGrouped>
__device__ __forceinline__ Place place_of(const Problem& p, const Work& work, int tile) {
  const int of_expert = work.row_tiles * work.token_tiles;
  const int expert = quotient<kGrouped>(tile, of_expert, work.by.tiles_of_expert);
  tile -= expert * of_expert;
  const int in_group = work.row_tiles * work.token_group;
  const int group = quotient<kGrouped>(tile, in_group, work.by.tiles_of_group);
  tile -= group * in_group;
  const int first = group * work.token_group, width = min(work.token_group, work.token_tiles - first);
  const int down = quotient<kGrouped>(tile, width, width == work.token_group ? work.by.group : work.by.last_group);
  const int token_tile = first + tile - down * width, row = down * S::kRows;
  if constexpr (kGrouped) {
    const TokenTile own = TokenTiles(p, S::kTokens).find(token_tile);
    return {own.expert, own.begin, own.expert * p.N / kBand * kBand + row, own.end};
  } else {
    return {expert, token_tile * S::kTokens, expert * p.N / kBand * kBand + row, p.M};
  }
}

}  // namespace many_rows
}  // namespace nvfp4
