// y = x w^T for few rows of x, on every GPU: bound by reading w, so built around that. Split-K over the warps of a
// block (and the blocks of a cluster), mma.m16n8k16, and in each warp a cp.async pipeline of its own.
//
// A block of threads keeps its x in registers and streams w past it. Each warp owns one slice of K, its B fragments of
// x for the tensor cores loaded once, and walks down tiles of 16 rows of w, the A operand: the small M lies on the
// 8-wide side of mma.m16n8k16. The order of K inside an MMA is free, so a lane's 16 bytes of codes are its A fragment
// in memory order, and x is permuted alike while it is loaded. Each lane copies the codes that it will decode to its
// own shared memory, kDepth steps ahead: no barrier is needed between memory and decoding.
//
// The 16 rows of a tile are r + 32 i, r in four consecutive rows, i in 0..3: in the 128x4 order of the scales these are
// 64 consecutive bytes for each 64 elements, so a tile reads whole sectors of them.
//
// Sums over the slices: warps leave theirs of a step in a slot of shared memory, one of them adds a step later, in the
// order of the warps; then blocks of a cluster, which split K, add through distributed shared memory, in the order of
// the blocks. Without clusters (sm_80) a block goes through all of K itself.
#pragma once

#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/groups.cuh"
#include "cuda/matmul/problem.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace few_rows {

constexpr int kTileRows = 16;
constexpr int kTilesPerBand = 128 / kTileRows;

constexpr int kWarps = 16, kThreads = kWarps * 32;
constexpr int kChunks = 2, kSlice = 128 * kChunks;     // of K, a warp's: K = 4096 fills a block
constexpr int kStepBytes = kChunks * (2 * 512 + 256);  // a step is a tile

// kColumns: 8-column tiles of x (M <= 8 * kColumns). kDepth: steps in flight. kMaxTiles: of a block's partial sums in
// shared memory at a time.
template <int kColumns_, int kDepth_, int kSlots_, int kMaxTiles_>
struct Shape {
  static constexpr int kColumns = kColumns_, kDepth = kDepth_, kSlots = kSlots_, kMaxTiles = kMaxTiles_;
  static constexpr int kRingBytes = kWarps * kDepth * kStepBytes;
  static constexpr int kTileSums = kTileRows * 8 * kColumns;
  static constexpr int kSlotSums = kWarps * kTileSums;
  static constexpr int kSharedBytes = kRingBytes + (kSlots * kSlotSums + kMaxTiles * kTileSums) * 4 + 16 * kSlots;
};

// How a grid of (cluster, clusters, experts) blocks divides the work; of groups, (cluster, clusters) do all of it.
struct Work {
  int cluster;            // blocks that share rows and split K
  int passes;             // over K, where a cluster's slices do not cover it
  int log2_warps_in_k;    // of a block's warps, how many split K; the others take other rows
  int tiles, more_tiles;  // every cluster takes so many, and the first ones another
  int tiles_of_expert;    // that all of its rows are
};

// Rows of x and tiles of w that a cluster multiplies by each other.
struct Share {
  int expert, m, rows;  // rows m.. of the expert (of all, in groups)
  int begin, end;       // tiles, counted over the batch
};

__device__ __forceinline__ int first_tile(const Problem& p, int expert) { return expert * p.N / 128 * kTilesPerBand; }

// The one share of a cluster where each expert has clusters of its own.
__device__ __forceinline__ Share own_share(const Problem& p, const Work& work) {
  const int cluster = blockIdx.y, expert = blockIdx.z;
  const int begin = first_tile(p, expert) + (cluster * work.tiles + min(cluster, work.more_tiles));
  return {expert, p.first_m, p.some_m, begin, begin + (work.tiles + (cluster < work.more_tiles))};
}

// The shares of a cluster in a product of groups. The pairs of a token tile and a tile of w, ordered by token
// tile, are divided equally among clusters, independent of the experts that the tokens belong to.
template <typename S>
struct GroupShares {
  static constexpr int kTokens = S::kColumns * 8;
  int64_t at, end;
  TokenTiles tiles;

