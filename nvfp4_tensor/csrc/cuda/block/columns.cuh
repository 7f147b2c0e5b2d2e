// The random Hadamard transform of blocks in registers, and of sixteen rows of two neighbouring columns of bfloat16;
// and what kernels quantize of the blocks that they load.
#pragma once

#include "cuda/block/elements.cuh"

namespace nvfp4 {

// +-1/4 for each of 16 elements: the sign and the scale of the transform, an operand from the constant bank.
struct HadamardFactors {
  float of[kBlock];

  static HadamardFactors from(uint32_t sign) {
    HadamardFactors factors;
    for (int i = 0; i < kBlock; ++i) factors.of[i] = sign >> i & 1 ? -0.25f : 0.25f;
    return factors;
  }

  __host__ __device__ static constexpr HadamardFactors none() {
    HadamardFactors factors{};
    for (int i = 0; i < kBlock; ++i) factors.of[i] = 1.0f;
    return factors;
  }
};

// hadamard16 of numerics/hadamard.h for bfloat16 values. A quarter of a bfloat16 is exact in float32, so the products
// go into the first additions as fused multiply-adds and nothing is rounded differently: 72 operations, not 80.
__device__ __forceinline__ void hadamard16_exact(float (&x)[kBlock], const HadamardFactors& factors) {
#pragma unroll
  for (int i = 0; i < kBlock; i += 2) {
    const float high = __fmul_rn(x[i + 1], factors.of[i + 1]), low = x[i];
    x[i] = __fmaf_rn(low, factors.of[i], high);
    x[i + 1] = __fmaf_rn(low, factors.of[i], -high);
  }
#pragma unroll
  for (int distance = 2; distance < kBlock; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (i & distance) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = __fadd_rn(low, high);
      x[i + distance] = __fsub_rn(low, high);
    }
  }
}

// A block's transform, rounded to bfloat16: what launch_hadamard makes of it, but that a NaN may have other bits.
template <typename T>
__device__ __forceinline__ Elements<__nv_bfloat16, kBlock> transformed_block(const Elements<T, kBlock>& block,
                                                                             const HadamardFactors& factors) {
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = block.value(i);
    // A quarter of a float32 may not be exact: rounded here, and whole below.
    if constexpr (std::is_same_v<T, float>) x[i] = __fmul_rn(x[i], factors.of[i]);
  }
  if constexpr (std::is_same_v<T, float>) {
    hadamard16_exact(x, HadamardFactors::none());
  } else {
    hadamard16_exact(x, factors);
  }
  return Elements<__nv_bfloat16, kBlock>::of(x);
}

// Column `which` (0: the low halves) of 16 words of two bfloat16 each, as a block of the transposed matrix.
template <bool transform>
__device__ __forceinline__ Elements<__nv_bfloat16, kBlock> column_block(const uint32_t (&word)[kBlock], int which,
                                                                        const HadamardFactors& factors) {
  if constexpr (!transform) {
    Elements<__nv_bfloat16, kBlock> out;
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      out.word[i] = __byte_perm(word[2 * i], word[2 * i + 1], which ? 0x7632 : 0x5410);
    }
    return out;
  } else {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = bits_float(which ? word[i] & 0xFFFF0000u : word[i] << 16);
    hadamard16_exact(x, factors);
    return Elements<__nv_bfloat16, kBlock>::of(x);
  }
}

// The elements as they are, or their Hadamard transform.
struct Plain {
  template <typename T>
  __device__ __forceinline__ const Elements<T, kBlock>& operator()(const Elements<T, kBlock>& block) const {
    return block;
  }
};

struct Transformed {
  HadamardFactors factors;

  template <typename T>
  __device__ __forceinline__ Elements<__nv_bfloat16, kBlock> operator()(const Elements<T, kBlock>& block) const {
    return transformed_block(block, factors);
  }
};

// The type of what it gives.
template <typename T, typename Transform>
using Given = std::conditional_t<std::is_same_v<Transform, Plain>, T, __nv_bfloat16>;

}  // namespace nvfp4
