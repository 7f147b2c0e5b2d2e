// y = x w^T on Hopper for more than a few rows of x: wgmma with w decoded into registers as its A operand.
//
// A thread block computes kRows rows of w by kTokens rows of x. One warp keeps the copy engine busy: x (128-byte
// swizzle, the B operand as it lies), codes (64-byte swizzle) and scales. Warpgroups of 64 rows of w decode codes into
// A fragments, so that no decoded weight ever goes through shared memory.
//
// The order of K inside a product is free. Lane t of a quad holds elements 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16;
// for its 16 bytes of codes to be that as they lie, x is rewritten first, each 128 elements of it in the order of
// `permute_x`. (With x as it lies a lane needs a byte of every word of codes: 380 instructions instead of 165 for
// 16 x 128 weights, and 1.3 times the time at 14336 x 8192, M = 32.)
//
// Where rows of w are too few to fill the machine, a cluster splits K and adds through distributed shared memory, in
// the order of its blocks.
#pragma once

#include <cuda.h>

#include "matmul_decode.cuh"
#include "matmul_groups.cuh"
#include "matmul_problem.cuh"
#include "matmul_shared.cuh"
#include "matmul_wgmma.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kBand = 128;     // rows of w that share a band of scales
constexpr int kStageK = 128;   // a stage of the pipeline: two column tiles of scales

// kTokens rows of x by kGroups * 64 of w, a warpgroup each.
template <int kTokens_, int kGroups_, int kStages_>
struct Shape {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kRows = kGroups * 64, kBands = kRows / kBand;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 224 : 104, kProducerRegisters = kGroups == 2 ? 56 : 64;
  static constexpr int kXBytes = kTokens * kStageK * 2;
  static constexpr int kCodeBytes = kRows * kStageK / 2;
  static constexpr int kScaleBytes = kBands * 1024;
  static constexpr int kStageBytes = kXBytes + kCodeBytes + kScaleBytes;
  static constexpr int kPitch = kRows + 4;  // of the sums in shared memory, in floats: no bank conflicts either way
  static constexpr int kSumBytes = kTokens * kPitch * 4;
  static constexpr int kPoolBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static constexpr int kSharedBytes = kPoolBytes + 16 * kStages + 1024;  // and what aligns the pool to 1024
};

// Where element k = 32 t + 8 w + e of 128 goes: to 16 (2 w + e % 4 / 2) + 2 t + 8 (e % 2) + e / 4, so that words of
// codes decoded by decode_word are A fragments. A thread moves 32 elements: its w of all four t.
__global__ void permute_x(const __grid_constant__ Problem p, uint4* out) {
  const int groups = (p.K + kStageK - 1) / kStageK;
  const int64_t all = static_cast<int64_t>(p.rows) * groups * 4;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) | (p.x_row * 2)) % 16 == 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (p.offs) zero_rows_of_no_expert(p, thread, threads);
  for (int64_t i = thread; i < all; i += threads) {
    const int64_t row = i / (groups * 4);
    const int k0 = static_cast<int>(i % (groups * 4)) / 4 * kStageK + static_cast<int>(i % 4) * 8;
    const uint16_t* from = static_cast<const uint16_t*>(p.x) + row * p.x_row;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) v[t] = to_fragment(load_x(p, from, k0 + 32 * t, aligned));
    uint4* to = out + i * 4;
    to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    to[1] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    to[2] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    to[3] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
  }
}