  __device__ GroupShares(const Problem& p, const Work& work) : tiles(p, kTokens) {
    const int64_t all = static_cast<int64_t>(tiles.count()) * work.tiles_of_expert;
    at = all * blockIdx.y / gridDim.y;
    end = all * (blockIdx.y + 1) / gridDim.y;
  }
  __device__ bool next(const Problem& p, const Work& work, Share& share) {
    if (at >= end) return false;
    const int token_tile = static_cast<int>(at / work.tiles_of_expert);
    const int tile = static_cast<int>(at - static_cast<int64_t>(token_tile) * work.tiles_of_expert);
    const int count = static_cast<int>(min(end - at, static_cast<int64_t>(work.tiles_of_expert - tile)));
    const TokenTile rows = tiles.find(token_tile);
    const int begin = first_tile(p, rows.expert) + tile;
    share = {rows.expert, rows.begin, min(rows.end - rows.begin, kTokens), begin, begin + count};
    at += count;
    return true;
  }
};

// A warp's slice of x, in memory order: 8 elements for each word of codes that a lane will decode.
template <typename S>
__device__ __forceinline__ void load_slice(const Problem& p, const Share& share, int k0, int lane,
                                           uint4 (&v)[kChunks][4][S::kColumns]) {
  const uint16_t* x = static_cast<const uint16_t*>(p.x);
  const bool aligned = (reinterpret_cast<uintptr_t>(x) | (p.x_row * 2)) % 16 == 0;
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) {
    const int m = column * 8 + lane / 4;
    const uint16_t* row = x + (static_cast<int64_t>(share.expert) * p.M + share.m + m) * p.x_row;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        v[chunk][word][column] = make_uint4(0, 0, 0, 0);
        const int k = k0 + chunk * 128 + lane % 4 * 32 + word * 8;
        if (m < share.rows) v[chunk][word][column] = load_x(p, row, k, aligned);
      }
    }
  }
}

// The lane's first row of a tile, counted over the batch; its second is 32 further.
__device__ __forceinline__ int tile_row(uint32_t tile, int lane) {
  const int g = lane / 4;
  return tile / kTilesPerBand * 128 + tile % kTilesPerBand * 4 + g % 4 + g / 4 * 64;
}

// Where a lane reads w, from one step to the next.
struct Cursor {
  const uint8_t* codes;  // of its first row
  const uint8_t* scales;
  int row;       // its first row, counted over the batch
  int in_band;   // tile
  int stride;    // tiles from one step to the next, a divisor of those of a band
  int elements;  // of K from its first on, beyond which zeros come
  __device__ Cursor(const Problem& p, uint32_t tile, int k, int lane, int tiles_a_step)
      : row(tile_row(tile, lane)), in_band(tile % kTilesPerBand), stride(tiles_a_step), elements(p.Kp - k) {
    codes = p.codes + row * p.code_row + k / 2;
    scales = p.scales + tile / kTilesPerBand * p.scale_band + (tile % kTilesPerBand * 4 + lane / 4 % 4) * 16 +
             lane / 16 * 8 + k / 64 * 512;
  }

  __device__ __forceinline__ void advance(const Problem& p) {
    in_band += stride;
    const bool next_band = in_band >= kTilesPerBand;
    const int rows = stride * 4 + (next_band ? 96 : 0);
    in_band -= next_band ? kTilesPerBand : 0;
    row += rows;
    codes += rows * p.code_row;
    scales += stride * 64 + (next_band ? p.scale_band - 512 : 0);
  }
};

// Starts the copies of what a lane multiplies in a step: for each 128 elements, 32 codes of each of its two rows, and
// the scales of both rows for 64 elements. kPlain: no tile and no slice reaches beyond w.
template <bool kPlain>
__device__ __forceinline__ void copy_step(const Problem& p, const Cursor& cursor, int lane, uint32_t to) {
  const int last = p.experts * p.N - 1, end_of_bands = (last / 128 + 1) * 128;
  const bool aligned = kPlain || (reinterpret_cast<uintptr_t>(p.codes) | p.code_row) % 16 == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* from = cursor.codes + i * 32 * p.code_row;
    const int elements = kPlain || cursor.row + i * 32 <= last ? cursor.elements : 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t at = to + (chunk * 2 + i) * 512 + lane * 16;
      const int left = elements - chunk * 128;
      if (aligned) {
        cp_async_16(at, from + chunk * 64, kPlain || left > 16 ? 16 : left > 0 ? 8 : 0);
      } else {
        cp_async_8(at, from + chunk * 64, left > 0 ? 8 : 0);
        cp_async_8(at + 8, from + chunk * 64 + 8, left > 16 ? 8 : 0);
      }
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const bool inside = cursor.row < end_of_bands && cursor.elements > chunk * 128;
    cp_async_8(to + kChunks * 1024 + chunk * 256 + lane * 8, cursor.scales + chunk * 1024, kPlain || inside ? 8 : 0);
  }
}

