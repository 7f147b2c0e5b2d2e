// What the ops ask of their arguments on any device: dtypes, shapes, devices. A tensor that is not what it should be
// would be read beyond its end, or for numbers that it does not hold.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "numerics/matrix.h"
#include "numerics/spec.h"

namespace nvfp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raises a RuntimeError whose message is the arguments alone. That of torch's STD_TORCH_CHECK begins with a function
// and its file where it was compiled.
template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  ((message << args), ...);
  throw std::runtime_error(message.str());
}

#define NVFP4_CHECK(condition, ...)                                    \
  do {                                                                 \
    if (__builtin_expect(!(condition), 0)) ::nvfp4::fail(__VA_ARGS__); \
  } while (false)

// "Byte (3, 5)", for messages.
inline std::string text_of(const Tensor& t) {
  std::string text = torch::headeronly::toString(t.scalar_type());
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : " (") + std::to_string(t.size(i));
  return text + (t.dim() ? ")" : ", 0-d");
}

inline void check_beside(const Tensor& t, const char* name, const Tensor& x, const char* x_name = "x") {
  NVFP4_CHECK(t.is_cpu() == x.is_cpu() && t.get_device_index() == x.get_device_index(), name,
              " is not on the device of ", x_name, ": move it there");
}

inline bool is_native(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
}

inline Dtype dtype_of(ScalarType type, const char* name) {
  NVFP4_CHECK(is_native(type), name, " must be bfloat16, float16 or float32, not ", type,
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

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  return strides;
}

inline bool begins_on(const Tensor& t, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
}

// Contiguous, and at an address that loads of so many bytes take: the tensor itself where it is that already, since
// asking torch takes a microsecond. A tensor over foreign memory (torch.frombuffer) may begin at any byte.
inline Tensor aligned(const Tensor& t, uintptr_t bytes) {
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  return begins_on(t, bytes) ? t : torch::stable::clone(t);
}

inline Tensor in_order(const Tensor& t) { return aligned(t, static_cast<uintptr_t>(t.element_size())); }

inline Tensor contiguous_as(const Tensor& t, ScalarType type) {
  return in_order(t.scalar_type() == type ? t : torch::stable::to(t, type));
}

// A tensor (..., K) as rows of K with last stride 1: itself where it is (2-D with strided rows, or contiguous) and its
// elements lie where loads of them may, else a copy.
struct Rows {
  Tensor held;
  Matrix matrix;

  explicit Rows(const Tensor& x) : held(x) {
    NVFP4_CHECK(x.dim() >= 1, "x must have at least one dimension: x.reshape(1) has");
    const Dtype dtype = dtype_of(x.scalar_type(), "x");
    const bool strided_rows = x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1) && x.stride(0) >= x.size(1) &&
                              begins_on(x, bytes_of(dtype));
    if (!strided_rows) held = in_order(x);
    const int64_t columns = x.size(x.dim() - 1), rows = leading_rows(x);
    const int64_t row_stride = strided_rows && rows > 1 ? x.stride(0) : columns;
    matrix = {held.const_data_ptr(), rows, columns, row_stride, dtype};
  }
};

// --- how to quantize -------------------------------------------------------------------------------------------------

inline QuantizeSpec spec_of(int64_t bits) {
  NVFP4_CHECK(QuantizeSpec::is_packed(bits), "spec is what QuantizeSpec.pack() gives, and that is never ", bits);
  return QuantizeSpec::unpack(bits);
}

// A mask of 16 bits, or, where that is allowed, -1 for no transform.
inline int hadamard_sign_of(int64_t sign, int least = -1) {
  NVFP4_CHECK(sign >= least && sign <= 0xFFFF, "the sign of a Hadamard transform is a mask from 0 to 0xFFFF, not ",
              sign);
  return static_cast<int>(sign);
}

inline const float* amax_of(const Tensor& amax, const Tensor& x) {
  check_beside(amax, "amax", x);
  NVFP4_CHECK(amax.numel() == 1 && amax.scalar_type() == ScalarType::Float, "amax must be one float32, not ",
              text_of(amax));
  return static_cast<const float*>(amax.const_data_ptr());
}

// (seed, offset).
inline const int64_t* rng_state_of(const Tensor& state, const Tensor& x) {
  check_beside(state, "rng_state", x);
  NVFP4_CHECK(state.scalar_type() == ScalarType::Long && state.numel() == 2 && state.is_contiguous(),
              "rng_state must be int64 (seed, offset), contiguous, not ", text_of(state));
  return static_cast<const int64_t*>(state.const_data_ptr());
}

// Null where nothing is random.
inline const int64_t* rng_state_of(const std::optional<Tensor>& state, const QuantizeSpec& spec, const Tensor& x) {
  if (!spec.takes_random_bits()) return nullptr;
  NVFP4_CHECK(state.has_value(), spec.is_eden() ? "EDEN" : "stochastic rounding",
              " needs rng_state, an int64 tensor (seed, offset)");
  return rng_state_of(*state, x);
}

