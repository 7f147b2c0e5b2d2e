// Arguments of the ops that multiply, made a Problem; and the kernel that one is given.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/host/tensors.h"
#include "cuda/matmul/dense.h"
#include "cuda/matmul/describe.h"
#include "cuda/matmul/problem.cuh"
#include "ops.h"
#include "plans_printed.h"

namespace nvfp4 {

// bias as what it is added with: steps by expert, row and column of the result.
inline Tensor set_bias(Problem& p, Tensor bias, const Tensor& x, const std::vector<int64_t>& shape) {
  const int64_t dims = static_cast<int64_t>(shape.size()), missing = dims - bias.dim();
  check_beside(bias, "bias", x);
  NVFP4_CHECK(missing >= 0, "nvfp4::matmul: bias has more dimensions than the product");
  for (int64_t i = 0; i < bias.dim(); ++i) {
    NVFP4_CHECK(bias.size(i) == 1 || bias.size(i) == shape[missing + i], "nvfp4::matmul: bias of size ", bias.size(i),
                " in dimension ", missing + i, " does not broadcast to a product of size ", shape[missing + i]);
  }
  std::vector<int64_t> steps(dims, 0);
  auto read_steps = [&] {
    for (int64_t i = 0; i < bias.dim(); ++i) steps[dims - bias.dim() + i] = bias.size(i) == 1 ? 0 : bias.stride(i);
  };
  read_steps();
  // leading dimensions of x that are rows together need one step for all
  const bool rows_are_one_dim = dims == 2 || (dims == 3 && p.experts == shape[0] && p.M == shape[1]);
  const bool same_for_all_rows = std::all_of(steps.begin(), steps.end() - 1, [](int64_t step) { return step == 0; });
  if (!rows_are_one_dim && !same_for_all_rows) {
    using torch::stable::detail::from;
    bias = torch::stable::contiguous(
        call("aten::expand", "", {from(bias), from(torch::headeronly::IntHeaderOnlyArrayRef(shape)), from(false)}));
    read_steps();
  }
  p.bias = bias.const_data_ptr();
  p.bias_dtype = dtype_of(bias.scalar_type(), "bias");
  p.bias_column = steps[dims - 1];
  p.bias_row = same_for_all_rows ? 0 : rows_are_one_dim ? steps[dims - 2] : p.N;
  p.bias_expert = dims == 3 && rows_are_one_dim ? steps[0] : 0;
  return bias;
}

inline Problem sized_problem(const std::vector<int64_t>& shape, int64_t inner, bool batched) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  NVFP4_CHECK(rows < INT32_MAX && shape.back() < INT32_MAX && inner < INT32_MAX, "nvfp4::matmul: a size beyond 2^31");
  Problem p = {};
  p.experts = batched ? static_cast<int>(shape[0]) : 1;
  p.M = static_cast<int>(batched ? shape[1] : rows);
  p.rows = static_cast<int>(rows);
  p.N = static_cast<int>(shape.back());
  p.y_row = p.N;
  p.K = static_cast<int>(inner);
  return p;
}

inline void check_weight(const Problem& p, const Tensor& x, const Tensor& qdata, const Tensor& scale,
                         const Tensor& per_tensor_scale, int64_t columns) {
  check_beside(qdata, "qdata", x);
  check_beside(per_tensor_scale, "per_tensor_scale", x);
  const int64_t rows = check_coded(qdata, scale, columns).rows, factors = per_tensor_scale.numel();
  NVFP4_CHECK(rows < INT32_MAX, "more than 2^31 - 1 rows of weights");
  NVFP4_CHECK(factors == 1 || factors == p.experts || factors == rows,
              "per_tensor_scale must be 0-d, (E, 1) or one per row of w, not ", factors, " for ", rows, " rows");
}

// x as the kernels take it: rows at any distance, their elements together.
inline Tensor place_x(Problem& p, const Tensor& given) {
  const bool rows_fit = given.dim() == 2 && (given.stride(1) == 1 || p.K <= 1) && given.stride(0) >= p.K;
  const Tensor x = rows_fit || given.is_contiguous() ? given : torch::stable::contiguous(given);
  p.x = x.const_data_ptr();
  p.x_dtype = dtype_of(x.scalar_type(), "x");
  p.x_row = rows_fit && p.M > 1 ? x.stride(0) : p.K;
  return x;
}

inline Tensor place_x_scale(Problem& p, const Tensor& x, const Tensor& scale) {
  const Tensor factor = factors_of(scale, "x_scale", p.rows, x);
  p.x_scale = static_cast<const float*>(factor.const_data_ptr());
  p.x_scale_step = factor.numel() > 1;
  return factor;
}

inline void place_codes(Problem& p, const Tensor& codes, const Tensor& scales) {
  p.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.code_row = codes.size(codes.dim() - 1);
  p.Kp = static_cast<int>(p.code_row * 2);
  p.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  p.scale_band = (static_cast<int64_t>(p.Kp) + 63) / 64 * 512;
}

inline bool one_a_row(const Problem& p, const Tensor& w_scale) {
  return w_scale.numel() > p.experts || (w_scale.numel() > 1 && p.experts == 1);
}

inline void place_w_scale(Problem& p, const Tensor& factor) {
  p.w_scale = static_cast<const float*>(factor.const_data_ptr());
  p.w_scale_step = one_a_row(p, factor);
  p.w_scale_expert = factor.numel() == 1 ? 0 : p.w_scale_step ? p.N : 1;
}

// The product of a problem that has x, factors, bias and y already, by the kernel that is fastest: what nvfp4::matmul
// does behind its checks. x: where p.x lies. w_factor: a factor inside the sums, of transposed products.
void multiply(Problem& p, const Tensor& x, const Tensor& qdata, const Tensor& scale,
              const std::optional<Tensor>& w_factor, int64_t columns, bool transposed, cudaStream_t stream);

// --- which kernel ----------------------------------------------------------------------------------------------------

// Remembered for the sizes of a step: plans take the host one to three microseconds.
Choice choose_kernel(const Problem& p);

inline void print_choice(const Choice& choice, const Problem& p) {
  if (!are_plans_printed()) return;
  const Fits fits = {fits_matmul_many_rows(p), fits_matmul_few_rows_sm90(p)};
  print_plan(describe(choice, size_of(p), fits, name_of(p.x_dtype), this_machine()));
}

}  // namespace nvfp4
