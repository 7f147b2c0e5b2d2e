// The ops that find an amax or transform a tensor, on CUDA.
#include "cuda/quantize/arguments.h"

namespace nvfp4 {

namespace {

// --- amax, Hadamard --------------------------------------------------------------------------------------------------

Tensor amax(const Tensor& x, int64_t hadamard_sign) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x.dim() ? x : torch::stable::reshape(x, {1}));
  const int sign = hadamard_sign_of(hadamard_sign);
  Tensor out = empty_scalar(x);
  launch_amax(rows.matrix, sign, floats(out), current_stream(x));
  check_launched("nvfp4::amax");
  return out;
}

}  // namespace

Tensor hadamard(const Tensor& x, int64_t sign) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const uint32_t mask = hadamard_sign_of(sign, 0);
  Tensor out = empty(with_last(x, rows.matrix.blocks() * kBlock), ScalarType::BFloat16, x);
  launch_hadamard(rows.matrix, mask, out.mutable_data_ptr(), current_stream(x));
  check_launched("nvfp4::hadamard");
  return out;
}

Tensor transposed(const Tensor& x, const Matrix& m, int sign) {
  if (!m.whole_blocks()) {
    const Tensor copy = torch::stable::contiguous(torch::stable::transpose(x, 0, 1));
    return sign < 0 ? copy : nvfp4::hadamard(copy, sign);
  }
  const ScalarType type = sign < 0 ? x.scalar_type() : ScalarType::BFloat16;
  Tensor out = empty({m.columns, ceil_div(m.rows, kBlock) * kBlock}, type, x);
  launch_transpose(m, sign, out.mutable_data_ptr(), current_stream(x));
  check_launched("nvfp4::transpose");
  return out;
}

namespace {

// --- EDEN's rotation -------------------------------------------------------------------------------------------------

// Whose first column has number col0.
Rotation rotation_of(const Tensor& rng_state, int64_t col0, const Tensor& x) {
  check_rotation_offset(col0);
  return {rng_state_of(rng_state, x), col0 / kRotation};
}

void check_rotated(const Matrix& m) {
  NVFP4_CHECK(m.columns % kRotation == 0, "a rotated tensor has a multiple of ", kRotation, " columns, not ",
              m.columns);
}

Tensor rotate(const Tensor& x, const Tensor& rng_state, bool inverse, int64_t col0) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  if (inverse) check_rotated(m);
  const Rotation rotation = rotation_of(rng_state, col0, x);
  Tensor out = empty(with_last(x, ceil_div(m.columns, kRotation) * kRotation), ScalarType::Float, x);
  launch_rotate(m, rotation, inverse, floats(out), current_stream(x));
  check_launched("nvfp4::rotate");
  return out;
}

Tensor amax_rotated(const Tensor& x, const Tensor& rng_state, int64_t col0) {
  const OnDeviceOf guard(x);
  const CudaRows rows(x);
  const Rotation rotation = rotation_of(rng_state, col0, x);
  Tensor out = empty_scalar(x);
  launch_amax_rotated(rows.matrix, rotation, floats(out), current_stream(x));
  check_launched("nvfp4::amax_rotated");
  return out;
}

}  // namespace

Tensor rotate_back(const Tensor& x, const Tensor& rng_state, int64_t columns, int64_t col0) {
  const OnDeviceOf guard(x);
  CudaRows rows(x);
  if (!rows.matrix.whole_blocks()) rows = CudaRows(torch::stable::clone(x));
  const Matrix& m = rows.matrix;
  check_rotated(m);
  NVFP4_CHECK(columns >= 0 && columns <= m.columns, "columns is at most the ", m.columns, " of x, not ", columns);
  const Rotation rotation = rotation_of(rng_state, col0, x);
  Tensor out = empty(with_last(x, columns), ScalarType::BFloat16, x);
  launch_rotate_back(m, rotation, columns, out.mutable_data_ptr(), current_stream(x));
  check_launched("nvfp4::rotate_back");
  return out;
}

Tensor own_amax(const Tensor& x, const QuantizeSpec& spec, const std::optional<Tensor>& rng_state, int64_t col0) {
  if (!spec.is_eden()) return nvfp4::amax(x, spec.hadamard_sign);
  rng_state_of(rng_state, spec, x);  // refuses none
  return nvfp4::amax_rotated(x, *rng_state, col0);
}

std::tuple<Tensor, Tensor> amax_pair(const Tensor& x, const std::optional<Tensor>& rng_state, int64_t spec,
                                     int64_t spec_t, int64_t row0, int64_t col0) {
  NVFP4_CHECK(x.dim() == 2, "amax_pair takes a matrix");
  const OnDeviceOf guard(x);
  const cudaStream_t stream = current_stream(x);
  const QuantizeSpec of_rows = spec_of(spec), of_columns = spec_of(spec_t);
  const CudaRows rows(x);
  const Matrix& m = rows.matrix;
  const int sign = of_columns.hadamard_sign;
  const bool as_is = !of_rows.is_eden() && of_rows.hadamard_sign < 0, rotates = rotates_pair(m, of_rows, of_columns);
  if (as_is && !of_columns.is_eden() && sign < 0) {
    Tensor row = nvfp4::amax(x, -1), column = empty_scalar(x);
    cudaMemcpyAsync(floats(column), floats(row), sizeof(float), cudaMemcpyDeviceToDevice, stream);
    return {row, column};
  }
  if (!rotates && !(as_is && sign >= 0 && m.dtype == Dtype::kBf16 && m.whole_blocks())) {
    const Tensor row = own_amax(x, of_rows, rng_state, col0), x_t = transposed(x, m, sign);
    return {row, of_columns.is_eden() ? own_amax(x_t, of_columns, rng_state, row0) : nvfp4::amax(x_t, -1)};
  }
  Tensor row = empty_scalar(x), column = empty_scalar(x);
  if (rotates) {
    const auto [by_rows, by_columns] = rotations_of_pair(x, rng_state, of_rows, of_columns, row0, col0);
    launch_amax_pair_eden(m, of_rows.is_eden(), by_rows, by_columns, floats(row), floats(column), stream);
  } else {
    launch_amax_pair(m, sign, floats(row), floats(column), stream);
  }
  check_launched("nvfp4::amax_pair");
  return {row, column};
}

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("amax", TORCH_BOX(&amax));
  m.impl("amax_pair", TORCH_BOX(&amax_pair));
  m.impl("hadamard", TORCH_BOX(&hadamard));
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate_back", TORCH_BOX(&rotate_back));
  m.impl("amax_rotated", TORCH_BOX(&amax_rotated));
}

}  // namespace nvfp4
