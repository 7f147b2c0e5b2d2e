// y = x w^T for at most 16 rows of x, on Hopper and later: bound by reading w, so everything else goes on beside that.
//
// Split-K, warp-specialized, each warp with a TMA pipeline of its own. A warp owns a slice of K. It keeps x of that
// slice in registers, as B fragments of mma.m16n8k16, and tiles of 16 rows of w stream past, the A operand. The order
// of K inside an MMA is free, so a lane's 16 bytes of codes are its A fragment in memory order, and x is permuted
// alike while it is loaded. Each warp loads its own tiles, kDepth copies ahead, and waits only for its own mbarriers.
//
// The 16 rows of a tile are r + 32 i, r in four consecutive rows, i in 0..3: in the 128x4 order of the scales these are
// 64 consecutive bytes for each 64 elements, so a tile reads whole sectors of them.
//
// Four more warps add the sums of the others, in their order, and write y (the epilogue) while they go on. Where a row
// has more than 16 slices, blocks of a cluster split it, and their adding warps send what they have to those of the
// first block, through distributed shared memory.
//
// Roles, of 20 warps (one block on a multiprocessor; it stays for all of its tiles: persistent)
//   multiplying  warps 0..15, 104 registers a thread: TMA for their own tiles, decode, mma, leave sums in a slot.
//                Of the first warps_in_k * row_groups each has a slice of K and every row_groups-th tile; others leave.
//   adding       warps 16..19, 64 registers: each every fourth tile: adds 16 or fewer warps' sums, those of the other
//                blocks of the cluster too, and writes y; or, in a block that is not the cluster's first, sends them.
//
// mbarriers, with the arrivals that complete a phase
//   copied[warp][kDepth]  1, the elected lane's expect_tx of 2304 bytes, and TMA's bytes: a unit has arrived.
//   loaded[warp]          32, every lane, once what it loaded of a unit has been used: TMA may fill its place again.
//   full[kSlots]          32 * warps_in_k * row_groups, every lane that multiplies: a step's sums are in the slot.
//   empty[kSlots]         128, every lane that adds: they have been read.
//   inbox full[adder]     1, lane 0's expect_tx in the first block, and the bytes of the other blocks' st.async.
//   inbox empty[adder]    1, in each other block, from a lane of the first block's adder: it may send again.
//
// Timeline
//   all          barriers set | __syncthreads | cluster arrives | registers dealt out (setmaxnreg)
//   multiplying  PDL wait | x to registers, TMA of kDepth units | x to fragments through its slots | cluster waits |
//                each tile: copied -> decode, mma -> loaded -> TMA of the unit kDepth ahead; empty -> sums -> full
//   adding       PDL wait, the next kernel may begin | cluster waits |
//                each tile: full -> add -> empty -> (first block) inbox full -> add -> y -> inbox empty
//                                                   (others) inbox empty -> st.async
//
// Shared memory, from a multiple of 1024 on; bytes for up to 8 rows of x, and up to 16
//   codes     kWarps * kDepth * 2048              131072    98304   128-byte swizzle
//   scales    kWarps * kDepth * 256                16384    12288
//   slots     kWarps * kSlots * kTileSums * 4      32768    81920   x passes through them first
//   inboxes   kAdders * 7 * kTileSums * 4          14336    28672   of the cluster's first block
//   barriers  copied, full, empty, inboxes; loaded   768      656
//
// A chain of such kernels overlaps by PDL (programmatic dependent launch): each is let begin while the one before still
// runs, prepares its barriers and waits: that kernel may be the one that writes w. More than a few rows of x go ahead
// of all copies of w, for what is asked for later waits behind them; fewer go behind the first tile
// (kMostRowsBehindATile). What is brought before the wait, to the ring or by prefetches to the L2 cache, is in the way
// of x and of the kernel before: decode of an 8B model took 2222 us per token without, 2213 to 2346 with a unit of each
// warp in that cache (by lines, by sectors), 2619 with all the ring's; 4 units in the ring took its layers, of one row,
// from 51.9 to 49.2 us of products alone, but from 68.7 to 69.1 with norms, gate and attention between them.
//
// An mma holds its scheduler's issue for 8 cycles on Hopper, decoding what it multiplies for 15, so that without any
// copy 14336 x 8192 takes 18 us in a chain at M = 1 and 22 at 16, where copies alone take 18.4. By wgmma, which holds
// nothing, with x in shared memory as 32 columns of four warps' slices, it was 24.9 and 30.3 us instead of 21.2 and
// 27.4: warps in lockstep wait for the slowest copy of four, and for the products of each unit.
#pragma once

