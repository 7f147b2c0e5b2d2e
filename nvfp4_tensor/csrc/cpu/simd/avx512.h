// Sixteen lanes in one AVX-512 register: the vocabulary of the kernels; lanes.h and portable.h say what each word
// means.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/host/kernels.h"

namespace nvfp4::avx512 {

using F = __m512;
using I = __m512i;
using Mask = __mmask16;

constexpr bool kManyRegisters = true;
alignas(64) inline constexpr int32_t kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline F set(float x) { return _mm512_set1_ps(x); }
inline I set(int32_t x) { return _mm512_set1_epi32(x); }
inline I bits(F x) { return _mm512_castps_si512(x); }
inline F as_float(I x) { return _mm512_castsi512_ps(x); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline I load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline F load_halves(const float* low, const float* high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1);
}
// p[0], p[16], ... p[240].
inline F gather_stride16(const float* p) { return _mm512_i32gather_ps(_mm512_slli_epi32(load(kLaneNumbers), 4), p, 4); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store(int32_t* p, I x) { _mm512_storeu_si512(p, x); }

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I max(I a, I b) { return _mm512_max_epi32(a, b); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int n>
inline I shift_left(I a) {
  return _mm512_slli_epi32(a, n);
}
template <int n>
inline I shift_right(I a) {
  return _mm512_srli_epi32(a, n);
}

inline Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Mask equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline Mask greater(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline uint32_t lanes(Mask m) { return m; }
inline F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
inline I select(Mask m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

// min(|a|, 6), one instruction.
inline F magnitude_to_6(F a) { return _mm512_range_ps(a, _mm512_set1_ps(6.0f), 0b1010); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// a +- t * scale, where t * scale is exact, so that fusing changes nothing.
inline F add_exact_product(F t, F scale, F a) { return fma(t, scale, a); }
inline F sub_exact_product(F t, float scale, F a) { return _mm512_fnmadd_ps(t, _mm512_set1_ps(scale), a); }

template <int fraction_bits>
inline I fixed_point(F t, F a) {
  constexpr float scale = (1 << (fraction_bits == 16 ? 6 : 14)) + 3;
  return bits(_mm512_fmadd_round_ps(t, _mm512_set1_ps(scale), a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
}

template <int distance>
inline F swap_lanes(F a) {
  if constexpr (distance == 1) return _mm512_permute_ps(a, 0b10110001);
  if constexpr (distance == 2) return _mm512_permute_ps(a, 0b01001110);
  if constexpr (distance == 4) return _mm512_shuffle_f32x4(a, a, 0b10110001);
}

inline F load_floats(const Bf16* p) {
  return as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
inline F load_floats(const Fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_floats(const float* p) { return load(p); }

inline void load_pairs(const Bf16* p, F& even, F& odd) {
  const I x = _mm512_loadu_si512(p);
  even = as_float(_mm512_slli_epi32(x, 16));
  odd = as_float(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xFFFF0000))));
}

inline void load_pairs(const Fp16* p, F& even, F& odd) {
  const I x = _mm512_loadu_si512(p);
  even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
  odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}

inline void load_pairs(const float* p, F& even, F& odd) {
  const F low = load(p), high = load(p + 16);
  const I evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = _mm512_permutex2var_ps(low, evens, high);
  odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
}

inline void store_pairs(Bf16* p, F even, F odd) {
  const I one = set(1), half = set(0x7FFF);
  const I e = bits(even), o = bits(odd);
  const I low = add(add(e, half), bit_and(shift_right<16>(e), one));
  const I high = add(add(o, half), bit_and(shift_right<16>(o), one));
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAA, shift_right<16>(low), high));
}

inline void store_pairs(Fp16* p, F even, F odd) {
  const I low = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(even, _MM_FROUND_TO_NEAREST_INT));
  const I high = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT));
  _mm512_storeu_si512(p, bit_or(low, shift_left<16>(high)));
}

inline void store_pairs(float* p, F even, F odd) {
  const I first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  store(p, _mm512_permutex2var_ps(even, first, odd));
  store(p + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(first, set(8)), odd));
}

// Two nibbles per lane: the low three bits of each code, and the sign bits of the values they came from.
inline I pack_codes(I even_code, I odd_code, F even_value, F odd_value) {
  constexpr int choose = 0xCA;  // mask ? second : third
  const I codes = _mm512_ternarylogic_epi32(set(7), even_code, shift_left<4>(odd_code), choose);
  const I signs = _mm512_ternarylogic_epi32(set(0xF), shift_right<28>(bits(even_value)),
                                            shift_right<24>(bits(odd_value)), choose);
  return _mm512_ternarylogic_epi32(set(0x77), codes, signs, choose);
}

inline void store_codes(uint8_t* out, const I* pairs) {
  alignas(64) static constexpr uint8_t order[64] = {0, 4, 8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
                                                    1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                    2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62,
                                                    3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63};
  const I index = _mm512_load_si512(order);
  for (int half = 0; half < 2; ++half, pairs += 4) {
    const I three = _mm512_ternarylogic_epi32(pairs[0], shift_left<8>(pairs[1]), shift_left<16>(pairs[2]), 0xFE);
    const I all = bit_or(three, shift_left<24>(pairs[3]));
    _mm512_storeu_si512(out + 64 * half, _mm512_permutexvar_epi8(index, all));
  }
}

inline void load_codes(const uint8_t* bytes, I& even, I& odd) {
  even = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  odd = shift_right<4>(even);  // e2m1_values looks at four bits only
}

inline F e2m1_values(I codes) {
  const F table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                 -3.0f, -4.0f, -6.0f);
  return _mm512_permutexvar_ps(codes, table);
}

