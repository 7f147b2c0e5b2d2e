// What a warpgroup does with its sums: to another block, from other blocks, and finished into y.
//
// A warp has 16 rows of w by all tokens: lane (g, t) = lane / 4, lane % 4 has of each 8 tokens
//   sum[4 i + j] = (row first_row(lane) + j / 2 * 2, token 8 i + 2 t + j % 2).
// Row g of a product is not row g of w but that one: transposed 8 x 8 by 8 x 8, each lane has four neighbours.
#pragma once

#include <type_traits>

#include "matmul_many_rows_decode.cuh"
#include "matmul_many_rows_schedule.cuh"
#include "shared.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kSumPitch = 20;  // floats between tokens: no bank conflicts either way
constexpr int kWarpSumBytes = 8 * kSumPitch * 4;  // 8 tokens by 16 rows
constexpr int kUnitOfY = 16 * 64 * 2;             // 16 tokens by 64 rows
// A warpgroup's shared memory: where its codes were in the last stage, which it holds back until it has written.
constexpr int kDesk = 64 * 64;
static_assert(kDesk >= 4 * kWarpSumBytes && kDesk >= 2 * kUnitOfY);

__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

// Where this warpgroup says that its sums are there.
template <typename S>
__device__ __forceinline__ uint64_t* ready_flag(const Work& work, int block) {
  return work.ready + block * S::kGroups + threadIdx.x / 128;
}

// At the start, so that nobody reads what nobody wrote. (What stood there was no launch's number anyhow.)
template <typename S>
__device__ __forceinline__ void not_ready(const Work& work) { *ready_flag<S>(work, blockIdx.x) = 0; }

// What this warpgroup's threads wrote before they met is there for who has waited.
__device__ __forceinline__ void say_ready(uint64_t* flag, uint64_t launch) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(launch) : "memory");
}

// The flag is taken back, for a graph that launches the same again.
__device__ __forceinline__ void wait_until_ready(uint64_t* flag, uint64_t launch) {
  uint64_t found = 0;
  while (found != launch) {
    asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, 0;" : "=l"(found) : "l"(flag), "l"(launch) : "memory");
  }
}

template <typename S>
__device__ __forceinline__ void leave_sums(const Work& work, const float (&sum)[S::kSums]) {
  float4* to = work.sums + static_cast<int64_t>(blockIdx.x) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    __stcg(to + i * S::kConsumers, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  }
  warpgroup_sync();
  if (threadIdx.x % 128 == 0) say_ready(ready_flag<S>(work, blockIdx.x), work.launch);
}

// Until the runs behind this one, as many as share its tile, have left their sums; how many there are.
template <typename S, bool kGrouped>
__device__ __forceinline__ int wait_for_others(const Work& work, const Runs<kGrouped>& segments, const Segment& s) {
  int others = 0;
  for (int block; (block = segments.other(s, others + 1)) >= 0; ++others) {
    if (threadIdx.x % 128 == 0) wait_until_ready(ready_flag<S>(work, block), work.launch);
  }
  warpgroup_sync();
  return others;
}

template <typename S>
__device__ __forceinline__ void add_sums(const Work& work, int block, float (&sum)[S::kSums]) {
  const float4* from = work.sums + static_cast<int64_t>(block) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    const float4 v = __ldcg(from + i * S::kConsumers);
    sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
  }
}

// Of the rows of w that a warpgroup has, its first, counted in the expert.
template <typename S>
__device__ __forceinline__ int first_row_of_group(const Problem& p, const Place& at) {
  return at.row - at.expert * p.N + threadIdx.x / 128 * 64;
}

// alpha and bias of a lane's two rows of w, where they are the same for all tokens: loaded before the sums of other
// blocks are waited for, not after.
struct TwoRows {
  float alpha[2], bias[2];

