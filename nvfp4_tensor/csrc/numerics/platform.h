// What makes one source mean the same float32 arithmetic on a host and on a device.
//
// The contract is IEEE float32, round to nearest even, in the order written, no fused multiply-add. On a device the
// functions below are intrinsics that the compiler never contracts; a host compiler needs -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#else
#define NVFP4_HD inline
#endif

namespace nvfp4 {

constexpr int kBlock = 16;
constexpr int kRotation = 128;  // columns that EDEN rotates together
constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kE2M1Max = 6.0f;
constexpr float kE4M3Max = 448.0f;

NVFP4_HD uint32_t float_bits(float v) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(v);
#else
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
#endif
}

NVFP4_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
#endif
}

#if defined(__CUDA_ARCH__)
NVFP4_HD float add(float a, float b) { return __fadd_rn(a, b); }
NVFP4_HD float sub(float a, float b) { return __fsub_rn(a, b); }
NVFP4_HD float mul(float a, float b) { return __fmul_rn(a, b); }
NVFP4_HD float div(float a, float b) { return __fdiv_rn(a, b); }
NVFP4_HD float reciprocal(float a) { return __frcp_rn(a); }
NVFP4_HD float root(float a) { return __fsqrt_rn(a); }
#else
NVFP4_HD float add(float a, float b) { return a + b; }
NVFP4_HD float sub(float a, float b) { return a - b; }
NVFP4_HD float mul(float a, float b) { return a * b; }
NVFP4_HD float div(float a, float b) { return a / b; }
NVFP4_HD float reciprocal(float a) { return 1.0f / a; }
NVFP4_HD float root(float a) { return __builtin_sqrtf(a); }
#endif

NVFP4_HD float magnitude(float v) { return bits_float(float_bits(v) & 0x7FFFFFFFu); }

// min(v, most), with NaN kept: torch's clamp(max=most).
NVFP4_HD float clamp_max(float v, float most) { return v > most ? most : v; }

NVFP4_HD bool is_finite(float v) { return magnitude(v) <= kFloatMax; }

// To the bits of bfloat16, to nearest even; every NaN becomes the quiet 0x7FC0, as torch has it.
NVFP4_HD uint16_t to_bfloat16(float v) {
  const uint32_t bits = float_bits(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

NVFP4_HD float from_bfloat16(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

}  // namespace nvfp4
