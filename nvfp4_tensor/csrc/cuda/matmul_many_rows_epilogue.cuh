// What a warpgroup does with its sums: to another block, from other blocks, and finished into y.
//
// A warp has 16 rows of w by all tokens: lane (g, t) = lane / 4, lane % 4 has of each 8 tokens
//   sum[4 i + j] = (row g + j / 2 * 8, token 8 i + 2 t + j % 2).
#pragma once

#include <type_traits>

#include "matmul_decode.cuh"
#include "matmul_many_rows_schedule.cuh"
#include "matmul_shared.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kSumPitch = 20;  // floats between tokens: no bank conflicts either way
constexpr int kWarpSumBytes = 8 * kSumPitch * 4;  // 8 tokens by 16 rows

__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

template <typename S>
__device__ __forceinline__ void leave_sums(const Work& work, const float (&sum)[S::kSums]) {
  float4* to = work.sums + static_cast<int64_t>(blockIdx.x) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    __stcg(to + i * S::kConsumers, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  }
  __threadfence();
  warpgroup_sync();
  if (threadIdx.x % 128 == 0) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(work.ready + blockIdx.x * S::kGroups + threadIdx.x / 128)
                 : "memory");
  }
}

template <typename S>
__device__ __forceinline__ void add_sums(const Work& work, int block, float (&sum)[S::kSums]) {
  if (threadIdx.x % 128 == 0) {
    const int* ready = work.ready + block * S::kGroups + threadIdx.x / 128;
    int there = 0;
    while (!there) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(ready) : "memory");
  }
  warpgroup_sync();
  const float4* from = work.sums + static_cast<int64_t>(block) * (S::kSums / 4) * S::kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < S::kSums / 4; ++i) {
    const float4 v = __ldcg(from + i * S::kConsumers);
    sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
  }
}

// The epilogue of four consecutive rows of w, those from n on, whatever the token.
struct FourRows {
  int n;
  bool whole;         // all four are the expert's, and lie aligned in y
  float alpha[4];     // without x's factor
  float bias[4];      // where it is the same for all tokens
  bool bias_by_token;

  __device__ FourRows(const Problem& p, int expert, int n) : n(n) {
    whole = n >= 0 && n + 3 < p.N && p.N % 4 == 0 && n % 4 == 0;
    bias_by_token = p.bias && p.bias_row != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(max(n + i, 0), p.N - 1);
      alpha[i] = p.w_scale ? p.w_scale[static_cast<int64_t>(expert) * p.w_scale_expert + row * p.w_scale_step] : 1.0f;
      bias[i] = p.bias && !bias_by_token
                    ? load_as_float(p.bias, p.bias_dtype, expert * p.bias_expert + row * p.bias_column) : 0.0f;
    }
  }
};

template <typename T>
__device__ __forceinline__ uint2 four_rounded(const float (&y)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(y[0], y[1]), high = __floats2bfloat162_rn(y[2], y[3]);
    return make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  } else {
    const __half2 low = __floats2half2_rn(y[0], y[1]), high = __floats2half2_rn(y[2], y[3]);
    return make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  }
}

// As `finish` has it: alpha in float32, then the bias, then one rounding. Here where y is of x's dtype and neither
// alpha nor the bias depends on the token.
template <typename T>
__device__ __forceinline__ void write_plain(const Problem& p, const FourRows& rows, int expert, int m, float4 sum) {
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = __fmul_rn(y[i], rows.alpha[i]);
    if (p.bias) y[i] = __fadd_rn(y[i], rows.bias[i]);
  }
  T* to = static_cast<T*>(p.y) + (static_cast<int64_t>(expert) * p.M + m) * p.N + rows.n;
  *reinterpret_cast<uint2*>(to) = four_rounded<T>(y);
}

__device__ __forceinline__ void write_any(const Problem& p, const FourRows& rows, int expert, int m, float4 sum) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  const int64_t at = (static_cast<int64_t>(expert) * p.M + m) * p.N + rows.n;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = rows.n + i;
    if (n >= 0 && n < p.N) store_rounded(p.y, p.y_dtype, at + i, finish(p, expert, m, n, sums[i]));
  }
}

// 8 tokens of a warp, turned around in shared memory: four lanes have 32 bytes of y together.
__device__ __forceinline__ float4 turn(const float* sum, float* shared, float factor) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* sums = shared + threadIdx.x / 32 * (kWarpSumBytes / 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[(2 * t + j % 2) * kSumPitch + g + j / 2 * 8] = sum[j] * factor;
  __syncwarp();
  const float4 four = *reinterpret_cast<const float4*>(sums + g * kSumPitch + t * 4);
  __syncwarp();
  return four;
}

template <typename T, typename S>
__device__ __forceinline__ void write_tile(const Problem& p, const Place& at, float (&sum)[S::kSums], float* shared) {
  constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
  constexpr Dtype kSame = std::is_same_v<T, __nv_bfloat16> ? Dtype::kBf16 : Dtype::kFp16;
  const int lane = threadIdx.x % 32;
  const FourRows rows(p, at.expert, at.row - at.expert * p.N + threadIdx.x / 32 * 16 + lane % 4 * 4);
  int m = at.token + lane / 4;
  if (__all_sync(0xFFFFFFFF, rows.whole) && p.y_dtype == kSame && !p.x_scale && !rows.bias_by_token) {
#pragma unroll
    for (int i = 0; i < S::kSums / 4; ++i, m += 8) {
      const float4 four = turn(sum + 4 * i, shared, kToOne);
      if (m < at.end) write_plain<T>(p, rows, at.expert, m, four);
    }
  } else {
#pragma unroll 1
    for (int token = 0; token < S::kTokens; token += 32) {  // registers have no index: the next sums move up
#pragma unroll
      for (int i = 0; i < 4; ++i, m += 8) {
        const float4 four = turn(sum + 4 * i, shared, kToOne);
        if (m < at.end) write_any(p, rows, at.expert, m, four);
      }
#pragma unroll
      for (int i = 0; i + 16 < S::kSums; ++i) sum[i] = sum[i + 16];
    }
  }
}

}  // namespace many_rows
}  // namespace nvfp4
