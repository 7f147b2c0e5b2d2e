// The ops that other ops are made of, as functions: each library has its own, which its registrations call too.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace nvfp4 {

// An op of torch or of this package by its name: for what is rare, since the dispatcher looks the name up.
inline Tensor call(const char* op, const char* overload, std::vector<StableIValue> arguments) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, arguments.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(arguments[0]);
}

namespace ops {

using OptionalTensor = std::optional<Tensor>;
using CodedTensors = std::tuple<Tensor, Tensor, Tensor>;  // qdata, scale, per_tensor_scale

// With its own amax.
CodedTensors quantize(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t stream);

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale);

// Of x (M, K): the values that fprop multiplies by w and their factor, and the codes of x^T for wgrad.
using InputTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
InputTensors quantize_input(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                            int64_t stream, int64_t stream_t);

// Of dy: the values that dgrad multiplies by w, with EDEN's rotation taken back, and their factor; and the values of
// dy^T for wgrad, and theirs.
using GradientTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
GradientTensors quantize_gradient(const Tensor& dy, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                                  int64_t stream, int64_t stream_t);

Tensor matmul(const Tensor& x, OptionalTensor x_scale, const Tensor& qdata, const Tensor& scale,
              const Tensor& per_tensor_scale, OptionalTensor bias, int64_t columns, bool across_blocks,
              ScalarType out_dtype);

}  // namespace ops
}  // namespace nvfp4
