// Split-K's reduction: sums of one tile from the blocks that share it, through global memory. Each leaves the others
// what they finish.
//
// A block finishes every so many units of 16 tokens, and adds to its own sums those of the others in their order, so
// the result is the same from run to run. H200, 4096 x 4096, M = 64 and 128, us in a chain of products: 11.8 and 15.2;
// with one block that adds what all others leave 13.9 and 16.7; with sums sent to the shared memory of the blocks of a
// cluster 13.4 (clusters of two: on 132 multiprocessors only 30 clusters of four fit). Since three others' sums
// are loaded at a time, and products begin sooner, 10.2 and 13.1.
#pragma once

#include "cuda/matmul/many_rows_sm90/epilogue.cuh"
#include "cuda/matmul/many_rows_sm90/schedule.cuh"

namespace nvfp4 {
namespace many_rows {

// Of the sums in global memory each thread has its own: it reads what the thread of its number in other blocks left.
template <typename S>
class Sharing {
 public:
  __device__ Sharing(const Work& work, const Meeting& meeting) : work_(work), meeting_(meeting) {
#pragma unroll 1  // otherwise it divides to know how often
    for (int unit = meeting.rank; unit < S::kUnits; unit += meeting.finishers) own_ |= 1u << unit;
    keep(own_);  // here, not where it is used
  }

  __device__ __forceinline__ bool owns(int unit) const { return own_ >> unit & 1; }

  // Sums to the blocks that finish them; what this block finishes to its own shared memory, at `own`, the second
  // stage's slot and on, where sums have an index, which registers have not. Nothing is copied there any more when all
  // warps have left their loops: the block has no further tile, and what it wrote of an earlier one has
  // been read.
  __device__ __forceinline__ void leave(const float (&sum)[S::kSums], uint32_t own) const {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      if (owns(unit)) continue;
      float4* to = sums_of(meeting_.rank, unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* four = sum + 8 * unit + 4 * half;
        __stcg(to + half * S::kConsumers, make_float4(four[0], four[1], four[2], four[3]));
      }
    }
    consumers_sync<S>();
    if (other() < meeting_.finishers && other() != meeting_.rank) {
      say_ready(ready_flag<S>(work_, meeting_.slot(meeting_.rank), other()), work_.launch);
    }
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      if (!owns(unit)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* from = sum + 8 * unit + 4 * half;
        const float four[4] = {from[0], from[1], from[2], from[3]};
        store_shared_floats(own_address(own, unit) + half * kHalf, four);
      }
    }
  }

  // Calls finished(unit, its eight sums) for each unit that this block finishes. The others' sums are added in their
  // order, then to its own.
  template <typename Finished>
  __device__ __forceinline__ void add(uint32_t own, Finished finished) const {
    for (int from = other(); from < meeting_.all; from += 128) {
      if (from == meeting_.rank) continue;
      wait_until_ready(ready_flag<S>(work_, meeting_.slot(from), meeting_.rank), work_.launch);
    }
    warpgroup_sync();
#pragma unroll 1
    for (int first = meeting_.rank; first < S::kUnits; first += kUnitsAtOnce * meeting_.finishers) {
      float sum[kUnitsAtOnce][8] = {};
#pragma unroll 1
      for (int begin = 0; begin < meeting_.all - 1; begin += kOthersAtOnce) {
        float4 theirs[kOthersAtOnce][kUnitsAtOnce][2];  // under way together, so no branch: what is not there is zero
#pragma unroll
        for (int j = 0; j < kOthersAtOnce; ++j) {
#pragma unroll
          for (int i = 0; i < kUnitsAtOnce; ++i) {
            const int other = begin + j, unit = first + i * meeting_.finishers;
            const float4* from = sums_of(other + (other >= meeting_.rank), unit);
            const bool is_there = other < meeting_.all - 1 && unit < S::kUnits;
            theirs[j][i][0] = load_or_zero(is_there, from);
            theirs[j][i][1] = load_or_zero(is_there, from + S::kConsumers);
          }
        }
#pragma unroll
        for (int j = 0; j < kOthersAtOnce; ++j) {
#pragma unroll
          for (int i = 0; i < kUnitsAtOnce; ++i) add_to(sum[i], theirs[j][i][0], theirs[j][i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnitsAtOnce; ++i) {
        const int unit = first + i * meeting_.finishers;
        if (unit >= S::kUnits) break;
        const uint32_t at = own_address(own, unit);
        add_to(sum[i], load_shared_floats(at), load_shared_floats(at + kHalf));
        finished(unit, sum[i]);
      }
    }
  }

 private:
  static constexpr int kMostOwn = (S::kUnits + 1) / 2, kUnitsAtOnce = kMostOwn < 4 ? kMostOwn : 4, kOthersAtOnce = 3;
  static constexpr int kHalf = S::kConsumers * 16;  // bytes: of a unit four sums of each thread
  static_assert(S::kUnits * 2 * kHalf <= S::kPoolBytes - S::kStageBytes,
                "a block's own sums lie in the pool behind its first stage, where y is on its way out");

  static __device__ __forceinline__ float4 load_or_zero(bool is_there, const float4* from) {
    return is_there ? __ldcg(from) : make_float4(0, 0, 0, 0);
  }
  static __device__ __forceinline__ void add_to(float (&sum)[8], float4 a, float4 b) {
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
  }
  static __device__ __forceinline__ uint32_t own_address(uint32_t own, int unit) {
    return own + unit * 2 * kHalf + threadIdx.x * 16;
  }
  // A warpgroup's thread for each of the others.
  __device__ __forceinline__ int other() const { return threadIdx.x % 128; }
  __device__ __forceinline__ float4* sums_of(int rank, int unit) const {
    const int64_t at = (static_cast<int64_t>(meeting_.slot(rank)) * S::kUnits + unit) * 2;
    return work_.sums + at * S::kConsumers + threadIdx.x;
  }

  const Work& work_;
  const Meeting meeting_;
  uint32_t own_ = 0;  // units, as bits: a remainder for each would be a division
};

}  // namespace many_rows
}  // namespace nvfp4
