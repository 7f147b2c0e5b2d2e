// torch.ops.nvfp4.grouped_linear on CUDA: rows of x in groups, each times its expert's weight; the host reads nothing.
#include "cuda/host/scratch.h"
#include "cuda/matmul/arguments.h"

namespace nvfp4 {
namespace {

// By the mean of the groups, whose sizes only the device knows.
void launch(const Problem& p, cudaStream_t stream) {
  const ProductSize size = size_of(p);
  const Fits fits = {fits_matmul_many_rows(p), false};
  Choice choice{KernelFamily::kFewRows, fits.many_rows ? "at most 4 rows an expert in the mean" : "no wgmma"};
  if (p.rows > costs::kFewRowsOfExpert * p.experts && fits.many_rows) {
    choice = {KernelFamily::kManyRows, "more than 4 rows an expert in the mean",
              many_rows::best_plan(size, this_machine().multiprocessors)};
  }
  if (are_plans_printed()) print_plan(describe(choice, size, fits, name_of(p.x_dtype), this_machine()));
  if (choice.family == KernelFamily::kManyRows) {
    RawScratch scratch;
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
  const int64_t experts = qdata.size(0), outer = qdata.size(1), inner = x.matrix.columns;
  Problem p = sized_problem({x.matrix.rows, outer}, inner, false);
  p.experts = static_cast<int>(experts), p.M = 0;
  check_weight(p, x_given, qdata, scale, per_tensor_scale, inner);
  check_beside(offs_given, "offs", x_given);
  Tensor y = empty({x.matrix.rows, outer}, out_dtype, x_given);
  if (y.numel() == 0) return y;
  if (experts == 0 || inner == 0) {
    cudaMemsetAsync(y.mutable_data_ptr(), 0, y.numel() * y.element_size(), stream);
    return y;
  }
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale), offs = in_order(offs_given);
  const Tensor factors = contiguous_as(per_tensor_scale, ScalarType::Float);
  Tensor row_factors;
  p.x = x.matrix.data, p.x_row = x.matrix.row_stride, p.x_dtype = x.matrix.dtype;
  place_codes(p, codes, scales);
  place_w_scale(p, factors);
  if (x_scale) row_factors = place_x_scale(p, x_given, *x_scale);
  p.y = y.mutable_data_ptr(), p.y_dtype = dtype_of(out_dtype, "out_dtype");
  p.offs = static_cast<const int32_t*>(offs.const_data_ptr());
  launch(p, stream);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) { m.impl("grouped_linear", TORCH_BOX(&grouped_linear)); }

}  // namespace nvfp4
