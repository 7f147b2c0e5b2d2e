// The ops of quantization on CUDA: arguments checked, outputs allocated, and the kernel that serves chosen.
#include "cuda/host/scratch.h"
#include "cuda/quantize/arguments.h"

namespace nvfp4 {

// --- quantize --------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0,
                                            int64_t col0, int64_t full_width, int64_t random_stream) {
  const QuantizeSpec unpacked = spec_of(spec);
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const bool fast = is_fast_mode(unpacked) && m.whole_blocks(), plain = is_plain(unpacked);
  const bool by_rows = fast && plain && unpacked.block_rows == 1;
  RawScratch scratch;
  Amax from{};
  if (!amax && fast && unpacked.hadamard_sign < 0 && m.rows && m.columns && fits_maxima(m)) {
    from = launch_maxima(m, std::ref(scratch), stream);
  } else {
    if (!amax) amax = own_amax(x, unpacked, rng_state, col0);
    from = amax_given(*amax, x);
  }
  if (const int sign = unpacked.hadamard_sign; sign >= 0 && !by_rows) {
    // What is quantized is the transform rounded to bfloat16, so two fast kernels do what one slow one would.
    return quantize(hadamard(x, sign), amax, rng_state, without_hadamard(spec), row0, col0, full_width, random_stream);
  }
  CodeOutputs out(with_last(x, 0), m.rows, m.columns, x, unpacked.column_multiple());
  Tensor factor = empty_scalar(x);
  const Quantization how = quantization(unpacked, from, rng_state, random_stream, x, m.rows, m.columns,
                                        {row0, col0, full_width}, factor);
  if (!fast) out.clear_padding(stream);
  const auto launch = unpacked.is_eden() ? launch_quantize_eden
                      : !fast            ? launch_quantize_any
                      : !plain           ? launch_quantize_chosen
                      : by_rows          ? launch_quantize_rows
                                         : launch_quantize_tiles;
  launch(m, how, out(), stream);
  check_launched("nvfp4::quantize");
  return {out.qdata, out.scale, factor};
}

namespace {

// --- quantize, each row by itself ------------------------------------------------------------------------------------

// Whether the kernel that finds a row's amax itself serves.
bool is_one_pass(const Matrix& m, const QuantizeSpec& spec) {
  return is_fast(spec) && m.whole_blocks() && m.rows && m.columns;
}

std::tuple<Tensor, Tensor, Tensor> quantize_rows(const Tensor& x, std::optional<Tensor> amax,
                                                 const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0,
                                                 int64_t col0, int64_t full_width, int64_t random_stream) {
  NVFP4_CHECK(spec & kRowScaledBit, "quantize_rows takes a spec with row_scaled=True");
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec unpacked = row_spec_of(spec);
  if (const int sign = unpacked.hadamard_sign;
      sign >= 0 && !(m.dtype == Dtype::kBf16 && is_fast(unpacked) && m.whole_blocks())) {
    return quantize_rows(hadamard(x, sign), amax, rng_state, without_hadamard(spec), row0, col0, full_width,
                         random_stream);
  }
  if (amax) amax = row_amaxes_of(*amax, m.rows, x);
  CodeOutputs out(with_last(x, 0), m.rows, m.columns, x);
  Tensor factors = empty({m.rows}, ScalarType::Float, x);
  const Amax given{amax ? static_cast<const float*>(amax->const_data_ptr()) : nullptr};
  Quantization how = quantization(unpacked, given, rng_state, random_stream, x, m.rows, m.columns,
                                  {row0, col0, full_width}, factors);
  how.per_row = true;
  if (is_one_pass(m, unpacked)) {
    launch_quantize_scaled_rows(m, how, out(), nullptr, stream);
  } else {
    out.clear_padding(stream);
    Tensor amaxes = empty({m.rows}, ScalarType::Float, x);
    launch_row_amax(m, how.amax, unpacked.scale_ceiling, floats(amaxes), how.per_tensor_scale, stream);
    how.amax = floats(amaxes);
    launch_quantize_any(m, how, out(), stream);
  }
  check_launched("nvfp4::quantize_rows");
  return {out.qdata, out.scale, factors};
}

}  // namespace

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

Tensor dequantize(const Tensor& qdata, const Tensor& scale, const std::optional<Tensor>& per_tensor_scale,
                  int64_t columns, ScalarType type) {
  if (!is_native(type)) {
    return torch::stable::to(dequantize(qdata, scale, per_tensor_scale, columns, ScalarType::Float), type);
  }
  const OnDeviceOf guard(qdata, "qdata");
  const CodeInputs in(qdata, scale, per_tensor_scale, columns);
  Tensor out = empty(with_last(qdata, columns), type, qdata);
  launch_dequantize(in(), columns, dtype_of(type, "dtype"), out.mutable_data_ptr(), current_stream(qdata));
  check_launched("nvfp4::dequantize");
  return out;
}