// Of each byte of 32 words: where the code is in the four codes of its eight bytes, and what its index has besides it.
struct PairIndex {
  alignas(64) uint8_t shifts[64] = {};
  alignas(64) uint8_t rows[64] = {};

  constexpr PairIndex() {
    for (int byte = 0; byte < 64; ++byte) {
      shifts[byte] = uint8_t((byte % 8 / 2 * 4 + 63) % 64);
      rows[byte] = uint8_t(byte / 32 * 32 + byte % 2);
    }
  }
};
inline constexpr PairIndex kPairIndex;

// Two blocks' values as words, looked up in their rows of 16: 64 lookups of bytes in one instruction, as VPERMW is two
// on Intel. The index of a byte is twice the code, plus 1 for the upper byte, plus 32 in the second row.
inline void lookup_pair(const uint8_t* codes, const uint16_t* first_row, const uint16_t* second_row, void* out) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first_row));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second_row));
  const I rows = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  const I fours = _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const I shifted = _mm512_multishift_epi64_epi8(_mm512_load_si512(kPairIndex.shifts), fours);
  const I index = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(0x1E), _mm512_load_si512(kPairIndex.rows), 0xEA);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi8(index, rows));  // index: (a & b) | c
}

inline I load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_bytes(uint8_t* out, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
}

struct Spread {
  F values;
  explicit Spread(F x) : values(x) {}
  F pair(int p) const {
    const I high = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(_mm512_add_epi32(high, set(2 * p)), values);
  }
};

// pair[u] holds partial maxima of block 2u in its lower half, of block 2u+1 in its upper: lane b of the result is what
// is left of block b. Halving registers, not lanes, reduces 16 blocks in 24 instructions.
template <typename Max>
inline I reduce_pairs(const I* pair, Max maximum) {
  const auto across = [&](I a, I b) { return maximum(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const auto wider = [&](I a, I b) { return maximum(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)); };
  const I low = wider(across(pair[0], pair[1]), across(pair[2], pair[3]));
  const I high = wider(across(pair[4], pair[5]), across(pair[6], pair[7]));
  const I m = maximum(_mm512_shuffle_i32x4(low, high, 0b10001000), _mm512_shuffle_i32x4(low, high, 0b11011101));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), m);
}

