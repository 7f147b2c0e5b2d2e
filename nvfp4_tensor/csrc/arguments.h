// What the ops ask of their arguments on any device: dtypes, shapes, devices. A tensor that is not what it should be
// would be read beyond its end, or for numbers that it does not hold.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "numerics/matrix.h"
#include "numerics/spec.h"

namespace nvfp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "Byte (3, 5)", for messages.
inline std::string text_of(const Tensor& t) {
  std::string text = torch::headeronly::toString(t.scalar_type());
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : " (") + std::to_string(t.size(i));
  return text + (t.dim() ? ")" : ", 0-d");
}

inline void check_beside(const Tensor& t, const char* name, const Tensor& x, const char* x_name = "x") {
  STD_TORCH_CHECK(t.is_cpu() == x.is_cpu() && t.get_device_index() == x.get_device_index(), name,
                  " is not on the device of ", x_name, ": move it there");
}

inline bool is_native(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
}

inline Dtype dtype_of(ScalarType type, const char* name) {
  STD_TORCH_CHECK(is_native(type), name, " must be bfloat16, float16 or float32, not ", type,
                  "; cast it, for example with .to(torch.bfloat16)");
  return type == ScalarType::BFloat16 ? Dtype::kBf16 : type == ScalarType::Half ? Dtype::kFp16 : Dtype::kFloat;
}

inline int64_t leading_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

inline std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  shape.push_back(last);
  return shape;
}

// The tensor itself where it is contiguous: asking torch for that takes a microsecond.
inline Tensor in_order(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline Tensor contiguous_as(const Tensor& t, ScalarType type) {
  return in_order(t.scalar_type() == type ? t : torch::stable::to(t, type));
}

// A tensor (..., K) as rows of K with last stride 1: itself where it is (2-D with strided rows, or contiguous), else a
// copy.
struct Rows {
  Tensor held;
  Matrix matrix;

  explicit Rows(const Tensor& x) : held(x) {
    STD_TORCH_CHECK(x.dim() >= 1, "x must have at least one dimension: x.reshape(1) has");
    const Dtype dtype = dtype_of(x.scalar_type(), "x");
    const bool strided_rows = x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1) && x.stride(0) >= x.size(1);
    if (!strided_rows && !x.is_contiguous()) held = torch::stable::contiguous(x);
    const int64_t columns = x.size(x.dim() - 1), rows = leading_rows(x);
    const int64_t row_stride = strided_rows && rows > 1 ? x.stride(0) : columns;
    matrix = {held.const_data_ptr(), rows, columns, row_stride, dtype};
  }
};

// --- how to quantize -------------------------------------------------------------------------------------------------

inline QuantizeSpec spec_of(int64_t bits) {
  STD_TORCH_CHECK(QuantizeSpec::is_packed(bits), "spec is what QuantizeSpec.pack() gives, and that is never ", bits);
  return QuantizeSpec::unpack(bits);
}

// A mask of 16 bits, or, where that is allowed, -1 for no transform.
inline int hadamard_sign_of(int64_t sign, int least = -1) {
  STD_TORCH_CHECK(sign >= least && sign <= 0xFFFF, "the sign of a Hadamard transform is a mask from 0 to 0xFFFF, not ",
                  sign);
  return static_cast<int>(sign);
}

inline const float* amax_of(const Tensor& amax, const Tensor& x) {
  check_beside(amax, "amax", x);
  STD_TORCH_CHECK(amax.numel() == 1 && amax.scalar_type() == ScalarType::Float, "amax must be one float32, not ",
                  text_of(amax));
  return static_cast<const float*>(amax.const_data_ptr());
}

// (seed, offset); null where nothing is random.
inline const int64_t* rng_state_of(const std::optional<Tensor>& state, const QuantizeSpec& spec, const Tensor& x) {
  if (!spec.is_stochastic()) return nullptr;
  STD_TORCH_CHECK(state.has_value(), "stochastic rounding needs rng_state, an int64 tensor (seed, offset)");
  check_beside(*state, "rng_state", x);
  STD_TORCH_CHECK(state->scalar_type() == ScalarType::Long && state->numel() == 2 && state->is_contiguous(),
                  "rng_state must be int64 (seed, offset), contiguous, not ", text_of(*state));
  return static_cast<const int64_t*>(state->const_data_ptr());
}

// --- what is quantized -----------------------------------------------------------------------------------------------

struct CodedShape {
  int64_t rows, blocks;  // blocks of a row, the last of which need not be whole
};

// Codes and block scales of so many columns.
inline CodedShape check_coded(const Tensor& qdata, const Tensor& scale, int64_t columns) {
  STD_TORCH_CHECK(qdata.scalar_type() == ScalarType::Byte && qdata.dim() >= 1,
                  "qdata must be uint8 (..., K/2), two codes a byte, not ", text_of(qdata));
  const int64_t bytes = qdata.size(qdata.dim() - 1), blocks = bytes * 2 / kBlock, rows = leading_rows(qdata);
  STD_TORCH_CHECK(bytes % (kBlock / 2) == 0, "a row of qdata must be whole blocks of 8 bytes, not ", bytes,
                  ": pad it with zeros");
  STD_TORCH_CHECK(columns <= blocks * kBlock && columns > (blocks - 1) * kBlock, "qdata of ", blocks,
                  " blocks a row is of ", std::max<int64_t>((blocks - 1) * kBlock + 1, 0), " to ", blocks * kBlock,
                  " columns, not ", columns);
  check_beside(scale, "scale", qdata, "qdata");
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float8_e4m3fn || scale.scalar_type() == ScalarType::Byte,
                  "scale must be float8_e4m3fn or its bytes in uint8, not ", scale.scalar_type());
  const int64_t row_tiles = ceil_div(rows, kTileRows), column_tiles = ceil_div(blocks, kTileColumns);
  STD_TORCH_CHECK(scale.dim() == 4 && scale.size(0) == row_tiles && scale.size(1) == column_tiles &&
                      scale.size(2) == 32 && scale.size(3) == 16,
                  "scale must be swizzled, (", row_tiles, ", ", column_tiles, ", 32, 16) for qdata of ", rows,
                  " rows of ", blocks, " blocks, not ", text_of(scale), ": nvfp4_tensor.format.swizzle does it");
  return {rows, blocks};
}

// One factor of all, or one a row: of a weight, or of what it meets.
inline Tensor factors_of(const Tensor& t, const char* name, int64_t rows, const Tensor& x, const char* x_name = "x") {
  check_beside(t, name, x, x_name);
  STD_TORCH_CHECK(t.numel() == 1 || t.numel() == rows, name, " must be one number, or one a row: 1 or ", rows,
                  ", not ", t.numel());
  return contiguous_as(t, ScalarType::Float);
}

}  // namespace nvfp4
