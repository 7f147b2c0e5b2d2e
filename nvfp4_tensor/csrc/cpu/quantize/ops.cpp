// The quantization ops on the CPU: they check arguments, allocate outputs and divide the work among torch's threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>
#include <vector>

#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "numerics/eden.h"
#include "quantization.h"

namespace nvfp4 {
namespace {

// About 20 us of work: fewer elements are not worth a second thread.
constexpr int64_t kElementsPerThread = 1 << 16;

Tensor scalar(float value) {
  Tensor out = empty({}, ScalarType::Float);
  *static_cast<float*>(out.mutable_data_ptr()) = value;
  return out;
}

// Work units [0, count) of about so many elements each, among torch's threads.
template <typename Function>
void each_unit(int64_t count, int64_t elements_per_unit, Function f) {
  parallel(count, std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(elements_per_unit, 1)), f);
}

void raise_to(std::atomic<uint32_t>& most, uint32_t value) {
  uint32_t seen = most.load(std::memory_order_relaxed);
  while (seen < value && !most.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

int64_t groups_of(int64_t rows, int64_t blocks) { return ceil_div(rows * blocks, kGroupBlocks); }

// --- amax, Hadamard --------------------------------------------------------------------------------------------------

float matrix_amax(const Matrix& m, int hadamard_sign) {
  std::atomic<uint32_t> most{0};
  each_unit(m.rows && m.columns ? groups_of(m.rows, m.blocks()) : 0, kGroupElements,
            [&](int64_t begin, int64_t end) { raise_to(most, kernels().amax(m, hadamard_sign, begin, end)); });
  return bits_float(most);
}

Tensor tensor_amax(const Tensor& x, int64_t hadamard_sign) {
  // The element of a 0-d tensor is a row.
  const Rows rows(x.dim() ? x : torch::stable::reshape(x, {1}));
  return scalar(matrix_amax(rows.matrix, hadamard_sign_of(hadamard_sign)));
}

int64_t pair_units(const Matrix& m) { return ceil_div(m.rows, kPairRows) * ceil_div(m.columns, kPairColumns); }

Tensor hadamard(const Tensor& x, int64_t sign) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const int mask = hadamard_sign_of(sign, 0);
  Tensor out = empty(with_last(x, m.blocks() * kBlock), ScalarType::BFloat16);
  uint16_t* data = static_cast<uint16_t*>(out.mutable_data_ptr());
  each_unit(groups_of(m.rows, m.blocks()), kGroupElements,
            [&](int64_t begin, int64_t end) { kernels().hadamard(m, mask, data, begin, end); });
  return out;
}

// --- rotation (EDEN) -------------------------------------------------------------------------------------------------

struct RngState {
  int64_t seed, offset;

  explicit RngState(const int64_t* given) {  // it may begin at any byte
    std::memcpy(&seed, given, sizeof seed);
    std::memcpy(&offset, reinterpret_cast<const char*>(given) + sizeof seed, sizeof offset);
  }
};

// What the elements of so many rotations are multiplied by, in the kernels' order: of each rotation element 0 of its
// eight blocks, then element 1, ...
std::vector<float> rotation_signs(const RngState& state, int64_t rotations, int64_t col0) {
  const RandomKey key = RandomKey::of(state.seed, state.offset, kSignStream);
  std::vector<float> signs(rotations * kRotation);
  for (int64_t g = 0; g < rotations; ++g) {
    const Words4 words = key.block_words(col0 / kRotation + g);
    for (int i = 0; i < kRotation; ++i) {
      const uint32_t bits = bits_of_block(words, i % kRotationBlocks);
      signs[g * kRotation + i] = bits >> (i / kRotationBlocks) & 1 ? -kRotationFactor : kRotationFactor;
    }
  }
  return signs;
}

// Rotations per row, the last one padded.
int64_t rotations_of(const Matrix& m) { return ceil_div(m.columns, kRotation); }

// Groups of what is rotated.
int64_t rotated_units(const Matrix& m) { return groups_of(m.rows, rotations_of(m) * kRotationBlocks); }

float matrix_amax_rotated(const Matrix& m, const std::vector<float>& signs) {
  std::atomic<uint32_t> most{0};
  each_unit(rotated_units(m), kGroupElements,
            [&](int64_t begin, int64_t end) { raise_to(most, kernels().amax_rotated(m, signs.data(), begin, end)); });
  return bits_float(most);
}

Tensor amax_rotated(const Tensor& x, const Tensor& rng_state, int64_t col0) {
  const Rows rows(x);
  check_rotation_offset(col0);
  const RngState state(rng_state_of(rng_state, x));
  return scalar(matrix_amax_rotated(rows.matrix, rotation_signs(state, rotations_of(rows.matrix), col0)));
}

Tensor rotate(const Tensor& x, const Tensor& rng_state, bool inverse, int64_t col0) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  check_rotation_offset(col0);
  NVFP4_CHECK(!inverse || m.columns % kRotation == 0, "a rotated tensor has a multiple of ", kRotation,
              " columns, not ", m.columns);
  const std::vector<float> signs = rotation_signs(RngState(rng_state_of(rng_state, x)), rotations_of(m), col0);
  Tensor out = empty(with_last(x, rotations_of(m) * kRotation), ScalarType::Float);
  float* data = static_cast<float*>(out.mutable_data_ptr());
  each_unit(rotated_units(m), kGroupElements,
            [&](int64_t begin, int64_t end) { kernels().rotate(m, signs.data(), inverse, data, begin, end); });
  return out;
}

Tensor own_amax(const Tensor& x, const QuantizeSpec& spec, const std::optional<Tensor>& rng_state, int64_t col0) {
  rng_state_of(rng_state, spec, x);  // or an error that says what is missing
  return spec.is_eden() ? amax_rotated(x, *rng_state, col0) : tensor_amax(x, spec.hadamard_sign);
}

std::tuple<Tensor, Tensor> amax_pair(const Tensor& x, std::optional<Tensor> rng_state, int64_t spec, int64_t spec_t,
                                     int64_t row0, int64_t col0) {
  NVFP4_CHECK(x.dim() == 2, "amax_pair takes a matrix");
  const QuantizeSpec of_rows = spec_of(spec), of_columns = spec_of(spec_t);
  if (of_rows.hadamard_sign >= 0 || of_rows.is_eden() || of_columns.is_eden()) {
    const Tensor x_t = torch::stable::contiguous(torch::stable::transpose(x, 0, 1));
    return {own_amax(x, of_rows, rng_state, col0), own_amax(x_t, of_columns, rng_state, row0)};
  }
  const Rows rows(x);
  if (of_columns.hadamard_sign < 0) {
    const float both = matrix_amax(rows.matrix, -1);
    return {scalar(both), scalar(both)};
  }
  std::atomic<uint32_t> row{0}, column{0};
  each_unit(pair_units(rows.matrix), kPairRows * kPairColumns, [&](int64_t begin, int64_t end) {
    uint32_t row_most, column_most;
    kernels().amax_pair(rows.matrix, of_columns.hadamard_sign, begin, end, &row_most, &column_most);
    raise_to(row, row_most);
    raise_to(column, column_most);
  });
  return {scalar(bits_float(row)), scalar(bits_float(column))};
}

// --- quantize --------------------------------------------------------------------------------------------------------

// The largest magnitude to allow for; that of the matrix where none is given.
float most_of(const std::optional<Tensor>& amax, const Matrix& m, const Plan& plan, const Tensor& x) {
  if (!amax.has_value()) {
    return plan.spec.is_eden() ? matrix_amax_rotated(m, plan.signs) : matrix_amax(m, plan.spec.hadamard_sign);
  }
  float most;
  std::memcpy(&most, amax_of(*amax, x), sizeof most);  // it may begin at any byte
  NVFP4_CHECK(!(most < 0), "amax is a magnitude, not ", most, ": give amax.abs()");
  return most;
}

// All of a plan but the tensor's scale. m: x, or its transpose.
Plan unscaled_plan(int64_t spec_bits, const std::optional<Tensor>& rng_state, int stream, const Tensor& x,
                   const Matrix& m, int64_t row0, int64_t col0, int64_t full_width) {
  Plan plan{};
  plan.spec = spec_of(spec_bits);
  const bool eden = plan.spec.is_eden();
  // Rows of a band share the cache lines of their scales (4096^2, one thread: 3.5 -> 3.0 ms).
  plan.banded = !eden && (plan.spec.block_rows > 1 || (m.blocks() >= kGroupBlocks && m.rows >= kTileRows));
  const auto [first, row_blocks] = block_numbers(m.rows, m.columns, row0, col0, full_width,
                                                 plan.spec.column_multiple());
  plan.first_block = first, plan.row_blocks = row_blocks;
  if (const int64_t* given = rng_state_of(rng_state, plan.spec, x)) {
    const RngState state(given);
    plan.key = RandomKey::of(state.seed, state.offset, eden ? int(kScaleStream) + stream : stream);
    if (eden) plan.signs = rotation_signs(state, rotations_of(m), col0);
  }
  return plan;
}

Plan make_plan(int64_t spec_bits, const std::optional<Tensor>& amax, const std::optional<Tensor>& rng_state, int stream,
               const Tensor& x, const Matrix& m, int64_t row0, int64_t col0, int64_t full_width) {
  Plan plan = unscaled_plan(spec_bits, rng_state, stream, x, m, row0, col0, full_width);
  plan.tensor = TensorScale::of(most_of(amax, m, plan, x), plan.spec.scale_ceiling);
  return plan;
}

// Where kernels, which leave padding alone, write.
Quantized pointers_of(CodeTensors& out) {
  uint8_t* scales = out.scales();
  if (out.is_padded() && scales) std::memset(scales, 0, out.scale.numel());
  return {out.codes(), scales, out.scale.size(1)};
}

Tensor factor_of(const Plan& plan) { return scalar(per_tensor_scale(plan.tensor.amax, plan.spec.scale_ceiling)); }

// Units of Kernels::quantize, and the elements of one.
std::pair<int64_t, int64_t> quantize_units(const Matrix& m, const Plan& plan) {
  if (!m.columns) return {0, 0};
  if (plan.spec.is_eden()) return {rotated_units(m), kGroupElements};
  if (!plan.banded) return {groups_of(m.rows, m.blocks()), kGroupElements};
  return {ceil_div(m.rows, kBlock), kBlock * m.columns};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            std::optional<Tensor> rng_state, int64_t spec, int64_t row0, int64_t col0,
                                            int64_t full_width, int64_t stream) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Plan plan = make_plan(spec, amax, rng_state, int(stream), x, m, row0, col0, full_width);
  CodeTensors out(with_last(x, 0), m.rows, m.columns, x, plan.spec.column_multiple());
  const Quantized to = pointers_of(out);
  const auto [units, elements] = quantize_units(m, plan);
  each_unit(units, elements, [&](int64_t begin, int64_t end) { kernels().quantize(m, plan, to, begin, end); });
  return {out.qdata, out.scale, factor_of(plan)};
}

