// The arithmetic of bfloat16 for the product kernels: two numbers a word, on AVX-512.
#pragma once

#include "cpu/matmul/common.h"

namespace nvfp4::avx512 {
namespace {

// The numbers of the codes as bfloat16, times kCodeFactor, for an index whose fifth bit does not count.
struct CodeWords {
  alignas(64) uint16_t twice[32];

  constexpr CodeWords() : twice() {
    constexpr uint16_t magnitudes[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
    static_assert(kCodeFactor == 1 << 8);
    for (int code = 0; code < 16; ++code) {
      const int magnitude = magnitudes[code % 8] ? magnitudes[code % 8] + (8 << 7) : 0;
      twice[code] = twice[16 + code] = uint16_t(code / 8 << 15 | magnitude);
    }
  }
};
inline constexpr CodeWords kCodeWords;

// Two bfloat16 a word. Their products are added one after the other, each sum rounded to nearest.
struct Bf16Math {
  using Value = uint16_t;
  static constexpr int kPerWord = 2;
  static constexpr unsigned kRefusedByFew = kTiny | kHuge, kRefusedByMany = kTiny;
  static constexpr int kMostFewRows = 31;  // 24 of 4096^2, one thread: few 1.86 ms, many 2.62; 32 of 576^2: 75 us, 60

  static F dot(F sum, F a, F b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

  static constexpr int kHalves = 2;
  static constexpr int kFewVectors = 4;
  template <int v>
  static F codes(I bytes) {  // code v of each two bytes' four
    const I words = v ? _mm512_srli_epi16(bytes, 4 * v) : bytes;
    return as_float(_mm512_permutexvar_epi16(words, _mm512_load_si512(kCodeWords.twice)));
  }
  // Of the codes of a pair of chunks, half 0 or 1 of each block, a block per lane.
  template <int half>
  static I half_of_pair(I first, I second) {
    return bits(_mm512_shuffle_ps(as_float(first), as_float(second), half ? 0b11011101 : 0b10001000));
  }
  // Their scales in that order, from the tile of the first on.
  static F pair_scales(const uint8_t* at) {
    const auto eight = [](const uint8_t* p) {
      return _mm_insert_epi32(_mm_cvtsi32_si128(load_word(p)), load_word(p + kTileBytes), 1);
    };
    const __m256i words = _mm256_cvtepu8_epi16(_mm_unpacklo_epi16(eight(at), eight(at + 2 * kTileBytes)));
    const F scales = _mm512_cvtph_ps(_mm256_slli_epi16(words, 7));
    return select(_mm256_cmpge_epu16_mask(words, _mm256_set1_epi16(0x7F)), set(__builtin_nanf("")), scales);
  }

  static constexpr int kVectors = 4;
  // Elements 2u and 2u+1 of each lane's eight; a decoded number has zeros in its lower half.
  template <int u>
  static F numbers(const Chunk& chunk) {
    return pair(chunk.values<2 * u>(), chunk.values<2 * u + 1>());
  }
  static F pair(F low, F high) { return as_float(bit_or(shift_right<16>(bits(low)), bits(high))); }
};

}  // namespace
}  // namespace nvfp4::avx512
