// The ops of quantization on CUDA: arguments checked, outputs allocated, and the kernel that serves chosen.
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/scratch.h"
#include "cuda/quantize/arguments.h"
#include "cuda/quantize/maxima.h"
#include "cuda/quantize/scaled_rows.h"
#include "ops.h"

namespace nvfp4 {

namespace {

// --- quantize --------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> quantize_eden(const Tensor& x, const Tensor& amax,
                                                 const std::optional<Tensor>& rng_state, const QuantizeSpec& spec,
                                                 int64_t row0, int64_t col0, int64_t full_width,
                                                 int64_t random_stream) {
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  Outputs out(with_last(x, 0), m.rows, ceil_div(m.columns, kRotation) * (kRotation / kBlock), x);
  const Quantization how = eden_quantization(spec, amax_given(amax, x), rng_state, random_stream, x, m.rows, m.columns,
                                             row0, col0, full_width, out.factor);
  if (m.rows % kTileRows) {
    cudaMemsetAsync(out.scale.mutable_data_ptr(), 0, static_cast<size_t>(out.scale.numel()), stream);
  }
  launch_quantize_eden(m, how, col0 / kRotation, out.codes(), stream);
  check_launched("nvfp4::quantize");
  return {out.qdata, out.scale, out.factor};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0,
                                            int64_t col0, int64_t full_width, int64_t random_stream) {
  const QuantizeSpec unpacked = spec_of(spec);
  if (unpacked.is_eden()) {
    if (!amax) amax = own_amax(x, unpacked, rng_state, col0);
    return quantize_eden(x, *amax, rng_state, unpacked, row0, col0, full_width, random_stream);
  }
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const bool fast = is_fast_mode(unpacked) && m.whole_blocks(), itself = transforms_itself(m, unpacked);
  RawScratch scratch;
  Amax parts{};
  if (!amax && fast && !itself && is_plain(unpacked) && unpacked.hadamard_sign < 0 && m.rows && m.columns &&
      fits_maxima(m)) {
    const Maxima maxima = launch_maxima(m, std::ref(scratch), stream);
    parts = {maxima.rows, maxima.count};
  } else if (!amax) {
    amax = own_amax(x, unpacked, rng_state, col0);
  }
  if (const int sign = unpacked.hadamard_sign; sign >= 0 && !itself) {
    // What is quantized is the transform rounded to bfloat16, so two fast kernels do what one slow one would.
    return quantize(hadamard(x, sign), amax, rng_state, without_hadamard(spec), row0, col0, full_width, random_stream);
  }
  Outputs out(with_last(x, 0), m.rows, m.blocks(), x);
  const Quantization how = quantization(spec, amax ? amax_given(*amax, x) : parts, rng_state, random_stream, x, m.rows,
                                        m.columns, row0, col0, full_width, out.factor);
  const bool plain = is_plain(how.spec), search = how.spec.scale_search != ScaleSearch::kNone;
  if (itself) {
    launch_quantize_rows(m, how, out.codes(), stream);
  } else {
    if (m.rows % kTileRows || m.blocks() % kTileColumns) {
      cudaMemsetAsync(out.scale.mutable_data_ptr(), 0, static_cast<size_t>(out.scale.numel()), stream);
    }
    if (fast && plain) {
      launch_quantize_tiles(m, how, amax ? 1 : parts.maxima, out.codes(), stream);
    } else {
      const auto launch = !fast ? launch_quantize_any : search ? launch_quantize_search : launch_quantize_four_over_six;
      launch(m, how, out.codes(), stream);
    }
  }
  check_launched("nvfp4::quantize");
  return {out.qdata, out.scale, out.factor};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> quantize_op(const Tensor& x, std::optional<Tensor> amax,
                                               std::optional<Tensor> rng_state, int64_t spec, int64_t row0,
                                               int64_t col0, int64_t full_width, int64_t random_stream) {
  return quantize(x, std::move(amax), rng_state, spec, row0, col0, full_width, random_stream);
}

// --- quantize, each row by itself ------------------------------------------------------------------------------------

constexpr int64_t kRowScaledBit = 1 << 13;  // of QuantizeSpec.pack()

QuantizeSpec row_spec_of(int64_t bits) {  // without that bit
  NVFP4_CHECK(QuantizeSpec::is_packed(bits & ~kRowScaledBit),
              "spec is what QuantizeSpec.pack() gives, and that is never ", bits);
  return QuantizeSpec::unpack(bits & ~kRowScaledBit);
}

// The arguments of a quantization with a scale per row, and what holds them.
struct RowQuantization {
  std::optional<Tensor> amax;
  Tensor factors;
  Quantization how{};
  bool is_one_pass;  // by the kernel that finds a row's amax itself

  RowQuantization(const Tensor& x, const Matrix& m, const std::optional<Tensor>& given,
                  const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0, int64_t col0, int64_t full_width,
                  int64_t random_stream)
      : factors(empty({m.rows}, ScalarType::Float, x)) {
    how.spec = row_spec_of(spec);
    NVFP4_CHECK(how.spec.block_rows == 1 && !how.spec.is_eden(), "rows are scaled in 1x16 blocks, without EDEN");
    if (given.has_value()) {
      check_beside(*given, "amax", x);
      NVFP4_CHECK(given->dim() == 1 && given->size(0) == m.rows && given->scalar_type() == ScalarType::Float,
                  "amax is float32 (", m.rows, ",), one per row, not ", text_of(*given));
      amax = in_order(*given);
      how.amax = static_cast<const float*>(amax->const_data_ptr());
    }
    how.per_tensor_scale = floats(factors);
    const auto [first, row_blocks] = block_numbers(m.rows, m.columns, row0, col0, full_width);
    how.random = {rng_state_of(rng_state, how.spec, x), first, row_blocks, static_cast<int>(random_stream)};
    is_one_pass = is_fast(how.spec) && m.whole_blocks() && m.rows && m.columns;
  }
};

std::tuple<Tensor, Tensor, Tensor> quantize_rows(const Tensor& x, std::optional<Tensor> amax,
                                                 std::optional<Tensor> rng_state, int64_t spec, int64_t row0,
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
  CodeOutputs out(with_last(x, 0), m.rows, m.blocks(), x);
  RowQuantization row(x, m, amax, rng_state, spec, row0, col0, full_width, random_stream);
  if (row.is_one_pass) {
    launch_quantize_scaled_rows(m, row.how, out.codes(), nullptr, stream);
  } else {
    if (m.rows % kTileRows || m.blocks() % kTileColumns) {
      cudaMemsetAsync(out.scale.mutable_data_ptr(), 0, static_cast<size_t>(out.scale.numel()), stream);
    }
    Tensor amaxes = empty({m.rows}, ScalarType::Float, x);
    launch_row_amax(m, row.how.amax, row.how.spec.scale_ceiling, floats(amaxes), row.how.per_tensor_scale, stream);
    row.how.amax = floats(amaxes);
    launch_quantize_any_rows(m, row.how, out.codes(), stream);
  }
  check_launched("nvfp4::quantize_rows");
  return {out.qdata, out.scale, row.factors};
}

}  // namespace

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

Tensor dequantize(const Tensor& qdata, const Tensor& scale, const std::optional<Tensor>& per_tensor_scale,
                  int64_t columns, ScalarType type) {
  if (!is_native(type)) {
    return torch::stable::to(dequantize(qdata, scale, per_tensor_scale, columns, ScalarType::Float), type);
  }
  const OnDeviceOf guard(qdata, "qdata");
  const CodedShape shape = check_coded(qdata, scale, columns);
  NVFP4_CHECK(shape.rows < INT32_MAX && columns < INT32_MAX, "qdata has more than 2^31 - 1 rows or columns: split it");
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale);
  Quantized in{};
  in.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  in.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  in.rows = shape.rows, in.blocks = shape.blocks;
  std::optional<Tensor> factor;
  if (per_tensor_scale.has_value()) {
    factor = factors_of(*per_tensor_scale, "per_tensor_scale", in.rows, qdata, "qdata");
    in.per_row = factor->numel() != 1;
    in.per_tensor_scale = static_cast<const float*>(factor->const_data_ptr());
  }
  Tensor out = empty(with_last(qdata, columns), type, qdata);
  launch_dequantize(in, columns, dtype_of(type, "dtype"), out.mutable_data_ptr(), current_stream(qdata));
  check_launched("nvfp4::dequantize");
  return out;
}

