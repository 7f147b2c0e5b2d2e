// Block scales: nonnegative float8_e4m3fn, as bytes (numerics contract, section 2).
#pragma once

#include "platform.h"
#include "spec.h"

namespace nvfp4 {

constexpr uint8_t kE4M3Nan = 0x7F;

// The value of a byte 0..0x7E; NaN for 0x7F.
NVFP4_HD float e4m3_value(uint8_t bits) {
  if (bits >= kE4M3Nan) return bits_float(0x7FC00000u);
  // Below 2^-6 the byte counts steps of 2^-9; above, it is the top of the float's own encoding, exponent rebiased.
  return bits < 8 ? mul(static_cast<float>(bits), 1.0f / 512.0f)
                  : bits_float((static_cast<uint32_t>(bits) + (120u << 3)) << 20);
}

// The nearest e4m3 of v in [0, 448], a tie to the even byte.
NVFP4_HD uint8_t e4m3_nearest(float v) {
  if (v < 1.0f / 64.0f) {
    // Steps of 2^-9 are what float addition rounds to around 2^14; the count stays in the sum's low bits.
    return static_cast<uint8_t>(float_bits(add(v, 16384.0f)) - float_bits(16384.0f));
  }
  const uint32_t bits = float_bits(v);
  return static_cast<uint8_t>(((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}

// v >= 0 or NaN, saturated at 448; UP never gives 0 to a block that is not zero.
NVFP4_HD uint8_t to_e4m3(float v, ScaleRounding rounding, float block_amax) {
  if (v != v) return kE4M3Nan;
  v = clamp_max(v, kE4M3Max);
  const uint8_t bits = e4m3_nearest(v);
  if (rounding == ScaleRounding::kNearest) return bits;
  return bits + ((e4m3_value(bits) < v) || (bits == 0 && block_amax > 0.0f));
}

}  // namespace nvfp4
