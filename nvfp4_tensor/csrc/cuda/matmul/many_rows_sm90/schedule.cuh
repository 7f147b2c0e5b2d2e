// Tile coordinates, and the division of groups of rows, whose tiles only the device can count; the rest is in runs.h.
#pragma once

#include <cuda.h>

#include "cuda/matmul/groups.cuh"
#include "cuda/matmul/many_rows_sm90/runs.h"
#include "cuda/matmul/many_rows_sm90/shapes.h"
#include "cuda/matmul/problem.cuh"

namespace nvfp4 {
namespace many_rows {

// The weights that a launch multiplies by the same x, one or up to kCount, whose tiles follow one another.
template <int kCount_>
struct Weights {
  static constexpr int kCount = kCount_;
  Problem p[kCount];
  CUtensorMap codes[kCount], y[kCount];
  int first[kCount];   // row tiles of those before it
  bool plain[kCount];  // y is of x's dtype, 16 bytes of it begin where 8 rows of w do, and all tokens have one bias
};

struct TileCoord {
  int expert, token, row;  // the row counted over the batch: down to 127 before the expert's first
  int end;                 // of the expert's tokens
  int which;               // of the weights
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

template <typename S, bool kGrouped, typename W>
__device__ __forceinline__ TileCoord tile_coord(const W& weights, const Work& work, int tile) {
  const Tile at = tile_at<kGrouped>(work, tile);
  const Problem& p = weights.p[0];
  if constexpr (kGrouped) {
    const TokenTile own = TokenTiles(p, S::kTokens).find(at.token_tile);
    return {own.expert, own.begin, own.expert * p.N / kBand * kBand + at.row_tile * S::kRows, own.end, 0};
  } else if constexpr (W::kCount == 1) {
    return {at.expert, at.token_tile * S::kTokens, at.expert * p.N / kBand * kBand + at.row_tile * S::kRows, p.M, 0};
  } else {
    int which = 0, first = 0;
#pragma unroll
    for (int i = 1; i < W::kCount; ++i) {
      if (at.row_tile >= weights.first[i]) which = i, first = weights.first[i];
    }
    return {0, at.token_tile * S::kTokens, (at.row_tile - first) * S::kRows, p.M, which};
  }
}

}  // namespace many_rows
}  // namespace nvfp4
