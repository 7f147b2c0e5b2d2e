// Rounding to E2M1 in about nine instructions an element, and the packing of the codes.
//
// c(a), the piecewise linear code of a magnitude a (numerics/e2m1.h), is a sum of saturations:
//     c(a) = 4 sat(a/2) + 2 sat(a/2 - 1) + sat(a/2 - 2),    sat(t) = min(max(t, 0), 1)
// Each sat is exact in float32 (a flag of the multiplier, so it costs nothing), only one of the three is ever strictly
// between 0 and 1, and the whole saturates at code 7, which is 6. Added term by term to a large number whose last place
// is one unit, c is rounded once, at the one fractional term, and its integer part is left in the low bits of the sum:
//     to nearest even   2^23 + c,               rounded to nearest even: an even code is an even integer
//     stochastic        2^7 + r16 2^-16 + c,    rounded down to 2^-16:  128 + (r16 + floor(2^16 c)) 2^-16
// All of it runs on the FMA pipes; min, max, shifts and logic share one pipe of half their rate.
#pragma once

#include "elements.cuh"
#include "numerics/e2m1.h"
#include "numerics/philox.h"

// cvt.rn e2m1x2 is on every Blackwell; cvt.rs e2m1x4, with random bits, on sm_100a and sm_103a alone.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define NVFP4_HARDWARE_NEAREST 1
#define NVFP4_HARDWARE_STOCHASTIC 1
#elif defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define NVFP4_HARDWARE_NEAREST 1
#endif

namespace nvfp4 {

// The modes with a fast path; the rest of them is served by round_e2m1 of numerics/e2m1.h.
enum class Fast { kNearestEven, kStochastic16, kStochastic8 };

__device__ __forceinline__ float saturate_fma(float a, float b, float c) {
  float out;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
  return out;
}

// 2^23 + the code nearest to a >= 0, as bits 0x4B00000c.
__device__ __forceinline__ uint32_t nearest_even_bits(float a) {
  const float first = saturate_fma(a, 0.5f, 0.0f);
  const float second = saturate_fma(a, 0.5f, -1.0f), third = saturate_fma(a, 0.5f, -2.0f);
  return float_bits(__fadd_rn(__fmaf_rn(second, 2.0f, __fmaf_rn(first, 4.0f, 8388608.0f)), third));
}

constexpr uint32_t kDrawBase = 0x43000000u;  // 128.0, whose last place is 2^-16

// draw = 0x4300 and the 16 random bits; the result has the code in bits 16..18, under 0x43000000.
__device__ __forceinline__ uint32_t stochastic_bits(float a, uint32_t draw) {
  const float first = saturate_fma(a, 0.5f, 0.0f);
  const float second = saturate_fma(a, 0.5f, -1.0f), third = saturate_fma(a, 0.5f, -2.0f);
  return float_bits(__fadd_rz(__fmaf_rz(second, 2.0f, __fmaf_rz(first, 4.0f, bits_float(draw))), third));
}

// Eight results of the functions above to 32 bits of unsigned codes, element 0 lowest: multiply-adds by powers of 16,
// the constant under each code taken off at the end.
template <Fast mode>
__device__ __forceinline__ uint32_t pack_codes(const uint32_t (&bits)[8]) {
  constexpr bool high = mode != Fast::kNearestEven;
  constexpr uint32_t constant = high ? 0x43004300u * 0x1111u : 0u;
  uint32_t packed = 0u - constant;
#pragma unroll
  for (int i = 3; i >= 0; --i) {  // codes i and i + 4 in the two halves of a word
    packed += __byte_perm(bits[i], bits[i + 4], high ? 0x7632 : 0x5410) << (4 * i);
  }
  return packed;
}

// What a kernel's threads know about their random bits.
struct DrawSource {
  RandomKey key;
  bool hardware;
  uint32_t base;  // kDrawBase, from opaque_base()
};

// A block's random bits, handed out as stochastic_bits wants them: PRMT takes bytes b and b + 1 of a word (8 bits: a
// zero and byte b + 1) under the base's upper two. The window of the last byte of a word needs the next word too.
template <Fast mode>
__device__ __forceinline__ uint32_t draw_of(const Words4& words, int element, uint32_t base) {
  constexpr bool eight = mode == Fast::kStochastic8;
  const uint32_t byte = element % 4, word = words.word[element / 4], next = words.word[(element / 4 + 1) % 4];
  if (byte < 3) return __byte_perm(word, base, 0x7600u | (byte + 1) << 4 | (eight ? 4u : byte));
  if (eight) return __byte_perm(next, base, 0x7604u);
  return (__byte_perm(word, next, 0x0043u) & 0xFFFFu) | base;
}

#if defined(NVFP4_HARDWARE_NEAREST)
__device__ __forceinline__ uint32_t hardware_nearest(const float (&v)[8]) {
  uint32_t codes;
  asm("{ .reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3}; }"
      : "=r"(codes)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return codes;
}
#endif

#if defined(NVFP4_HARDWARE_STOCHASTIC)
// The top byte of an element's 16 bits.
__device__ __forceinline__ uint32_t byte_of(const Words4& words, int element) {
  return words.word[(element + 1) / 4 % 4] >> ((element + 1) % 4 * 8) & 0xFFu;
}

__device__ __forceinline__ uint32_t hardware_stochastic(const float (&v)[8], const Words4& words, int first) {
  uint32_t half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int e = first + 4 * i;
    const uint32_t bits = byte_of(words, e) | byte_of(words, e + 2) << 8 | byte_of(words, e + 1) << 16 |
                          byte_of(words, e + 3) << 24;
    uint16_t codes;
    asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%1, %2, %3, %4}, %5;"
        : "=h"(codes)
        : "f"(v[4 * i + 3]), "f"(v[4 * i + 2]), "f"(v[4 * i + 1]), "f"(v[4 * i]), "r"(bits));
    half[i] = codes;
  }
  return half[0] | half[1] << 16;
}
#endif