#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/few_rows_sm90/finish.cuh"
#include "cuda/matmul/few_rows_sm90/shape.cuh"
#include "cuda/matmul/few_rows_sm90/slice.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_sm90.cuh"

namespace nvfp4 {
namespace few_rows_sm90 {

#if NVFP4_LARGE_SHARED_MEMORY

__device__ __forceinline__ void add_to(float4& sum, float4 v) {
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

__device__ __forceinline__ void copy_unit(const Maps& maps, uint32_t tile, int k, uint32_t codes, uint32_t scales,
                                          uint32_t barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const int band = tile / kTilesPerBand, first = tile % kTilesPerBand;
  mbarrier_arrive_expect_tx(barrier, kUnitCodes + kUnitScales);
  tma_load_4d(codes, &maps.codes, k / 2, first * 4, 0, band, barrier, policy);
  tma_load_3d(scales, &maps.scales, first * 64, k / 64, band, barrier, policy);
}

// The lane's offsets in a unit.
struct LaneOffsets {
  uint32_t codes;     // of its first row, elements 0..127; of its second row at this ^ 576, of 128 further at ^ 64
  uint32_t scales;    // of both rows and 64 elements; of 128 elements further at + 128
  uint32_t selector;  // of the two blocks' scales for the first row, then for the second

  __device__ explicit LaneOffsets(int lane) {
    const int g = lane / 4, t = lane % 4;
    const int row = g / 4 * 8 + g % 2 * 4 + g % 4;  // in the copy: r + 4 i; the other one is row ^ 4
    codes = row * 128 + (t ^ row % 8) * 16;
    scales = t / 2 * 64 + g % 4 * 16 + g / 4 * 8;
    const uint32_t even = t % 2 ? 0x32 : 0x10, odd = even + 0x44;
    selector = g % 2 ? even << 8 | odd : odd << 8 | even;
    keep(codes, scales, selector);  // worked out again for each unit they were 15 of 419 instructions
  }
};

// Rows of x up to which the first tile of w goes ahead of x. H200, in one run, us single and in a chain, x first -> the
// tile first: 14336 x 8192, M = 1, 4 and 8 25.6, 21.0 -> 24.7, 20.6; 25.3, 21.2 -> 24.8, 20.7; 25.8, 21.5 -> 26.4,
// 21.8; 4096 x 4096 11.1, 6.0 -> 10.9, 5.7; 10.8, 6.0 -> 10.9, 5.9; 11.5, 6.2 -> 11.8, 6.4. Decode of an 8B model, in
// another: 2235 -> 2183 us per token.
constexpr int kMostRowsBehindATile = 4;

// Adds the product of a unit with the x of its columns; calls loaded() once all of it is in registers, and used.
template <typename T, typename S, typename Loaded>
__device__ __forceinline__ void multiply_unit(const LaneOffsets& offsets, uint32_t codes_at, uint32_t scales_at,
                                              const uint4 (&b)[2][4][S::kColumns], float (&sum)[S::kColumns][4],
                                              Loaded loaded) {
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint4 codes[2] = {load_shared_16(codes_at + (offsets.codes ^ chunk * 64)),
                            load_shared_16(codes_at + (offsets.codes ^ (576 ^ chunk * 64)))};
    const uint2 scales = load_shared_8(scales_at + offsets.scales + chunk * 128);
    uint32_t factors[4];  // first row: blocks 0, 1; second row: blocks 0, 1
    scale_factors<T>(__byte_perm(scales.x, scales.y, offsets.selector), factors);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t w0[4], w1[4];
      decode_word<T>((&codes[0].x)[word], factors[word / 2], w0);
      decode_word<T>((&codes[1].x)[word], factors[2 + word / 2], w1);
      const uint32_t a0[4] = {w0[0], w1[0], w0[1], w1[1]}, a1[4] = {w0[2], w1[2], w0[3], w1[3]};
#pragma unroll
      for (int column = 0; column < S::kColumns; ++column) {
        mma(sum[column], a0, b[chunk][word][column].x, b[chunk][word][column].y, T{});
        mma(sum[column], a1, b[chunk][word][column].z, b[chunk][word][column].w, T{});
      }
      if (chunk == 1 && word == 0) loaded();
    }
  }
}

// The tiles of w that a warp multiplies, on their way to it.
template <typename S, typename F>
struct Stream {
  const Sets<F>& sets;
  int group, k0;                           // of the rows, and where its slice of K begins
  uint32_t codes, scales, copied, loaded;  // its copies, a barrier for each, one more for its own loads of them
  uint32_t first, end;                     // tiles