// --- quantize, each row by itself ------------------------------------------------------------------------------------

// The given amaxes, one per row; empty where each row is to find its own.
std::vector<float> row_amaxes(const std::optional<Tensor>& amax, int64_t rows, const Tensor& x) {
  if (!amax.has_value()) return {};
  const Tensor ordered = row_amaxes_of(*amax, rows, x);
  std::vector<float> values(rows);
  if (rows) std::memcpy(values.data(), ordered.const_data_ptr(), rows * sizeof(float));
  for (const float most : values) {
    NVFP4_CHECK(!(most < 0), "amax is a magnitude, not ", most, ": give amax.abs()");
  }
  return values;
}

// A row of a matrix, and where its codes and scales go. Offsets of the 128x4 layout add up over row and column.
Matrix row_of(const Matrix& m, int64_t row) {
  const char* data = static_cast<const char*>(m.data) + row * m.row_stride * bytes_of(m.dtype);
  return {data, 1, m.columns, m.row_stride, m.dtype};
}

Quantized row_of(const Quantized& out, int64_t row, int64_t blocks) {
  const int64_t in_tile = row % kTileRows;
  const int64_t scale = (row / kTileRows * out.column_tiles * 32 + in_tile % 32) * 16 + in_tile / 32 * 4;
  return {out.qdata + row * blocks * kBlock / 2, out.scale + scale, out.column_tiles};
}

