// The ops of a training linear, of the ops of either library: what nvfp4_tensor/ops/composite/training.py does, in one
// call. Registered in cpu/training and cuda/training.
#pragma once

#include <optional>
#include <tuple>

#include "ops.h"

namespace nvfp4 {
namespace training {

using ops::CodedTensors;
using ops::OptionalTensor;

// Of random bits (numerics contract, section 8).
constexpr int64_t kDyStream = 0, kDyTStream = 1, kXTStream = 3, kWStream = 4, kXStream = 5;

// (seed, offset) from torch's default generator of the device.
inline Tensor fill_rng_state(Tensor state) {
  using torch::stable::detail::from;
  return call("aten::random_", "from",
              {from(state), from(INT64_MIN), from(std::optional<int64_t>(INT64_MAX)), from(std::nullopt)});
}

Tensor draw_rng_state(const Tensor& like);  // on its device

inline std::tuple<Tensor, Tensor, Tensor, Tensor> train_linear(const Tensor& x, OptionalTensor x_scale, const Tensor& w,
                                                               OptionalTensor bias, OptionalTensor rng_state,
                                                               int64_t spec, ScalarType out_dtype) {
  const auto [qdata, scale, factor] = ops::quantize(w, rng_state, spec, kWStream);
  const Tensor y = ops::matmul(x, x_scale, qdata, scale, factor, bias, x.size(x.dim() - 1), false, out_dtype);
  return {y, qdata, scale, factor};
}

// The memory of t, which is contiguous, in another shape; not by the dispatcher.
inline Tensor with_shape(const Tensor& t, const std::vector<int64_t>& shape) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(shape.size()), shape.data(),
                                                        contiguous_strides(shape).data(), 0, &handle));
  return Tensor(handle);
}

using ForwardTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
inline ForwardTensors train_linear_forward(const Tensor& x, const Tensor& w, OptionalTensor bias,
                                           OptionalTensor rng_state, int64_t spec, int64_t spec_t, int64_t spec_w,
                                           ScalarType out_dtype) {
  NVFP4_CHECK(x.dim() >= 1, "train_linear_forward takes x (..., K), not a 0-d tensor");
  const Tensor state = rng_state ? torch::stable::clone(*rng_state) : draw_rng_state(x);
  const bool is_matrix = x.dim() == 2;
  const Tensor x_MK = is_matrix ? x : with_shape(torch::stable::contiguous(x), {leading_rows(x), x.size(x.dim() - 1)});
  const auto [values, factor, qdata_t, scale_t, factor_t] = ops::quantize_input(x_MK, state, spec, spec_t, kXStream,
                                                                                kXTStream);
  const Tensor left = is_matrix ? values : with_shape(values, with_last(x, values.size(1)));
  const auto [y, qdata, scale, w_factor] = train_linear(left, factor, w, bias, state, spec_w, out_dtype);
  return {y, state, values, factor, qdata_t, scale_t, factor_t, qdata, scale, w_factor};
}

// dx (M, columns) = values (M, N), which dy was rounded to, times w (N, columns).
inline Tensor dgrad(Tensor values, const Tensor& factor, const CodedTensors& w, bool transposes_w, int64_t columns,
                    ScalarType dtype) {
  const auto& [qdata, scale, w_factor] = w;
  if (!transposes_w) return ops::matmul(values, factor, qdata, scale, w_factor, std::nullopt, columns, true, dtype);
  const auto [qdata_t, scale_t] = ops::transpose_codes(qdata, scale);
  Tensor dx = ops::matmul(values, factor, qdata_t, scale_t, w_factor, std::nullopt, values.size(1), false, dtype);
  return dx.size(1) == columns ? dx : torch::stable::contiguous(torch::stable::narrow(dx, 1, 0, columns));
}

inline std::tuple<Tensor, Tensor> train_linear_backward(const Tensor& dy, OptionalTensor rng_state,
                                                        const Tensor& x_qdata, const Tensor& x_scale,
                                                        const Tensor& x_per_tensor_scale, OptionalTensor w,
                                                        OptionalTensor w_qdata, OptionalTensor w_scale,
                                                        OptionalTensor w_per_tensor_scale, int64_t spec, int64_t spec_t,
                                                        int64_t spec_w, bool transposes_w, ScalarType dx_dtype,
                                                        ScalarType dw_dtype) {
  const bool has_codes = w_qdata && w_scale && w_per_tensor_scale;
  NVFP4_CHECK(has_codes || w, "train_linear_backward needs w or its codes");
  auto [values, factor, values_t, factor_t] = ops::quantize_gradient(dy, rng_state, spec, spec_t, kDyStream,
                                                                     kDyTStream);
  const CodedTensors codes = has_codes ? CodedTensors(*w_qdata, *w_scale, *w_per_tensor_scale)
                                       : ops::quantize(*w, rng_state, spec_w, kWStream);
  const Tensor dx = dgrad(values, factor, codes, transposes_w, x_qdata.size(0), dx_dtype);
  values = Tensor();  // its memory may serve dw
  const Tensor dw = ops::matmul(values_t, factor_t, x_qdata, x_scale, x_per_tensor_scale, std::nullopt,
                                values_t.size(1), false, dw_dtype);
  return {dx, dw};
}

}  // namespace training
}  // namespace nvfp4
