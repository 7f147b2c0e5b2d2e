// EDEN: the random bits of its rotation and of its scales, and how a scale is rounded by them (numerics contract,
// section 9).
#pragma once

#include "e4m3.h"
#include "philox.h"

namespace nvfp4 {

constexpr int kRotationBlocks = kRotation / kBlock;
constexpr float kRotationFactor = 0.08838834764831845f;  // 2^-3.5

// A block's largest element lands at 6.07, MS-EDEN's choice; the correction scales what was rounded (section 9).
constexpr float kOntoGrid = static_cast<float>(1.0625 * 0.93 / 6);

// Streams of Philox: of the signs, and of the scales of stream 0.
constexpr uint32_t kSignStream = 256, kScaleStream = 257;

// The 16 bits of block 0..7 of a rotation: the signs of its elements, or the draw of its scale. Chosen, not indexed: on
// a device an array indexed by a lane's number lies in memory.
NVFP4_HD uint32_t bits_of_block(const Words4& words, uint32_t block) {
  const uint32_t low = block & 2u ? words.word[1] : words.word[0];
  const uint32_t high = block & 2u ? words.word[3] : words.word[2];
  return (block & 4u ? high : low) >> (block % 2u * 16u) & 0xFFFFu;
}

// The byte of 0 <= t <= 448, rounded stochastically.
NVFP4_HD uint8_t round_scale(float t, uint32_t r16) {
  // In steps of 2^-16 of the distance to the next e4m3, which is 2^-9 below 2^-6.
  const uint32_t fixed = t < 1.0f / 64.0f ? static_cast<uint32_t>(mul(t, 33554432.0f))
                                          : (float_bits(t) >> 4) - (120u << 19);
  return static_cast<uint8_t>((fixed + r16) >> 16);
}

// t of a block: its scale times the rotation's correction A / B, where that is finite.
NVFP4_HD float corrected_scale(float s1, float correction) {
  return clamp_max(is_finite(correction) ? mul(s1, correction) : s1, kE4M3Max);
}
NVFP4_HD float corrected_scale(float s1, float a, float b) { return corrected_scale(s1, div(a, b)); }

}  // namespace nvfp4
