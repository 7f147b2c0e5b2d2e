// Grouped GEMM: rows of x in groups, one per expert, whose sizes only the device knows: which rows a block computes.
//
// Expert e has the rows offs[e - 1]..offs[e]. They are divided into tiles of so many tokens, the last of an expert not
// whole; a launch knows only how many tiles there can be (ProductSize::token_tiles), and each block finds its own here.
#pragma once

#include "cuda/matmul/problem.cuh"

namespace nvfp4 {

struct TokenTile {
  int expert;      // -1: there are fewer tiles
  int begin, end;  // its rows, and those that follow of its expert
};

#ifdef __CUDACC__

// The token tiles of a problem, for whole warps: each lane looks at one expert of 32.
class TokenTiles {
 public:
  __device__ TokenTiles(const Problem& p, int tokens) : p_(p), tokens_(tokens), lane_(threadIdx.x % 32) {}

  // The rows before this one are somebody's.
  __device__ int end() const { return end(p_.experts - 1); }

  __device__ int count() const {
    int mine = 0;
    for (int expert = lane_; expert < p_.experts; expert += 32) mine += tiles(end(expert - 1), end(expert));
    return __reduce_add_sync(0xFFFFFFFF, mine);
  }

  __device__ TokenTile find(int tile) const {
    for (int first = 0, before = 0; first < p_.experts; first += 32) {
      const int expert = first + lane_;
      const bool is_one = expert < p_.experts;
      const int from = is_one ? end(expert - 1) : 0, to = is_one ? end(expert) : 0;
      const int own = tiles(from, to);
      int sum = own;  // of this lane's and those before it
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(0xFFFFFFFF, sum, distance);
        sum += lane_ >= distance ? below : 0;
      }
      const int index = tile - before - (sum - own);  // in this lane's expert
      const unsigned holds = __ballot_sync(0xFFFFFFFF, index >= 0 && index < own);
      if (holds) {
        const int lane = __ffs(holds) - 1;
        return {first + lane, __shfl_sync(0xFFFFFFFF, from + index * tokens_, lane), __shfl_sync(0xFFFFFFFF, to, lane)};
      }
      before += __shfl_sync(0xFFFFFFFF, sum, 31);
    }
    return {-1, 0, 0};
  }

 private:
  // Offsets that are not those of rows would read and write elsewhere.
  __device__ int end(int expert) const { return expert < 0 ? 0 : max(min(p_.offs[expert], p_.rows), 0); }
  __device__ int tiles(int from, int to) const { return to > from ? (to - from + tokens_ - 1) / tokens_ : 0; }

  const Problem& p_;
  int tokens_, lane_;
};

// Zeros for one row of y, by so many threads.
__device__ __forceinline__ void zero_row(const Problem& p, int64_t row, int thread, int threads) {
  for (int n = thread; n < p.N; n += threads) store_rounded(p.y, p.y_dtype, row * p.y_row + n, 0);
}

#endif  // __CUDACC__

}  // namespace nvfp4
