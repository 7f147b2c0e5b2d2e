// Sixteen lanes in two AVX2 registers: the vocabulary of the kernels; lanes.h and portable.h say what each word means.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace nvfp4::avx2 {

using Floats = __m256;
using Ints = __m256i;
constexpr int kParts = 2;

}  // namespace nvfp4::avx2

#include "cpu/simd/lanes.h"

namespace nvfp4::avx2 {

constexpr bool kManyRegisters = false;
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
// p[0], p[16], ... p[240].
inline F gather_stride16(const float* p) {
  const __m256i index = _mm256_slli_epi32(load256(kLaneNumbers), 4);
  return {_mm256_i32gather_ps(p, index, 4), _mm256_i32gather_ps(p + 128, index, 4)};
}

inline F min(F a, F b) { return {_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}; }
inline I select(Mask m, I yes, I no) {
  return {_mm256_blendv_epi8(no.v[0], yes.v[0], m.v[0]), _mm256_blendv_epi8(no.v[1], yes.v[1], m.v[1])};
}
inline F select(Mask m, F yes, F no) { return as_float(select(m, bits(yes), bits(no))); }
inline uint32_t lanes(Mask m) {
  const F f = as_float(m);
  return uint32_t(_mm256_movemask_ps(f.v[0])) | uint32_t(_mm256_movemask_ps(f.v[1])) << 8;
}

inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])};
}
inline F add_exact_product(F t, F scale, F a) { return fma(t, scale, a); }
inline F sub_exact_product(F t, float scale, F a) {
  const __m256 s = _mm256_set1_ps(scale);
  return {_mm256_fnmadd_ps(t.v[0], s, a.v[0]), _mm256_fnmadd_ps(t.v[1], s, a.v[1])};
}
template <int distance>
inline F swap_lanes(F a) {
  if constexpr (distance == 4) {
    return {_mm256_permute2f128_ps(a.v[0], a.v[0], 1), _mm256_permute2f128_ps(a.v[1], a.v[1], 1)};
  } else {
    constexpr int order = distance == 1 ? 0b10110001 : 0b01001110;
    return {_mm256_permute_ps(a.v[0], order), _mm256_permute_ps(a.v[1], order)};
  }
}

// --- 32 elements as even and odd ones --------------------------------------------------------------------------------

inline __m128i load128(const void* p, int i) { return _mm_loadu_si128(static_cast<const __m128i*>(p) + i); }
inline F load_floats(const Bf16* p) {
  return as_float(shift_left<16>(I{_mm256_cvtepu16_epi32(load128(p, 0)), _mm256_cvtepu16_epi32(load128(p, 1))}));
}
inline F load_floats(const Fp16* p) { return {_mm256_cvtph_ps(load128(p, 0)), _mm256_cvtph_ps(load128(p, 1))}; }

// AlignedFloats 0, 2, .. 14 of 32 bits' halves, as the low 128 bits.
inline __m128i even_words(__m256i x) {
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)), _mm256_setzero_si256());
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0b1000));
}

inline void load_pairs(const Fp16* p, F& even, F& odd) {
  const I x = {load256(p), load256(p + 16)}, upper = shift_right<16>(x);
  even = {_mm256_cvtph_ps(even_words(x.v[0])), _mm256_cvtph_ps(even_words(x.v[1]))};
  odd = {_mm256_cvtph_ps(even_words(upper.v[0])), _mm256_cvtph_ps(even_words(upper.v[1]))};
}

inline void split(__m256 a, __m256 b, __m256& even, __m256& odd) {
  const auto in_order = [](__m256 x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0b11011000));
  };
  even = in_order(_mm256_shuffle_ps(a, b, 0b10001000));
  odd = in_order(_mm256_shuffle_ps(a, b, 0b11011101));
}
inline void load_pairs(const float* p, F& even, F& odd) {
  split(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), even.v[0], odd.v[0]);
  split(_mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24), even.v[1], odd.v[1]);
}

inline I upper_halves(I low, I high) {
  return map<I>([](__m256i a, __m256i b) { return _mm256_blend_epi16(a, b, 0b10101010); }, shift_right<16>(low), high);
}

inline void store_pairs(Fp16* p, F even, F odd) {
  const auto halves = [](__m256 x) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); };
  store256(p, _mm256_or_si256(halves(even.v[0]), _mm256_slli_epi32(halves(odd.v[0]), 16)));
  store256(p + 16, _mm256_or_si256(halves(even.v[1]), _mm256_slli_epi32(halves(odd.v[1]), 16)));
}

inline void merge(float* p, __m256 even, __m256 odd) {
  const __m256 a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a, b, 0x31));
}
inline void store_pairs(float* p, F even, F odd) {
  merge(p, even.v[0], odd.v[0]);
  merge(p + 16, even.v[1], odd.v[1]);
}

