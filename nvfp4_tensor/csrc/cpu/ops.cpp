// The ops of ops.py on the CPU: arguments checked, outputs allocated, work divided among torch's threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "cpu/empty.h"
#include "cpu/kernels.h"

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
void parallel(int64_t count, int64_t elements_per_unit, Function f) {
  if (count <= 0) return;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(elements_per_unit, 1));
  if (count <= grain) return f(0, count);
  torch::stable::parallel_for(0, count, grain, f);
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
  parallel(m.rows && m.columns ? groups_of(m.rows, m.blocks()) : 0, kGroupElements,
           [&](int64_t begin, int64_t end) { raise_to(most, kernels().amax(m, hadamard_sign, begin, end)); });
  return bits_float(most);
}

Tensor tensor_amax(const Tensor& x, int64_t hadamard_sign) {
  // Of a 0-d tensor the one element is a row.
  const Rows rows(x.dim() ? x : torch::stable::reshape(x, {1}));
  return scalar(matrix_amax(rows.matrix, hadamard_sign_of(hadamard_sign)));
}

int64_t pair_units(const Matrix& m) { return ceil_div(m.rows, kPairRows) * ceil_div(m.columns, kPairColumns); }

std::tuple<Tensor, Tensor> amax_pair(const Tensor& x, int64_t hadamard_sign) {
  STD_TORCH_CHECK(x.dim() == 2, "amax_pair takes a matrix");
  const int sign = hadamard_sign_of(hadamard_sign);
  if (sign < 0) {
    const float both = matrix_amax(Rows(x).matrix, -1);
    return {scalar(both), scalar(both)};
  }
  const Rows rows(x);
  std::atomic<uint32_t> row{0}, column{0};
  parallel(pair_units(rows.matrix), kPairRows * kPairColumns, [&](int64_t begin, int64_t end) {
    uint32_t row_most, column_most;
    kernels().amax_pair(rows.matrix, sign, begin, end, &row_most, &column_most);
    raise_to(row, row_most);
    raise_to(column, column_most);
  });
  return {scalar(bits_float(row)), scalar(bits_float(column))};
}

Tensor hadamard(const Tensor& x, int64_t sign) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const int mask = hadamard_sign_of(sign, 0);
  Tensor out = empty(with_last(x, m.blocks() * kBlock), ScalarType::BFloat16);
  uint16_t* data = static_cast<uint16_t*>(out.mutable_data_ptr());
  parallel(groups_of(m.rows, m.blocks()), kGroupElements,
           [&](int64_t begin, int64_t end) { kernels().hadamard(m, mask, data, begin, end); });
  return out;
}

// --- quantize --------------------------------------------------------------------------------------------------------

// The largest magnitude to allow for; that of the matrix where none is given.
float most_of(const std::optional<Tensor>& amax, const Matrix& m, const QuantizeSpec& spec, const Tensor& x) {
  if (!amax.has_value()) return matrix_amax(m, spec.hadamard_sign);
  float most;
  std::memcpy(&most, amax_of(*amax, x), sizeof most);  // it may begin at any byte
  STD_TORCH_CHECK(!(most < 0), "amax is a magnitude, not ", most, ": give amax.abs()");
  return most;
}

// m: x, or its transpose.
Plan make_plan(int64_t spec_bits, const std::optional<Tensor>& amax, const std::optional<Tensor>& rng_state, int stream,
               const Tensor& x, const Matrix& m, int64_t row0, int64_t col0, int64_t full_width) {
  Plan plan{};
  plan.spec = spec_of(spec_bits);
  STD_TORCH_CHECK(!plan.spec.is_eden(), "this CPU library has no kernels for EDEN: NVFP4_TENSOR_NATIVE=0 in the environment "
                  "lets plain torch serve them");
  plan.tensor = TensorScale::of(most_of(amax, m, plan.spec, x), plan.spec.scale_ceiling);
  // Rows of a band share the cache lines of their scales (4096^2, one thread: 3.5 -> 3.0 ms).
  plan.banded = plan.spec.block_rows > 1 || (m.blocks() >= kGroupBlocks && m.rows >= kTileRows);
  const auto [first, row_blocks] = block_numbers(m.rows, m.columns, row0, col0, full_width);
  plan.first_block = first, plan.row_blocks = row_blocks;
  if (const int64_t* given = rng_state_of(rng_state, plan.spec, x)) {
    int64_t state[2];
    std::memcpy(state, given, sizeof state);
    plan.key = RandomKey::of(state[0], state[1], stream);
  }
  return plan;
}

struct Outputs {
  Tensor qdata, scale;
  Quantized pointers;