  __device__ Stream(const Sets<F>& sets, const Work& work, uint32_t shared, int warp, uint32_t begin, int tiles)
      : sets(sets), group(warp * work.share >> 16) {
    k0 = (blockIdx.x * work.warps_in_k + warp - group * work.warps_in_k) * S::kSlice;
    codes = shared + warp * S::kDepth * kUnitCodes;
    scales = shared + S::kScalesAt + warp * S::kDepth * kUnitScales;
    copied = shared + S::kBarriersAt + 8 * warp * S::kDepth;
    loaded = shared + S::kLoadedAt + 8 * warp;
    first = begin + group;
    end = group < work.row_groups && k0 < sets.problems[0].Kp ? begin + tiles : 0;
  }
  __device__ __forceinline__ void copy_tile(uint32_t which, uint32_t to) const {
    const auto [set, index] = sets.find(which);
    const Maps& maps = sets.maps[set];
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      copy_unit(maps, index, k0 + unit * kUnitElements, codes + (to + unit) * kUnitCodes,
                scales + (to + unit) * kUnitScales, copied + 8 * (to + unit));
    }
  }
  __device__ __forceinline__ void begin() const {
    if (!elect_one()) return;
#pragma unroll
    for (int d = 0; d < S::kDepth; ++d) mbarrier_init(copied + 8 * d, 1);
    mbarrier_init(loaded, 32);
    fence_proxy_async_shared();
  }
};

// What a warp that multiplies does. It waits for the cluster for the adding warps' sake: under compute-sanitizer's
// racecheck none of them goes on before every thread of the cluster has come to that wait.
template <typename T, typename S, typename F>
__device__ __forceinline__ void multiply(const Problem& p, const Work& work, const Stream<S, F>& w, uint32_t shared,
                                         int warp, int lane, int expert, uint32_t begin, int tiles) {
  const uint32_t full = shared + S::kBarriersAt + 8 * kWarps * S::kDepth, empty = full + 8 * S::kSlots;
  uint32_t tile = w.first, next_tile = tile + S::kDepth / S::kUnits * work.row_groups;  // multiplied, fetched next
  if (w.group >= work.row_groups) {
    if (work.cluster > 1) cluster_wait();
    return;
  }
  const auto copy_tiles = [&](int from, int end) {
    if (!elect_one()) return;
#pragma unroll
    for (int to = 0; to < S::kDepth; to += S::kUnits) {
      const uint32_t which = tile + to / S::kUnits * work.row_groups;
      if (to >= from && to < end && which < w.end) w.copy_tile(which, to);
    }
  };
  const int before_x = p.some_m <= kMostRowsBehindATile ? S::kUnits : 0;
  griddepcontrol_wait();
  copy_tiles(0, before_x);
  uint4 b[S::kUnits][2][4][S::kColumns];
  if constexpr (F::kInput == Input::kNormed) {
    fetch_normed<T, S>(p, w.sets.fused, work, w.group, w.k0, shared + S::kInboxAt, warp, lane, b);
  } else {
    fetch_slice<S>(p, expert, w.k0, lane, b);
  }
  copy_tiles(before_x, S::kDepth);
  turn_slice<S>(p.some_m, lane, shared + S::kSlotsAt + warp * S::kSlots * S::kTileSums * 4, b);
  const LaneOffsets offsets(lane);
  __syncwarp();  // the other lanes have read x out of the slots
  if (work.cluster > 1) cluster_wait();
  uint32_t slot = 0, slot_parity = 0, at = 0, parity = 0, loaded_parity = 0;
#pragma unroll 1
  for (uint32_t first = begin; first < begin + tiles; first += work.row_groups) {
    float sum[S::kColumns][4] = {};
    if (tile < w.end) {
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit) {
        const uint32_t its = at + unit;
        mbarrier_wait(w.copied + 8 * its, parity);
        multiply_unit<T, S>(offsets, w.codes + its * kUnitCodes, w.scales + its * kUnitScales, b[unit], sum, [&] {
          if (unit + 1 < S::kUnits || next_tile >= w.end) return;
          // By a barrier, and after what was loaded has been used: a load that still waits in its queue would see
          // what a copy begun before it brings, and arriving does not wait for loads. (With the arrival right behind
          // the last load no run was ever wrong by itself, but two of three at 14336 x 8192, M = 16, under memcheck.)
          mbarrier_arrive(w.loaded);
          if (elect_one()) {
            mbarrier_wait(w.loaded, loaded_parity);
            w.copy_tile(next_tile, at);
          }
          loaded_parity ^= 1;
        });
      }
      if ((at += S::kUnits) == S::kDepth) at = 0, parity ^= 1;
    }
    tile += work.row_groups;
    next_tile += work.row_groups;
    mbarrier_wait(empty + 8 * slot, slot_parity ^ 1);
    const uint32_t to = shared + S::kSlotsAt + (warp * S::kSlots + slot) * S::kTileSums * 4 + lane * 16;
#pragma unroll
    for (int column = 0; column < S::kColumns; ++column) store_shared_floats(to + column * 512, sum[column]);
    mbarrier_arrive(full + 8 * slot);
    if (++slot == S::kSlots) slot = 0, slot_parity ^= 1;
  }
}

