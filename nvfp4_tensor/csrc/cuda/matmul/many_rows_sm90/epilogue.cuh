// The epilogue, what a warpgroup does with its sums: to another block, from other blocks (stream-K's fix-up), and
// finished into y: alpha, bias, one rounding.
//
// A warp has 16 rows of w by all tokens: lane (g, t) = lane / 4, lane % 4 has of each 8 tokens
//   sum[4 i + j] = (row g + j / 2 * 8, token 8 i + 2 t + j % 2).
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/matmul/many_rows_sm90/decode.cuh"
#include "cuda/matmul/many_rows_sm90/schedule.cuh"
#include "cuda/ptx/shared_sm90.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kSumPitch = 20;                     // floats between tokens: no bank conflicts either way
constexpr int kWarpSumBytes = 8 * kSumPitch * 4;  // 8 tokens by 16 rows
constexpr int kUnitTokens = 16, kUnitBytes = kUnitTokens * 64 * 2;  // of y: 16 tokens by a warpgroup's 64 rows

__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

template <typename S>
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(1 + S::kGroups), "n"(S::kConsumers) : "memory");
}

// Where this warpgroup says to that of another block, the tile's `to`th, that its sums are in their slot.
template <typename S>
__device__ __forceinline__ uint64_t* ready_flag(const Work& work, int slot, int to) {
  return work.ready + (slot * kMostSharers + to) * S::kGroups + threadIdx.x / 128;
}

// At the start, so that no block reads an uninitialized flag. (Its content would hardly be the launch's number.)
template <typename S>
__device__ __forceinline__ void not_ready(const Work& work) {
  if (threadIdx.x % 128 >= kMostSharers) return;
  for (int slot = blockIdx.x; slot < work.slots; slot += gridDim.x) {
    *ready_flag<S>(work, slot, threadIdx.x % 128) = 0;
  }
}

// Release: what this warpgroup's threads wrote before its barrier is visible to a block that has waited.
__device__ __forceinline__ void say_ready(uint64_t* flag, uint64_t launch) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(launch) : "memory");
}

// Resets the flag, since a CUDA graph launches with the same number again.
__device__ __forceinline__ void wait_until_ready(uint64_t* flag, uint64_t launch) {
  uint64_t found = 0;
  while (found != launch) {
    asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, 0;" : "=l"(found) : "l"(flag), "l"(launch) : "memory");
  }
}

// Store all sums for the blocks that finish the tile.
template <typename S>
__device__ __forceinline__ void leave_sums(const Work& work, const Meeting& meeting, const float (&sum)[S::kSums]) {
  const int slot = meeting.slot(meeting.rank);
  float4* to = work.sums + static_cast<int64_t>(slot) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    __stcg(to + i * S::kConsumers, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  }
  warpgroup_sync();
  const int finisher = threadIdx.x % 128;
  if (finisher < meeting.finishers) say_ready(ready_flag<S>(work, slot, finisher), work.launch);
}

// What is left to the only block that finishes the tile.
template <typename S>
__device__ __forceinline__ void add_sums(const Work& work, int slot, float (&sum)[S::kSums]) {
  if (threadIdx.x % 128 == 0) wait_until_ready(ready_flag<S>(work, slot, 0), work.launch);
  warpgroup_sync();
  const float4* from = work.sums + static_cast<int64_t>(slot) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    const float4 v = __ldcg(from + i * S::kConsumers);
    sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
  }
}

// Of the rows of w that a warpgroup has, its first, counted in the expert.
template <typename S>
__device__ __forceinline__ int first_row_of_group(const Problem& p, const TileCoord& at) {
  return at.row - at.expert * p.N + threadIdx.x / 128 * 64;
}

// alpha and bias of a lane's two rows of w, without what tokens have of their own: loaded before the sums of other
// blocks are waited for, not after.
struct TwoRows {
  float alpha[2], bias[2];

