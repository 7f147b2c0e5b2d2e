// The ops of ops.py on the CPU: arguments checked, outputs allocated, work divided among torch's threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/empty.h"
#include "cpu/kernels.h"
#include "numerics/layout.h"

namespace nvfp4 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// About 20 us of work: fewer elements are not worth a second thread.
constexpr int64_t kElementsPerThread = 1 << 16;

void check_cpu(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " is on another device than the input: move it to the CPU");
}

Dtype dtype_of(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::BFloat16: return Dtype::kBf16;
    case ScalarType::Half: return Dtype::kFp16;
    case ScalarType::Float: return Dtype::kFloat;
    default:
      STD_TORCH_CHECK(false, name, " must be bfloat16, float16 or float32; cast it, for example with .float()");
  }
}

int64_t leading_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

// A tensor (..., K) as rows of K with last stride 1: itself if contiguous, or 2-D with strided rows; else a copy.
struct Rows {
  Tensor held;
  Matrix matrix;

  explicit Rows(const Tensor& x, const char* name = "x") : held(x) {
    check_cpu(x, name);
    STD_TORCH_CHECK(x.dim() >= 1, name, " must have at least one dimension");
    const Dtype dtype = dtype_of(x.scalar_type(), name);
    const bool strided_rows = x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1) && x.stride(0) >= x.size(1);
    if (!strided_rows && !x.is_contiguous()) held = torch::stable::contiguous(x);
    const int64_t columns = x.size(x.dim() - 1);
    const int64_t row_stride = strided_rows && x.size(0) > 1 ? x.stride(0) : columns;
    matrix = {held.const_data_ptr(), leading_rows(x), columns, row_stride, dtype};
  }
};

Tensor scalar(float value) {
  Tensor out = empty({}, ScalarType::Float);
  *static_cast<float*>(out.mutable_data_ptr()) = value;
  return out;
}