// The sums that the warps of a tile left, added in their order.
template <typename S>
__device__ __forceinline__ void add_warps(uint32_t from, int warps, float4 (&sum)[S::kColumns]) {
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) sum[column] = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int column = 0; column < S::kColumns; ++column) {
      add_to(sum[column], load_shared_floats(from + warp * S::kSlots * S::kTileSums * 4 + column * 512));
    }
  }
}

// One warp of each block of a cluster, and a place in the first block where the others leave a tile's sums.
struct Inbox {
  uint32_t full, empty;  // barriers: the first block's, and each other block's own
  uint32_t sums;         // of the second block; the others' follow
  uint32_t parity;

  template <typename S>
  __device__ __forceinline__ void send(uint32_t rank, const float4 (&sum)[S::kColumns]) {
    mbarrier_wait(empty, parity ^ 1);
#pragma unroll
    for (int column = 0; column < S::kColumns; ++column) {
      st_async_floats(mapa_shared_cluster(sums + (rank - 1) * S::kTileSums * 4 + column * 512, 0), sum[column],
                      mapa_shared_cluster(full, 0));
    }
    parity ^= 1;
  }

  // Adds what the others sent, in their order.
  template <typename S>
  __device__ __forceinline__ void receive(int others, int lane, float4 (&sum)[S::kColumns]) {
    if (lane == 0) mbarrier_arrive_expect_tx(full, others * S::kTileSums * 4);
    mbarrier_wait(full, parity);
    for (int other = 0; other < others; ++other) {
#pragma unroll
      for (int column = 0; column < S::kColumns; ++column) {
        add_to(sum[column], load_shared_floats(sums + other * S::kTileSums * 4 + column * 512));
      }
    }
    parity ^= 1;
  }

  // Once the sums are used, so that no load of them still waits, the others may send again.
  __device__ __forceinline__ void make_room(int others, int lane) const {
    __syncwarp();
    if (lane < others) mbarrier_arrive_cluster(mapa_shared_cluster(empty, lane + 1));
  }
};

// Barriers of the slots, and of an adding warp's inbox.
template <typename S>
__device__ __forceinline__ void begin_adding(const Work& work, uint32_t shared, int adder) {
  if (!elect_one()) return;
  const uint32_t full = shared + S::kBarriersAt + 8 * kWarps * S::kDepth, empty = full + 8 * S::kSlots;
  if (adder == 0) {
#pragma unroll
    for (int slot = 0; slot < S::kSlots; ++slot) {
      mbarrier_init(full + 8 * slot, work.warps_in_k * work.row_groups * 32);
      mbarrier_init(empty + 8 * slot, kAdders * 32);
    }
  }
#pragma unroll
  for (int inbox = 0; inbox < 2; ++inbox) mbarrier_init(empty + 8 * S::kSlots + 16 * adder + 8 * inbox, 1);
  fence_mbarrier_init_cluster();
}

