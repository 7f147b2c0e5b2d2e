// The ops that quantize a matrix and its transpose in one pass.
#include <optional>
#include <tuple>

#include "cuda/host/scratch.h"
#include "cuda/quantize/arguments.h"
#include "cuda/quantize/maxima.h"
#include "ops.h"

namespace nvfp4 {

namespace {

// searches: whether the kernel knows a search over the scales of the rows, of those to nearest.
bool is_fast_pair(const Matrix& m, const QuantizeSpec& a, const QuantizeSpec& b, bool searches = false) {
  const bool search = searches && a.round_mode == RoundingMode::kNearestEven && a.four_over_six == FourOverSix::kNone;
  return m.dtype == Dtype::kBf16 && m.whole_blocks() && m.rows && m.columns && (is_fast(a) || search) && is_fast(b) &&
         a.block_rows == 1 && b.block_rows == 1 && a.round_mode == b.round_mode &&
         (!a.is_stochastic() || a.random_bits == b.random_bits) && a.hadamard_sign < 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair(
    const Tensor& x, const Tensor& amax, const Tensor& amax_t, const std::optional<Tensor>& rng_state, int64_t spec,
    int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width, int64_t stream_t,
    int64_t stream) {
  NVFP4_CHECK(x.dim() == 2, "quantize_pair takes a matrix");
  check_transposed_offset(row0, full_rows);
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  if (!is_fast_pair(m, spec_of(spec), spec_of(spec_t))) {
    const Tensor x_t = transposed(x, m, spec_of(spec_t).hadamard_sign);
    return std::tuple_cat(quantize(x, amax, rng_state, spec, row0, col0, full_width, stream),
                          quantize(x_t, amax_t, rng_state, without_hadamard(spec_t), col0, row0, full_rows, stream_t));
  }
  const int64_t blocks_t = ceil_div(m.rows, kBlock);
  Outputs out({m.rows, 0}, m.rows, m.blocks(), x), out_t({m.columns, 0}, m.columns, blocks_t, x);
  const Quantization how = quantization(spec, amax_given(amax, x), rng_state, stream, x, m.rows, m.columns, row0, col0,
                                        full_width, out.factor);
  const Quantization how_t = quantization(spec_t, amax_given(amax_t, x), rng_state, stream_t, x, m.columns, m.rows,
                                          col0, row0, full_rows, out_t.factor);
  launch_quantize_pair(m, how, how_t, out.codes(), out_t.codes(), current_stream(x));
  check_launched("nvfp4::quantize_pair");
  return {out.qdata, out.scale, out.factor, out_t.qdata, out_t.scale, out_t.factor};
}

// Whether launch_quantize_pair_eden serves.
bool is_eden_pair(const Matrix& m, const QuantizeSpec& a, const QuantizeSpec& b, bool codes_t) {
  const bool nearest = a.round_mode == RoundingMode::kNearestEven && a.four_over_six == FourOverSix::kNone;
  return rotates_pair(m, a, b) && m.rows && m.columns && a.block_rows == 1 && (codes_t ? nearest : a.is_eden()) &&
         fits_quantize_pair_eden(codes_t);
}

// The amaxes of x and of its transpose, given or found: together, or as maxima of parts where the kernel takes them.
struct AmaxPair {
  Tensor amax, amax_t;
  RawScratch parts;
  Amax rows, columns;

  AmaxPair(const Tensor& x, const std::optional<Tensor>& given, const std::optional<Tensor>& given_t,
           const std::optional<Tensor>& rng_state, int64_t spec, int64_t spec_t, int64_t row0, int64_t col0,
           const Matrix* by_parts = nullptr) {
    NVFP4_CHECK(given.has_value() == given_t.has_value(), "amax and amax_t are given together, or neither is");
    const int sign = spec_of(spec_t).hadamard_sign;
    if (!given.has_value() && by_parts && sign >= 0) {
      const Maxima maxima = launch_maxima_of_pair(*by_parts, sign, std::ref(parts), current_stream(x));
      rows = {maxima.rows, maxima.count}, columns = {maxima.columns(), maxima.count};
      return;
    }
    if (given.has_value()) {
      amax = *given, amax_t = *given_t;
    } else {
      std::tie(amax, amax_t) = amax_pair_by_spec(x, rng_state, spec, spec_t, row0, col0);
    }
    rows = amax_given(amax, x), columns = amax_given(amax_t, x);
  }
};

// Values, their factor, and of the transpose codes, scales and factor, or values, no scales and factor. back: EDEN's
// rotation of the values of the rows is taken back.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair_values(
    const Tensor& x, const std::optional<Tensor>& given, const std::optional<Tensor>& given_t,
    const std::optional<Tensor>& rng_state, int64_t spec, int64_t spec_t, bool codes_t, int64_t row0, int64_t col0,
    int64_t full_rows, int64_t full_width, int64_t stream_t, int64_t stream, bool back = false) {
  NVFP4_CHECK(x.dim() == 2, "quantize_pair_values takes a matrix");
  check_transposed_offset(row0, full_rows);
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec of_rows = spec_of(spec), of_columns = spec_of(spec_t);
  const int64_t padded = columns_of_values(of_rows, m.columns), width_t = columns_of_values(of_columns, m.rows);
  back = back && of_rows.is_eden();
  const int64_t width = back ? m.columns : padded;
  const bool eden = is_eden_pair(m, of_rows, of_columns, codes_t);
  const bool one_kernel = is_fast_pair(m, of_rows, of_columns, true) && !of_rows.hardware_rounding &&
                          !of_columns.hardware_rounding && (codes_t || width_t % kBlock == 0) &&
                          fits_quantize_pair_values(codes_t);
  const AmaxPair pair(x, given, given_t, rng_state, spec, spec_t, row0, col0, one_kernel && !eden ? &m : nullptr);
  if (!one_kernel && !eden) {
    auto [qdata, scale, factor, qdata_t, scale_t, factor_t] = quantize_pair(
        x, pair.amax, pair.amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t, stream);
    Tensor values = dequantize(qdata, scale, std::nullopt, padded, ScalarType::BFloat16);
    if (back) values = rotate_back(values, *rng_state, width, col0);
    if (codes_t) return {values, factor, qdata_t, scale_t, factor_t};
    return {values, factor, dequantize(qdata_t, scale_t, std::nullopt, width_t, ScalarType::BFloat16),
            empty({0}, ScalarType::Float8_e4m3fn, x), factor_t};
  }
  Tensor values = empty({m.rows, width}, ScalarType::BFloat16, x), factor = empty_scalar(x);
  Tensor t, scale_t, factor_t = empty_scalar(x);
  Codes codes{};
  if (codes_t) {
    const int64_t multiple = of_columns.column_multiple();
    CodeOutputs out({m.columns, 0}, m.columns, ceil_div(m.rows, multiple) * (multiple / kBlock), x);
    t = out.qdata, scale_t = out.scale, codes = out.codes();
  } else {
    t = empty({m.columns, width_t}, ScalarType::BFloat16, x), scale_t = empty({0}, ScalarType::Float8_e4m3fn, x);
  }
  const auto side = [&](const QuantizeSpec& of, int64_t packed, const Amax& of_amax, int64_t of_stream, int64_t rows_of,
                        int64_t columns_of, int64_t first_row, int64_t first_column, int64_t width_of, Tensor& to) {
    return of.is_eden() ? eden_quantization(of, of_amax, rng_state, of_stream, x, rows_of, columns_of, first_row,
                                            first_column, width_of, to)
                        : quantization(packed, of_amax, rng_state, of_stream, x, rows_of, columns_of, first_row,
                                       first_column, width_of, to);
  };
  const Quantization how = side(of_rows, spec, pair.rows, stream, m.rows, m.columns, row0, col0, full_width, factor);
  const Quantization how_t = side(of_columns, spec_t, pair.columns, stream_t, m.columns, m.rows, col0, row0, full_rows,
                                  factor_t);
  void* to_t = codes_t ? nullptr : t.mutable_data_ptr();
  if (eden) {
    launch_quantize_pair_eden(m, {how, how_t, col0 / kRotation, row0 / kRotation, back}, values.mutable_data_ptr(),
                              to_t, codes, current_stream(x));
  } else {
    launch_quantize_pair_values(m, how, how_t, pair.rows.maxima, values.mutable_data_ptr(), to_t, codes,
                                current_stream(x));
  }
  check_launched("nvfp4::quantize_pair_values");
  return {values, factor, t, scale_t, factor_t};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair_op(
    const Tensor& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, std::optional<Tensor> rng_state,
    int64_t spec, int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width, int64_t stream_t,
    int64_t stream) {
  const AmaxPair pair(x, amax, amax_t, rng_state, spec, spec_t, row0, col0);
  return quantize_pair(x, pair.amax, pair.amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t,
                       stream);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair_values_op(
    const Tensor& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, std::optional<Tensor> rng_state,
    int64_t spec, int64_t spec_t, bool codes_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width,
    int64_t stream_t, int64_t stream) {
  return quantize_pair_values(x, amax, amax_t, rng_state, spec, spec_t, codes_t, row0, col0, full_rows, full_width,
                              stream_t, stream);
}

}  // namespace

namespace ops {

InputTensors quantize_input(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                            int64_t stream, int64_t stream_t) {
  return nvfp4::quantize_pair_values(x, std::nullopt, std::nullopt, rng_state, spec, spec_t, true, 0, 0, 0, 0, stream_t,
                                     stream);
}

GradientTensors quantize_gradient(const Tensor& dy, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                                  int64_t stream, int64_t stream_t) {
  auto [values, factor, values_t, no_scales, factor_t] = nvfp4::quantize_pair_values(
      dy, std::nullopt, std::nullopt, rng_state, spec, spec_t, false, 0, 0, 0, 0, stream_t, stream, true);
  return {values, factor, values_t, factor_t};
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("quantize_pair", TORCH_BOX(&quantize_pair_op));
  m.impl("quantize_pair_values", TORCH_BOX(&quantize_pair_values_op));
}

}  // namespace nvfp4
