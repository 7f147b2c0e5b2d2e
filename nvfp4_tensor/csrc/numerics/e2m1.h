// E2M1 elements: rounding to a code, and back (numerics contract, sections 1 and 3).
//
// The code of a magnitude a, made piecewise linear, is c(a) = min(2a, a + 2, a/2 + 4): its slopes fall, so the smallest
// of the three lines is always the right one. Rounding to E2M1 is rounding c(a) to an integer.
#pragma once

#include "platform.h"
#include "spec.h"

namespace nvfp4 {

// The value of code 0..15; code 8 is -0.0.
NVFP4_HD float e2m1_value(uint32_t code) {
  const uint32_t index = code & 7u;
  const uint32_t magnitude_bits = index < 2 ? index * 0x3F000000u : 0x3F800000u + ((index - 2u) << 22);
  return bits_float(magnitude_bits | (code & 8u) << 28);
}

// c(a) in steps of 2^-16, rounded down; *inexact says whether anything was cut off. 0 <= a <= 6.
NVFP4_HD uint32_t e2m1_fixed(float a, bool* inexact) {
  const int segment = a < 2.0f ? 0 : a < 4.0f ? 1 : 2;                // step 1/2, 1, 2
  const float steps = mul(a, static_cast<float>(131072 >> segment));  // exact: a power of two
  const uint32_t floor = static_cast<uint32_t>(steps);
  *inexact = static_cast<float>(floor) != steps;
  return floor + (static_cast<uint32_t>(segment) << 17);
}

// The code 0..15 of v, saturated at 6. draw: the element's 16 random bits, used by STOCHASTIC alone. With 8 random
// bits it is random16 & 0xFF00: floor(f * 2^16) + 2^8 r8 reaches 2^16 exactly where floor(f * 2^8) + r8 reaches 2^8.
NVFP4_HD uint32_t round_e2m1(float v, RoundingMode mode, uint32_t draw) {
  bool inexact;
  const uint32_t fixed = e2m1_fixed(clamp_max(magnitude(v), kE2M1Max), &inexact);
  uint32_t carry = draw;
  if (mode == RoundingMode::kNearestEven) carry = 0x7FFFu + (inexact | (fixed >> 16 & 1u));
  if (mode == RoundingMode::kNearestAway) carry = 0x8000u;
  if (mode == RoundingMode::kNearestZero) carry = 0x7FFFu + inexact;
  return (fixed + carry) >> 16 | (float_bits(v) >> 31) << 3;
}

}  // namespace nvfp4
