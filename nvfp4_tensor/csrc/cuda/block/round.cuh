// Rounding to E2M1 in about nine instructions an element to nearest and eight stochastically, and the packing of codes.
//
// To nearest: c(a), the piecewise linear code of a magnitude a (numerics/e2m1.h), is a sum of saturations,
//     c(a) = 4 sat(a/2) + 2 sat(a/2 - 1) + sat(a/2 - 2),    sat(t) = min(max(t, 0), 1)
// Each sat is exact in float32 (a flag of the multiplier, so it costs nothing), only one of the three is ever strictly
// between 0 and 1, and the whole saturates at code 7, which is 6. Added term by term to 2^23, whose last place is one
// unit, c is rounded once, at the one fractional term, and left in the low bits: an even code is an even integer.
//
// Stochastically: float32 itself has this code. In the encoding of 2^-126 a, c is a number with its integer part from
// bit 22 up, subnormal for a < 1 and normal above, and the 16 bits below are floor(2^16 frac): adding r16 to those
// carries into the code just as the contract has it. Multiplied by 2^-126 toward zero, an a below 1 keeps 2^-23 where
// 2^-17 is looked at, and all others are exact; what comes out above code 7, at most 255, is held to 7 when codes are
// packed, two an instruction.
//
// Both leave most of the work to the FMA pipes; min, max, shifts and logic share one pipe of half their rate.
#pragma once

#include "cuda/block/elements.cuh"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/philox.h"

namespace nvfp4 {

// cvt.rn e2m1x2 is on every Blackwell; cvt.rs e2m1x4, with random bits, on sm_100a and sm_103a alone.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
constexpr bool kHardwareNearest = true, kHardwareStochastic = true;
#elif defined(__CUDA_ARCH_FEAT_SM110_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
constexpr bool kHardwareNearest = true, kHardwareStochastic = false;
#else
constexpr bool kHardwareNearest = false, kHardwareStochastic = false;
#endif

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

// draw = r16 << 8; the result has the code, or more than 7 for 7, in its top byte.
__device__ __forceinline__ uint32_t stochastic_bits(float a, uint32_t draw) {
  float v;
  asm("mul.rz.sat.f32 %0, %1, 0f00800000;" : "=f"(v) : "f"(a));  // 2^-126 a, at most 1: times four that is 254 << 24
  return float_bits(v) * 4u + draw;
}

// Eight results of the functions above to 32 bits of unsigned codes, element 0 lowest.
template <Fast mode>
__device__ __forceinline__ uint32_t pack_codes(const uint32_t (&bits)[8]) {
  if constexpr (mode == Fast::kNearestEven) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) packed += __byte_perm(bits[i], bits[i + 4], 0x5410) << (4 * i);
    return packed;
  } else {
    const auto pair = [&](int i) { return __vminu2(__byte_perm(bits[i], bits[i + 2], 0x7632), 0x07FF07FFu); };
    uint32_t half[2];  // codes of even and of odd elements, one a byte
#pragma unroll
    for (int i = 0; i < 2; ++i) half[i] = __byte_perm(pair(i), pair(i + 4), 0x7531);
    return half[1] * 16u + half[0];
  }
}

// A block's random bits, r16 << 8, as stochastic_bits adds them (8 bits: its upper eight), a PRMT each: bytes b and
// b + 1 of a word between zeros. The window of the last byte of a word takes its zeros from the window after it.
template <Fast mode>
__device__ __forceinline__ uint32_t draw_of(const Words4& words, int element) {
  constexpr bool eight = mode == Fast::kStochastic8;
  const uint32_t byte = element % 4, word = words.word[element / 4], next = words.word[(element / 4 + 1) % 4];
  if (eight) return byte < 3 ? __byte_perm(word, 0, 0x4044u | (byte + 1) << 8) : __byte_perm(next, 0, 0x4044u);
  if (byte < 3) return __byte_perm(word, 0, 0x4004u | (byte + 1) << 8 | byte << 4);
  return __byte_perm(word, __byte_perm(next, 0, 0x4104u), 0x4534u);
}

// What a kernel's threads know about their random bits.
struct DrawSource {
  RandomKey key;
  bool hardware;
};

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

// Codes of elements first .. first + 7 of a block, times enc, packed: in software,
template <Fast mode, typename T>
__device__ __forceinline__ uint32_t encode8_software(const Elements<T, kBlock>& x, int first, float enc,
                                                     const Words4& words) {
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __fmul_rn(x.magnitude(first + i), enc);
    bits[i] = mode == Fast::kNearestEven ? nearest_even_bits(a) : stochastic_bits(a, draw_of<mode>(words, first + i));
  }
  return pack_codes<mode>(bits) | x.signs(first);
}

// and by what the device has: to nearest the same bits, stochastically its own where the spec asks for them.
template <Fast mode, typename T>
__device__ __forceinline__ uint32_t encode8(const Elements<T, kBlock>& x, int first, float enc, const Words4& words,
                                            const DrawSource& source) {
  constexpr bool kNearest = kHardwareNearest && mode == Fast::kNearestEven;
  constexpr bool kStochastic = kHardwareStochastic && mode == Fast::kStochastic8;
  if constexpr (kNearest || kStochastic) {
    if (kNearest || source.hardware) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = mul(x.value(first + i), enc);
      if constexpr (kNearest) {
        return hardware_nearest(v);
      } else {
        return hardware_stochastic(v, words, first);
      }
    }
  }
  return encode8_software<mode>(x, first, enc, words);
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