// 32 lanes of a byte each to 32 bytes in order.
inline __m256i bytes_of(I a, I b) {
  const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(a.v[0], a.v[1]), _mm256_packus_epi32(b.v[0], b.v[1]));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store_codes(uint8_t* out, const I* pairs) {
  for (int i = 0; i < 4; ++i) store256(out + 32 * i, bytes_of(pairs[2 * i], pairs[2 * i + 1]));
}
inline I load_bytes(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline void store_bytes(uint8_t* out, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes_of(x, x)));
}
inline void load_codes(const uint8_t* bytes, I& even, I& odd) {
  even = load_bytes(bytes);
  odd = shift_right<4>(even);  // e2m1_values looks at four bits only
}
inline F e2m1_values(I codes) {
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const F magnitude = {_mm256_permutevar8x32_ps(table, codes.v[0]), _mm256_permutevar8x32_ps(table, codes.v[1])};
  return as_float(bit_or(bits(magnitude), shift_left<28>(bit_and(codes, set(8)))));
}

// 32 bytes, 64 codes, as two pairs: even, odd, even, odd: before the template of attention/tile.h. A value's bfloat16
// is two bytes, each of a table of 16: 20 instructions, where e2m1_values takes 40.
inline void code_pairs(const uint8_t* bytes, F* out) {
  const auto both = [](__m128i table) { return _mm256_broadcastsi128_si256(table); };
  const __m256i low_bytes = both(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const __m256i high_bytes = both(
      _mm_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  // So that unpacks, which work within halves, leave the values in order.
  const __m256i x = _mm256_permutevar8x32_epi32(load256(bytes), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  for (int odd = 0; odd < 2; ++odd) {
    const __m256i code = _mm256_and_si256(odd ? _mm256_srli_epi16(x, 4) : x, nibble);
    const __m256i low = _mm256_shuffle_epi8(low_bytes, code), high = _mm256_shuffle_epi8(high_bytes, code);
    const __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    for (int pair = 0; pair < 2; ++pair) {
      out[2 * pair + odd] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words[pair])),
                             _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words[pair]))};
    }
  }
}

// --- block maxima ----------------------------------------------------------------------------------------------------

// The largest of 16 magnitudes of 15 bits: the instruction for it finds the smallest of 8.
inline int32_t largest16(const void* p) {
  const __m256i x = _mm256_andnot_si256(load256(p), _mm256_set1_epi16(0x7FFF));
  const __m128i least = _mm_min_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return 0x7FFF - _mm_cvtsi128_si32(_mm_minpos_epu16(least)) % 0x10000;
}
template <typename T>
I block_magnitudes16(const T* p) {
  alignas(64) int32_t out[16];
  for (int block = 0; block < 16; ++block) out[block] = largest16(p + 16 * block);
  return load(out);
}
inline I block_magnitudes(const Bf16* p) { return shift_left<16>(block_magnitudes16(p)); }
inline I block_magnitudes(const Fp16* p) {
  const I m = block_magnitudes16(p);
  return bits(F{_mm256_cvtph_ps(even_words(m.v[0])), _mm256_cvtph_ps(even_words(m.v[1]))});
}
inline I block_magnitudes(const float* p) {
  alignas(64) int32_t out[16];
  for (int block = 0; block < 16; ++block) {
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    const __m256i most = _mm256_max_epi32(_mm256_and_si256(load256(p + 16 * block), mask),
                                          _mm256_and_si256(load256(p + 16 * block + 8), mask));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b01001110));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b10110001));
    out[block] = _mm_cvtsi128_si32(m);
  }
  return load(out);
}

// --- random bits -----------------------------------------------------------------------------------------------------

inline void multiply_wide(__m256i a, __m256i b, __m256i& low, __m256i& high) {
  const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0b10101010);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0b10101010);
}
inline void multiply_wide(I a, uint32_t constant, I& low, I& high) {
  const __m256i b = _mm256_set1_epi32(int32_t(constant));
  multiply_wide(a.v[0], b, low.v[0], high.v[0]);
  multiply_wide(a.v[1], b, low.v[1], high.v[1]);
}
// Each block's 16 bytes in order.
struct RandomWindows {
  alignas(64) uint8_t bytes[16][16];
  static I lane_order(I x) { return x; }
  RandomWindows() = default;
  explicit RandomWindows(const I* word) {
    place(0, word[0].v[0], word[1].v[0], word[2].v[0], word[3].v[0]);
    place(8, word[0].v[1], word[1].v[1], word[2].v[1], word[3].v[1]);
  }
  void pair(int p, I& even, I& odd) const {
    const __m128i a = block(2 * p), b = block(2 * p + 1);
    even = {_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(b)};
    odd = {_mm256_cvtepu16_epi32(_mm_alignr_epi8(a, a, 1)), _mm256_cvtepu16_epi32(_mm_alignr_epi8(b, b, 1))};
  }

 private:
  __m128i block(int i) const { return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes[i])); }
  void place(int first, __m256i w0, __m256i w1, __m256i w2, __m256i w3) {
    const __m256i a = _mm256_unpacklo_epi32(w0, w1), b = _mm256_unpackhi_epi32(w0, w1);
    const __m256i c = _mm256_unpacklo_epi32(w2, w3), d = _mm256_unpackhi_epi32(w2, w3);
    put(first, _mm256_unpacklo_epi64(a, c));
    put(first + 1, _mm256_unpackhi_epi64(a, c));
    put(first + 2, _mm256_unpacklo_epi64(b, d));
    put(first + 3, _mm256_unpackhi_epi64(b, d));
  }
  void put(int i, __m256i two) {
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes[i]), _mm256_castsi256_si128(two));
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes[i + 4]), _mm256_extracti128_si256(two, 1));
  }
};

}  // namespace nvfp4::avx2
