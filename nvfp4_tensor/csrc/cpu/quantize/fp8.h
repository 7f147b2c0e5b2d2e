// Weights in FP8: code x scale in float32, rounded once.
#pragma once

#include "cpu/quantize/block_math.h"

namespace nvfp4::NVFP4_ISA {

constexpr int kFp8Step = 32;

template <typename Out>
NVFP4_INLINE void decode_fp8_step(const uint8_t* codes, F scale, Out* out) {
  alignas(64) float in_order[kFp8Step];
  for (int i = 0; i < kFp8Step; i += 16) {
    const I code = load_bytes(codes + i);
    const I magnitude = bits(e4m3_values(bit_and(code, set(0x7F))));
    const F value = as_float(bit_or(magnitude, shift_left<24>(bit_and(code, set(0x80)))));
    store(in_order + i, plain_nan(mul(value, scale)));
  }
  if constexpr (sizeof(Out) == sizeof(float)) {
    std::memcpy(out, in_order, sizeof in_order);
  } else {
    F even, odd;
    load_pairs(in_order, even, odd);
    store_pairs(out, even, odd);
  }
}

template <typename Out>
void decode_fp8(const Fp8Codes& in, Out* out, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t scale_row = row / in.rows * in.scale_rows + (in.first + row % in.rows) / in.height;
    const float* scale = in.scale + scale_row * in.scale_columns;
    const uint8_t* codes = in.codes + row * in.columns;
    Out* values = out + row * in.columns;
    for (int64_t column = 0; column < in.columns; ++scale) {
      const F factor = set(*scale);
      const int64_t stop = std::min(column + in.width, in.columns);
      for (; column + kFp8Step <= stop; column += kFp8Step) decode_fp8_step(codes + column, factor, values + column);
      if (column == stop) continue;
      uint8_t last_codes[kFp8Step] = {};
      Out last[kFp8Step];
      std::memcpy(last_codes, codes + column, stop - column);
      decode_fp8_step(last_codes, factor, last);
      std::memcpy(values + column, last, (stop - column) * sizeof(Out));
      column = stop;
    }
  }
}

}  // namespace nvfp4::NVFP4_ISA