namespace {

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  NVFP4_CHECK(qdata.dim() == 2, "transpose_codes takes the codes of a matrix");
  const OnDeviceOf guard(qdata, "qdata");
  const CodedShape shape = check_coded(qdata, scale, qdata.size(1) * 2);
  NVFP4_CHECK(shape.rows < INT32_MAX - kBlock && shape.blocks * kBlock < INT32_MAX,
              "qdata has more than 2^31 - 1 rows or columns: split it");
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale);
  Quantized in{};
  in.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  in.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  in.rows = shape.rows, in.blocks = shape.blocks;
  CodeOutputs out({in.blocks * kBlock, 0}, in.blocks * kBlock, ceil_div(in.rows, kBlock), qdata);
  launch_transpose_codes(in, out.codes(), current_stream(qdata));
  check_launched("nvfp4::transpose_codes");
  return {out.qdata, out.scale};
}

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
  const cudaStream_t stream = current_stream(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec unpacked = spec_of(spec);
  const Dtype dtype = dtype_of(type, "dtype");
  const bool fast = is_fast_mode(unpacked) && m.whole_blocks();
  const bool one_kernel = fast && is_fast(unpacked) && unpacked.hadamard_sign < 0 && unpacked.block_rows == 1 &&
                          dtype == m.dtype;
  const int64_t columns = columns_of_values(unpacked, m.columns);
  if (unpacked.is_eden() || (fast && !one_kernel && m.rows * m.columns >= kTwoKernels)) {
    auto [qdata, scale, factor] = quantize(x, amax, rng_state, spec, row0, col0, full_width, 0);
    return {dequantize(qdata, scale, scaled ? std::optional<Tensor>(factor) : std::nullopt, columns, type), factor};
  }
  Tensor factor = empty({}, ScalarType::Float, x);
  const Quantization how = quantization(spec, amax_given(amax, x), rng_state, 0, x, m.rows, m.columns, row0, col0,
                                        full_width, factor);
  Tensor out = empty(with_last(x, columns), type, x);
  const Values values{out.mutable_data_ptr(), dtype, columns, scaled};
  (one_kernel ? launch_fake_quantize_rows : launch_fake_quantize_any)(m, how, values, stream);
  check_launched("nvfp4::fake_quantize");
  return {out, factor};
}

