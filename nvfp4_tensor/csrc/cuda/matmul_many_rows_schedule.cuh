// Which block computes what: tiles of y, whole or in parts along K, so that all blocks have equally much to do.
//
// Tiles that fill all blocks evenly are computed whole, in waves. The others are laid end to end, K innermost, and cut
// into as many equal runs as there are blocks. The block with the beginning of a tile finishes it: it waits for the
// sums of the blocks behind it and adds them in their order, so the result is the same from run to run.
//
// Few tiles are cut otherwise: each belongs to a cluster, whose blocks take equal parts of K and meet in shared memory
// (matmul_many_rows_meet.cuh), not through global memory.
#pragma once

#include "matmul_groups.cuh"
#include "matmul_problem.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kBand = 128;  // rows of w that share a band of scales

struct Work {
  int row_tiles, token_tiles;  // of an expert
  int token_group;             // tiles of so many tokens run together, so that both operands stay in L2
  int steps;                   // stages along K
  int whole_tiles;             // computed by a block each, in waves
  int cut_tiles;               // the others
  int cut_cost;                // stages that take as long as cutting does: by this groups of rows decide on the device
  float4* sums;                // (blocks, tokens / 8, consumers): what a block has of a tile that another one finishes
  uint64_t* ready;             // (blocks, warpgroups of consumers): `launch` where sums are there, then 0 again
  uint64_t launch;             // a number that no memory holds by chance, another one for each launch
  int cluster;                 // blocks that share a tile, of the shapes for which a cluster has one
};

struct Place {
  int expert, token, row;  // the row counted over the batch: down to 127 before the expert's first
  int end;                 // of the expert's tokens
};

// Of groups of rows only the device knows how many tiles there are, so each block plans again; by one warp.
__device__ __forceinline__ void plan_groups(const Problem& p, const Work& launched, int tokens, Work* work) {
  const int token_tiles = TokenTiles(p, tokens).count(), blocks = gridDim.x, steps = launched.steps;
  const int tiles = token_tiles * launched.row_tiles, waves = (tiles + blocks - 1) / blocks;
  const int64_t stages = static_cast<int64_t>(tiles) * steps;
  const bool whole = waves * steps <= stages / blocks + launched.cut_cost || stages * blocks >= INT32_MAX;
  if (threadIdx.x % 32 == 0) {
    *work = launched;
    work->token_tiles = token_tiles;
    work->whole_tiles = whole ? tiles : max(tiles / blocks - 1, 0) * blocks;
    work->cut_tiles = tiles - work->whole_tiles;
  }
}

// The one place that knows where a tile lies: tiles go down the rows of w, token_group tiles of tokens wide.
template <typename S, bool kGrouped>
__device__ __forceinline__ Place place_of(const Problem& p, const Work& work, int tile) {
  const int of_expert = work.row_tiles * work.token_tiles, expert = tile / of_expert;
  tile -= expert * of_expert;
  const int in_group = work.row_tiles * work.token_group, group = tile / in_group;
  const int width = min(work.token_group, work.token_tiles - group * work.token_group);
  tile -= group * in_group;
  const int token_tile = group * work.token_group + tile % width, row = tile / width * S::kRows;
  if constexpr (kGrouped) {
    const TokenTile own = TokenTiles(p, S::kTokens).find(token_tile);
    return {own.expert, own.begin, own.expert * p.N / kBand * kBand + row, own.end};
  } else {
    return {expert, token_tile * S::kTokens, expert * p.N / kBand * kBand + row, p.M};
  }
}

struct Segment {
  int tile, begin, end;  // stages begin .. end - 1
};

// The segments of a block, in order.
class Runs {
 public:
  __device__ explicit Runs(const Work& work)
      : work_(work), whole_(blockIdx.x), number_(number_of(blockIdx.x)), at_(cut(number_)), end_(cut(number_ + 1)) {}

  __device__ bool next(Segment& s) {
    if (whole_ < work_.whole_tiles) {
      s = {whole_, 0, work_.steps};
      whole_ += gridDim.x;
      return true;
    }
    if (at_ >= end_) return false;
    const int tile = at_ / work_.steps, begin = at_ - tile * work_.steps;
    const int end = min(work_.steps, begin + (end_ - at_));
    s = {work_.whole_tiles + tile, begin, end};
    at_ += end - begin;
    return true;
  }
  // Where the sums of the run behind this one lie, `behind` = 1, 2, ...; -1 where that run is not of this tile.
  __device__ int other(const Segment& s, int behind) const {
    const int tile_end = (s.tile - work_.whole_tiles + 1) * work_.steps;
    return cut(number_ + behind) < tile_end ? number_of(number_ + behind) : -1;
  }

 private:
  // Runs are numbered from the last block: a block waits only for blocks that were started before it.
  __device__ int number_of(int block) const { return gridDim.x - 1 - block; }
  // Below 2^31 (Plan sees to it): 64-bit divisions would take a microsecond of the start.
  __device__ int cut(int number) const {
    return work_.cut_tiles * work_.steps * number / static_cast<int>(gridDim.x);
  }

  const Work& work_;
  int whole_, number_, at_, end_;
};

// The segment of a block whose cluster has one tile.
class Part {
 public:
  __device__ explicit Part(const Work& work) : work_(work) {}

  __device__ bool next(Segment& s) {
    const int cluster = work_.cluster, rank = blockIdx.x % cluster;
    s = {static_cast<int>(blockIdx.x) / cluster, work_.steps * rank / cluster, work_.steps * (rank + 1) / cluster};
    const bool is_first = !done_;
    done_ = true;
    return is_first;
  }

 private:
  const Work& work_;
  bool done_ = false;
};

}  // namespace many_rows
}  // namespace nvfp4
