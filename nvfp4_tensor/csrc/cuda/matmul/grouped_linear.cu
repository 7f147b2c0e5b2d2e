// torch.ops.nvfp4.grouped_linear on CUDA: rows of x in groups, each times its expert's weight; the host reads nothing.
#include "cuda/host/tensors.h"
#include "cuda/matmul/describe.h"
#include "cuda/matmul/problem.cuh"
#include "plans_printed.h"

namespace nvfp4 {
namespace {

// By the mean of the groups, whose sizes only the device knows.
void launch(const Problem& p, const Tensor& x, cudaStream_t stream) {
  const ProductSize size = size_of(p);
  const Fits fits = {fits_matmul_many_rows(p), false};
  Choice choice{KernelFamily::kFewRows, fits.many_rows ? "at most 4 rows an expert in the mean" : "no wgmma"};
  if (p.rows > costs::kFewRowsOfExpert * p.experts && fits.many_rows) {
    choice = {KernelFamily::kManyRows, "more than 4 rows an expert in the mean",
              many_rows::best_plan(size, this_machine().multiprocessors)};
  }
  if (are_plans_printed()) print_plan(describe(choice, size, fits, name_of(p.x_dtype), this_machine()));
  if (choice.family == KernelFamily::kManyRows) {
    Scratch scratch(x);
    launch_matmul_many_rows(p, choice.many_rows, std::ref(scratch), stream);
  } else {
    launch_matmul_few_rows_grouped(p, stream);
  }
  check_launched("nvfp4::grouped_linear");
}

Tensor grouped_linear(const Tensor& x_given, const std::optional<Tensor>& x_scale, const Tensor& qdata,
                      const Tensor& scale, const Tensor& per_tensor_scale, const Tensor& offs_given,
                      ScalarType out_dtype) {
  NVFP4_CHECK(x_given.dim() == 2 && qdata.dim() == 3 && offs_given.dim() == 1 && offs_given.size(0) == qdata.size(0) &&
                  offs_given.scalar_type() == ScalarType::Int,
              "nvfp4::grouped_linear takes x (M, K), qdata (E, N, K/2) and offs (E,), int32");
  const OnDeviceOf guard(x_given);
  const cudaStream_t stream = current_stream(x_given);
  const CudaRows x(x_given);
  NVFP4_CHECK(x.matrix.dtype != Dtype::kFloat, "nvfp4::grouped_linear takes x in bfloat16 or float16: cast it");
  const int64_t experts = qdata.size(0), outer = qdata.size(1), half = qdata.size(2), inner = x.matrix.columns;
  check_beside(qdata, "qdata", x_given);
  check_beside(per_tensor_scale, "per_tensor_scale", x_given);
  check_beside(offs_given, "offs", x_given);
  check_coded(qdata, scale, inner);
  NVFP4_CHECK(experts * outer < INT32_MAX, "nvfp4::grouped_linear: more than 2^31 - 1 rows of weights");
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale), offs = in_order(offs_given);
  const Tensor factors = contiguous_as(per_tensor_scale, ScalarType::Float);
  Tensor y = empty({x.matrix.rows, outer}, out_dtype, x_given);
  if (y.numel() == 0) return y;
  if (experts == 0 || inner == 0) {
    cudaMemsetAsync(y.mutable_data_ptr(), 0, y.numel() * y.element_size(), stream);
    return y;
  }

  Problem p = {};
  p.x = x.matrix.data;
  p.x_row = x.matrix.row_stride;
  p.x_dtype = x.matrix.dtype;
  p.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.code_row = half;
  p.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  p.Kp = static_cast<int>(half * 2);
  p.scale_band = ceil_div(half * 2, 64) * 512;
  std::optional<Tensor> row_factors;
  if (x_scale) {
    row_factors = factors_of(*x_scale, "x_scale", x.matrix.rows, x_given);
    p.x_scale = static_cast<const float*>(row_factors->const_data_ptr());
    p.x_scale_step = row_factors->numel() > 1;
  }
  p.w_scale = static_cast<const float*>(factors.const_data_ptr());
  const bool one_a_row = factors.dim() == 1;  // else (E, 1), or one for all
  NVFP4_CHECK(factors.numel() == (one_a_row            ? experts * outer
                                  : factors.dim() == 2 ? experts
                                                       : 1),
              "nvfp4::grouped_linear takes per_tensor_scale 0-d, (E, 1) or (E * N,)");
  p.w_scale_step = one_a_row;
  p.w_scale_expert = one_a_row ? static_cast<int>(outer) : factors.dim() == 2;
  p.y = y.mutable_data_ptr();
  p.y_dtype = dtype_of(out_dtype, "out_dtype");
  p.experts = static_cast<int>(experts);
  p.N = static_cast<int>(outer);
  p.y_row = outer;
  p.K = static_cast<int>(inner);
  p.rows = static_cast<int>(x.matrix.rows);
  p.offs = static_cast<const int32_t*>(offs.const_data_ptr());
  launch(p, x_given, stream);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) { m.impl("grouped_linear", TORCH_BOX(&grouped_linear)); }

}  // namespace nvfp4
