// One product y = round(alpha * (x w^T) + bias) of a dense x and an NVFP4 w, its epilogue, and its kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#include "cuda/generation/activation.h"
#include "cuda/host/kernels.h"
#include "cuda/host/machine.h"
#include "cuda/matmul/size.h"

namespace nvfp4 {

// Rows of w are counted over the whole batch: row n of expert e is row e * N + n; 128 of them share a band of scales.
//
// With `offs` the rows of x are in groups, one an expert, which only the device knows: see groups.cuh. Then M is
// 0 and m counts over all rows, there is no bias, and rows beyond the last group give zeros.
struct Problem {
  const void* x;          // (E, M, K) bf16 or fp16
  int64_t x_row;          // elements between rows of x; experts are M rows apart
  const uint8_t* codes;   // (E * N, Kp / 2), the even element in the low nibble
  int64_t code_row;       // bytes between rows of codes
  const uint8_t* scales;  // (bands, Kp / 64 rounded up, 32, 16) e4m3
  int64_t scale_band;     // bytes between bands of scales
  const float* x_scale;   // absent, 0-d, or one per row of x
  const float* w_scale;   // absent, 0-d, one per expert, or one per row of w
  int x_scale_step, w_scale_expert, w_scale_step;
  const void* bias;  // absent, or broadcast to (E, M, N) by these steps
  int64_t bias_expert, bias_row, bias_column;
  Dtype x_dtype, bias_dtype, y_dtype;
  void* y;        // (E, M, N)
  int64_t y_row;  // elements between rows of y: N, or more where y is columns of a wider matrix
  int experts, M, N, K;
  int rows;                     // of x over the batch: experts * M, or of all groups
  const int32_t* offs;          // (experts), where each group ends; null where every expert has M rows
  int Kp;                       // K rounded up to 16
  int first_m = 0, some_m = 0;  // the rows of x that a launch is about, where it is not about all and not of groups
};

inline ProductSize size_of(const Problem& p) { return {p.experts, p.M, p.N, p.K, p.rows, p.offs != nullptr}; }

// What Hopper's few-rows kernel may do besides.
struct Fused {
  // x is not multiplied itself, but as y of nvfp4::rms_norm: all in x's dtype, rows of K
  bool normed = false;
  const void *residual = nullptr, *norm = nullptr;
  void* sum = nullptr;  // null: not wanted
  float eps = 0, offset = 0, multiplier = 1;
  bool round_before_weight = true;
  // of two weights, gate and up, only nvfp4::gated's result is written, by the first one's y
  bool gated = false;
  step::Activation activation = step::Activation::kSilu;
  float limit = 0, alpha = 0;
};

namespace many_rows {
struct PlannedKernel;  // many_rows_sm90/plan.h
}

// Each only enqueues, and each needs M, N, K > 0 and x in bf16 or fp16.
void launch_matmul_few_rows(const Problem& p, cudaStream_t stream);  // any such problem; made for M <= 16
void launch_matmul_few_rows_grouped(const Problem& p, cudaStream_t stream);
bool fits_matmul_few_rows_sm90(const Problem& p);                         // what it calls where alignment allows
void launch_matmul_few_rows_sm90(const Problem& p, cudaStream_t stream);  // for at most 16 rows
// The same for up to kMostSets weights that share x (one expert each), in one launch; without what may be fused the
// values are those of single launches. fits: it takes each of them, in the same shape, and what is fused.
constexpr int kMostSets = 3;
bool fits_matmul_sets_sm90(const Problem* sets, int count, const Fused& fused);
void launch_matmul_sets_sm90(const Problem* sets, int count, const Fused& fused, cudaStream_t stream);
bool fits_matmul_many_rows(const Problem& p);  // a Hopper, and codes aligned to 16 bytes
// scratch: memory of so many bytes, which lives as long as the stream needs it.
void launch_matmul_many_rows(const Problem& p, const many_rows::PlannedKernel& planned,
                             const std::function<void*(int64_t)>& scratch, cudaStream_t stream);
// Likewise of up to kMostSets weights that share x, by a plan of their rows of w together. fits: of at most 128 rows of
// x, and each with a multiple of 256 rows of w.
bool fits_matmul_sets_many_rows(const Problem* sets, int count);
void launch_matmul_sets_many_rows(const Problem* sets, int count, const many_rows::PlannedKernel& planned,
                                  const std::function<void*(int64_t)>& scratch, cudaStream_t stream);
void launch_matmul_finish(const Problem& p, const float* sums, cudaStream_t stream);  // alpha, bias, rounding

#ifdef __CUDACC__

__device__ __forceinline__ float load_as_float(const void* from, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::kBf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
    case Dtype::kFp16: return __half2float(static_cast<const __half*>(from)[i]);
    default: return static_cast<const float*>(from)[i];
  }
}

__device__ __forceinline__ void store_rounded(void* to, Dtype dtype, int64_t i, float v) {
  switch (dtype) {
    case Dtype::kBf16: static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(v); break;
    case Dtype::kFp16: static_cast<__half*>(to)[i] = __float2half_rn(v); break;
    default: static_cast<float*>(to)[i] = v;
  }
}

// alpha * sum + bias in float32, unfused, rounded once to y's dtype by the caller.
__device__ __forceinline__ float finish(const Problem& p, int expert, int m, int n, float sum) {
  float alpha = 1;
  if (p.w_scale) alpha = p.w_scale[static_cast<int64_t>(expert) * p.w_scale_expert + n * p.w_scale_step];
  if (p.x_scale) alpha = __fmul_rn(alpha, p.x_scale[(static_cast<int64_t>(expert) * p.M + m) * p.x_scale_step]);
  float y = __fmul_rn(sum, alpha);
  if (p.bias) {
    const int64_t i = expert * p.bias_expert + m * p.bias_row + n * p.bias_column;
    y = __fadd_rn(y, load_as_float(p.bias, p.bias_dtype, i));
  }
  return y;
}

#endif  // __CUDACC__

}  // namespace nvfp4