  template <typename S>
  static __device__ __forceinline__ TwoRows of(const Problem& p, const TileCoord& at) {
    TwoRows rows;
    const int first = first_row_of_group<S>(p, at) + threadIdx.x / 32 % 4 * 16 + first_row(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = min(max(first + i * kToOtherRow, 0), p.N - 1);
      const int64_t factor = static_cast<int64_t>(at.expert) * p.w_scale_expert + n * p.w_scale_step;
      rows.alpha[i] = p.w_scale ? p.w_scale[factor] : 1.0f;
      if (p.x_scale && !p.x_scale_step) rows.alpha[i] = __fmul_rn(rows.alpha[i], *p.x_scale);
      rows.bias[i] = p.bias ? load_as_float(p.bias, p.bias_dtype, at.expert * p.bias_expert + n * p.bias_column) : 0.0f;
    }
    return rows;
  }
};

template <typename T>
__device__ __forceinline__ uint32_t two_rounded(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  }
}

// The scales of tokens, where each has its own. A lane loads one of a unit's 16 and is sent those of its two of each 8:
// loaded directly, four addresses a unit cost registers that the loop over K needs.
struct TokenScales {
  const float* of;  // a unit's first
  int last;         // of the tile, counted from there

  static __device__ __forceinline__ TokenScales at(const Problem& p, const TileCoord& at) {
    const int own = threadIdx.x % kUnitTokens;
    const float* of = p.x_scale + (static_cast<int64_t>(at.expert) * p.M + at.token + own);
    asm volatile("" : "+l"(of));  // once here, not for each unit
    return {of, at.end - at.token - 1 - own};
  }
  __device__ __forceinline__ void load(int unit, float (&token)[2][2]) const {
    const float own = of[min(kUnitTokens * unit, last)];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      token[i / 2][i % 2] = __shfl_sync(0xFFFFFFFF, own, 8 * (i / 2) + threadIdx.x % 4 * 2 + i % 2);
    }
  }
};
struct NoTokenScales {
  static __device__ __forceinline__ NoTokenScales at(const Problem&, const TileCoord&) { return {}; }
};

// Calls does(whether there is a bias, the scales of tokens), which are then constants.
template <typename Does>
__device__ __forceinline__ void for_scaling(const Problem& p, const TileCoord& at, Does does) {
  const auto with = [&](auto scales) { p.bias ? does(std::true_type(), scales) : does(std::false_type(), scales); };
  if (p.x_scale && p.x_scale_step) {
    with(TokenScales::at(p, at));
  } else {
    with(NoTokenScales::at(p, at));
  }
}

// y of a warp's 16 tokens, turned around on its way to shared memory: rows of w lie together there. Each lane has the
// address of 8 of them, of a token.
template <typename T, bool kBias, typename Scales>
__device__ __forceinline__ void finish_unit(const TwoRows& rows, const Scales& scales, int unit, const float* sum,
                                            uint32_t units) {
  constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
  constexpr bool kTokens = std::is_same_v<Scales, TokenScales>;
  float token[2][2];
  if constexpr (kTokens) scales.load(unit, token);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float alpha = rows.alpha[i % 2];
      if constexpr (kTokens) alpha = __fmul_rn(alpha, token[i / 2][j]);
      y[j] = __fmul_rn(sum[2 * i + j] * kToOne, alpha);
      if constexpr (kBias) y[j] = __fadd_rn(y[j], rows.bias[i % 2]);
    }
    pairs[i] = two_rounded<T>(y[0], y[1]);
  }
  stmatrix_transposed(units + unit * kUnitBytes, pairs);
}

__device__ __forceinline__ void write_any(const Problem& p, int first, int expert, int m, float4 sum) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  const int64_t at = (static_cast<int64_t>(expert) * p.M + m) * p.y_row + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = first + i;
    if (n >= 0 && n < p.N) store_rounded(p.y, p.y_dtype, at + i, finish(p, expert, m, n, sums[i]));
  }
}

// 8 tokens of a warp through shared memory: four rows of w of one token, one after another.
__device__ __forceinline__ float4 turn(const float* sum, uint8_t* desk, float factor) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* sums = reinterpret_cast<float*>(desk + threadIdx.x / 32 % 4 * kWarpSumBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sums[(2 * t + j % 2) * kSumPitch + first_row(lane) + j / 2 * kToOtherRow] = sum[j] * factor;
  }
  __syncwarp();
  const float4 four = *reinterpret_cast<const float4*>(sums + g * kSumPitch + t * 4);
  __syncwarp();
  return four;
}

