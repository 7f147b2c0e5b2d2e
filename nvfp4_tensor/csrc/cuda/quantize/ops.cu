// The ops of quantization on CUDA: arguments checked, outputs allocated, and the kernel that serves chosen.
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/scratch.h"
#include "cuda/quantize/maxima.h"
#include "cuda/quantize/scaled_rows.h"
#include "cuda/quantize/transforms.h"
#include "ops.h"

namespace nvfp4 {

namespace {

// --- quantize --------------------------------------------------------------------------------------------------------

// An amax, or maxima of parts of a tensor.
struct Amax {
  const float* at;
  int maxima = 1;
};
Amax amax_given(const Tensor& amax, const Tensor& x) { return {amax_of(amax, x)}; }

// Of x, or of what is made of it, as a matrix of so many rows and columns.
Quantization quantization(int64_t spec, const Amax& amax, const std::optional<Tensor>& rng_state, int64_t stream,
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
Quantization eden_quantization(const QuantizeSpec& spec, const Amax& amax, const std::optional<Tensor>& rng_state,
                               int64_t stream, const Tensor& x, int64_t rows, int64_t columns, int64_t row0,
                               int64_t col0, int64_t full_width, Tensor& factor) {
  const auto [first, row_groups] = block_numbers(rows, columns, row0, col0, full_width, kRotation);
  return {
      spec, amax.at, floats(factor), {rng_state_of(rng_state, spec, x), first, row_groups, static_cast<int>(stream)}};
}

// Whether the fast kernels know the rounding mode, on a side whose Hadamard transform (if any) they take care of.
bool is_fast_mode(const QuantizeSpec& spec) {
  return spec.round_mode == RoundingMode::kNearestEven || spec.is_stochastic();
}

// Whether a block's scale follows from its largest element alone.
bool is_plain(const QuantizeSpec& spec) {
  return spec.four_over_six == FourOverSix::kNone && spec.scale_search == ScaleSearch::kNone;
}

bool is_fast(const QuantizeSpec& spec) { return is_fast_mode(spec) && is_plain(spec); }

// Whether launch_quantize_rows serves, which transforms blocks itself.
bool transforms_itself(const Matrix& m, const QuantizeSpec& spec) {
  return is_fast(spec) && m.whole_blocks() && spec.block_rows == 1;
}

// The packed spec of what is already transformed.
int64_t without_hadamard(int64_t spec) { return spec & ~(int64_t{0xFFFF} << 16 | 1 << 9); }

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

// Without amax: that of x (or of its transform).
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

std::tuple<Tensor, Tensor, Tensor> quantize_op(const Tensor& x, std::optional<Tensor> amax,
                                               std::optional<Tensor> rng_state, int64_t spec, int64_t row0,
                                               int64_t col0, int64_t full_width, int64_t random_stream) {
  return quantize(x, std::move(amax), rng_state, spec, row0, col0, full_width, random_stream);
}

// --- quantize, each row by itself ------------------------------------------------------------------------------------

constexpr int64_t kRowScaledBit = 1 << 13;  // of QuantizeSpec.pack()

QuantizeSpec row_spec_of(int64_t bits) {  // without that bit
  STD_TORCH_CHECK(QuantizeSpec::is_packed(bits & ~kRowScaledBit),
                  "spec is what QuantizeSpec.pack() gives, and that is never ", bits);
  return QuantizeSpec::unpack(bits & ~kRowScaledBit);
}

// The arguments of a quantization with a scale a row, and what holds them.
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
    STD_TORCH_CHECK(how.spec.block_rows == 1 && !how.spec.is_eden(), "rows are scaled in 1x16 blocks, without EDEN");
    if (given.has_value()) {
      check_beside(*given, "amax", x);
      STD_TORCH_CHECK(given->dim() == 1 && given->size(0) == m.rows && given->scalar_type() == ScalarType::Float,
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
  STD_TORCH_CHECK(spec & kRowScaledBit, "quantize_rows takes a spec with row_scaled=True");
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

// searches: whether the kernel knows a search over the scales of the rows, of those to nearest.
bool is_fast_pair(const Matrix& m, const QuantizeSpec& a, const QuantizeSpec& b, bool searches = false) {
  const bool search = searches && a.round_mode == RoundingMode::kNearestEven && a.four_over_six == FourOverSix::kNone;
  return m.dtype == Dtype::kBf16 && m.whole_blocks() && m.rows && m.columns && (is_fast(a) || search) && is_fast(b) &&
         a.block_rows == 1 && b.block_rows == 1 && a.round_mode == b.round_mode &&
         (!a.is_stochastic() || a.random_bits == b.random_bits) && a.hadamard_sign < 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair(
    const Tensor& x, const Tensor& amax, const Tensor& amax_t, const std::optional<Tensor>& rng_state, int64_t spec,
    int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width, int64_t stream_t) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_pair takes a matrix");
  check_transposed_offset(row0, full_rows);
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  if (!is_fast_pair(m, spec_of(spec), spec_of(spec_t))) {
    const Tensor x_t = transposed(x, m, spec_of(spec_t).hadamard_sign);
    return std::tuple_cat(quantize(x, amax, rng_state, spec, row0, col0, full_width, 0),
                          quantize(x_t, amax_t, rng_state, without_hadamard(spec_t), col0, row0, full_rows, stream_t));
  }
  const int64_t blocks_t = ceil_div(m.rows, kBlock);
  Outputs out({m.rows, 0}, m.rows, m.blocks(), x), out_t({m.columns, 0}, m.columns, blocks_t, x);
  const Quantization how = quantization(spec, amax_given(amax, x), rng_state, 0, x, m.rows, m.columns, row0, col0,
                                        full_width, out.factor);
  const Quantization how_t = quantization(spec_t, amax_given(amax_t, x), rng_state, stream_t, x, m.columns, m.rows,
                                          col0, row0, full_rows, out_t.factor);
  launch_quantize_pair(m, how, how_t, out.codes(), out_t.codes(), current_stream(x));
  check_launched("nvfp4::quantize_pair");
  return {out.qdata, out.scale, out.factor, out_t.qdata, out_t.scale, out_t.factor};
}

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

Tensor dequantize(const Tensor& qdata, const Tensor& scale, const std::optional<Tensor>& per_tensor_scale,
                  int64_t columns, ScalarType type) {
  if (!is_native(type)) {
    return torch::stable::to(dequantize(qdata, scale, per_tensor_scale, columns, ScalarType::Float), type);
  }
  const OnDeviceOf guard(qdata, "qdata");
  const CodedShape shape = check_coded(qdata, scale, columns);
  STD_TORCH_CHECK(shape.rows < INT32_MAX && columns < INT32_MAX,
                  "qdata has more than 2^31 - 1 rows or columns: split it");
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

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  STD_TORCH_CHECK(qdata.dim() == 2, "transpose_codes takes the codes of a matrix");
  const OnDeviceOf guard(qdata, "qdata");
  const CodedShape shape = check_coded(qdata, scale, qdata.size(1) * 2);
  STD_TORCH_CHECK(shape.rows < INT32_MAX - kBlock && shape.blocks * kBlock < INT32_MAX,
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

// A transform fills the padding of the last columns that it takes together, so what it returns keeps it.
int64_t columns_of_values(const QuantizeSpec& spec, int64_t columns) {
  const int together = spec.is_eden() ? kRotation : spec.hadamard_sign >= 0 ? kBlock : 1;
  return ceil_div(columns, together) * together;
}

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
    STD_TORCH_CHECK(given.has_value() == given_t.has_value(), "amax and amax_t are given together, or neither is");
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
    int64_t full_rows, int64_t full_width, int64_t stream_t, bool back = false) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_pair_values takes a matrix");
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
        x, pair.amax, pair.amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t);
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
  const auto side = [&](const QuantizeSpec& of, int64_t packed, const Amax& of_amax, int64_t stream, int64_t rows_of,
                        int64_t columns_of, int64_t first_row, int64_t first_column, int64_t width_of, Tensor& to) {
    return of.is_eden() ? eden_quantization(of, of_amax, rng_state, stream, x, rows_of, columns_of, first_row,
                                            first_column, width_of, to)
                        : quantization(packed, of_amax, rng_state, stream, x, rows_of, columns_of, first_row,
                                       first_column, width_of, to);
  };
  const Quantization how = side(of_rows, spec, pair.rows, 0, m.rows, m.columns, row0, col0, full_width, factor);
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

// With a scale a row: values in one pass, where the kernel makes them, and the rows' scales.
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

// --- the ops of pairs ------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair_op(
    const Tensor& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, std::optional<Tensor> rng_state,
    int64_t spec, int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width, int64_t stream_t) {
  const AmaxPair pair(x, amax, amax_t, rng_state, spec, spec_t, row0, col0);
  return quantize_pair(x, pair.amax, pair.amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair_values_op(
    const Tensor& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, std::optional<Tensor> rng_state,
    int64_t spec, int64_t spec_t, bool codes_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width,
    int64_t stream_t) {
  return quantize_pair_values(x, amax, amax_t, rng_state, spec, spec_t, codes_t, row0, col0, full_rows, full_width,
                              stream_t);
}

}  // namespace

namespace ops {

CodedTensors quantize(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t stream) {
  return quantize_op(x, std::nullopt, rng_state, spec, 0, 0, 0, stream);
}

std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  return nvfp4::transpose_codes(qdata, scale);
}

GradientTensors quantize_gradient(const Tensor& dy, const OptionalTensor& rng_state, int64_t spec, int64_t spec_t,
                                  int64_t stream_t) {
  auto [values, factor, values_t, no_scales, factor_t] = nvfp4::quantize_pair_values(
      dy, std::nullopt, std::nullopt, rng_state, spec, spec_t, false, 0, 0, 0, 0, stream_t, true);
  return {values, factor, values_t, factor_t};
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&quantize_op));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("quantize_pair", TORCH_BOX(&quantize_pair_op));
  m.impl("quantize_pair_values", TORCH_BOX(&quantize_pair_values_op));
  m.impl("transpose_codes", TORCH_BOX(&transpose_codes));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
}

}  // namespace nvfp4
