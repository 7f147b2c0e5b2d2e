// E2M1 codes to bf16 or fp16 in registers, times their block scale, for the tensor cores.
//
// Moved to the top of a float's mantissa and the bottom of its exponent, the three bits of an E2M1 magnitude ARE that
// float, subnormals included, but for a power of two (2^-126 in bf16, 2^-14 in fp16). So a code needs no table, only
// its sign moved away from its magnitude, and the multiplication by the block scale takes the power of two along. Codes
// i and i + 4 of a word are decoded together, one in each half of a register.
//
// A word chosen bit by bit from w and w shifted has signs and magnitudes of two pairs that far apart; a shift and a
// mask then make one pair each: 15 instructions for 8 codes, 7 of them on the ALU pipe, which takes one every other
// cycle, or 8 where the compiler has a shift to the left go there too. (Each pair by a mask, a multiplication that
// moves both, a mask: 17 and 9 in bfloat16. Byte-permute tables: 21.)
//
// What is decoded is code * s_b * kUnit, exact: at most 6 significant bits. kUnit keeps the factor that the scale is
// multiplied by inside the exponent's range, and leaves the sum as a float32 power of two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/matmul/problem.cuh"

namespace nvfp4 {

// Bits of a where the mask has ones, else of b: one instruction, which the compiler would take apart again.
__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

template <typename T>
struct Decoder;

template <>
struct Decoder<__nv_bfloat16> {
  static constexpr float kUnit = 0x1p-8f;  // 448 * 2^118 is the largest scale factor: finite in bf16

  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000));
    return d;
  }
  // Two scale bytes, in bits 0..7 and 16..23, to s_b * 2^118 in the two halves. As bf16 bits they are s_b * 2^-120.
  static __device__ __forceinline__ uint32_t scale_factors(uint32_t bytes) {
    constexpr uint32_t k2To119 = 0x7B007B00;
    return multiply(multiply(bytes * 16, k2To119), k2To119);
  }
  // The same from s_b in two fp16.
  static __device__ __forceinline__ uint32_t factors_of_halves(uint32_t s) {
    constexpr uint32_t k2To118 = 0x7A807A80;
    float low, high;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(s));
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return multiply(pair, k2To118);
  }
  static constexpr uint32_t kBits = 0x81C081C0;  // sign and magnitude
  static __device__ __forceinline__ void spread(uint32_t w, uint32_t (&out)[4]) {
    const uint32_t low = choose(0x00770077, w, w << 6), high = choose(0x01DC01DC, w >> 6, w);
    out[0] = low << 6 & kBits;
    out[1] = low << 2 & kBits;
    out[2] = high << 4 & kBits;
    out[3] = high & kBits;
  }
  // The codes in bits 4..7 of each half alone.
  static __device__ __forceinline__ uint32_t spread_second(uint32_t w) {
    return (w & 0x00F000F0u) * ((1u << 8) + (1u << 2)) & kBits;
  }
};

template <>
struct Decoder<__half> {
  static constexpr float kUnit = 0x1p-7f;  // 448 * 2^7 is the largest scale factor: finite in fp16

  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000));
    return d;
  }
  // Likewise to s_b * 2^7. As fp16 bits they are s_b * 2^-8.
  static __device__ __forceinline__ uint32_t scale_factors(uint32_t bytes) {
    constexpr uint32_t k2To15 = 0x78007800;
    return multiply(bytes * 128, k2To15);
  }
  static __device__ __forceinline__ uint32_t factors_of_halves(uint32_t s) {
    constexpr uint32_t k2To7 = 0x58005800;
    return multiply(s, k2To7);
  }
  static constexpr uint32_t kBits = 0x8E008E00;
  static __device__ __forceinline__ void spread(uint32_t w, uint32_t (&out)[4]) {
    const uint32_t even = choose(0x07070707, w, w << 3), odd = choose(0x0E0E0E0E, w >> 3, w);
    out[0] = even << 9 & kBits;
    out[1] = odd << 8 & kBits;
    out[2] = even << 1 & kBits;
    out[3] = odd & kBits;
  }
  static __device__ __forceinline__ uint32_t spread_second(uint32_t w) {
    return choose(0x0E000E00, w << 5, w << 8) & kBits;
  }
};

// Codes (0, 4), (1, 5), (2, 6), (3, 7) of a word, scaled, to four registers.
template <typename T>
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t factor, uint32_t (&out)[4]) {
  Decoder<T>::spread(word, out);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = Decoder<T>::multiply(out[i], factor);
}

// Two scale bytes as Decoder::scale_factors takes them, those from 0x7F on NaN.
template <typename T>
__device__ __forceinline__ uint32_t any_scale_factors(uint32_t bytes) {
  const uint32_t is_nan = (bytes | (bytes + 0x00010001u)) >> 7 & 0x00010001u;
  return Decoder<T>::scale_factors(bytes & 0x007F007Fu) | is_nan * 0x7FFFu;
}

// Four scale bytes for a conversion that takes them as signed: those from 0x80 on, which mean NaN, to one, 0xFF.
__device__ __forceinline__ uint32_t signed_to_nan(uint32_t bytes) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, 0, 0xBA98;" : "=r"(signs) : "r"(bytes));  // each byte's sign bit, eight times
  return bytes | signs;
}

// One of two halves in both: which the multiplications take along, where a byte permutation would be an instruction.
__device__ __forceinline__ uint32_t low_in_both(uint32_t v) {
  uint32_t both;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(v));
  return both;
}

__device__ __forceinline__ uint32_t high_in_both(uint32_t v) {
  uint32_t both;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(v));
  return both;
}

// Four scale bytes to the factors of their blocks: two, in their order, in the halves of each register.
template <typename T>
__device__ __forceinline__ void scale_factor_pairs(uint32_t bytes, uint32_t (&out)[2]) {
#if __CUDA_ARCH__ >= 890  // converts e4m3, NaN included
  uint32_t halves[2];
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(signed_to_nan(bytes)));
  out[0] = Decoder<T>::factors_of_halves(halves[0]), out[1] = Decoder<T>::factors_of_halves(halves[1]);
#else
  const uint32_t pairs[2] = {__byte_perm(bytes, 0, 0x4140), __byte_perm(bytes, 0, 0x4342)};
  out[0] = Decoder<T>::scale_factors(pairs[0]), out[1] = Decoder<T>::scale_factors(pairs[1]);
  if ((bytes | (bytes + 0x01010101u)) & 0x80808080u) {  // a NaN: rare, so one test for four
    out[0] = any_scale_factors<T>(pairs[0]), out[1] = any_scale_factors<T>(pairs[1]);
  }
#endif
}

// Likewise, each factor in both halves of a register.
template <typename T>
__device__ __forceinline__ void scale_factors(uint32_t bytes, uint32_t (&out)[4]) {
  uint32_t pairs[2];
  scale_factor_pairs<T>(bytes, pairs);
#pragma unroll
  for (int i = 0; i < 2; ++i) out[2 * i] = low_in_both(pairs[i]), out[2 * i + 1] = high_in_both(pairs[i]);
}

// Eight elements of a row of x from column k on, zero beyond K.
__device__ __forceinline__ uint4 load_x(const Problem& p, const uint16_t* row, int k, bool aligned) {
  if (aligned && k + 8 <= p.K) return *reinterpret_cast<const uint4*>(row + k);
  uint32_t v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = k + i < p.K ? row[k + i] : 0;
  return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

// They in the order in which decode_word decodes, two registers for each of two products.
__device__ __forceinline__ uint4 to_fragment(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

}  // namespace nvfp4