std::tuple<Tensor, Tensor, Tensor> quantize_rows(const Tensor& x, std::optional<Tensor> amax,
                                                 std::optional<Tensor> rng_state, int64_t spec, int64_t row0,
                                                 int64_t col0, int64_t full_width, int64_t stream) {
  NVFP4_CHECK(spec & kRowScaledBit, "quantize_rows takes a spec with row_scaled=True");
  row_spec_of(spec);  // or an error
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  Plan plan = unscaled_plan(spec & ~kRowScaledBit, rng_state, int(stream), x, m, row0, col0, full_width);
  plan.banded = false;
  const std::vector<float> given = row_amaxes(amax, m.rows, x);
  CodeTensors out(with_last(x, 0), m.rows, m.columns, x);
  const Quantized to = pointers_of(out);
  const Tensor factors = empty({m.rows}, ScalarType::Float);
  float* factor = static_cast<float*>(factors.mutable_data_ptr());
  const int64_t groups = groups_of(1, m.blocks());
  each_unit(m.rows, m.columns, [&](int64_t begin, int64_t end) {
    Plan own = plan;
    for (int64_t r = begin; r < end; ++r) {
      const Matrix row = row_of(m, r);
      const float most = amax.has_value() ? given[r]
                         : m.columns      ? bits_float(kernels().amax(row, plan.spec.hadamard_sign, 0, groups))
                                          : 0.0f;
      own.tensor = TensorScale::of(most, plan.spec.scale_ceiling);
      own.first_block = plan.first_block + r * plan.row_blocks;
      factor[r] = per_tensor_scale(own.tensor.amax, plan.spec.scale_ceiling);
      if (m.columns) kernels().quantize(row, own, row_of(to, r, m.blocks()), 0, groups);
    }
  });
  return {out.qdata, out.scale, factors};
}

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