// A step's sums of one warp, over its slice, from its copies.
template <typename T, typename S>
__device__ __forceinline__ void multiply_step(uint32_t from, int lane, const uint4 (&b)[kChunks][4][S::kColumns],
                                              float (&sum)[S::kColumns][4]) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const uint4 codes[2] = {load_shared_16(from + chunk * 1024 + lane * 16),
                            load_shared_16(from + chunk * 1024 + 512 + lane * 16)};
    uint32_t factors[4];  // row 0: blocks 0, 1; row 1: blocks 0, 1
    const uint2 scales = load_shared_8(from + kChunks * 1024 + chunk * 256 + lane * 8);
    scale_factors<T>(__byte_perm(scales.x, scales.y, lane % 2 ? 0x7632 : 0x5410), factors);
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
    }
  }
}

// One warp adds a step's sums over the warps that split K, in their order, into the block's partial sums.
template <typename S>
__device__ __forceinline__ void add_warps(const float* slot, float* partial, int tiles, int warps_in_k, int lane,
                                          bool fresh) {
#pragma unroll 1
  for (int i = lane * 4; i < tiles * S::kTileSums; i += 128) {
    const float* from = slot + i / S::kTileSums * warps_in_k * S::kTileSums + i % S::kTileSums;
    float4 sum = fresh ? make_float4(0, 0, 0, 0) : *reinterpret_cast<const float4*>(partial + i);
#pragma unroll 4
    for (int warp = 0; warp < warps_in_k; ++warp) {
      const float4 v = *reinterpret_cast<const float4*>(from + warp * S::kTileSums);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<float4*>(partial + i) = sum;
  }
}

template <typename S>
__device__ __forceinline__ void write_tiles(const Problem& p, const Work& work, const Share& share,
                                            const float* partial, int tile0, int tiles) {
  const uint32_t rank = blockIdx.x;
  const int first_row = share.expert * p.N;
  // consecutive threads: the 16 rows of a tile, then its columns, so that what M leaves out is skipped in whole warps
  for (int i = threadIdx.x + rank * kThreads; i < tiles * kTileRows * share.rows; i += work.cluster * kThreads) {
    const int r = i % kTileRows, tile = i / kTileRows % tiles, m = i / kTileRows / tiles;
    const int lane = r % 4 + r / 8 * 4, half = r / 4 % 2;  // row r is r % 4 + 32 (r / 4)
    const int n = tile_row(tile0 + tile, lane * 4) + half * 32 - first_row;
    if (n < 0 || n >= p.N) continue;
    const int e = m / 8 * 128 + (lane * 4 + m % 8 / 2) * 4 + half * 2 + m % 2;
    float sum = 0;
    for (int from = 0; from < work.cluster; ++from) sum += load_from_rank(partial + tile * S::kTileSums + e, from);
    const int64_t at = (static_cast<int64_t>(share.expert) * p.M + share.m + m) * p.y_row + n;
    store_rounded(p.y, p.y_dtype, at, finish(p, share.expert, share.m + m, n, sum));
  }
}

template <typename T, typename S, bool kPlain, bool kGrouped>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Problem p, const Work work) {
  extern __shared__ __align__(16) uint8_t shared[];
  float* slots = reinterpret_cast<float*>(shared + S::kRingBytes);
  float* partial = slots + S::kSlots * S::kSlotSums;
  const uint32_t full = address_of(partial + S::kMaxTiles * S::kTileSums), empty = full + 8 * S::kSlots;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps_in_k = 1 << work.log2_warps_in_k;
  const int mine = warp >> work.log2_warps_in_k, tiles_a_step = kWarps >> work.log2_warps_in_k;
  const uint32_t ring = address_of(shared) + warp * S::kDepth * kStepBytes;

  if (threadIdx.x == 0 && p.w_scale) prefetch(p.w_scale);
  if (threadIdx.x < S::kSlots) {
    mbarrier_init(full + 8 * threadIdx.x, kThreads);
    mbarrier_init(empty + 8 * threadIdx.x, 32);
  }
  __syncthreads();

  auto steps_of = [&](int tiles) { return (tiles + (tiles_a_step - 1)) * warps_in_k / kWarps; };
  uint32_t slot = 0, parity = 0;
  auto multiply = [&](const Share& share) {
    for (int tile0 = share.begin; tile0 < share.end; tile0 += S::kMaxTiles) {
      const int tiles = min(share.end - tile0, S::kMaxTiles);
      const int steps = steps_of(tiles);
      for (int pass = 0; pass < work.passes; ++pass) {
        const int slice = ((pass * work.cluster + blockIdx.x) << work.log2_warps_in_k) + (warp & (warps_in_k - 1));
        const int k0 = slice * kSlice;
        // where the last step has fewer tiles than warps for them, or K ends before this warp's slice
        const int my_steps = k0 < p.Kp ? steps_of(tiles - mine) : 0;
        uint4 b[kChunks][4][S::kColumns];
        Cursor cursor(p, tile0 + mine, k0 + lane % 4 * 32, lane, tiles_a_step);
#pragma unroll
        for (int d = 0; d < S::kDepth; ++d, cursor.advance(p)) {
          if (d < my_steps) copy_step<kPlain>(p, cursor, lane, ring + d * kStepBytes);
          cp_async_commit();
          if (d == 0) load_slice<S>(p, share, k0, lane, b);  // x is wanted when the first step's copies have come
        }
#pragma unroll
        for (int i = 0; i < kChunks * 4 * S::kColumns; ++i) (&b[0][0][0])[i] = to_fragment((&b[0][0][0])[i]);

        int turn = warp;  // the next step whose sums this warp adds
        uint32_t at = ring;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          float sum[S::kColumns][4] = {};
          if (step < my_steps) {
            cp_async_wait<S::kDepth - 1>();
            multiply_step<T, S>(at, lane, b, sum);
            if (step + S::kDepth < my_steps) copy_step<kPlain>(p, cursor, lane, at);
            cp_async_commit();
            cursor.advance(p);
            at = at == ring + (S::kDepth - 1) * kStepBytes ? ring : at + kStepBytes;
          }
          mbarrier_wait(empty + 8 * slot, parity ^ 1);
          float* to = slots + slot * S::kSlotSums + warp * S::kTileSums + lane * 4;
#pragma unroll
          for (int i = 0; i < S::kColumns; ++i) {
            constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
            const float (&d)[4] = sum[i];
            *reinterpret_cast<float4*>(to + i * 128) = make_float4(d[0] * kToOne, d[1] * kToOne, d[2] * kToOne,
                                                                   d[3] * kToOne);
          }
          mbarrier_arrive(full + 8 * slot);
          // A step's sums are added a step later, when the other warps have most likely come as far.
          auto add = [&](uint32_t its_slot, uint32_t its_parity) {
            mbarrier_wait(full + 8 * its_slot, its_parity);
            add_warps<S>(slots + its_slot * S::kSlotSums, partial + turn * tiles_a_step * S::kTileSums,
                         min(tiles - turn * tiles_a_step, tiles_a_step), warps_in_k, lane, pass == 0);
            mbarrier_arrive(empty + 8 * its_slot);
            turn += kWarps;
          };
          if (turn == step - 1) add(slot == 0 ? S::kSlots - 1 : slot - 1, slot == 0 ? parity ^ 1 : parity);
          if (step == steps - 1 && turn == step) add(slot, parity);
          if (++slot == S::kSlots) slot = 0, parity ^= 1;
        }
        __syncthreads();
      }
      if (work.cluster > 1) cluster_sync();
      write_tiles<S>(p, work, share, partial, tile0, tiles);
      if (work.cluster > 1) cluster_wait_all();
      else __syncthreads();
    }
  };
  if constexpr (kGrouped) {
    GroupShares<S> shares(p, work);
    Share share;
    while (shares.next(p, work, share)) multiply(share);
    for (int row = max(p.offs[p.experts - 1], 0) + blockIdx.y * gridDim.x + blockIdx.x; row < p.rows;
         row += gridDim.x * gridDim.y) {
      zero_row(p, row, threadIdx.x, kThreads);
    }
  } else {
    multiply(own_share(p, work));
  }
}

}  // namespace few_rows
}  // namespace nvfp4
