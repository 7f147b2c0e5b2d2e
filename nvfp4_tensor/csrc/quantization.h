// What the ops of quantization share: specs with a scale per row, columns of values, and codes as outputs.
#pragma once

#include <vector>

#include "ops.h"

namespace nvfp4 {

constexpr int64_t kRowScaledBit = 1 << 13;  // of QuantizeSpec.pack()

inline QuantizeSpec row_spec_of(int64_t bits) {  // without that bit
  const QuantizeSpec spec = spec_of(bits & ~kRowScaledBit);
  NVFP4_CHECK(spec.block_rows == 1 && !spec.is_eden(), "rows are scaled in 1x16 blocks, without EDEN");
  return spec;
}

// Contiguous float32, one per row.
inline Tensor row_amaxes_of(const Tensor& amax, int64_t rows, const Tensor& x) {
  check_beside(amax, "amax", x);
  NVFP4_CHECK(amax.dim() == 1 && amax.size(0) == rows && amax.scalar_type() == ScalarType::Float, "amax is float32 (",
              rows, ",), one per row, not ", text_of(amax));
  return in_order(amax);
}

// A transform fills the padding of the last columns that it takes together, so what it returns keeps it.
inline int64_t columns_of_values(const QuantizeSpec& spec, int64_t columns) {
  const int together = spec.is_eden() ? kRotation : spec.hadamard_sign >= 0 ? kBlock : 1;
  return ceil_div(columns, together) * together;
}

// Codes of a shape whose last number is not yet known, and scales, on the device of `like` by the library's empty().
struct CodeTensors {
  int64_t rows, blocks;
  Tensor qdata, scale;

  CodeTensors(std::vector<int64_t> shape, int64_t row_count, int64_t columns, const Tensor& like,
              int64_t multiple = kBlock)
      : rows(row_count),
        blocks(ceil_div(columns, multiple) * (multiple / kBlock)),
        qdata(empty((shape.back() = blocks * kBlock / 2, shape), ScalarType::Byte, like)),
        scale(empty({ceil_div(rows, kTileRows), ceil_div(blocks, kTileColumns), 32, 16}, ScalarType::Float8_e4m3fn,
                    like)) {}

  bool is_padded() const { return rows % kTileRows != 0 || blocks % kTileColumns != 0; }
  uint8_t* codes() { return static_cast<uint8_t*>(qdata.mutable_data_ptr()); }
  uint8_t* scales() { return static_cast<uint8_t*>(scale.mutable_data_ptr()); }
};

}  // namespace nvfp4
