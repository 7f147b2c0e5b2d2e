// y = x w^T on Hopper for more than a few rows of x: wgmma with w decoded into registers as its A operand.
//
// Warp-specialized and persistent. A tile of y is kRows rows of w by kTokens rows of x. One warp keeps TMA, the bulk
// copy engine, busy: x (128-byte swizzle, the B operand), codes (64-byte swizzle) and scales; or four do, and permute x
// on its way. Warpgroups of 64 rows of w decode codes into A fragments, so that no decoded weight ever goes through
// shared memory. Blocks stay for all of their tiles: the copies for the next one are under way while sums are written.
//
// Of few tiles, each is shared by some blocks, each with a part of K (split-K). Of others, some are cut along K too
// (stream-K): runs.h.
//
// Roles, of 3 or 5 warpgroups (one block on a multiprocessor)
//   consumers  the first kGroups, 2 or 4: 64 rows of w each. Decode, wgmma, and the epilogue.
//   producer   the last. Its first warp has all copies; or each of its four every fourth stage, and permutes that
//              stage's x (X::kPermutedInCopy). Of groups of rows the other three write zeros beyond the last group.
//   Registers of a thread (setmaxnreg): consumers 224, or 104 where they are 4 warpgroups, the producer 56 or 64. Where
//   it permutes x none move: all have up to 168 or 96.
//
// mbarriers, two per stage, with the arrivals that complete a phase
//   full[kStages]   kFilledBy: 1, the elected lane's expect_tx, and TMA's bytes; or 2, that of the warp that has stored
//                   a permuted x too, behind a proxy fence.
//   empty[kStages]  kConsumers: every consumer, when it has what it read. Where y is on its way out of a stage's coord,
//                   the thread that started that copy arrives when TMA has read it.
// Named barriers: 1 + warpgroup, 128 threads, and 1 + kGroups, all consumers. Between blocks: flags in global memory,
// one for each slot of sums, block that waits and warpgroup, which hold the number of the launch (epilogue.cuh).
//
// Timeline
//   all        barriers set, tensor maps prefetched | of groups: PDL wait, plan again | __syncthreads
//   producer   first codes and scales to L2 | PDL wait | each stage: empty -> TMA (-> permute x -> full)
//   consumers  PDL wait (shared tiles let the next kernel begin) | flags to 0 | each tile's stages:
//                full -> decode half 0 -> wgmma half 0 -> products of the stage before are done: its empty
//                     -> decode half 1 -> wgmma half 1 -> full of the next stage, its codes -> half 0 is done
//              then sums to other blocks, or theirs added -> alpha, bias, rounding -> y by TMA, or by whole lines
//
// Shared memory, from a multiple of 1024 on
//   kStages of  x       kTokens * 256    two halves of 64 elements, 128-byte swizzle
//               codes   kRows * 64       64-byte swizzle
//               scales  kRows * 8        1024 for each band of 128 rows
//   full, empty         16 * kStages
//   Work                of groups of rows, as this block planned it
//   Slots that no copy needs any more serve the epilogue: the tile's last stage y on its way out (Desk), or, of tiles
//   that several blocks finish, the first stage y, the others this block's own sums (share.cuh).
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/many_rows_sm90/decode.cuh"
#include "cuda/matmul/many_rows_sm90/epilogue.cuh"
#include "cuda/matmul/many_rows_sm90/permute.cuh"
#include "cuda/matmul/many_rows_sm90/schedule.cuh"
#include "cuda/matmul/many_rows_sm90/shapes.h"
#include "cuda/matmul/many_rows_sm90/share.cuh"
#include "cuda/matmul/problem.cuh"
#include "cuda/ptx/shared_sm90.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kPermutingCopiers = 4;  // warps