struct Work {
  int ranks;                     // blocks that share a tile and split K
  int token_tiles, token_group;  // blocks of one group of token tiles run together, so that both operands stay in L2
                                 // (of groups of rows: as many token tiles as there can be)
  int row_tiles;                 // of an expert
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

// A fragments of one row of a lane's two, from two words of codes: four products' registers `row` and `row + 2`.
template <typename T>
__device__ __forceinline__ void decode_fragments(uint2 codes, uint32_t factor, int row, uint32_t (&a)[16]) {
  const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    uint32_t w[4];
    decode_word<T>(words[word], factor, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[word * 8 + i / 2 * 4 + i % 2 * 2 + row] = w[i];
  }
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Starts the products of 64 elements of K.
template <typename T, typename S>
__device__ __forceinline__ void start_products(uint32_t (&a)[16], uint64_t x, float (&sum)[S::kTokens / 2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");  // all decoded first
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<S::kTokens, T>::run(sum, a + 4 * k, x + k * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

template <typename S>
__device__ void produce(const Problem& p, const CUtensorMap* x_map, const CUtensorMap* code_map, uint32_t pool,
                        uint32_t full, uint32_t empty, int row, int token, int begin, int end) {
  uint64_t keep, stream;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for permute_x
  const int column_tiles = (p.Kp + 63) / 64, last_band = (p.experts * p.N - 1) / kBand;
  for (int step = begin; step < end; ++step) {
    const int stage = (step - begin) % S::kStages, round = (step - begin) / S::kStages;
    const uint32_t at = pool + stage * S::kStageBytes, barrier = full + 8 * stage;
    barrier_wait(empty + 8 * stage, round % 2 ^ 1);
    if (!elect_one()) continue;
    barrier_expect(barrier, S::kStageBytes);
    copy_box(at, x_map, step * kStageK, token, barrier, keep);
    copy_box(at + S::kXBytes / 2, x_map, step * kStageK + 64, token, barrier, keep);
    copy_box(at + S::kXBytes, code_map, step * kStageK / 2, row, barrier, stream);
    // beyond K codes and x are zero; there the last scales stand in, never a NaN that the row has not met
    const int second = min(step * 2 + 1, column_tiles - 1);
    for (int band = 0; band < S::kBands; ++band) {
      const uint32_t to = at + S::kXBytes + S::kCodeBytes + band * 1024;
      const uint8_t* scales = p.scales + min(row / kBand + band, last_band) * p.scale_band;
      copy_bytes(to, scales + step * 1024, 512, barrier);
      copy_bytes(to + 512, scales + second * 512, 512, barrier);
    }
  }
}

// What a lane of a warpgroup needs of a stage.
template <typename T, typename S>
struct Consumer {
  uint32_t pool, full, empty;
  int lane = threadIdx.x % 32, stage = 0, parity = 0;
  uint32_t code_offset, scale_offset;

  __device__ Consumer(uint32_t pool, uint32_t full, uint32_t empty) : pool(pool), full(full), empty(empty) {
    const int row = threadIdx.x / 32 * 16 + lane / 4;  // and 8 further
    code_offset = S::kXBytes + row * 64 + (lane % 4 ^ row / 2 % 4) * 16;  // its 16 bytes, swizzled
    scale_offset = S::kXBytes + S::kCodeBytes + row / kBand * 1024 + lane % 4 / 2 * 512 + row % 32 * 16 +
                   row % kBand / 32 * 4;
  }
  __device__ __forceinline__ void wait() const { barrier_wait(full + 8 * stage, parity); }
  __device__ __forceinline__ void next() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void release(int which) const {
    if (lane == 0) barrier_arrive(empty + 8 * which);
  }
  // The B operand, K-major with 128-byte swizzle: 8 rows of 128 bytes are 1024 bytes.
  __device__ __forceinline__ uint64_t x(int half) const {
    const uint32_t at = pool + stage * S::kStageBytes + half * (S::kXBytes / 2);
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | (at >> 4);
  }
  __device__ __forceinline__ void decode(int half, uint32_t (&a)[16]) const {
    const uint32_t at = pool + stage * S::kStageBytes;
    const uint32_t scales = __byte_perm(load_shared_4(at + scale_offset), load_shared_4(at + scale_offset + 128),
                                        (lane % 2 ? 0x62 : 0x40) + half * 0x11);
    uint32_t factors[2];  // of this half, for both rows
    two_scale_factors<T>(scales, factors);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      decode_fragments<T>(load_shared_8(at + code_offset + row * 512 + half * 8), factors[row], row, a);
    }
  }
};

// Decodes the next 64 elements of K while the products of the last are under way.
template <typename T, typename S>
__device__ __forceinline__ void consume(Consumer<T, S> in, int steps, float (&sum)[S::kTokens / 2]) {
  if (steps == 0) return;
  uint32_t a0[16], a1[16];
  in.wait();
  in.decode(0, a0);
  for (int step = 0; step < steps; ++step) {
    const int stage = in.stage;
    start_products<T, S>(a0, in.x(0), sum);
    in.decode(1, a1);
    wait_products();
    start_products<T, S>(a1, in.x(1), sum);
    in.next();
    if (step + 1 < steps) {
      in.wait();
      in.decode(0, a0);
    }
    wait_products();
    in.release(stage);
  }
}

// y of one token for four consecutive rows of w.
__device__ __forceinline__ void write_four(const Problem& p, int expert, int m, int n, float4 sum) {
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const int64_t at = (static_cast<int64_t>(expert) * p.M + m) * p.N + n;
  if (n >= 0 && n + 3 < p.N && p.N % 4 == 0 && n % 4 == 0 && p.y_dtype != Dtype::kFloat) {
    float f[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = finish(p, expert, m, n + i, v[i]);
    uint2 packed;
    if (p.y_dtype == Dtype::kBf16) {
      const __nv_bfloat162 low = __floats2bfloat162_rn(f[0], f[1]), high = __floats2bfloat162_rn(f[2], f[3]);
      packed = make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
    } else {
      const __half2 low = __floats2half2_rn(f[0], f[1]), high = __floats2half2_rn(f[2], f[3]);
      packed = make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
    }
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.y) + at) = packed;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (n + i >= 0 && n + i < p.N) store_rounded(p.y, p.y_dtype, at + i, finish(p, expert, m, n + i, v[i]));
  }
}

template <typename T, typename S>
__device__ __forceinline__ void leave_sums(const float (&sum)[S::kTokens / 2], float* sums) {
  constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  named_barrier_sync(1, S::kConsumers);  // all are done with the pool
#pragma unroll
  for (int i = 0; i < S::kTokens / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[(i * 8 + lane % 4 * 2 + j % 2) * S::kPitch + row + j / 2 * 8] = sum[i * 4 + j] * kToOne;
    }
  }
  named_barrier_sync(1, S::kConsumers);
}

template <typename S>
__device__ __forceinline__ void write_sums(
    const Problem& p, const float* sums, int expert, int token, int last_token, int row, int rank, int ranks) {
  constexpr int kWarps = S::kConsumers / 32;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32 * ranks + rank; i < S::kTokens && token + i < last_token; i += kWarps * ranks) {
#pragma unroll
    for (int r = lane * 4; r < S::kRows; r += 128) {
      float4 total = make_float4(0, 0, 0, 0);
      for (int from = 0; from < ranks; ++from) {
        const float4 v = load_four_from_rank(sums + i * S::kPitch + r, from);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      write_four(p, expert, token + i, row + r, total);
    }
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    kernel(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap x_map,
           const __grid_constant__ CUtensorMap code_map, const Work work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  const uint32_t pool = (address_of(shared) + 1023) / 1024 * 1024;
  float* sums = reinterpret_cast<float*>(shared + (pool - address_of(shared)));
  const uint32_t full = pool + S::kPoolBytes, empty = full + 8 * S::kStages;
  const int ranks = work.ranks, rank = blockIdx.x % ranks, block = blockIdx.x / ranks;

  // blocks go down the rows of w, token_group tiles of tokens wide
  const int in_group = work.row_tiles * work.token_group, group = block / in_group;
  const int width = min(work.token_group, work.token_tiles - group * work.token_group);
  const int tile = block - group * in_group;
  const int token_tile = group * work.token_group + tile % width;
  int expert = blockIdx.z, token = token_tile * S::kTokens, last_token = p.M;
  if (p.offs) {
    const TokenTile rows = TokenTiles(p, S::kTokens).find(token_tile);
    if (rows.expert < 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");  // the grid is not done before permute_x is
      return;
    }
    expert = rows.expert, token = rows.begin, last_token = rows.end;
  }
  const int row = expert * p.N / kBand * kBand + tile / width * S::kRows;  // counted over the batch

  const int steps = (p.Kp + kStageK - 1) / kStageK;
  const int begin = steps * rank / ranks, end = steps * (rank + 1) / ranks;

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, S::kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x >= S::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kProducerRegisters));
    if (__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) == S::kConsumers / 32) {
      produce<S>(p, &x_map, &code_map, pool, full, empty, row, expert * p.M + token, begin, end);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kConsumerRegisters));
    float sum[S::kTokens / 2];
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) sum[i] = 0;
    consume<T, S>(Consumer<T, S>(pool, full, empty), end - begin, sum);
    leave_sums<T, S>(sum, sums);
  }
  if (ranks > 1) cluster_sync();
  if (threadIdx.x < S::kConsumers) write_sums<S>(p, sums, expert, token, last_token, row - expert * p.N, rank, ranks);
  if (ranks > 1) cluster_wait_all();
#endif
}

}  // namespace many_rows
}  // namespace nvfp4
