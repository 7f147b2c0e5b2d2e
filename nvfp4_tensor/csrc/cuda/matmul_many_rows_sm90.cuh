// y = x w^T on Hopper for more than a few rows of x: wgmma with w decoded into registers as its A operand.
//
// A tile of y is kRows rows of w by kTokens rows of x. One warp keeps the copy engine busy: x (128-byte swizzle, the B
// operand as it lies), codes (64-byte swizzle) and scales. Warpgroups of 64 rows of w decode codes into
// A fragments, so that no decoded weight ever goes through shared memory. Blocks stay for all of their tiles: the
// copies for the next one are under way while sums are written.
#pragma once

#include <cuda.h>

#include "matmul_decode.cuh"
#include "matmul_many_rows_epilogue.cuh"
#include "matmul_many_rows_schedule.cuh"
#include "matmul_problem.cuh"
#include "matmul_shared.cuh"
#include "matmul_wgmma.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kStageK = 128;  // a stage of the pipeline: two column tiles of scales

template <int kTokens_, int kGroups_, int kStages_>
struct Shape {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kSums = kTokens / 2;  // of a thread
  // Registers are dealt out by warpgroup: one for the warp that copies.
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 224 : 104, kProducerRegisters = kGroups == 2 ? 56 : 64;
  static constexpr int kSumsAtOnce = kGroups == 2 && kTokens <= 128 ? 2 : 1;  // blocks' that fit into registers
  static constexpr int kXBytes = kTokens * kStageK * 2;
  static constexpr int kCodeBytes = kRows * kStageK / 2;
  static constexpr int kScaleBytes = kRows / kBand * 1024;
  static constexpr int kStageBytes = kXBytes + kCodeBytes + kScaleBytes;
  static constexpr int kPoolBytes = kStages * kStageBytes;
  static constexpr int kWarpSumsAt = kPoolBytes + 16 * kStages;  // after two barriers a stage
  static constexpr int kSharedBytes = kWarpSumsAt + kConsumers / 32 * kWarpSumBytes + 1024;  // aligns the pool to 1024
  static_assert(kSharedBytes <= 232448);
};

__device__ __forceinline__ void copy_box(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The ring of stages: a barrier that says full and one that says empty for each, after the pool.
template <typename S>
struct Ring {
  uint32_t pool;
  int stage = 0, parity = 0;

  __device__ explicit Ring(uint32_t pool) : pool(pool) {}
  __device__ __forceinline__ uint32_t data() const { return pool + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t full() const { return pool + S::kPoolBytes + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int which) const {
    return pool + S::kPoolBytes + 8 * (S::kStages + which);
  }
  __device__ __forceinline__ void next() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
};

template <typename S>
__device__ __forceinline__ void copy_stage(const Problem& p, const CUtensorMap* x_map, const CUtensorMap* code_map,
                                           uint32_t at, uint32_t barrier, const Place& place, int step) {
  uint64_t keep, stream;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  const int column_tiles = (p.Kp + 63) / 64, last_band = (p.experts * p.N - 1) / kBand;
  const int token = place.expert * p.M + place.token;
  barrier_expect(barrier, S::kStageBytes);
  copy_box(at, x_map, step * kStageK, token, barrier, keep);
  copy_box(at + S::kXBytes / 2, x_map, step * kStageK + 64, token, barrier, keep);
  copy_box(at + S::kXBytes, code_map, step * kStageK / 2, place.row, barrier, stream);
  // beyond K codes and x are zero; there the last scales stand in, never a NaN that the row has not met
  for (int band = 0; band < S::kRows / kBand; ++band) {
    const uint32_t to = at + S::kXBytes + S::kCodeBytes + band * 1024;
    const uint8_t* scales = p.scales + min(place.row / kBand + band, last_band) * p.scale_band;
    copy_bytes(to, scales + step * 1024, 512, barrier);
    copy_bytes(to + 512, scales + min(step * 2 + 1, column_tiles - 1) * 512, 512, barrier);
  }
}

template <typename S>
__device__ __forceinline__ void produce(const Problem& p, const CUtensorMap* x_map, const CUtensorMap* code_map,
                                        const Work& work, Ring<S> ring) {
  asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(x_map), "l"(code_map) : "memory");
  Segments segments(work);
  for (Segment s; segments.next(s);) {
    const Place place = place_of<S>(p, work, s.tile);
    for (int step = s.begin; step < s.end; ++step, ring.next()) {
      barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
      if (elect_one()) copy_stage<S>(p, x_map, code_map, ring.data(), ring.full(), place, step);
    }
  }
}

// A lane's codes and scales of half a stage, 64 elements of K: its two rows. All four lanes of a quad have the same.
struct Encoded {
  uint4 codes[2][2];
  uint32_t scales[2];
};

// One of two factors in both halves of a register: the multiplication takes it so without an instruction more.
template <int kWhich>
__device__ __forceinline__ uint32_t both_halves(uint32_t factors) {
  uint32_t twice;
  if constexpr (kWhich == 0) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(twice) : "r"(factors));
  } else {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(twice) : "r"(factors));
  }
  return twice;
}

