// The operands of FP8 products on CUDA: arguments checked, outputs allocated.
#include "cuda/quantize/arguments.h"
#include "cuda/quantize/fp8.h"

namespace nvfp4 {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_operands(const Tensor& x, const Tensor& qdata, const Tensor& scale,
                                                        const Tensor& per_tensor_scale) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  check_beside(qdata, "qdata", x);
  const CodeInputs w(qdata, scale, per_tensor_scale, rows.matrix.columns);
  NVFP4_CHECK(w.shape.rows < INT32_MAX / 2 && rows.matrix.rows < INT32_MAX / 2,
              "x or qdata has more than 2^30 - 1 rows: split it");
  const int64_t columns = w.shape.blocks * kBlock;
  Tensor x_values = empty(with_last(x, columns), ScalarType::Float8_e4m3fn, x);
  Tensor w_values = empty(with_last(qdata, columns), ScalarType::Float8_e4m3fn, x);
  Tensor x_scale = empty({rows.matrix.rows}, ScalarType::Float, x);
  Tensor w_factor = empty({w.shape.rows}, ScalarType::Float, x);
  launch_fp8_operands(rows.matrix, w(), {static_cast<uint8_t*>(x_values.mutable_data_ptr()), floats(x_scale)},
                      {static_cast<uint8_t*>(w_values.mutable_data_ptr()), floats(w_factor)}, current_stream(x));
  check_launched("nvfp4::fp8_operands");
  return {x_values, x_scale, w_values, w_factor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) { m.impl("fp8_operands", TORCH_BOX(&fp8_operands)); }

}  // namespace nvfp4