float read_scalar(const Tensor& t, const char* name) {
  check_cpu(t, name);
  STD_TORCH_CHECK(t.numel() == 1 && t.scalar_type() == ScalarType::Float, name, " must be one float32");
  return *static_cast<const float*>(t.const_data_ptr());
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

float amax_of(const Matrix& m, int hadamard_sign) {
  std::atomic<uint32_t> most{0};
  parallel(m.rows && m.columns ? groups_of(m.rows, m.blocks()) : 0, kGroupElements, [&](int64_t begin, int64_t end) {
    raise_to(most, kernels().amax(m, hadamard_sign, begin, end));
  });
  return bits_float(most);
}

Tensor tensor_amax(const Tensor& x, int64_t hadamard_sign) {
  // Of a 0-d tensor the one element is a row.
  const Rows rows(x.dim() ? x : torch::stable::reshape(x, {1}));
  return scalar(amax_of(rows.matrix, int(hadamard_sign)));
}

int64_t pair_units(const Matrix& m) { return ceil_div(m.rows, kPairRows) * ceil_div(m.columns, kPairColumns); }

std::tuple<Tensor, Tensor> amax_pair(const Tensor& x, int64_t hadamard_sign) {
  STD_TORCH_CHECK(x.dim() == 2, "amax_pair takes a matrix");
  if (hadamard_sign < 0) {
    const Tensor both = tensor_amax(x, -1);
    return {both, scalar(read_scalar(both, "amax"))};
  }
  const Rows rows(x);
  std::atomic<uint32_t> row{0}, column{0};
  parallel(pair_units(rows.matrix), kPairRows * kPairColumns, [&](int64_t begin, int64_t end) {
    uint32_t row_most, column_most;
    kernels().amax_pair(rows.matrix, int(hadamard_sign), begin, end, &row_most, &column_most);
    raise_to(row, row_most);
    raise_to(column, column_most);
  });
  return {scalar(bits_float(row)), scalar(bits_float(column))};
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  shape.push_back(last);
  return shape;
}

Tensor hadamard(const Tensor& x, int64_t sign) {
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  Tensor out = empty(with_last(x, m.blocks() * kBlock), ScalarType::BFloat16);
  uint16_t* data = static_cast<uint16_t*>(out.mutable_data_ptr());
  parallel(groups_of(m.rows, m.blocks()), kGroupElements, [&](int64_t begin, int64_t end) {
    kernels().hadamard(m, int(sign), data, begin, end);
  });
  return out;
}

// --- quantize --------------------------------------------------------------------------------------------------------

// Without amax, that of the matrix.
Plan make_plan(int64_t spec_bits, const std::optional<Tensor>& amax, const std::optional<Tensor>& rng_state, int stream,
               const Matrix& m, int64_t row0, int64_t col0, int64_t full_width) {
  Plan plan{};
  plan.spec = QuantizeSpec::unpack(spec_bits);
  const float most = amax.has_value() ? read_scalar(*amax, "amax") : amax_of(m, plan.spec.hadamard_sign);
  plan.tensor = TensorScale::of(most, plan.spec.scale_ceiling);
  // Rows of a band share the cache lines of their scales (4096^2, one thread: 3.5 -> 3.0 ms).
  plan.banded = plan.spec.block_rows > 1 || (m.blocks() >= kGroupBlocks && m.rows >= kTileRows);
  plan.row_blocks = ceil_div(full_width ? full_width : m.columns, kBlock);
  plan.first_block = row0 * plan.row_blocks + col0 / kBlock;
  if (!plan.spec.is_stochastic()) return plan;
  STD_TORCH_CHECK(rng_state.has_value(), "stochastic rounding needs rng_state, an int64 tensor (seed, offset)");
  check_cpu(*rng_state, "rng_state");
  STD_TORCH_CHECK(rng_state->scalar_type() == ScalarType::Long && rng_state->numel() == 2 && rng_state->is_contiguous(),
                  "rng_state must be an int64 tensor (seed, offset)");
  const int64_t* state = static_cast<const int64_t*>(rng_state->const_data_ptr());
  plan.key = RandomKey::of(state[0], state[1], stream);
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
    if (rows % kTileRows || blocks % kTileColumns) std::memset(pointers.scale, 0, scale.numel());
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
  const Plan plan = make_plan(spec, amax, rng_state, int(stream), m, row0, col0, full_width);
  std::vector<int64_t> leading = with_last(x, 0);
  leading.pop_back();
  const Outputs out(leading, m.rows, m.blocks());
  const auto [units, elements] = quantize_units(m, plan);
  parallel(units, elements, [&](int64_t begin, int64_t end) { kernels().quantize(m, plan, out.pointers, begin, end); });
  return {out.qdata, out.scale, factor_of(plan)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_pair(
    const Tensor& x, const Tensor& amax, const Tensor& amax_t, std::optional<Tensor> rng_state, int64_t spec,
    int64_t spec_t, int64_t row0, int64_t col0, int64_t full_rows, int64_t full_width) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_pair takes a matrix");
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Matrix transposed{m.data, m.columns, m.rows, 0, m.dtype};
  const Plan plan = make_plan(spec, amax, rng_state, 0, m, row0, col0, full_width);
  const Plan plan_t = make_plan(spec_t, amax_t, rng_state, 1, transposed, col0, row0, full_rows);
  const Outputs out({m.rows}, m.rows, m.blocks());
  const Outputs out_t({m.columns}, m.columns, transposed.blocks());
  parallel(pair_units(m), kPairRows * kPairColumns, [&](int64_t begin, int64_t end) {
    kernels().quantize_pair(m, plan, out.pointers, plan_t, out_t.pointers, begin, end);
  });
  return {out.qdata, out.scale, factor_of(plan), out_t.qdata, out_t.scale, factor_of(plan_t)};
}

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

bool is_native(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
}

Tensor dequantize(const Tensor& qdata, const Tensor& scale, std::optional<Tensor> per_tensor_scale, int64_t columns,
                  ScalarType type) {
  if (!is_native(type)) {
    return torch::stable::to(dequantize(qdata, scale, per_tensor_scale, columns, ScalarType::Float), type);
  }
  check_cpu(qdata, "qdata");
  check_cpu(scale, "scale");
  STD_TORCH_CHECK(qdata.scalar_type() == ScalarType::Byte && qdata.dim() >= 1, "qdata must be uint8 (..., K/2)");
  STD_TORCH_CHECK(qdata.size(qdata.dim() - 1) % 8 == 0, "a row of qdata must be whole blocks of 8 bytes, not ",
                  qdata.size(qdata.dim() - 1));
  STD_TORCH_CHECK(scale.dim() == 4 && scale.element_size() == 1 && scale.size(2) == 32 && scale.size(3) == 16,
                  "scale must be e4m3 (row tiles, column tiles, 32, 16)");
  const Tensor codes = torch::stable::contiguous(qdata), scales = torch::stable::contiguous(scale);
  Encoded in{};
  in.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  in.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  in.column_tiles = scale.size(1);
  in.rows = leading_rows(qdata);
  in.blocks = qdata.size(qdata.dim() - 1) * 2 / kBlock;
  in.columns = columns;
  STD_TORCH_CHECK(columns <= in.blocks * kBlock && columns > (in.blocks - 1) * kBlock,
                  "qdata of ", in.blocks, " blocks a row cannot hold ", columns, " columns");
  STD_TORCH_CHECK(scale.size(0) >= ceil_div(in.rows, kTileRows) && in.column_tiles >= ceil_div(in.blocks, kTileColumns),
                  "scale has too few tiles for qdata");
  std::optional<Tensor> factors;
  if (per_tensor_scale.has_value()) {
    check_cpu(*per_tensor_scale, "per_tensor_scale");
    const int64_t count = per_tensor_scale->numel();
    STD_TORCH_CHECK(per_tensor_scale->scalar_type() == ScalarType::Float && (count == 1 || count == in.rows),
                    "per_tensor_scale must be float32, one or one a row");
    factors = torch::stable::contiguous(*per_tensor_scale);
    in.factors = static_cast<const float*>(factors->const_data_ptr());
    in.factor_per_row = count != 1;
  }
  Tensor out = empty(with_last(qdata, columns), type);
  void* data = out.mutable_data_ptr();
  const Dtype dtype = dtype_of(type, "dtype");
  parallel(groups_of(in.rows, in.blocks), kGroupElements, [&](int64_t begin, int64_t end) {
    kernels().dequantize(in, dtype, data, begin, end);
  });
  return out;
}

std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& amax, std::optional<Tensor> rng_state,
                                         int64_t spec, ScalarType type, bool scaled, int64_t row0, int64_t col0,
                                         int64_t full_width) {
  if (!is_native(type)) {
    auto [values, factor] =
        fake_quantize(x, amax, rng_state, spec, ScalarType::Float, scaled, row0, col0, full_width);
    return {torch::stable::to(values, type), factor};
  }
  const Rows rows(x);
  const Matrix& m = rows.matrix;
  const Plan plan = make_plan(spec, amax, rng_state, 0, m, row0, col0, full_width);
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
  const Tensor amax = tensor_amax(x, QuantizeSpec::unpack(spec).hadamard_sign);
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
