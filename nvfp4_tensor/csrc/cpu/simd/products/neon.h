// What products need beyond simd/neon.h.
#pragma once

#include "cpu/simd/neon.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// A "register" is four: 24 of the 32 hold an output tile, 16 the sums of few rows. Counted, not measured on an Arm CPU.
constexpr int kMostVectors = 1;
constexpr int tile_rows(int) { return 6; }
constexpr int kFewX = 4;
constexpr int few_rows(int x) { return x > 2 ? 1 : 2; }
constexpr int kMostFewFloatRows = 8;

constexpr int kCodeExponent = 8;  // see products/avx512.h
constexpr float kCodeFactor = 1 << kCodeExponent;

NVFP4_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
// Lane i: the sum of the lanes of the register at p + i * step.
inline F sums_of_lanes(const float* p, int64_t step) {
  const auto partial = [&](int i) {
    const F x = load(p + i * step);
    return vaddq_f32(vaddq_f32(x.v[0], x.v[1]), vaddq_f32(x.v[2], x.v[3]));
  };
  const auto halving = [](float32x4_t a, float32x4_t b) { return vpaddq_f32(a, b); };
  return {{reduce_blocks<4>(0, partial, halving), reduce_blocks<4>(4, partial, halving),
           reduce_blocks<4>(8, partial, halving), reduce_blocks<4>(12, partial, halving)}};
}

// Four rows and columns of 32 bits, swapped.
inline void transpose4(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
  const auto low = [](float32x4_t x, float32x4_t y) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  };
  const auto high = [](float32x4_t x, float32x4_t y) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  };
  const float32x4_t ab = vtrn1q_f32(a, b), AB = vtrn2q_f32(a, b), cd = vtrn1q_f32(c, d), CD = vtrn2q_f32(c, d);
  a = low(ab, cd);
  b = low(AB, CD);
  c = high(ab, cd);
  d = high(AB, CD);
}
// Lane i of register j and lane j of register i are swapped, for 16 registers.
inline void transpose(F* r) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) transpose4(r[4 * i].v[j], r[4 * i + 1].v[j], r[4 * i + 2].v[j], r[4 * i + 3].v[j]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) {
      for (int row = 0; row < 4; ++row) {
        const float32x4_t held = r[4 * i + row].v[j];
        r[4 * i + row].v[j] = r[4 * j + row].v[i];
        r[4 * j + row].v[i] = held;
      }
    }
  }
}

// Code v of each lane's eight.
template <int v>
F code_values(I codes) {
  if constexpr (v == 7) {
    return e2m1_numbers<kCodeExponent>(shift_right<28>(codes));
  } else if constexpr (v == 0) {
    return e2m1_numbers<kCodeExponent>(bit_and(codes, set(15)));
  } else {
    return e2m1_numbers<kCodeExponent>(bit_and(shift_right<4 * v>(codes), set(15)));
  }
}

// Scales of eight bytes; a NaN for 0x7F and what lies above it.
inline void scale_values(uint16x8_t bytes, float32x4_t& low, float32x4_t& high) {
  const float16x8_t halves = vreinterpretq_f16_u16(vshlq_n_u16(bytes, 7));
  const int16x8_t nan = vreinterpretq_s16_u16(vcgtq_u16(bytes, vdupq_n_u16(0x7E)));  // all ones are one
  const auto with = [](float32x4_t x, int32x4_t nan) {
    return vreinterpretq_f32_s32(vorrq_s32(vreinterpretq_s32_f32(x), nan));
  };
  low = with(vcvt_f32_f16(vget_low_f16(halves)), vmovl_s16(vget_low_s16(nan)));
  high = with(vcvt_high_f32_f16(halves), vmovl_high_s16(nan));
}
inline uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}
// Scales of eight blocks, four at each address, in two lanes each.
inline F chunk_scales(const uint8_t* first, const uint8_t* second) {
  const uint8x8_t bytes = vcreate_u8(load_word(first) | uint64_t{load_word(second)} << 32);
  float32x4_t low, high;
  scale_values(vmovl_u8(bytes), low, high);
  return {{vzip1q_f32(low, low), vzip2q_f32(low, low), vzip1q_f32(high, high), vzip2q_f32(high, high)}};
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