// Where a lane leaves its part of 16 tokens of y in shared memory, so that rows of w lie together there: 64 by 16
// tokens of a warpgroup are 128-byte lines, 16 bytes at a time swizzled against bank conflicts.
__device__ __forceinline__ uint32_t offset_in_unit() {
  const int lane = threadIdx.x % 32, own = lane / 16 * 8 + lane % 8, eight = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  return own * 128 + (eight ^ own % 8) * 16;
}

// Units from there to y, those that are this block's, by the warpgroup: whole lines.
template <typename T, typename S, typename Owns>
__device__ __forceinline__ void write_units(const Problem& p, const TileCoord& at, uint32_t units, Owns owns) {
  const int token = threadIdx.x % 128 / 8, unit = threadIdx.x % 8, tokens = at.end - at.token;
  const int mine = first_row_of_group<S>(p, at) + unit * 8;
  if (mine < 0 || mine >= p.N) return;
  T* y = static_cast<T*>(p.y) + (static_cast<int64_t>(at.expert) * p.M + at.token + token) * p.y_row + mine;
  const uint32_t from = units + token * 128 + (unit ^ token % 8) * 16;
#pragma unroll
  for (int i = 0; i < S::kUnits; ++i, y += kUnitTokens * p.y_row) {
    if (owns(i) && kUnitTokens * i + token < tokens) {
      __stcg(reinterpret_cast<uint4*>(y), load_shared_16(from + i * kUnitBytes));  // plain, nvcc makes it four stores
    }
  }
}

// A unit of any y.
template <typename T, typename S>
__device__ __forceinline__ void write_any_unit(const Problem& p, const TileCoord& at, int unit, const float* sum,
                                               uint8_t* desk) {
  const int lane = threadIdx.x % 32, n = first_row_of_group<S>(p, at) + threadIdx.x / 32 % 4 * 16 + lane % 4 * 4;
  const int m = at.token + unit * kUnitTokens + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = turn(sum + 4 * i, desk, 1.0f / Decoder<T>::kUnit);
    if (m + 8 * i < at.end) write_any(p, n, at.expert, m + 8 * i, four);
  }
}

// A tile, by TMA while the next one's products run: by the warpgroup, 16 tokens at a time, 256 took 4,900
// cycles, 3 % of 14336 x 8192 with 4096 rows and 16 of 24576 x 1536. The desk is free when
// tma_store_wait_read() has returned to the warpgroup's first thread.
template <typename T, typename S>
__device__ __forceinline__ void write_plain(const Problem& p, const CUtensorMap* y_map, const TileCoord& at,
                                            const TwoRows& rows, const float (&sum)[S::kSums], uint8_t* desk) {
  const uint32_t units = address_of(desk), to = units + offset_in_unit();
  for_scaling(p, at, [&](auto has_bias, auto scales) {
#pragma unroll
    for (int i = 0; i < S::kUnits; ++i) finish_unit<T, has_bias.value>(rows, scales, i, sum + 8 * i, to);
  });
  fence_proxy_async_shared();
  warpgroup_sync();
  const int first = at.expert * p.M + at.token, n = first_row_of_group<S>(p, at), tokens = at.end - at.token;
  // TMA leaves out what lies beyond y, but not another expert's rows.
  if (n < 0 || (tokens < S::kTokens && first + tokens != p.rows)) {
    write_units<T, S>(p, at, units, [](int) { return true; });
  } else if (threadIdx.x % 128 == 0) {
    tma_store_2d(y_map, n, first, units);
    tma_store_commit();
  }
}

template <typename T, typename S>
__device__ __forceinline__ void write_any_tile(const Problem& p, const TileCoord& at, float (&sum)[S::kSums],
                                               uint8_t* desk) {
#pragma unroll 1
  for (int unit = 0; unit < S::kUnits; ++unit) {  // registers have no index: the next sums move up
    write_any_unit<T, S>(p, at, unit, sum, desk);
#pragma unroll
    for (int i = 0; i + 8 < S::kSums; ++i) sum[i] = sum[i + 8];
  }
  fence_proxy_async_shared();
}

}  // namespace many_rows
}  // namespace nvfp4