template <int kTokens_, int kRowGroups_, int kStages_, X kX_, Tiles kTiles>
struct Shape {
  static constexpr X kX = kX_;
  static constexpr bool kPermuted = kX != X::kAsItLies, kInCopy = kX == X::kPermutedInCopy;
  static constexpr bool kShared = kTiles == Tiles::kShared;
  static_assert(kShared || !kInCopy, "only tiles that blocks share are so small that permuting x in the copy pays");
  static constexpr int kTokens = kTokens_, kGroups = kRowGroups_, kStages = kStages_;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kSums = kTokens / 2, kUnits = kTokens / 16;  // of a thread
  // Registers are dealt out by warpgroup, one for the warps that copy; not where these permute x, but all have up to
  // 168, or 96 where there are five.
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 224 : 104, kProducerRegisters = kGroups == 2 ? 56 : 64;
  static constexpr int kXBytes = kTokens * kStageK * 2;
  static constexpr int kFilledBy = kInCopy ? 2 : 1;  // arrivals: of copies, and of the warp that permutes
  static constexpr int kCodeBytes = kRows * kStageK / 2;
  static constexpr int kScaleBytes = kRows / kBand * 1024;
  static constexpr int kCodesAt = kXBytes, kScalesAt = kCodesAt + kCodeBytes;
  static constexpr int kStageBytes = kScalesAt + kScaleBytes;
  static constexpr int kPoolBytes = kStages * kStageBytes;
  static constexpr int kDeskBytes = kTokens == 16 ? 3072 : kTokens * 128;  // y of a warpgroup, swizzled by 1024
  static_assert(kDeskBytes >= 4 * kWarpSumBytes, "a desk holds 8 tokens of each warp of its warpgroup");
  static_assert(kGroups * kDeskBytes <= kScalesAt, "the desks of all warpgroups lie in one stage, over x and codes");
  static constexpr int kPlanAt = kPoolBytes + 16 * kStages;           // after two barriers a stage
  static constexpr int kSharedBytes = kPlanAt + sizeof(Work) + 1024;  // aligns the pool to 1024
  static_assert(kSharedBytes <= 232448, "a block of Hopper has 227 KB of shared memory at most");
  // Each slot of the ring is one warp's: where several fill it in turn, two barriers (full, empty) lie between their
  // stores, but compute-sanitizer's racecheck reports them.
  static_assert(!kInCopy || kStages % kPermutingCopiers == 0, "each slot of the ring is one permuting warp's");
};

// The ring of stages: a barrier that says full and one that says empty for each, after the pool.
template <typename S>
struct Ring {
  uint32_t pool;
  int stage = 0, parity = 0;

  __device__ explicit Ring(uint32_t pool) : pool(pool) {}
  __device__ __forceinline__ uint32_t data() const { return pool + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t full() const { return pool + S::kPoolBytes + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int which) const { return pool + S::kPoolBytes + 8 * (S::kStages + which); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), parity); }
  // What the thread has read, and used. (One arrival of a warp, or of a warpgroup, behind a barrier of theirs is as
  // fast over all, between 3 % slower and 4 % faster; but compute-sanitizer's racecheck counts an arrival for its
  // thread alone, and reports hazards then wherever a slot is filled again.)
  __device__ __forceinline__ void release(int which) const { mbarrier_arrive(empty(which)); }
  __device__ __forceinline__ void next() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
};

template <typename S, bool kGrouped>
using Segments = std::conditional_t<S::kShared, Part, Runs<kGrouped>>;

// Scales of a band of the tile's rows; the last band's where that is out of bounds.
__device__ __forceinline__ const uint8_t* scales_of(const Problem& p, const TileCoord& coord, int band) {
  const int last = (p.experts * p.N - 1) / kBand;
  return p.scales + min(coord.row / kBand + band, last) * p.scale_band;
}

template <typename S>
__device__ __forceinline__ void copy_stage(const Problem& p, const CUtensorMap* x_map, const CUtensorMap* code_map,
                                           uint32_t at, uint32_t barrier, const TileCoord& coord, int step) {
  uint64_t stay, stream;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  const int column_tiles = (p.Kp + 63) / 64;
  mbarrier_arrive_expect_tx(barrier, S::kStageBytes - (S::kInCopy ? S::kXBytes : 0));
  if constexpr (!S::kInCopy) {
    const int token = coord.expert * p.M + coord.token;
    tma_load_2d(at, x_map, step * kStageK, token, barrier, stay);
    tma_load_2d(at + S::kXBytes / 2, x_map, step * kStageK + 64, token, barrier, stay);
  }
  tma_load_2d(at + S::kXBytes, code_map, step * kStageK / 2, coord.row, barrier, stream);
  // Beyond K, codes and x are zero. The row's last scales are read again there: any NaN is one of its own.
  for (int band = 0; band < S::kRows / kBand; ++band) {
    const uint32_t to = at + S::kXBytes + S::kCodeBytes + band * 1024;
    const uint8_t* scales = scales_of(p, coord, band);
    bulk_load(to, scales + step * 1024, 512, barrier);
    bulk_load(to + 512, scales + min(step * 2 + 1, column_tiles - 1) * 512, 512, barrier);
  }
}

