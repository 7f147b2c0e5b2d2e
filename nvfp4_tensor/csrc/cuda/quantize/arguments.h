// What the ops of quantization on CUDA share: the arguments of kernels, which kernel serves, and outputs.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/quantize/transforms.h"
#include "ops.h"

namespace nvfp4 {

// An amax, or maxima of parts of a tensor.
struct Amax {
  const float* at;
  int maxima = 1;
};
inline Amax amax_given(const Tensor& amax, const Tensor& x) { return {amax_of(amax, x)}; }

// Of x, or of what is made of it, as a matrix of so many rows and columns.
inline Quantization quantization(int64_t spec, const Amax& amax, const std::optional<Tensor>& rng_state, int64_t stream,
                                 const Tensor& x, int64_t rows, int64_t columns, int64_t row0, int64_t col0,
                                 int64_t full_width, Tensor& factor) {
  Quantization how{};
  how.spec = spec_of(spec);
  how.amax = amax.at;
  how.per_tensor_scale = floats(factor);
  const auto [first, row_blocks] = block_numbers(rows, columns, row0, col0, full_width);
  how.random = {rng_state_of(rng_state, how.spec, x), first, row_blocks, static_cast<int>(stream)};
  return how;
}

// The same by EDEN, which numbers rotations.
inline Quantization eden_quantization(const QuantizeSpec& spec, const Amax& amax,
                                      const std::optional<Tensor>& rng_state, int64_t stream, const Tensor& x,
                                      int64_t rows, int64_t columns, int64_t row0, int64_t col0, int64_t full_width,
                                      Tensor& factor) {
  const auto [first, row_groups] = block_numbers(rows, columns, row0, col0, full_width, kRotation);
  return {
      spec, amax.at, floats(factor), {rng_state_of(rng_state, spec, x), first, row_groups, static_cast<int>(stream)}};
}

// Whether the fast kernels know the rounding mode, on a side whose Hadamard transform (if any) they take care of.
inline bool is_fast_mode(const QuantizeSpec& spec) {
  return spec.round_mode == RoundingMode::kNearestEven || spec.is_stochastic();
}

// Whether a block's scale follows from its largest element alone.
inline bool is_plain(const QuantizeSpec& spec) {
  return spec.four_over_six == FourOverSix::kNone && spec.scale_search == ScaleSearch::kNone;
}

inline bool is_fast(const QuantizeSpec& spec) { return is_fast_mode(spec) && is_plain(spec); }

// Whether launch_quantize_rows serves, which transforms blocks itself.
inline bool transforms_itself(const Matrix& m, const QuantizeSpec& spec) {
  return is_fast(spec) && m.whole_blocks() && spec.block_rows == 1;
}

// The packed spec of what is already transformed.
inline int64_t without_hadamard(int64_t spec) { return spec & ~(int64_t{0xFFFF} << 16 | 1 << 9); }

struct CodeOutputs {
  Tensor qdata, scale;

  CodeOutputs(std::vector<int64_t> shape, int64_t rows, int64_t blocks, const Tensor& like)
      : qdata(empty((shape.back() = blocks * kBlock / 2, shape), ScalarType::Byte, like)),
        scale(empty({ceil_div(rows, kTileRows), ceil_div(blocks, kTileColumns), 32, 16}, ScalarType::Float8_e4m3fn,
                    like)) {}

  Codes codes() {
    return {static_cast<uint8_t*>(qdata.mutable_data_ptr()), static_cast<uint8_t*>(scale.mutable_data_ptr())};
  }
};

struct Outputs : CodeOutputs {
  Tensor factor;

  Outputs(std::vector<int64_t> shape, int64_t rows, int64_t blocks, const Tensor& like)
      : CodeOutputs(std::move(shape), rows, blocks, like), factor(empty_scalar(like)) {}
};

// A transform fills the padding of the last columns that it takes together, so what it returns keeps it.
inline int64_t columns_of_values(const QuantizeSpec& spec, int64_t columns) {
  const int together = spec.is_eden() ? kRotation : spec.hadamard_sign >= 0 ? kBlock : 1;
  return ceil_div(columns, together) * together;
}

// Codes, block scales and factor of x. Without amax: that of x (or of its transform).
std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0,
                                            int64_t col0, int64_t full_width, int64_t random_stream);

Tensor dequantize(const Tensor& qdata, const Tensor& scale, const std::optional<Tensor>& per_tensor_scale,
                  int64_t columns, ScalarType type);

}  // namespace nvfp4
