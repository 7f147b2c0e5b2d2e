// The operands of FP8 products on CUDA: arguments checked, outputs allocated.
#include <tuple>

#include "cuda/host/tensors.h"
#include "cuda/quantize/fp8.h"

namespace nvfp4 {
namespace {

Fp8 fp8_of(Tensor& values, Tensor& factor) {
  return {static_cast<uint8_t*>(values.mutable_data_ptr()), static_cast<float*>(factor.mutable_data_ptr())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_operands(const Tensor& x, const Tensor& qdata, const Tensor& scale,
                                                        const Tensor& per_tensor_scale) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  check_beside(qdata, "qdata", x);
  const CodedShape shape = check_coded(qdata, scale, rows.matrix.columns);
  NVFP4_CHECK(shape.rows < INT32_MAX / 2 && rows.matrix.rows < INT32_MAX / 2,
              "x or qdata has more than 2^30 - 1 rows: split it");
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale);
  const Tensor factors = factors_of(per_tensor_scale, "per_tensor_scale", shape.rows, x);
  Quantized w{};
  w.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  w.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  w.per_tensor_scale = static_cast<const float*>(factors.const_data_ptr());
  w.per_row = factors.numel() != 1;
  w.rows = shape.rows, w.blocks = shape.blocks;
  Tensor x_values = empty(with_last(x, w.blocks * kBlock), ScalarType::Float8_e4m3fn, x);
  Tensor w_values = empty(with_last(qdata, w.blocks * kBlock), ScalarType::Float8_e4m3fn, x);
  Tensor x_scale = empty({rows.matrix.rows}, ScalarType::Float, x);
  Tensor w_factor = empty({w.rows}, ScalarType::Float, x);
  launch_fp8_operands(rows.matrix, w, fp8_of(x_values, x_scale), fp8_of(w_values, w_factor), current_stream(x));
  check_launched("nvfp4::fp8_operands");
  return {x_values, x_scale, w_values, w_factor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) { m.impl("fp8_operands", TORCH_BOX(&fp8_operands)); }

}  // namespace nvfp4