// The codes and scales of a block's first stage, 9 or 18 KB, are on their way to the L2 cache while the kernel before
// ends. That kernel may be the one that writes them: it writes through that cache. (More was in its way where x has few
// rows: few_rows_sm90/kernel.cuh.) H200, us in a chain: 4096 x 4096, 64 and 128 rows of x 10.5 and 13.6 -> 10.2 and
// 13.1.
template <typename S>
__device__ __forceinline__ void bring_first_to_cache(const Problem& p, const CUtensorMap* code_map,
                                                     const TileCoord& coord, int step) {
  tma_prefetch_2d(code_map, step * kStageK / 2, coord.row);
  const int bytes = 512 * min(2, (p.Kp + 63) / 64 - 2 * step);
  for (int band = 0; band < S::kRows / kBand; ++band) bulk_prefetch(scales_of(p, coord, band) + step * 1024, bytes);
}

// What needs no memory is behind each role: from here on there is what the kernel before wrote. (Groups of rows, whose
// offsets may be among it, have waited.) The next kernel is let begin only where it is small: a large one's blocks
// would crowd the multiprocessors that are free until then.
template <typename S, bool kGrouped>
__device__ __forceinline__ void begin() {
  if constexpr (!kGrouped) griddepcontrol_wait();
  if constexpr (S::kShared) griddepcontrol_launch_dependents();
}

// One warp copies all stages; or each of four copies a fourth of them, and permutes their x. A stage a warp, since the
// fence between what it has stored and the products waits for all that the warp has under way, loads for another stage
// too: tiles of 32 x 256 of 14336 x 8192 took 41.5 us with all four at each stage, loads two stages ahead, and so 36.8.
template <typename S, bool kGrouped, typename W>
__device__ __forceinline__ void produce(const W& weights, const CUtensorMap* x_map, const Work& work, Ring<S> ring,
                                        int helper) {
  Segments<S, kGrouped> segments(work);
  Segment s;
  TileCoord coord;
  const auto next = [&] {
    if (!segments.next(s)) return false;
    coord = tile_coord<S, kGrouped>(weights, work, s.tile);
    return true;
  };
  bool is_one = next();
  if (!kGrouped && is_one && helper == 0 && elect_one()) {
    bring_first_to_cache<S>(weights.p[coord.which], &weights.codes[coord.which], coord, s.begin);
  }
  begin<S, kGrouped>();
  for (int turn = 0; is_one; is_one = next()) {
    for (int step = s.begin; step < s.end; ++step, ring.next()) {
      if (S::kInCopy && turn++ % kPermutingCopiers != helper) continue;
      mbarrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
      if (elect_one()) {
        const CUtensorMap* code_map = &weights.codes[coord.which];
        copy_stage<S>(weights.p[coord.which], x_map, code_map, ring.data(), ring.full(), coord, step);
      }
      if constexpr (S::kInCopy) {
        const Problem& p = weights.p[0];
        permute_stage<S::kTokens>(p, coord.expert * p.M + coord.token, step, ring.data());
        fence_proxy_async_shared();  // each lane's, for the products
        __syncwarp();
        if (elect_one()) mbarrier_arrive(ring.full());
      }
    }
  }
}

template <typename S>
struct Consumer : Ring<S> {
  using Ring<S>::Ring;
  // The stage's address, known to be uniform: descriptors are then made of it by the uniform datapath, one instruction
  // each, instead of two moves to it for each of 8 products.
  __device__ __forceinline__ uint32_t uniform_data() const { return __shfl_sync(0xFFFFFFFF, this->data(), 0); }
  // The B operand, K-major with 128-byte swizzle: 8 rows of 128 bytes are 1024 bytes.
  static __device__ __forceinline__ uint64_t x(uint32_t data, int half) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((data + half * (S::kXBytes / 2)) >> 4);
  }
};

// Where a warpgroup puts its y: a part of the tile's last stage, kDeskBytes, once all warpgroups are done with that.
// (Each waiting only for what it takes, so that one writes while the other multiplies: a stage took 2,190 cycles, not
// 2,137, for the products of one warpgroup alone do not fill the tensor cores.)
template <typename S>
class Desk {
 public:
  __device__ Desk(const Ring<S>& ring, uint8_t* shared) : ring_(ring), shared_(shared) {}

  __device__ __forceinline__ uint8_t* take(int stage) const {
    consumers_sync<S>();
    return shared_ + stage * S::kStageBytes + threadIdx.x / 128 * S::kDeskBytes;
  }
  // The stage's slot is released, by the thread that has the copies under way when they have read it.
  __device__ __forceinline__ void leave(int stage) {
    if (threadIdx.x % 128 == 0) {
      held_ = stage;
    } else {
      ring_.release(stage);
    }
  }
  __device__ __forceinline__ void release_if_read() {
    if (held_ < 0) return;
    tma_store_wait_read();
    ring_.release(held_);
    held_ = -1;
  }