// What a warp that adds does: every fourth tile is its own.
template <typename T, typename S, typename F>
__device__ __forceinline__ void add(const Sets<F>& sets, const Work& work, uint32_t shared, int adder, int lane,
                                    int expert, uint32_t begin, int tiles) {
  constexpr int kTileBytes = S::kTileSums * 4;
  const uint32_t full = shared + S::kBarriersAt + 8 * kWarps * S::kDepth, empty = full + 8 * S::kSlots;
  const uint32_t inbox_at = empty + 8 * S::kSlots + 16 * adder;
  Inbox inbox = {inbox_at, inbox_at + 8,
                 shared + S::kInboxAt + adder * (kMostBlocksInCluster - 1) * kTileBytes + lane * 16, 0};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  bool uniform[F::kSets];
  float alpha[F::kSets];
#pragma unroll
  for (int set = 0; set < F::kSets; ++set) {
    const Problem& p = sets.problems[set];
    uniform[set] = p.w_scale_step == 0 && p.x_scale_step == 0 && p.bias == nullptr;
    alpha[set] = uniform[set] ? finish(p, expert, 0, 0, 1.0f) : 0.0f;
  }
  if (work.cluster > 1) cluster_wait();

  uint32_t slot = 0, parity = 0;
  float4 gate[S::kColumns];  // of the pair under way
#pragma unroll 1
  for (int first = 0; first < tiles; first += work.row_groups) {
    const int step_end = min(first + work.row_groups, tiles);
    int tile = Sets<F>::next_of(adder, first);
    mbarrier_wait(full + 8 * slot, parity);
    if (tile >= step_end) mbarrier_arrive(empty + 8 * slot);
#pragma unroll 1
    while (tile < step_end) {
      float4 sum[S::kColumns];
      const int group = tile - first, next = Sets<F>::next_of(adder, tile + 1);
      add_warps<S>(shared + S::kSlotsAt + (group * work.warps_in_k * S::kSlots + slot) * kTileBytes + lane * 16,
                   work.warps_in_k, sum);
      if (next >= step_end) mbarrier_arrive(empty + 8 * slot);
      if (blockIdx.x != 0) {
        inbox.send<S>(blockIdx.x, sum);
      } else {
        if (work.cluster > 1) inbox.receive<S>(work.cluster - 1, lane, sum);
        const auto [set, index] = sets.find(begin + tile);
        if constexpr (F::kOutput == Output::kGated) {
          round_tile<T, S>(sets.problems[set], index, lane, set ? uniform[1] : uniform[0], set ? alpha[1] : alpha[0],
                           sum);
          if (set == 0) {
#pragma unroll
            for (int column = 0; column < S::kColumns; ++column) gate[column] = sum[column];
          } else {
            write_gated<T, S>(sets.problems[0], sets.fused, index, lane, gate, sum);
          }
        } else {
#pragma unroll
          for (int i = 0; i < F::kSets; ++i) {
            if (set == i) finish_tile<T, S>(sets.problems[i], expert, index, lane, uniform[i], alpha[i], sum);
          }
        }
        // after its last tile a block may be gone
        if (work.cluster > 1 && next < tiles) inbox.make_room(work.cluster - 1, lane);
      }
      tile = next;
    }
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
}

#endif

template <typename T, typename S, typename F>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Sets<F> sets, const Work work) {
#if NVFP4_LARGE_SHARED_MEMORY
  extern __shared__ uint8_t memory[];
  const uint32_t shared = (address_of(memory) + 1023) / 1024 * 1024;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // known to be uniform
  const int cluster = blockIdx.y, expert = blockIdx.z;
  const Problem& p = sets.problems[0];
  constexpr int kTogether = F::kOutput == Output::kGated ? 2 : 1;  // tiles that one block has
  const uint32_t begin = expert * (p.N / kTileRows) +
                         (cluster * work.tiles + min(cluster, work.more_tiles)) * kTogether;
  const int tiles = (work.tiles + (cluster < work.more_tiles)) * kTogether;
  const Stream<S, F> w(sets, work, shared, warp, begin, tiles);
  if (warp < kWarps) {
    w.begin();
  } else {
    begin_adding<S>(work, shared, warp - kWarps);
  }
  __syncthreads();
  if (work.cluster > 1) cluster_arrive();
  if (warp < kWarps) {
    setmaxnreg_inc<kMultiplyingRegisters>();
    multiply<T, S, F>(p, work, w, shared, warp, lane, expert, begin, tiles);
  } else {
    setmaxnreg_dec<kAddingRegisters>();
    add<T, S, F>(sets, work, shared, warp - kWarps, lane, expert, begin, tiles);
  }
#endif
}

}  // namespace few_rows_sm90
}  // namespace nvfp4
