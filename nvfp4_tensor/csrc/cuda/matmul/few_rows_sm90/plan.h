// How Hopper's few-rows kernel divides a product of at most 16 rows of x, and what that costs. Without CUDA headers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/matmul/few_rows_sm90/costs.h"
#include "cuda/matmul/size.h"

namespace nvfp4 {
namespace few_rows_sm90 {

constexpr int kWarps = 16;  // that multiply, each a slice of K
constexpr int kTileRows = 16;
constexpr int kSliceOf16Rows = 256;  // elements of K that a warp has where x has more than 8 rows
constexpr int kSliceOf8Rows = 512;

// K is split over the warps of a block and, where it has more slices, over the blocks of a cluster (split-K).
struct Split {
  int cluster;     // blocks
  int warps_in_k;  // of a block's warps, how many split K
  int row_groups;  // and how many tiles are thus multiplied at a time

  static Split of(int K, int slice) {
    const int slices = ceil_quotient(K, slice), cluster = ceil_quotient(slices, kWarps);
    const int warps_in_k = ceil_quotient(slices, cluster);
    return {cluster, warps_in_k, kWarps / warps_in_k};
  }
};

// Of 9 to 16 rows of x.
inline int64_t cost(const ProductSize& size, int multiprocessors) {
  const Split split = Split::of(size.K, kSliceOf16Rows);
  const int tiles_at_a_time = split.row_groups * std::max(multiprocessors / split.cluster, 1);
  const int64_t tiles = static_cast<int64_t>(size.N / kTileRows) * size.experts;
  const int64_t turns = (tiles + tiles_at_a_time - 1) / tiles_at_a_time;
  return costs::kFewCycles + turns * costs::kFewTileCycles +
         static_cast<int64_t>(size.M) * size.K * 1000 / costs::kFewXPerKilocycle;
}

// Up to so many rounds of all multiprocessors short slices are faster: H200, K = 4096, M = 1, us of a product and a
// norm before it, slices of 256 and of 512: N = 4096 (2 rounds) 7.2 and 7.3, 6144 (3) 8.6 and 9.0, 28672 (14) 24.6 and
// 23.5.
constexpr int kShortRounds = 6;

// Whether up to 8 rows of x are multiplied in slices of 256, not 512.
inline bool are_slices_short(const ProductSize& size, int multiprocessors) {
  const int64_t rows = static_cast<int64_t>(size.experts) * size.N;
  return size.K <= kWarps * kSliceOf16Rows && rows <= static_cast<int64_t>(kShortRounds) * kTileRows * multiprocessors;
}

}  // namespace few_rows_sm90
}  // namespace nvfp4