 private:
  const Ring<S>& ring_;
  uint8_t* const shared_;
  int held_ = -1;
};

// Starts the products of 64 elements of K, to be added to `sum`, or to be what it holds.
template <typename T, typename S, bool kFirst>
__device__ __forceinline__ void start_products(uint32_t (&a)[16], uint64_t x, float (&sum)[S::kSums]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");  // all decoded first
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  Wgmma<S::kTokens, T>::template run<!kFirst>(sum, a, x);
#pragma unroll
  for (int k = 1; k < 4; ++k) Wgmma<S::kTokens, T>::template run<true>(sum, a + 4 * k, x + k * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// While the products of one half stage run, the next one is decoded: waiting for all but one leaves the other's
// registers free and the tensor cores at work (2,048 cycles are the least for a stage of 256 tokens). `meanwhile`,
// while the first products run, does what else there is to do. Returns the last stage, which is still to be released.
//
// A stage by itself at the start, of runs, so that sums need no zeros and the loop no branch: 2,137 cycles a stage,
// with a branch 2,360. Shared tiles have few stages, and pay for code that is not in the cache.
template <typename T, typename S, typename Meanwhile>
__device__ __forceinline__ int consume(Consumer<S>& in, int steps, float (&sum)[S::kSums], Meanwhile meanwhile) {
  using Encoded = std::conditional_t<S::kPermuted, PermutedStage<S>, PlainStage<S>>;
  uint32_t a0[16], a1[16];
  int last = 0;
  in.wait_full();
  Encoded encoded;
  encoded.load_first(in.data());
  const auto consume_stage = [&](auto is_first, int step) {
    const uint32_t data = in.uniform_data();
    encoded.template decode_first<T>(a0);
    start_products<T, S, is_first.value>(a0, in.x(data, 0), sum);
    encoded.load_second(in.data());
    wait_products<1>();
    if constexpr (is_first.value) {
      meanwhile();
    } else if (!S::kShared || step > 0) {
      in.release(last);
    }
    encoded.template decode_second<T>(a1);
    start_products<T, S, false>(a1, in.x(data, 1), sum);
    last = in.stage;
    in.next();
    if (step + 1 < steps) {
      in.wait_full();
      encoded.load_first(in.data());
    }
    wait_products<1>();
  };
  if constexpr (!S::kShared) consume_stage(std::true_type(), 0);
  for (int step = !S::kShared; step < steps; ++step) consume_stage(std::false_type(), step);
  wait_products<0>();
  return last;
}

// What this block finishes of a tile, its own sums at `own`.
template <typename T, typename S, typename W>
__device__ __forceinline__ void write_shared(const W& weights, const Sharing<S>& sharing, const TileCoord& coord,
                                             const TwoRows& rows, uint32_t own, uint8_t* shared) {
  const Problem& p = weights.p[coord.which];
  uint8_t* const desk = shared + threadIdx.x / 128 * S::kDeskBytes;  // in the first stage's slot
  const uint32_t units = address_of(desk), to = units + offset_in_unit();
  const bool plain = weights.plain[coord.which];
  sharing.add(own, [&](int unit, const float* eight) {
    if (!plain) return write_any_unit<T, S>(p, coord, unit, eight, desk);
    for_scaling(p, coord,
                [&](auto has_bias, auto scales) { finish_unit<T, has_bias.value>(rows, scales, unit, eight, to); });
  });
  if (!plain) return;
  warpgroup_sync();
  write_units<T, S>(p, coord, units, [&](int unit) { return sharing.owns(unit); });
}

template <typename T, typename S, bool kGrouped, typename W>
__device__ __forceinline__ void multiply(const W& weights, const Work& work, uint32_t pool, uint8_t* shared) {
  constexpr bool kCoordAhead = S::kGroups == 2;  // four have no registers left
  constexpr bool kTogether = finish_together(S::kTokens);
  Consumer<S> in(pool);
  Desk<S> desk(in, shared);
  Runs<kGrouped> segments(work);
  begin<S, kGrouped>();
  not_ready<S>(work);
  float sum[S::kSums];
  for (Segment s; segments.next(s);) {
    TileCoord coord;
    TwoRows rows;
    const auto find_coord = [&] {
      coord = tile_coord<S, kGrouped>(weights, work, s.tile);
      rows = TwoRows::of<S>(weights.p[coord.which], coord);
    };
    const int last = consume<T, S>(in, s.end - s.begin, sum, [&] {
      desk.release_if_read();
      if constexpr (kCoordAhead) find_coord();
    });
    if (s.begin > 0) {
      const Meeting meeting = segments.meeting(s);
      if (!kTogether || meeting.rank >= meeting.finishers) {
        in.release(last);
        leave_sums<S>(work, meeting, sum);
        continue;
      }
    }
    if constexpr (!kCoordAhead) find_coord();
    if (s.end < work.steps) {
      const Meeting meeting = segments.meeting(s);
      if constexpr (kTogether) {
        if (meeting.finishers > 1) {
          const Sharing<S> sharing(work, meeting);
          sharing.leave(sum, pool + S::kStageBytes);
          write_shared<T, S>(weights, sharing, coord, rows, pool + S::kStageBytes, shared);
          break;
        }
      }
      for (int rank = 1; rank < meeting.all; ++rank) add_sums<S>(work, meeting.slot(rank), sum);
    }
    const Problem& p = weights.p[coord.which];
    if (weights.plain[coord.which]) {
      write_plain<T, S>(p, &weights.y[coord.which], coord, rows, sum, desk.take(last));
    } else {
      write_any_tile<T, S>(p, coord, sum, desk.take(last));
    }
    desk.leave(last);
  }
  desk.release_if_read();
}

// Likewise of a tile that blocks share.
template <typename T, typename S, typename W>
__device__ __forceinline__ void multiply_shared(const W& weights, const Work& work, uint32_t pool, uint8_t* shared) {
  Consumer<S> in(pool);
  Part part(work);
  const Meeting meeting = part.meeting();
  const Sharing<S> sharing(work, meeting);
  Segment s;
  part.next(s);
  int steps = s.end - s.begin;
  keep(steps);
  begin<S, false>();
  not_ready<S>(work);
  const uint32_t own = pool + S::kStageBytes;
  float sum[S::kSums] = {};
  consume<T, S>(in, steps, sum, [] {});
  if (meeting.rank >= meeting.finishers) return leave_sums<S>(work, meeting, sum);
  sharing.leave(sum, own);
  const TileCoord coord = tile_coord<S, false>(weights, work, s.tile);
  write_shared<T, S>(weights, sharing, coord, TwoRows::of<S>(weights.p[coord.which], coord), own, shared);
}

template <typename T, typename S, bool kGrouped, int kCount>
__global__ void __launch_bounds__(S::kThreads, 1)
    kernel(const __grid_constant__ Weights<kCount> weights, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ Work launched) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  const uint32_t pool = (address_of(shared) + 1023) / 1024 * 1024;
  const Ring<S> ring(pool);
  Work* planned = reinterpret_cast<Work*>(shared + (pool - address_of(shared)) + S::kPlanAt);
  const Work& work = kGrouped ? *planned : launched;
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), helper = warp - S::kConsumers / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(pool + S::kPoolBytes + 8 * i, S::kFilledBy);
      mbarrier_init(ring.empty(i), S::kConsumers);
    }
    fence_proxy_async_shared();
  }
  if (helper == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(&weights.codes[i]), "l"(&weights.y[i])
                   : "memory");
    }
  }
  if constexpr (kGrouped) {
    griddepcontrol_wait();
    if (warp == 1) plan_groups(weights.p[0], launched, S::kTokens, planned);
  }
  __syncthreads();
  if (helper >= 0) {
    if constexpr (!S::kInCopy) setmaxnreg_dec<S::kProducerRegisters>();
    if (S::kInCopy || helper == 0) {
      produce<S, kGrouped>(weights, &x_map, work, ring, helper);
    } else if (kGrouped) {
      const Problem& p = weights.p[0];
      for (int row = TokenTiles(p, S::kTokens).end() + blockIdx.x; row < p.rows; row += gridDim.x) {
        zero_row(p, row, threadIdx.x - S::kConsumers - 32, S::kThreads - S::kConsumers - 32);
      }
    }
  } else {
    if constexpr (!S::kInCopy) setmaxnreg_inc<S::kConsumerRegisters>();
    uint8_t* const at_pool = shared + (pool - address_of(shared));
    if constexpr (S::kShared) {
      multiply_shared<T, S>(weights, work, pool, at_pool);
    } else {
      multiply<T, S, kGrouped>(weights, work, pool, at_pool);
    }
  }
#endif
}

}  // namespace many_rows
}  // namespace nvfp4
