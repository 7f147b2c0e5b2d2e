// What products need beyond simd/avx512.h.
#pragma once

#include "cpu/simd/avx512.h"

namespace nvfp4::avx512 {
namespace {

constexpr int kMostVectors = 4;  // registers of a row of an output tile, and for so many of them, its rows: 24 sums
constexpr int tile_rows(int vectors) { return 24 / vectors; }
constexpr int kFewX = 8;                                 // rows of x that meet a decoded weight in registers
constexpr int few_rows(int x) { return x > 4 ? 2 : 4; }  // and rows of the weight side by side
constexpr int kMostFewFloatRows = 12;  // 12 rows of 4096^2: few 2.4 ms of one thread, many 2.6; 16 rows: 3.0 and 2.5

// Codes are looked up as 2^8 times themselves and scales as 2^-8 times: a byte of e4m3 shifted up by seven is just that
// in float16.
constexpr float kCodeFactor = 256.0f;

inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// Lane i: the sum of the lanes of the register at p + i * step. Halves of registers are added, not lanes: 45
// instructions instead of 16 times 11.
inline F sums_of_lanes(const float* p, int64_t step) {
  F r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = load(p + i * step);
  const auto low = [](F a, F b) { return as_float(_mm512_unpacklo_epi64(bits(a), bits(b))); };
  const auto high = [](F a, F b) { return as_float(_mm512_unpackhi_epi64(bits(a), bits(b))); };
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = add(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) r[i] = add(low(r[2 * i], r[2 * i + 1]), high(r[2 * i], r[2 * i + 1]));
  constexpr int even = 0b10001000, odd = 0b11011101;  // quarters of the registers
#pragma GCC unroll 2
  for (int n = 2; n; --n) {
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) {
      r[i] = add(_mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], even), _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], odd));
    }
  }
  return r[0];
}

// Lane i of register j and lane j of register i are swapped, for 16 registers.
inline void transpose(F* r) {
  F t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto low = [](F a, F b) { return as_float(_mm512_unpacklo_epi64(bits(a), bits(b))); };
  const auto high = [](F a, F b) { return as_float(_mm512_unpackhi_epi64(bits(a), bits(b))); };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
  constexpr int even = 0b10001000, odd = 0b11011101;  // quarters of the registers
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const F a = _mm512_shuffle_f32x4(r[j], r[4 + j], even), b = _mm512_shuffle_f32x4(r[j], r[4 + j], odd);
    const F c = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], even), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], odd);
    t[j] = _mm512_shuffle_f32x4(a, c, even);
    t[4 + j] = _mm512_shuffle_f32x4(b, d, even);
    t[8 + j] = _mm512_shuffle_f32x4(a, c, odd);
    t[12 + j] = _mm512_shuffle_f32x4(b, d, odd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

inline I load_chunk(const uint8_t* codes) { return _mm512_loadu_si512(codes); }
// The first `count` bytes of a chunk, 1 to 63, and zeros.
inline I load_part(const uint8_t* codes, int count) {
  return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - count), codes);
}
// Code v of each lane's eight.
template <int v>
F code_values(I codes) {
  const F table = mul(set(kCodeFactor), _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f));
  return _mm512_permutexvar_ps(v ? _mm512_srli_epi32(codes, 4 * v) : codes, table);
}

inline int32_t load_word(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Scales of eight blocks, four at each address, in two lanes each.
inline F chunk_scales(const uint8_t* first, const uint8_t* second) {
  const __m128i bytes = _mm_insert_epi32(_mm_cvtsi32_si128(load_word(first)), load_word(second), 1);
  const __m256 scales = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
  const __mmask8 nan = _mm_cmpge_epu16_mask(_mm_cvtepu8_epi16(bytes), _mm_set1_epi16(0x7F));
  const __m256 all = _mm256_mask_mov_ps(scales, nan, _mm256_set1_ps(__builtin_nanf("")));
  const I twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(all));
}

}  // namespace
}  // namespace nvfp4::avx512
