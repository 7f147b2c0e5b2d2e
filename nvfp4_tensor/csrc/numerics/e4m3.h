// Block scales: nonnegative float8_e4m3fn, as bytes (numerics contract, section 2).
#pragma once

#include "platform.h"
#include "spec.h"

namespace nvfp4 {

constexpr uint8_t kE4M3Nan = 0x7F;

// The value of a byte 0..0x7E; NaN for 0x7F.
NVFP4_HD float e4m3_value(uint8_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bits)));
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(halves));
  return value;
#else
  if (bits >= kE4M3Nan) return bits_float(0x7FC00000u);
  // Below 2^-6 the byte counts steps of 2^-9; above, it is the top of the float's own encoding, exponent rebiased.
  return bits < 8 ? mul(static_cast<float>(bits), 1.0f / 512.0f)
                  : bits_float((static_cast<uint32_t>(bits) + (120u << 3)) << 20);
#endif
}

// The nearest e4m3 of v >= 0, a tie to the even byte, saturated at 448; NaN for NaN.
NVFP4_HD uint8_t e4m3_nearest(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return static_cast<uint8_t>(pair);
#else
  if (v != v) return kE4M3Nan;
  v = clamp_max(v, kE4M3Max);
  if (v < 1.0f / 64.0f) {
    // Steps of 2^-9 are what float addition rounds to around 2^14; the count stays in the sum's low bits.
    return static_cast<uint8_t>(float_bits(add(v, 16384.0f)) - float_bits(16384.0f));
  }
  const uint32_t bits = float_bits(v);
  return static_cast<uint8_t>(((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
#endif
}

// v >= 0 or NaN; UP never gives 0 to a block that is not zero.
NVFP4_HD uint8_t to_e4m3(float v, ScaleRounding rounding, float block_amax) {
  const uint8_t bits = e4m3_nearest(v);
  if (rounding == ScaleRounding::kNearest) return bits;
  const bool below = e4m3_value(bits) < clamp_max(v, kE4M3Max) || (bits == 0 && block_amax > 0.0f);
  return bits + below;  // NaN is below nothing
}

}  // namespace nvfp4