  template <typename S>
  static __device__ __forceinline__ TwoRows of(const Problem& p, const Place& at) {
    TwoRows rows;
    const int first = first_row_of_group<S>(p, at) + threadIdx.x / 32 % 4 * 16 + first_row(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = min(max(first + 2 * i, 0), p.N - 1);
      const int64_t factor = static_cast<int64_t>(at.expert) * p.w_scale_expert + n * p.w_scale_step;
      rows.alpha[i] = p.w_scale ? p.w_scale[factor] : 1.0f;
      if (p.x_scale) rows.alpha[i] = __fmul_rn(rows.alpha[i], *p.x_scale);
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

// Lane (g, t) gives elements 2 t, 2 t + 1 of row g of 8 x 8, and has those of row g of the transpose.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}

// y of a lane's sums of 8 tokens as `finish` has it, turned around: four neighbouring rows of w of token g of the 8.
template <typename T>
__device__ __forceinline__ uint2 finish_eight(const Problem& p, const TwoRows& rows, const float* sum) {
  constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
  float y[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    y[j] = __fmul_rn(sum[j] * kToOne, rows.alpha[j / 2]);
    if (p.bias) y[j] = __fadd_rn(y[j], rows.bias[j / 2]);
  }
  return make_uint2(transposed(two_rounded<T>(y[0], y[1])), transposed(two_rounded<T>(y[2], y[3])));
}

__device__ __forceinline__ void write_any(const Problem& p, int first, int expert, int m, float4 sum) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  const int64_t at = (static_cast<int64_t>(expert) * p.M + m) * p.N + first;
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
  for (int j = 0; j < 4; ++j) sums[(2 * t + j % 2) * kSumPitch + first_row(lane) + j / 2 * 2] = sum[j] * factor;
  __syncwarp();
  const float4 four = *reinterpret_cast<const float4*>(sums + g * kSumPitch + t * 4);
  __syncwarp();
  return four;
}

// alpha and bias are the same for all tokens, y is of x's dtype, and 16 bytes of it begin where 8 rows of w do.
template <typename T>
__device__ __forceinline__ bool is_plain(const Problem& p) {
  constexpr Dtype kSame = std::is_same_v<T, __nv_bfloat16> ? Dtype::kBf16 : Dtype::kFp16;
  return p.y_dtype == kSame && p.N % 8 == 0 && !(p.x_scale && p.x_scale_step) && !(p.bias && p.bias_row);
}

// 16 tokens of a warpgroup at a time meet in shared memory, in units of 16 bytes swizzled against bank conflicts, so
// that whole lines of 128 bytes are written. (In sectors of 32 bytes, a warp each: 4.1 us for 256 tokens.) One place is
// filled while the other is read, and the next tokens are finished meanwhile: one barrier for 16 tokens.
template <typename T, typename S, typename Owns>
__device__ __forceinline__ void write_plain(const Problem& p, const Place& at, const TwoRows& rows,
                                            const float (&sum)[S::kSums], uint8_t* desk, Owns owns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int token = threadIdx.x % 128 / 8, unit = threadIdx.x % 8, n = first_row_of_group<S>(p, at) + unit * 8;
  const uint8_t* from = desk + token * 128 + (unit ^ token % 8) * 16;
  uint8_t* to = desk + g * 128 + ((warp % 4 * 2 + t / 2) ^ g) * 16 + t % 2 * 8;
  int m = at.token + token;
  T* y = static_cast<T*>(p.y) + (static_cast<int64_t>(at.expert) * p.M + m) * p.N + n;
  int place = 0;
  uint2 low = finish_eight<T>(p, rows, sum), high = finish_eight<T>(p, rows, sum + 4);
#pragma unroll
  for (int i = 0; i < S::kUnits; ++i, m += 16, y += 16 * static_cast<int64_t>(p.N)) {
    if (at.token + 16 * i >= at.end) break;
    const bool is_own = owns(i);
    if (is_own) {
      *reinterpret_cast<uint2*>(to + place) = low;
      *reinterpret_cast<uint2*>(to + place + 1024) = high;
    }
    if (i + 1 < S::kUnits) {
      low = finish_eight<T>(p, rows, sum + 8 * i + 8);
      high = finish_eight<T>(p, rows, sum + 8 * i + 12);
    }
    if (!is_own) continue;
    warpgroup_sync();
    const uint4 eight = *reinterpret_cast<const uint4*>(from + place);
    if (n >= 0 && n < p.N && m < at.end) *reinterpret_cast<uint4*>(y) = eight;
    place ^= kUnitOfY;
  }
}

// The units of 16 tokens that this warpgroup owns.
template <typename T, typename S, typename Owns>
__device__ __forceinline__ void write_tile(const Problem& p, const Place& at, const TwoRows& rows,
                                           float (&sum)[S::kSums], uint8_t* desk, Owns owns) {
  warpgroup_sync();  // none of its warps needs its codes any more
  if (is_plain<T>(p)) {
    write_plain<T, S>(p, at, rows, sum, desk, owns);
    return;
  }
  const int lane = threadIdx.x % 32, n = first_row_of_group<S>(p, at) + threadIdx.x / 32 % 4 * 16 + lane % 4 * 4;
  int m = at.token + lane / 4;
#pragma unroll 1
  for (int unit = 0; unit < S::kUnits; ++unit, m += 16) {  // registers have no index: the next sums move up
    if (owns(unit)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = turn(sum + 4 * i, desk, 1.0f / Decoder<T>::kUnit);
        if (m + 8 * i < at.end) write_any(p, n, at.expert, m + 8 * i, four);
      }
    }
#pragma unroll
    for (int i = 0; i + 8 < S::kSums; ++i) sum[i] = sum[i + 8];
  }
}

}  // namespace many_rows
}  // namespace nvfp4