// Where EDEN's rotations may begin.
inline void check_rotation_offset(int64_t col0) {
  NVFP4_CHECK(col0 >= 0 && col0 % kRotation == 0, "col0 must be a multiple of ", kRotation,
              ", where a rotation begins, not ", col0);
}

// How the blocks of a matrix (EDEN: its rotations) are numbered for their random bits: block (r, c) is number first +
// r * row_blocks + c of the logical tensor (numerics contract, sections 4 and 9).
struct BlockNumbers {
  int64_t first, row_blocks;
};

// The numbers of the blocks of a matrix at offset (row0, col0) of a tensor of full_width columns (0: the matrix's own).
inline BlockNumbers block_numbers(int64_t rows, int64_t columns, int64_t row0, int64_t col0, int64_t full_width,
                                  int64_t column_multiple = kBlock) {
  NVFP4_CHECK(row0 >= 0 && col0 >= 0 && full_width >= 0,
              "row0, col0 and full_width, where x lies in a larger tensor, must not be negative, not ", row0, ", ",
              col0, " and ", full_width);
  NVFP4_CHECK(col0 % column_multiple == 0, "col0 must be a multiple of ", column_multiple, ", where ",
              column_multiple == kBlock ? "a block" : "a rotation", " begins, not ", col0);
  const int64_t width = full_width ? full_width : columns;
  const int64_t row_blocks = width / column_multiple + (width % column_multiple != 0);
  int64_t last_row, before, last;
  const bool too_many = __builtin_add_overflow(row0, rows, &last_row) ||
                        __builtin_mul_overflow(last_row, row_blocks, &before) ||
                        __builtin_add_overflow(before, col0 / column_multiple + ceil_div(columns, column_multiple),
                                               &last);
  NVFP4_CHECK(!too_many, "blocks are numbered in 63 bits: row0 ", row0, " of a tensor of ", width,
              " columns lies beyond them");
  return {row0 * row_blocks + col0 / column_multiple, row_blocks};
}

// row0 and full_rows are col0 and full_width of the transpose: refused by their own names.
inline void check_transposed_offset(int64_t row0, int64_t full_rows) {
  NVFP4_CHECK(row0 >= 0 && row0 % kBlock == 0, "row0 must be a multiple of ", kBlock,
              ", where a block of the transpose begins, not ", row0);
  NVFP4_CHECK(full_rows >= 0, "full_rows must not be negative, not ", full_rows);
}

// --- what is quantized -----------------------------------------------------------------------------------------------

struct CodedShape {
  int64_t rows, blocks;  // blocks per row; the last may be partial
};

// Codes and block scales of so many columns.
inline CodedShape check_coded(const Tensor& qdata, const Tensor& scale, int64_t columns) {
  NVFP4_CHECK(qdata.scalar_type() == ScalarType::Byte && qdata.dim() >= 1,
              "qdata must be uint8 (..., K/2), two codes a byte, not ", text_of(qdata));
  const int64_t bytes = qdata.size(qdata.dim() - 1), blocks = bytes * 2 / kBlock, rows = leading_rows(qdata);
  NVFP4_CHECK(bytes % (kBlock / 2) == 0, "a row of qdata must be whole blocks of 8 bytes, not ", bytes,
              ": pad it with zeros");
  NVFP4_CHECK(columns <= blocks * kBlock && columns > (blocks - 1) * kBlock, "qdata of ", blocks,
              " blocks a row is of ", std::max<int64_t>((blocks - 1) * kBlock + 1, 0), " to ", blocks * kBlock,
              " columns, not ", columns);
  check_beside(scale, "scale", qdata, "qdata");
  NVFP4_CHECK(scale.scalar_type() == ScalarType::Float8_e4m3fn || scale.scalar_type() == ScalarType::Byte,
              "scale must be float8_e4m3fn or its bytes in uint8, not ", scale.scalar_type());
  const int64_t row_tiles = ceil_div(rows, kTileRows), column_tiles = ceil_div(blocks, kTileColumns);
  NVFP4_CHECK(scale.dim() == 4 && scale.size(0) == row_tiles && scale.size(1) == column_tiles && scale.size(2) == 32 &&
                  scale.size(3) == 16,
              "scale must be swizzled, (", row_tiles, ", ", column_tiles, ", 32, 16) for qdata of ", rows, " rows of ",
              blocks, " blocks, not ", text_of(scale), ": nvfp4_tensor.numerics.layout.swizzle does it");
  return {rows, blocks};
}

// One factor, or one per row, of a weight or of x.
inline Tensor factors_of(const Tensor& t, const char* name, int64_t rows, const Tensor& x, const char* x_name = "x") {
  check_beside(t, name, x, x_name);
  NVFP4_CHECK(t.numel() == 1 || t.numel() == rows, name, " must be one number, or one per row: 1 or ", rows, ", not ",
              t.numel());
  return contiguous_as(t, ScalarType::Float);
}

}  // namespace nvfp4
