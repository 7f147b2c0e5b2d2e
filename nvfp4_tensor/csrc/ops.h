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

// A matrix and how it and its transpose are quantized; without amaxes by their own.
struct Pair {
  const Tensor& x;
  OptionalTensor amax, amax_t;
  const OptionalTensor& rng_state;
  int64_t spec, spec_t, row0, col0, full_rows, full_width, stream_t, stream;

  void check(const char* op) const {
    NVFP4_CHECK(x.dim() == 2, op, " takes a matrix");
    NVFP4_CHECK(amax.has_value() == amax_t.has_value(), "amax and amax_t are given together, or neither is");
    check_transposed_offset(row0, full_rows);
  }
};

// Codes, scales and factor of x, and of x^T.
using PairTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
PairTensors quantize_pair(Pair p);

// Values, their factor, and of the transpose codes, scales and factor, or values, no scales and factor. back: EDEN's
// rotation of the values of the rows is taken back.
using InputTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
InputTensors quantize_pair_values(Pair p, bool codes_t, bool back = false);

// These as they are registered.
inline PairTensors quantize_pair_op(const Tensor& x, OptionalTensor amax, OptionalTensor amax_t,
                                    OptionalTensor rng_state, int64_t spec, int64_t spec_t, int64_t row0, int64_t col0,
                                    int64_t full_rows, int64_t full_width, int64_t stream_t, int64_t stream) {
  return quantize_pair({x, amax, amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t, stream});
}

inline InputTensors quantize_pair_values_op(const Tensor& x, OptionalTensor amax, OptionalTensor amax_t,
                                            OptionalTensor rng_state, int64_t spec, int64_t spec_t, bool codes_t,
                                            int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width,
                                            int64_t stream_t, int64_t stream) {
  return quantize_pair_values(
      {x, amax, amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t, stream}, codes_t);
}

// Of x (M, K): the values that fprop multiplies by w and their factor, and the codes of x^T for wgrad.
inline InputTensors quantize_input(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                                   int64_t stream, int64_t stream_t) {
  return quantize_pair_values({x, {}, {}, rng_state, spec, spec_t, 0, 0, 0, 0, stream_t, stream}, true);
}

// Of dy: the values that dgrad multiplies by w, with EDEN's rotation taken back, and their factor; and the values of
// dy^T for wgrad, and theirs.
using GradientTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
inline GradientTensors quantize_gradient(const Tensor& dy, const OptionalTensor& rng_state, int64_t spec,
                                         int64_t spec_t, int64_t stream, int64_t stream_t) {
  auto [values, factor, values_t, no_scales, factor_t] = quantize_pair_values(
      {dy, {}, {}, rng_state, spec, spec_t, 0, 0, 0, 0, stream_t, stream}, false, true);
  return {values, factor, values_t, factor_t};
}

Tensor matmul(const Tensor& x, OptionalTensor x_scale, const Tensor& qdata, const Tensor& scale,
              const Tensor& per_tensor_scale, OptionalTensor bias, int64_t columns, bool across_blocks,
              ScalarType out_dtype);

}  // namespace ops
}  // namespace nvfp4