  Outputs(const std::vector<int64_t>& leading, int64_t rows, int64_t blocks)
      : qdata(empty(with_codes(leading, blocks), ScalarType::Byte)),
        scale(empty({ceil_div(rows, kTileRows), ceil_div(blocks, kTileColumns), 32, 16}, ScalarType::Float8_e4m3fn)),
        pointers{static_cast<uint8_t*>(qdata.mutable_data_ptr()), static_cast<uint8_t*>(scale.mutable_data_ptr()),
                 scale.size(1)} {
    const bool padded = rows % kTileRows || blocks % kTileColumns;
    if (padded && pointers.scale) std::memset(pointers.scale, 0, scale.numel());
  }

  static std::vector<int64_t> with_codes(std::vector<int64_t> leading, int64_t blocks) {
    leading.push_back(blocks * kBlock / 2);
    return leading;
  }
};

Tensor factor_of(const Plan& plan) { return scalar(per_tensor_scale(plan.tensor.amax, plan.spec.scale_ceiling)); }

// Units of Kernels::quantize, and the elements of one.
std::pair<int64_t, int64_t> quantize_units(const Matrix& m, const Plan& plan) {
  if (!m.columns) return {0, 0};
  if (!plan.banded) return {groups_of(m.rows, m.blocks()), kGroupElements};
  return {ceil_div(m.rows, kBlock), kBlock * m.columns};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            std::optional<Tensor> rng_state, int64_t spec, int64_t row0, int64_t col0,
                                            int64_t full_width, int64_t stream) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Plan plan = make_plan(spec, amax, rng_state, int(stream), x, m, row0, col0, full_width);
  std::vector<int64_t> leading = with_last(x, 0);
  leading.pop_back();
  const Outputs out(leading, m.rows, m.blocks());
  const auto [units, elements] = quantize_units(m, plan);
  parallel(units, elements, [&](int64_t begin, int64_t end) { kernels().quantize(m, plan, out.pointers, begin, end); });
  return {out.qdata, out.scale, factor_of(plan)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair(
    const Tensor& x, const Tensor& amax, const Tensor& amax_t, std::optional<Tensor> rng_state, int64_t spec,
    int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width, int64_t stream_t) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_pair takes a matrix");
  check_transposed_place(row0, full_rows);
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Matrix transposed{m.data, m.columns, m.rows, 0, m.dtype};
  const Plan plan = make_plan(spec, amax, rng_state, 0, x, m, row0, col0, full_width);
  const Plan plan_t = make_plan(spec_t, amax_t, rng_state, int(stream_t), x, transposed, col0, row0, full_rows);
  const Outputs out({m.rows}, m.rows, m.blocks());
  const Outputs out_t({m.columns}, m.columns, transposed.blocks());
  parallel(pair_units(m), kPairRows * kPairColumns, [&](int64_t begin, int64_t end) {
    kernels().quantize_pair(m, plan, out.pointers, plan_t, out_t.pointers, begin, end);
  });
  return {out.qdata, out.scale, factor_of(plan), out_t.qdata, out_t.scale, factor_of(plan_t)};
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
  parallel(groups_of(in.rows, in.blocks), kGroupElements,
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
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Plan plan = make_plan(spec, amax, rng_state, 0, x, m, row0, col0, full_width);
  const int64_t columns = plan.spec.hadamard_sign < 0 ? m.columns : m.blocks() * kBlock;
  Tensor out = empty(with_last(x, columns), type);
  const Tensor factor = factor_of(plan);
  const float* factor_data = scaled ? static_cast<const float*>(factor.const_data_ptr()) : nullptr;
  void* data = out.mutable_data_ptr();
  const Dtype dtype = dtype_of(type, "dtype");
  const auto [units, elements] = quantize_units(m, plan);
  parallel(units, elements, [&](int64_t begin, int64_t end) {
    kernels().fake_quantize(m, plan, factor_data, dtype, data, columns, begin, end);
  });
  return {out, factor};
}

// One op, not two that Python calls: 4 us less for a row of x.
std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, std::optional<Tensor> rng_state, int64_t spec,
                                               ScalarType type) {
  const Tensor amax = tensor_amax(x, spec_of(spec).hadamard_sign);
  return fake_quantize(x, amax, rng_state, spec, type, false, 0, 0, 0);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nvfp4, CPU, m) {
  m.impl("amax", TORCH_BOX(&tensor_amax));
  m.impl("amax_pair", TORCH_BOX(&amax_pair));
  m.impl("hadamard", TORCH_BOX(&hadamard));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_pair", TORCH_BOX(&quantize_pair));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
}

}  // namespace nvfp4
