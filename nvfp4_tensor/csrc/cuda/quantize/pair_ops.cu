// The ops that quantize a matrix and its transpose in one pass.
#include "cuda/host/scratch.h"
#include "cuda/quantize/arguments.h"

namespace nvfp4 {

namespace {

PairQuantization quantization_of(const ops::Pair& p, const Matrix& m, const std::array<Amax, 2>& from, Tensor& factor,
                                 Tensor& factor_t) {
  return {quantization(spec_of(p.spec), from[0], p.rng_state, p.stream, p.x, m.rows, m.columns,
                       {p.row0, p.col0, p.full_width}, factor),
          quantization(spec_of(p.spec_t), from[1], p.rng_state, p.stream_t, p.x, m.columns, m.rows,
                       {p.col0, p.row0, p.full_rows}, factor_t)};
}

void find_amaxes(ops::Pair& p) {
  if (!p.amax) std::tie(p.amax, p.amax_t) = amax_pair(p.x, p.rng_state, p.spec, p.spec_t, p.row0, p.col0);
}

// searches: whether the kernel knows a search over the scales of the rows, of those to nearest.
bool is_fast_pair(const Matrix& m, const QuantizeSpec& a, const QuantizeSpec& b, bool searches = false) {
  const bool search = searches && a.round_mode == RoundingMode::kNearestEven && a.four_over_six == FourOverSix::kNone;
  return m.dtype == Dtype::kBf16 && m.whole_blocks() && m.rows && m.columns && (is_fast(a) || search) && is_fast(b) &&
         a.block_rows == 1 && b.block_rows == 1 && a.round_mode == b.round_mode &&
         (!a.is_stochastic() || a.random_bits == b.random_bits) && a.hadamard_sign < 0;
}

// Whether launch_quantize_pair_eden serves.
bool is_eden_pair(const Matrix& m, const QuantizeSpec& a, const QuantizeSpec& b, bool codes_t) {
  const bool nearest = a.round_mode == RoundingMode::kNearestEven && a.four_over_six == FourOverSix::kNone;
  return rotates_pair(m, a, b) && m.rows && m.columns && a.block_rows == 1 && (codes_t ? nearest : a.is_eden()) &&
         fits_quantize_pair_eden(codes_t);
}

}  // namespace

namespace ops {

PairTensors quantize_pair(Pair p) {
  p.check("quantize_pair");
  find_amaxes(p);
  const OnDeviceOf guard(p.x);
  const CudaRows rows(p.x);
  const Matrix& m = rows.matrix;
  if (!is_fast_pair(m, spec_of(p.spec), spec_of(p.spec_t))) {
    const Tensor x_t = transposed(p.x, m, spec_of(p.spec_t).hadamard_sign);
    return std::tuple_cat(nvfp4::quantize(p.x, p.amax, p.rng_state, p.spec, p.row0, p.col0, p.full_width, p.stream),
                          nvfp4::quantize(x_t, p.amax_t, p.rng_state, without_hadamard(p.spec_t), p.col0, p.row0,
                                          p.full_rows, p.stream_t));
  }
  CodeOutputs out({m.rows, 0}, m.rows, m.columns, p.x), out_t({m.columns, 0}, m.columns, m.rows, p.x);
  Tensor factor = empty_scalar(p.x), factor_t = empty_scalar(p.x);
  const auto how = quantization_of(p, m, {amax_given(*p.amax, p.x), amax_given(*p.amax_t, p.x)}, factor, factor_t);
  launch_quantize_pair(m, how, {nullptr, nullptr, out(), out_t()}, current_stream(p.x));
  check_launched("nvfp4::quantize_pair");
  return {out.qdata, out.scale, factor, out_t.qdata, out_t.scale, factor_t};
}

InputTensors quantize_pair_values(Pair p, bool codes_t, bool back) {
  p.check("quantize_pair_values");
  const Tensor& x = p.x;
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec of_rows = spec_of(p.spec), of_columns = spec_of(p.spec_t);
  const int64_t padded = columns_of_values(of_rows, m.columns), width_t = columns_of_values(of_columns, m.rows);
  back = back && of_rows.is_eden();
  const int64_t width = back ? m.columns : padded;
  const bool eden = is_eden_pair(m, of_rows, of_columns, codes_t);
  const bool one_kernel = eden || (is_fast_pair(m, of_rows, of_columns, true) && !of_rows.hardware_rounding &&
                                   !of_columns.hardware_rounding && (codes_t || width_t % kBlock == 0));
  if (!one_kernel) {
    auto [qdata, scale, factor, qdata_t, scale_t, factor_t] = quantize_pair(p);
    Tensor values = dequantize(qdata, scale, std::nullopt, padded, ScalarType::BFloat16);
    if (back) values = rotate_back(values, *p.rng_state, width, p.col0);
    if (codes_t) return {values, factor, qdata_t, scale_t, factor_t};
    return {values, factor, dequantize(qdata_t, scale_t, std::nullopt, width_t, ScalarType::BFloat16),
            empty({0}, ScalarType::Float8_e4m3fn, x), factor_t};
  }
  RawScratch parts;
  std::array<Amax, 2> from;
  if (p.amax || (!eden && of_columns.hadamard_sign < 0)) {
    find_amaxes(p);
    from = {amax_given(*p.amax, x), amax_given(*p.amax_t, x)};
  } else if (eden) {
    const auto rotations = rotations_of_pair(x, p.rng_state, of_rows, of_columns, p.row0, p.col0);
    from = launch_maxima_of_pair_eden(m, of_rows.is_eden(), rotations, std::ref(parts), stream);
  } else {
    from = launch_maxima_of_pair(m, of_columns.hadamard_sign, std::ref(parts), stream);
  }
  Tensor values = empty({m.rows, width}, ScalarType::BFloat16, x), factor = empty_scalar(x);
  Tensor t, scale_t, factor_t = empty_scalar(x);
  PairOutputs to{values.mutable_data_ptr(), nullptr, {}, {}};
  if (codes_t) {
    CodeOutputs out({m.columns, 0}, m.columns, m.rows, x, of_columns.column_multiple());
    t = out.qdata, scale_t = out.scale, to.codes_transposed = out();
  } else {
    t = empty({m.columns, width_t}, ScalarType::BFloat16, x), scale_t = empty({0}, ScalarType::Float8_e4m3fn, x);
    to.values_transposed = t.mutable_data_ptr();
  }
  const auto how = quantization_of(p, m, from, factor, factor_t);
  if (eden) {
    launch_quantize_pair_eden(m, how, back, to, stream);
  } else {
    launch_quantize_pair(m, how, to, stream);
  }
  check_launched("nvfp4::quantize_pair_values");
  return {values, factor, t, scale_t, factor_t};
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("quantize_pair", TORCH_BOX(&ops::quantize_pair_op));
  m.impl("quantize_pair_values", TORCH_BOX(&ops::quantize_pair_values_op));
}

}  // namespace nvfp4
