// What products need beyond simd/avx2.h.
#pragma once

#include "cpu/simd/avx2.h"

namespace nvfp4::avx2 {
namespace {

constexpr int kMostVectors = 1;  // a "register" is two: 12 of the 16 hold an output tile
constexpr int tile_rows(int) { return 6; }
constexpr int kFewX = 2;
constexpr int few_rows(int) { return 2; }
constexpr int kMostFewFloatRows = 8;  // 8 rows of 4096^2: few 5.4 ms of one thread, many 6.6; 16 rows: 10.1 and 6.6

constexpr float kCodeFactor = 256.0f;  // see products/avx512.h

inline F multiply_add(F a, F b, F c) { return fma(a, b, c); }
// Eight of the sums below: of halves, of their halves, and so on.
inline __m256 eight_sums(const float* p, int64_t step) {
  const auto folded = [&](int i) {
    const F x = load(p + i * step);
    return _mm256_add_ps(x.v[0], x.v[1]);
  };
  const auto halves = [&](int i) {  // sums i and i + 4, four lanes each
    const __m256 a = folded(i), b = folded(i + 4);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto quarters = [&](int i) {  // and i + 1 and i + 5, two lanes each
    const __m256d a = _mm256_castps_pd(halves(i)), b = _mm256_castps_pd(halves(i + 1));
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  };
  const __m256 a = quarters(0), b = quarters(2);
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0b10001000), _mm256_shuffle_ps(a, b, 0b11011101));
}
// Lane i: the sum of the lanes of the register at p + i * step.
inline F sums_of_lanes(const float* p, int64_t step) { return {eight_sums(p, step), eight_sums(p + 8 * step, step)}; }

// Lane i of register j and lane j of register i are swapped, for 16 registers.
inline void transpose(F* r) {
  float rows[16][16], columns[16][16];
  std::memcpy(rows, r, sizeof rows);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) columns[j][i] = rows[i][j];
  }
  std::memcpy(static_cast<void*>(r), columns, sizeof columns);
}

template <int v>
__m256 code_values(__m256i codes) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f * kCodeFactor, 1.0f * kCodeFactor, 1.5f * kCodeFactor,
                                           2.0f * kCodeFactor, 3.0f * kCodeFactor, 4.0f * kCodeFactor,
                                           6.0f * kCodeFactor);
  const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(codes, 4 * v));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28 - 4 * v), _mm256_set1_epi32(int32_t(0x80000000)));
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}
template <int v>
F code_values(I codes) {
  return {code_values<v>(codes.v[0]), code_values<v>(codes.v[1])};
}

// Scales of four blocks in two lanes each.
inline __m256 four_scales(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  const __m128i bytes = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(word));
  const __m128 scales = _mm_cvtph_ps(_mm_slli_epi16(bytes, 7));
  const __m128i nan = _mm_cvtepi16_epi32(_mm_cmpgt_epi16(bytes, _mm_set1_epi16(0x7E)));  // all ones are a NaN
  const __m128 all = _mm_or_ps(scales, _mm_castsi128_ps(nan));
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(all), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
inline F chunk_scales(const uint8_t* first, const uint8_t* second) { return {four_scales(first), four_scales(second)}; }

}  // namespace
}  // namespace nvfp4::avx2