// Codes of elements first .. first + 7 of a block, times enc, packed: in software,
template <Fast mode, typename T>
__device__ __forceinline__ uint32_t encode8_software(const Elements<T, kBlock>& x, int first, float enc,
                                                     const Words4& words, uint32_t base) {
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __fmul_rn(fabsf(x.value(first + i)), enc);
    bits[i] = mode == Fast::kNearestEven ? nearest_even_bits(a)
                                         : stochastic_bits(a, draw_of<mode>(words, first + i, base));
  }
  return pack_codes<mode>(bits) | x.signs(first);
}

// and by what the device has: to nearest the same bits, stochastically its own where the spec asks for them.
template <Fast mode, typename T>
__device__ __forceinline__ uint32_t encode8(const Elements<T, kBlock>& x, int first, float enc, const Words4& words,
                                            const DrawSource& source) {
  [[maybe_unused]] const auto scaled = [&](float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(x.value(first + i), enc);
  };
#if defined(NVFP4_HARDWARE_STOCHASTIC)
  if (mode == Fast::kStochastic8 && source.hardware) {
    float v[8];
    scaled(v);
    return hardware_stochastic(v, words, first);
  }
#endif
#if defined(NVFP4_HARDWARE_NEAREST)
  if constexpr (mode == Fast::kNearestEven) {
    float v[8];
    scaled(v);
    return hardware_nearest(v);
  } else {
    return encode8_software<mode>(x, first, enc, words, source.base);
  }
#else
  return encode8_software<mode>(x, first, enc, words, source.base);
#endif
}

// A whole block: 64 bits of codes; zeros where the scale is NaN.
template <Fast mode, typename T>
__device__ __forceinline__ uint2 encode16(const Elements<T, kBlock>& x, uint32_t s_bits, float enc,
                                          const DrawSource& source, uint64_t block_number) {
  Words4 words{};
  if constexpr (mode != Fast::kNearestEven) words = source.key.block_words(block_number);
  const uint2 codes = make_uint2(encode8<mode>(x, 0, enc, words, source), encode8<mode>(x, 8, enc, words, source));
  return s_bits == kE4M3Nan ? make_uint2(0u, 0u) : codes;
}

}  // namespace nvfp4
