// Sums of one tile from all warpgroups that share it, of all blocks of a cluster: sent to shared memory, each unit of
// 16 tokens to the warpgroup that finishes it.
//
// What shares a tile is numbered, rank + cluster * part. Each has some units of 16 tokens and adds to its own sums
// those of the others in their order, so the result is the same from run to run.
#pragma once

#include "matmul_many_rows_schedule.cuh"
#include "shared_sm90.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kUnitBytes = 16 * 64 * 4;  // 16 tokens of a warpgroup's 64 rows of w: 8 sums of each thread

// The most bytes that a block receives where up to `most_blocks`, of `parts` each, share a tile of so many units.
constexpr int inbox_bytes(int units, int parts, int row_groups, int most_blocks) {
  int most = 0;
  for (int cluster = 2; cluster <= most_blocks; ++cluster) {
    const int sharers = parts * cluster, owning = (units + cluster - 1) / cluster;
    const int units_of_each = (units + sharers - 1) / sharers;
    const int bytes = row_groups * (owning < parts ? owning : parts) * units_of_each * (sharers - 1) * kUnitBytes;
    most = bytes > most ? bytes : most;
  }
  return most;
}

template <typename S>
class Meeting {
 public:
  // shared: S::kGroups barriers at kMeetingAt, and the inboxes. threadIdx.x / 128 is a consumer's warpgroup.
  __device__ Meeting(uint32_t shared, const Work& work)
      : barriers_(shared + S::kMeetingAt),
        inboxes_(shared + S::kInboxAt),
        cluster_(work.cluster),
        rank_(blockIdx.x % work.cluster) {}

  // By one thread, before the cluster is told.
  __device__ void prepare() const {
    for (int group = 0; group < S::kGroups; ++group) {
      barrier_init(barrier(group), 1);
      barrier_expect(barrier(group), units_of(number(group)) * others() * kUnitBytes);
    }
    show_barriers_to_cluster();
  }

  __device__ __forceinline__ bool owns(int unit) const { return unit % sharers() == number(threadIdx.x / 128); }

  __device__ __forceinline__ void send(const float (&sum)[S::kSums]) const {
    const int own = number(threadIdx.x / 128);
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      const int owner = unit % sharers();
      if (owner == own) continue;
      const int rank = owner % cluster_, group = owner / cluster_ * S::kRowGroups + row_group();
      const uint32_t to = in_rank(place(group, unit, own - (own > owner)), rank), full = in_rank(barrier(group), rank);
      send_floats(to, make_float4(sum[8 * unit], sum[8 * unit + 1], sum[8 * unit + 2], sum[8 * unit + 3]), full);
      send_floats(to + kUnitBytes / 2,
                  make_float4(sum[8 * unit + 4], sum[8 * unit + 5], sum[8 * unit + 6], sum[8 * unit + 7]), full);
    }
  }

  __device__ __forceinline__ void receive(float (&sum)[S::kSums]) const {
    const int group = threadIdx.x / 128;
    if (units_of(number(group)) == 0) return;
    barrier_wait(barrier(group), 0);
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      if (!owns(unit)) continue;
      for (int other = 0; other < others(); ++other) {
        const uint32_t from = place(group, unit, other);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 v = load_shared_floats(from + half * (kUnitBytes / 2));
          float* to = sum + 8 * unit + 4 * half;
          to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int sharers() const { return cluster_ * S::kParts; }
  __device__ __forceinline__ int others() const { return sharers() - 1; }
  __device__ __forceinline__ int row_group() const { return threadIdx.x / 128 % S::kRowGroups; }
  __device__ __forceinline__ int number(int group) const { return rank_ + cluster_ * (group / S::kRowGroups); }
  __device__ __forceinline__ int units_of(int number) const {
    return number < S::kUnits ? (S::kUnits - number - 1) / sharers() + 1 : 0;
  }
  __device__ __forceinline__ uint32_t barrier(int group) const { return barriers_ + 8 * group; }
  // Where a sender leaves this thread's sums of a unit; senders are counted without the owner.
  __device__ __forceinline__ uint32_t place(int group, int unit, int other) const {
    const int most_units = (S::kUnits + sharers() - 1) / sharers();
    const int at = (group * most_units + unit / sharers()) * others() + other;
    return inboxes_ + at * kUnitBytes + threadIdx.x % 128 * 16;
  }

  uint32_t barriers_, inboxes_;
  int cluster_, rank_;
};

}  // namespace many_rows
}  // namespace nvfp4
