// The arithmetic of bfloat16 for the product kernels: two numbers a word, on NEON with BFDOT and BFMMLA.
#pragma once

#include "cpu/simd/products/neon.h"
//
#include "cpu/simd/products/neon_16bit.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// Two bfloat16 a word. Sums round to odd and flush subnormals.
struct Bf16Math {
  using Value = uint16_t;
  static constexpr int kPerWord = 2;
  static constexpr unsigned kRefusedByFew = kTiny | kHuge, kRefusedByMany = kTiny;
  static constexpr int kMostFewRows = 8;  // not measured on an Arm CPU

  static bfloat16x8_t pairs_of(float32x4_t x) { return vreinterpretq_bf16_f32(x); }
  static F dot(F sum, F a, F b) {
    return map<F>(
        [](float32x4_t sum, float32x4_t a, float32x4_t b) { return vbfdotq_f32(sum, pairs_of(a), pairs_of(b)); }, sum,
        a, b);
  }

  static constexpr int kHalves = 2;
  static constexpr int kFewVectors = 4;
  template <int v>
  static F codes(I bytes) {
    return code_words<v>(bytes, e2m1_table<kCodeExponent>());
  }
  template <int half>
  static I half_of_pair(I first, I second) {
    return half_of_chunks<half>(first, second);
  }
  static F pair_scales(const uint8_t* at) { return scales_of_chunks(at); }

  static constexpr int kVectors = 4;
  // Elements 2u and 2u+1 of each lane's eight; a decoded number has zeros in its lower half.
  template <int u>
  static F numbers(const Chunk& chunk) {
    return pair(chunk.values<2 * u>(), chunk.values<2 * u + 1>());
  }
  static F pair(F low, F high) {
    return map<F>(
        [](float32x4_t low, float32x4_t high) {
          return vreinterpretq_f32_u32(vsriq_n_u32(vreinterpretq_u32_f32(high), vreinterpretq_u32_f32(low), 16));
        },
        low, high);
  }

  // multiply_tile of many.h, kVectors = 1, with a row step of words: a register of 2x2 sums takes two rows by two words
  // of a and of b at a time. Two words of b's rows are interleaved as they are loaded; all rows of a share them.
  template <int kRows>
  static void tile(const float* a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step, bool first);
};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
