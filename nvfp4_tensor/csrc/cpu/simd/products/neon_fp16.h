// The arithmetic of float16 for few rows: two numbers a word, on NEON with FMLAL.
#pragma once

#include "cpu/simd/products/neon.h"
//
#include "cpu/simd/products/neon_16bit.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// The numbers of the codes as float16, times kCodeFactor: the upper bytes, and the lower ones, which are zero.
inline uint8x16x2_t fp16_table() {
  static_assert(kCodeExponent == 8);
  alignas(16) static constexpr uint8_t kUpper[16] = {0,    0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66,
                                                     0x80, 0xD8, 0xDC, 0xDE, 0xE0, 0xE2, 0xE4, 0xE6};
  return {{vld1q_u8(kUpper), vdupq_n_u8(0)}};
}

// Two float16 a word, each product added exactly before the one rounding of the sum.
struct Fp16Math {
  using Value = Fp16;
  static constexpr unsigned kRefusedByFew = 0;
  static constexpr int kMostFewRows = 8;  // not measured on an Arm CPU

  // FMLAL takes a lane's first number from the lower half of a register, its second from the upper: `arrange` puts
  // those of x there, `codes` those of the weight.
  static uint8x16_t arranged(uint8x16_t x) {
    const uint16x8_t words = vreinterpretq_u16_u8(x);
    return vreinterpretq_u8_u64(
        vzip1q_u64(vreinterpretq_u64_u16(vuzp1q_u16(words, words)), vreinterpretq_u64_u16(vuzp2q_u16(words, words))));
  }
  static void arrange(Value* chunk) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(chunk);
    for (int i = 0; i < kChunk * int(sizeof(Value)); i += 16) vst1q_u8(bytes + i, arranged(vld1q_u8(bytes + i)));
  }
  static F dot(F sum, F a, F b) {
    return map<F>(
        [](float32x4_t sum, float32x4_t a, float32x4_t b) {
          const float16x8_t x = vreinterpretq_f16_f32(a), y = vreinterpretq_f16_f32(b);
          return vfmlalq_high_f16(vfmlalq_low_f16(sum, x, y), x, y);
        },
        sum, a, b);
  }

  static constexpr int kHalves = 2;
  static constexpr int kFewVectors = 4;
  template <int v>
  static F codes(I bytes) {
    const I own = map<I>([](int32x4_t x) { return vreinterpretq_s32_u8(arranged(vreinterpretq_u8_s32(x))); }, bytes);
    return code_words<v>(own, fp16_table());
  }
  template <int half>
  static I half_of_pair(I first, I second) {
    return half_of_chunks<half>(first, second);
  }
  static F pair_scales(const uint8_t* at) { return scales_of_chunks(at); }
};

// Elements [first, first + kChunk) of a row of x in float16, as it is, zeros beyond its end.
inline unsigned load_x(const Product& p, int64_t row, int64_t first, Fp16* out) {
  const int64_t count = least(kChunk, p.depth() - first);
  if (count < kChunk) std::memset(out, 0, kChunk * sizeof *out);
  if (count > 0) std::memcpy(out, x_row(p, row) + first * sizeof *out, count * sizeof *out);
  return 0;
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
