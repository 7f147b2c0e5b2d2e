// Sums of one tile from the blocks that share it, through global memory: each leaves the others what they finish.
//
// A block finishes every so many units of 16 tokens, and adds to its own sums those of the others in their order, so
// the result is the same from run to run. H200, 4096 x 4096, M = 64 and 128, us in a chain of products: 11.8 and 15.2;
// with one block that adds what all others leave 13.9 and 16.7; with sums sent to the shared memory of the blocks of a
// cluster 13.4 (clusters of two: on 132 multiprocessors only 30 clusters of four find places).
#pragma once

#include "matmul_many_rows_epilogue.cuh"
#include "matmul_many_rows_schedule.cuh"

namespace nvfp4 {
namespace many_rows {

// Of the sums in global memory each thread has its own: it reads what the thread of its number in other blocks left.
template <typename S>
class Sharing {
 public:
  __device__ explicit Sharing(const Work& work)
      : work_(work), rank_(blockIdx.x % work.sharers), first_block_(blockIdx.x - rank_) {}

  // At the start, as not_ready.
  __device__ __forceinline__ void begin() const {
    if (other() < work_.sharers) *flag(rank_, other()) = 0;
  }

  __device__ __forceinline__ bool owns(int unit) const { return unit % work_.sharers == rank_; }

  __device__ __forceinline__ void leave(const float (&sum)[S::kSums]) const {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      if (owns(unit)) continue;
      float4* to = place(rank_, unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* four = sum + 8 * unit + 4 * half;
        __stcg(to + half * S::kConsumers, make_float4(four[0], four[1], four[2], four[3]));
      }
    }
    warpgroup_sync();
    if (talks_to_another()) say_ready(flag(rank_, other()), work_.launch);
  }

  __device__ __forceinline__ void add(float (&sum)[S::kSums]) const {
    if (talks_to_another()) wait_until_ready(flag(other(), rank_), work_.launch);
    warpgroup_sync();
#pragma unroll 2
    for (int own = rank_; own < S::kUnits; own += work_.sharers) {
      float others[8] = {};
#pragma unroll 4
      for (int rank = 0; rank < work_.sharers; ++rank) {
        if (rank == rank_) continue;
        const float4 a = __ldcg(place(rank, own)), b = __ldcg(place(rank, own) + S::kConsumers);
        others[0] += a.x, others[1] += a.y, others[2] += a.z, others[3] += a.w;
        others[4] += b.x, others[5] += b.y, others[6] += b.z, others[7] += b.w;
      }
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {  // registers have no index
        if (unit != own) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[8 * unit + i] += others[i];
      }
    }
  }

 private:
  // A warpgroup's thread for each of the others.
  __device__ __forceinline__ int other() const { return threadIdx.x % 128; }
  __device__ __forceinline__ bool talks_to_another() const { return other() < work_.sharers && other() != rank_; }
  __device__ __forceinline__ uint64_t* flag(int from, int to) const {
    return work_.ready + ((first_block_ + from) * kMostSharers + to) * S::kGroups + threadIdx.x / 128;
  }
  __device__ __forceinline__ float4* place(int rank, int unit) const {
    const int64_t at = (static_cast<int64_t>(first_block_ + rank) * S::kUnits + unit) * 2;
    return work_.sums + at * S::kConsumers + threadIdx.x;
  }

  const Work& work_;
  int rank_, first_block_;
};

}  // namespace many_rows
}  // namespace nvfp4