Tensor dequantize(const Tensor& qdata, const Tensor& scale, std::optional<Tensor> per_tensor_scale, int64_t columns,
                  ScalarType type) {
  if (!is_native(type)) {
    return torch::stable::to(dequantize(qdata, scale, per_tensor_scale, columns, ScalarType::Float), type);
  }
  const CodedShape shape = check_coded(qdata, scale, columns);
  const Tensor codes = in_order(qdata), scales = in_order(scale);
  Encoded in{};
  in.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  in.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  in.column_tiles = scale.size(1);
  in.rows = shape.rows, in.blocks = shape.blocks, in.columns = columns;
  std::optional<Tensor> factors;
  if (per_tensor_scale.has_value()) {
    factors = factors_of(*per_tensor_scale, "per_tensor_scale", in.rows, qdata, "qdata");
    in.factors = static_cast<const float*>(factors->const_data_ptr());
    in.factor_per_row = factors->numel() != 1;
  }
  Tensor out = empty(with_last(qdata, columns), type);
  void* data = out.mutable_data_ptr();
  const Dtype dtype = dtype_of(type, "dtype");
  each_unit(groups_of(in.rows, in.blocks), kGroupElements,
            [&](int64_t begin, int64_t end) { kernels().dequantize(in, dtype, data, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& amax, std::optional<Tensor> rng_state,
                                         int64_t spec, ScalarType type, bool scaled, int64_t row0, int64_t col0,
                                         int64_t full_width) {
  if (!is_native(type)) {
    auto [values, factor] = fake_quantize(x, amax, rng_state, spec, ScalarType::Float, scaled, row0, col0, full_width);
    return {torch::stable::to(values, type), factor};
  }
  if (spec_of(spec).is_eden()) {
    auto [qdata, scale, factor] = quantize(x, amax, rng_state, spec, row0, col0, full_width, 0);
    return {dequantize(qdata, scale, scaled ? std::optional<Tensor>(factor) : std::nullopt,
                       qdata.size(qdata.dim() - 1) * 2, type),
            factor};
  }
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Plan plan = make_plan(spec, amax, rng_state, 0, x, m, row0, col0, full_width);
  const int64_t columns = columns_of_values(plan.spec, m.columns);
  Tensor out = empty(with_last(x, columns), type);
  const Tensor factor = factor_of(plan);
  const float* factor_data = scaled ? static_cast<const float*>(factor.const_data_ptr()) : nullptr;
  void* data = out.mutable_data_ptr();
  const Dtype dtype = dtype_of(type, "dtype");
  const auto [units, elements] = quantize_units(m, plan);
  each_unit(units, elements, [&](int64_t begin, int64_t end) {
    kernels().fake_quantize(m, plan, factor_data, dtype, data, columns, begin, end);
  });
  return {out, factor};
}

// One op, not two that Python calls: 4 us less for a row of x.
std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, std::optional<Tensor> rng_state, int64_t spec,
                                               ScalarType type) {
  if (spec & kRowScaledBit) {
    const auto [qdata, scale, factors] = quantize_rows(x, std::nullopt, rng_state, spec, 0, 0, 0, 0);
    return {dequantize(qdata, scale, std::nullopt, columns_of_values(row_spec_of(spec), x.size(x.dim() - 1)), type),
            factors};
  }
  return fake_quantize(x, own_amax(x, spec_of(spec), rng_state, 0), rng_state, spec, type, false, 0, 0, 0);
}

}  // namespace

namespace ops {

CodedTensors quantize(const Tensor& x, const OptionalTensor& rng_state, int64_t spec, int64_t stream) {
  return nvfp4::quantize(x, std::nullopt, rng_state, spec, 0, 0, 0, stream);
}

// In plain torch: products on a CPU sum across the blocks of w instead.
std::tuple<Tensor, Tensor> transpose_codes(const Tensor& qdata, const Tensor& scale) {
  using torch::stable::detail::from, torch::stable::detail::to;
  std::vector<StableIValue> values = {from(qdata), from(scale)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("nvfp4::transpose_codes", "", values.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(values[0]), to<Tensor>(values[1])};
}

PairTensors quantize_pair(Pair p) {
  p.check("quantize_pair");
  const Rows rows(p.x);
  const Matrix& m = rows.matrix;
  const Matrix t{m.data, m.columns, m.rows, 0, m.dtype};
  if (!p.amax) std::tie(p.amax, p.amax_t) = amax_pair(p.x, p.rng_state, p.spec, p.spec_t, p.row0, p.col0);
  const Plan plan = make_plan(p.spec, p.amax, p.rng_state, int(p.stream), p.x, m, p.row0, p.col0, p.full_width);
  const Plan plan_t = make_plan(p.spec_t, p.amax_t, p.rng_state, int(p.stream_t), p.x, t, p.col0, p.row0, p.full_rows);
  CodeTensors out({m.rows, 0}, m.rows, m.columns, p.x, plan.spec.column_multiple());
  CodeTensors out_t({m.columns, 0}, m.columns, m.rows, p.x, plan_t.spec.column_multiple());
  const Quantized to = pointers_of(out), to_t = pointers_of(out_t);
  each_unit(pair_units(m), kPairRows * kPairColumns,
            [&](int64_t begin, int64_t end) { kernels().quantize_pair(m, plan, to, plan_t, to_t, begin, end); });
  return {out.qdata, out.scale, factor_of(plan), out_t.qdata, out_t.scale, factor_of(plan_t)};
}

InputTensors quantize_pair_values(Pair p, bool codes_t, bool back) {
  const auto [qdata, scale, factor, qdata_t, scale_t, factor_t] = quantize_pair(p);
  const auto values_of = [](const Tensor& codes, const Tensor& scales, const QuantizeSpec& spec, int64_t columns) {
    return dequantize(codes, scales, std::nullopt, columns_of_values(spec, columns), ScalarType::BFloat16);
  };
  const QuantizeSpec spec = spec_of(p.spec);
  Tensor values = values_of(qdata, scale, spec, p.x.size(1));
  if (back && spec.is_eden()) {
    values = nvfp4::rotate(torch::stable::to(values, ScalarType::Float), *p.rng_state, true, 0);
    values = torch::stable::to(torch::stable::narrow(values, 1, 0, p.x.size(1)), ScalarType::BFloat16);
  }
  if (codes_t) return {values, factor, qdata_t, scale_t, factor_t};
  return {values, factor, values_of(qdata_t, scale_t, spec_of(p.spec_t), p.x.size(0)),
          empty({0}, ScalarType::Float8_e4m3fn), factor_t};
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) {
  m.impl("amax", TORCH_BOX(&tensor_amax));
  m.impl("amax_pair", TORCH_BOX(&amax_pair));
  m.impl("hadamard", TORCH_BOX(&hadamard));
  m.impl("amax_rotated", TORCH_BOX(&amax_rotated));
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("quantize_pair", TORCH_BOX(&ops::quantize_pair_op));
  m.impl("quantize_pair_values", TORCH_BOX(&ops::quantize_pair_values_op));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
}

}  // namespace nvfp4
