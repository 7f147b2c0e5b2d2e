// Operands of FP8 products: e4m3 times a power of two per row (numerics contract, section 13).
#pragma once

#include "e4m3.h"

namespace nvfp4 {

// The least p from -126 on with a <= 448 * 2^p; 0 for a == 0. a is finite and not negative, and p is at most 120.
NVFP4_HD int fp8_exponent(float a) {
  const uint32_t bits = float_bits(a);
  const int p = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFFu) > 0x600000u);  // 448 = 1.75 * 2^8
  return bits == 0 ? 0 : p < -126 ? -126 : p;
}

// 2^p for -126 <= p <= 127.
NVFP4_HD float power_of_two(int p) { return bits_float(static_cast<uint32_t>(p + 127) << 23); }

// The largest of a row's block scales as the exponent of its e4m3 values. Bytes from 0x7F on mean NaN: leave them out.
NVFP4_HD int fp8_weight_exponent(uint8_t largest_scale) { return fp8_exponent(mul(6.0f, e4m3_value(largest_scale))); }

}  // namespace nvfp4