// A fragments of them, registers of four products. Lane t of a quad has elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of
// each 16, which is byte t of two words. Its two codes go to the two halves of a register, both into bits 4 to 7.
// (Were x permuted so that a lane's codes are a word, these would be 17 instructions instead of 24 for 8 codes, but the
// permutation is 2 us more for few rows and 2.4 % more for 4096.)
template <typename T>
__device__ __forceinline__ void decode(const Encoded& in, uint32_t (&a)[16]) {
  const uint32_t t = threadIdx.x % 4, my_byte = t * 0x0101 + 0x0400;  // the shifted word's to byte 0, the word's to 2
  uint32_t pairs[4], factors[4];  // of each 16 elements for both rows
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    pairs[k] = __byte_perm(in.scales[0], in.scales[1], 0x0400 + 0x0101 * k) & 0x00FF00FF;
    factors[k] = Decoder<T>::scale_factors(pairs[k]);
  }
  const uint32_t over = in.scales[0] + 0x01010101u | in.scales[1] + 0x01010101u;
  if ((in.scales[0] | in.scales[1] | over) & 0x80808080u) {  // a negative or NaN: rare
#pragma unroll
    for (int k = 0; k < 4; ++k) factors[k] = any_scale_factors<T>(pairs[k]);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint4 c[2] = {in.codes[row][0], in.codes[row][1]};
    const uint32_t words[8] = {c[0].x, c[0].y, c[0].z, c[0].w, c[1].x, c[1].y, c[1].z, c[1].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t codes = __byte_perm(words[i] << 4, words[i], my_byte), pair = factors[i / 2];
      const uint32_t factor = row == 0 ? both_halves<0>(pair) : both_halves<1>(pair);
      a[i / 2 * 4 + i % 2 * 2 + row] = Decoder<T>::multiply(Decoder<T>::template spread<1>(codes), factor);
    }
  }
}

template <typename S>
struct Consumer : Ring<S> {
  uint32_t code_offset, swizzle, scale_offset;

