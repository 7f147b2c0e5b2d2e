// QuantizeSpec, unpacked from the integer that QuantizeSpec.pack() of spec.py makes.
#pragma once

#include "platform.h"

namespace nvfp4 {

enum class RoundingMode : int { kNearestEven = 0, kNearestAway = 1, kNearestZero = 2, kStochastic = 3, kEden = 4 };
enum class ScaleRounding : int { kNearest = 0, kUp = 1 };
enum class FourOverSix : int { kNone = 0, kAbsolute = 1, kSquared = 2 };
enum class ScaleSearch : int { kNone = 0, kSquared = 1 };

struct QuantizeSpec {
  RoundingMode round_mode;
  ScaleRounding scale_rounding;
  FourOverSix four_over_six;
  ScaleSearch scale_search;
  int block_rows;          // 1 or 16
  float scale_ceiling;     // 448 or 256
  int random_bits;         // 16 or 8
  bool hardware_rounding;  // cvt.rs where the device has it
  int hadamard_sign;       // -1, or 16 bits: element i is negated where bit i is set

  // Whether QuantizeSpec.pack() makes this integer of any spec.
  static bool is_packed(int64_t bits) {
    constexpr int64_t kEdenBit = 1 << 12, kCeilingBit = 1 << 6;
    if (bits & kEdenBit) return (bits & ~(kEdenBit | kCeilingBit)) == 0;
    const bool hadamard = bits >> 9 & 1, hardware = bits >> 8 & 1, search = bits >> 10 & 1;
    constexpr int64_t kStochastic8 = 1 << 7 | 3;
    return (bits & ~(hadamard ? int64_t{0xFFFF07FF} : int64_t{0x7FF})) == 0 && (bits >> 4 & 3) != 3 &&
           (!hardware || (bits & kStochastic8) == kStochastic8) && !(search && (bits >> 4 & 3));
  }

  NVFP4_HD static QuantizeSpec unpack(int64_t bits) {
    QuantizeSpec spec;
    spec.round_mode = bits >> 12 & 1 ? RoundingMode::kEden : static_cast<RoundingMode>(bits & 3);
    spec.scale_search = static_cast<ScaleSearch>(bits >> 10 & 1);
    spec.block_rows = bits >> 2 & 1 ? kBlock : 1;
    spec.scale_rounding = static_cast<ScaleRounding>(bits >> 3 & 1);
    spec.four_over_six = static_cast<FourOverSix>(bits >> 4 & 3);
    spec.scale_ceiling = bits >> 6 & 1 ? 256.0f : 448.0f;
    spec.random_bits = bits >> 7 & 1 ? 8 : 16;
    spec.hardware_rounding = bits >> 8 & 1;
    spec.hadamard_sign = bits >> 9 & 1 ? static_cast<int>(bits >> 16 & 0xFFFF) : -1;
    return spec;
  }

  // Whether the codes take random bits; EDEN's do not, its scales and its rotation do.
  NVFP4_HD bool is_stochastic() const { return round_mode == RoundingMode::kStochastic; }
  NVFP4_HD bool is_eden() const { return round_mode == RoundingMode::kEden; }
  NVFP4_HD bool takes_random_bits() const { return is_stochastic() || is_eden(); }
  // Columns that are stored together, the last ones filled up.
  NVFP4_HD int column_multiple() const { return is_eden() ? kRotation : kBlock; }
};

}  // namespace nvfp4