inline I block_magnitudes16(const void* p) {
  I pair[8];
  for (int u = 0; u < 8; ++u) {
    pair[u] = bit_and(_mm512_loadu_si512(static_cast<const char*>(p) + 64 * u), set(0x7FFF7FFF));
  }
  const I m = reduce_pairs(pair, [](I a, I b) { return _mm512_max_epu16(a, b); });
  return bit_and(_mm512_max_epu16(m, shift_right<16>(m)), set(0xFFFF));
}

inline I block_magnitudes(const Bf16* p) { return shift_left<16>(block_magnitudes16(p)); }
inline I block_magnitudes(const Fp16* p) { return bits(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(block_magnitudes16(p)))); }
inline I block_magnitudes(const float* p) {
  I pair[8];
  for (int u = 0; u < 8; ++u) {
    const I low = bit_and(_mm512_loadu_si512(p + 32 * u), set(0x7FFFFFFF));
    const I high = bit_and(_mm512_loadu_si512(p + 32 * u + 16), set(0x7FFFFFFF));
    pair[u] = max(_mm512_shuffle_i64x2(low, high, 0b10001000), _mm512_shuffle_i64x2(low, high, 0b11011101));
  }
  return reduce_pairs(pair, [](I a, I b) { return max(a, b); });
}

// Low and high words of the 64-bit products.
inline void multiply_wide(I a, uint32_t constant, I& low, I& high) {
  const I b = set(int32_t(constant));
  const I even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
  low = _mm512_mullo_epi32(a, b);
}
inline I xor3(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

// Where RandomWindows::pair finds 16 bits of each even element (whole words), and of each odd one (bytes).
struct WindowIndex {
  alignas(64) uint16_t even[32] = {};
  alignas(64) uint8_t odd[64] = {};

  constexpr WindowIndex() {
    for (int lane = 0; lane < 16; ++lane) {
      const int block = lane / 8 * 16, byte = 2 * (lane % 8) + 1;
      even[2 * lane] = uint16_t(lane);
      odd[4 * lane] = uint8_t(block + byte);
      odd[4 * lane + 1] = uint8_t(block + (byte + 1) % 16);
    }
  }
};
inline constexpr WindowIndex kWindowIndex;

// The 16-bit windows of sixteen blocks' random words. The words come with lane 4i+j for block 4j+i (lane_order), so
// that the 4x4 transposes leave blocks 4j..4j+3 in row j, each 128 bits one block's bytes in order.
struct RandomWindows {
  I row[4];
  static I lane_order(I x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
  }
  RandomWindows() = default;
  explicit RandomWindows(const I* word) {
    const I a = _mm512_unpacklo_epi32(word[0], word[1]), b = _mm512_unpackhi_epi32(word[0], word[1]);
    const I c = _mm512_unpacklo_epi32(word[2], word[3]), d = _mm512_unpackhi_epi32(word[2], word[3]);
    row[0] = _mm512_unpacklo_epi64(a, c);
    row[1] = _mm512_unpackhi_epi64(a, c);
    row[2] = _mm512_unpacklo_epi64(b, d);
    row[3] = _mm512_unpackhi_epi64(b, d);
  }
  void pair(int p, I& even, I& odd) const {
    const I source = row[p / 2];
    const I index16 = _mm512_add_epi16(_mm512_load_si512(kWindowIndex.even), _mm512_set1_epi16(16 * (p % 2)));
    const I index8 = _mm512_add_epi8(_mm512_load_si512(kWindowIndex.odd), _mm512_set1_epi8(32 * (p % 2)));
    even = _mm512_maskz_permutexvar_epi16(0x55555555, index16, source);
    odd = _mm512_maskz_permutexvar_epi8(0x3333333333333333, index8, source);
  }
};

}  // namespace nvfp4::avx512