  __device__ explicit Consumer(uint32_t pool) : Ring<S>(pool) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + first_row(lane);
    code_offset = S::kXBytes + row * 64;
    swizzle = row / 2 % 4 * 16;
    scale_offset = S::kXBytes + S::kCodeBytes + row / kBand * 1024 + row % 32 * 16 + row % kBand / 32 * 4;
  }
  __device__ __forceinline__ void wait() const { barrier_wait(this->full(), this->parity); }
  __device__ __forceinline__ Encoded load(int half) const {
    const uint32_t codes = this->data() + code_offset, scales = this->data() + scale_offset + half * 512;
    const uint32_t first = codes + (half * 32 ^ swizzle), second = codes + (half * 32 + 16 ^ swizzle);
    // two rows further the swizzle differs in its lowest bit
    return {{{load_shared_16(first), load_shared_16(second)}, {load_shared_16(second + 128), load_shared_16(first + 128)}},
            {load_shared_4(scales), load_shared_4(scales + 32)}};
  }
  __device__ __forceinline__ void release(int which) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(this->empty(which));
  }
  // The B operand, K-major with 128-byte swizzle: 8 rows of 128 bytes are 1024 bytes.
  __device__ __forceinline__ uint64_t x(int half) const {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((this->data() + half * (S::kXBytes / 2)) >> 4);
  }
};

// Starts the products of 64 elements of K.
template <typename T, typename S>
__device__ __forceinline__ void start_products(uint32_t (&a)[16], uint64_t x, float (&sum)[S::kSums]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");  // all decoded first
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<S::kTokens, T>::run(sum, a + 4 * k, x + k * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// While the products of one half stage run, the next one is decoded: waiting for all but one leaves the other's
// registers free and the tensor cores at work (2059 cycles a stage of 256 tokens; 2048 are the least).
template <typename T, typename S>
__device__ __forceinline__ void consume(Consumer<S>& in, int steps, float (&sum)[S::kSums]) {
  uint32_t a0[16], a1[16];
  int last = 0;
  in.wait();
  Encoded encoded = in.load(0);
  for (int step = 0; step < steps; ++step) {
    decode<T>(encoded, a0);
    start_products<T, S>(a0, in.x(0), sum);
    encoded = in.load(1);
    wait_products<1>();
    if (step > 0) in.release(last);
    decode<T>(encoded, a1);
    start_products<T, S>(a1, in.x(1), sum);
    last = in.stage;
    in.next();
    if (step + 1 < steps) {
      in.wait();
      encoded = in.load(0);
    }
    wait_products<1>();
  }
  wait_products<0>();
  in.release(last);
}

template <typename T, typename S>
__device__ __forceinline__ void multiply(const Problem& p, const Work& work, uint32_t pool, float* shared) {
  Consumer<S> in(pool);
  Segments segments(work);
  for (Segment s; segments.next(s);) {
    float sum[S::kSums];
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
    consume<T, S>(in, s.end - s.begin, sum);
    if (s.begin > 0) {
      leave_sums<S>(work, sum);
      continue;
    }
    if (s.end < work.steps) {
      const int others = wait_for_others<S>(work, segments, s);
#pragma unroll S::kSumsAtOnce
      for (int behind = 1; behind <= others; ++behind) add_sums<S>(work, segments.other(s, behind), sum);
    }
    write_tile<T, S>(p, place_of<S>(p, work, s.tile), sum, shared);
  }
}

// x with rows of a multiple of 16 bytes, which copies need; a thread moves 8 elements.
__global__ void __launch_bounds__(128) align_x(const __grid_constant__ Problem p, uint4* out) {
  const int units = (p.K + 7) / 8, unit = blockIdx.y * 128 + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = blockIdx.x;
  out[row * units + unit] = load_x(p, static_cast<const uint16_t*>(p.x) + row * p.x_row, unit * 8, false);
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ CUtensorMap code_map, const __grid_constant__ Work work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  const uint32_t pool = (address_of(shared) + 1023) / 1024 * 1024;
  const Ring<S> ring(pool);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(pool + S::kPoolBytes + 8 * i, 1);
      barrier_init(ring.empty(i), S::kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= S::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kProducerRegisters));
    if (__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) == S::kConsumers / 32) {
      produce<S>(p, &x_map, &code_map, work, ring);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kConsumerRegisters));
    multiply<T, S>(p, work, pool, reinterpret_cast<float*>(shared + (pool - address_of(shared)) + S::kWarpSumsAt));
  }
#endif
}

}  // namespace many_rows
}  // namespace nvfp4
