// A table of what a block's codes can decode to: 16 numbers in bfloat16 for each byte of a block scale.
#pragma once

#include <bit>
#include <cstdint>

#include "numerics/block.h"

namespace nvfp4 {

// code * scale, which bfloat16 holds exactly; NaN from scale 0x7F on. 8 KiB, which stay in the first-level cache.
struct DecodedWords {
  alignas(64) uint16_t of[256][kBlock];

  constexpr DecodedWords() : of() {
    constexpr float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int scale = 0; scale < 256; ++scale) {
      const int exponent = scale >> 3, fraction = scale & 7;
      const float value = exponent ? float(8 + fraction) * std::bit_cast<float>((exponent - 10 + 127) << 23)
                                   : float(fraction) * 0x1p-9f;
      for (int code = 0; code < 16; ++code) {
        const uint32_t bits = std::bit_cast<uint32_t>(value * magnitudes[code & 7]) | uint32_t(code & 8) << 28;
        of[scale][code] = scale < 0x7F ? uint16_t(bits >> 16) : uint16_t{0x7FC0};
      }
    }
  }
};
inline constexpr DecodedWords kDecodedWords;

}  // namespace nvfp4