// With a scale per row: values in one pass, where the kernel makes them, and the rows' scales.
std::tuple<Tensor, Tensor> quantize_activation_rows(const Tensor& x, const std::optional<Tensor>& rng_state,
                                                    int64_t spec, ScalarType type) {
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const QuantizeSpec how = row_spec_of(spec);
  if (m.dtype != Dtype::kBf16 || type != ScalarType::BFloat16 || how.hadamard_sign >= 0 || !is_fast(how) ||
      !m.whole_blocks() || !m.rows || !m.columns) {
    auto [qdata, scale, factors] = quantize_rows(x, std::nullopt, rng_state, spec, 0, 0, 0, 0);
    return {dequantize(qdata, scale, std::nullopt, columns_of_values(how, m.columns), type), factors};
  }
  RowQuantization row(x, m, std::nullopt, rng_state, spec, 0, 0, 0, 0);
  Tensor out = empty(with_last(x, m.columns), type, x);
  launch_quantize_scaled_rows(m, row.how, {}, out.mutable_data_ptr(), current_stream(x));
  check_launched("nvfp4::quantize_activation");
  return {out, row.factors};
}

std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, const std::optional<Tensor>& rng_state, int64_t spec,
                                               ScalarType type) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  if (spec & kRowScaledBit) return quantize_activation_rows(x, rng_state, spec, type);
  const QuantizeSpec how = spec_of(spec);
  if (x.scalar_type() != type || !fits_quantize_activation(rows.matrix, how)) {
    return fake_quantize(x, own_amax(x, how, rng_state, 0), rng_state, spec, type, false, 0, 0, 0);
  }
  Tensor factor = empty({}, ScalarType::Float, x), out = empty(with_last(x, rows.matrix.columns), type, x);
  RawScratch scratch;
  launch_quantize_activation(rows.matrix, how, floats(factor), out.mutable_data_ptr(), std::ref(scratch),
                             current_stream(x));
  check_launched("nvfp4::quantize_activation");
  return {out, factor};
}

}  // namespace

namespace ops {

CodedTensors quantize(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t stream) {
  return quantize_op(x, std::nullopt, rng_state, spec, 0, 0, 0, stream);
}

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  return nvfp4::transpose_codes(qdata, scale);
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&quantize_op));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("transpose_codes", TORCH_BOX(&transpose_codes));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
}

}  // namespace nvfp4