namespace {

// Elements from which two fast kernels, of quantize and of dequantize, take less time than the general one: it needs
// 9 us for 2^20 of them on an H200, as much as the second call does on the host.
constexpr int64_t kTwoKernels = 1 << 20;

std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& amax, const std::optional<Tensor>& rng_state,
                                         int64_t spec, ScalarType type, bool scaled, int64_t row0, int64_t col0,
                                         int64_t full_width) {
  if (!is_native(type)) {
    auto [values, factor] = fake_quantize(x, amax, rng_state, spec, ScalarType::Float, scaled, row0, col0, full_width);
    return {torch::stable::to(values, type), factor};
  }
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec unpacked = spec_of(spec);
  const Dtype dtype = dtype_of(type, "dtype");
  const bool fast = is_fast_mode(unpacked) && m.whole_blocks();
  const bool one_kernel = fast && is_plain(unpacked) && unpacked.hadamard_sign < 0 && unpacked.block_rows == 1 &&
                          dtype == m.dtype;
  const int64_t columns = columns_of_values(unpacked, m.columns);
  if (unpacked.is_eden() || (fast && !one_kernel && m.rows * m.columns >= kTwoKernels)) {
    auto [qdata, scale, factor] = quantize(x, amax, rng_state, spec, row0, col0, full_width, 0);
    return {dequantize(qdata, scale, scaled ? std::optional<Tensor>(factor) : std::nullopt, columns, type), factor};
  }
  Tensor factor = empty_scalar(x);
  const Quantization how = quantization(unpacked, amax_given(amax, x), rng_state, 0, x, m.rows, m.columns,
                                        {row0, col0, full_width}, factor);
  Tensor out = empty(with_last(x, columns), type, x);
  const auto launch = one_kernel ? launch_fake_quantize_rows : launch_fake_quantize_any;
  launch(m, how, {out.mutable_data_ptr(), dtype, columns, scaled}, current_stream(x));
  check_launched("nvfp4::fake_quantize");
  return {out, factor};
}

// With its own amax: values in one pass, where the kernel makes them, and the factor or, with a scale per row, those.
std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, const std::optional<Tensor>& rng_state, int64_t spec,
                                               ScalarType type) {
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  Tensor factor, out;
  if (spec & kRowScaledBit) {
    const QuantizeSpec how = row_spec_of(spec);
    if (m.dtype != Dtype::kBf16 || type != ScalarType::BFloat16 || how.hadamard_sign >= 0 || !is_one_pass(m, how)) {
      auto [qdata, scale, factors] = quantize_rows(x, std::nullopt, rng_state, spec, 0, 0, 0, 0);
      return {dequantize(qdata, scale, std::nullopt, columns_of_values(how, m.columns), type), factors};
    }
    factor = empty({m.rows}, ScalarType::Float, x), out = empty(with_last(x, m.columns), type, x);
    launch_quantize_scaled_rows(m, quantization(how, {}, rng_state, 0, x, m.rows, m.columns, {}, factor), {},
                                out.mutable_data_ptr(), stream);
  } else {
    const QuantizeSpec how = spec_of(spec);
    if (x.scalar_type() != type || !fits_quantize_activation(m, how)) {
      return fake_quantize(x, own_amax(x, how, rng_state, 0), rng_state, spec, type, false, 0, 0, 0);
    }
    factor = empty_scalar(x), out = empty(with_last(x, m.columns), type, x);
    RawScratch scratch;
    launch_quantize_activation(m, how, floats(factor), out.mutable_data_ptr(), std::ref(scratch), stream);
  }
  check_launched("nvfp4::quantize_activation");
  return {out, factor};
}

// --- operands of FP8 products ---------------------------------------------------------------------------------------

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

namespace ops {

CodedTensors quantize(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t stream) {
  return nvfp4::quantize(x, std::nullopt, rng_state, spec, 0, 0, 0, stream);
}

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  NVFP4_CHECK(qdata.dim() == 2, "transpose_codes takes the codes of a matrix");
  const OnDeviceOf guard(qdata, "qdata");
  const CodeInputs in(qdata, scale, std::nullopt, qdata.size(1) * 2);
  const int64_t columns = in.shape.blocks * kBlock;
  CodeOutputs out({columns, 0}, columns, in.shape.rows, qdata);
  launch_transpose_codes(in(), out(), current_stream(qdata));
  check_launched("nvfp4::transpose_codes");
  return {out.qdata, out.scale};
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("transpose_codes", TORCH_BOX(&ops::transpose_codes));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
  m.impl("fp8_operands", TORCH_BOX(&fp8_operands));
}

}  // namespace nvfp4
