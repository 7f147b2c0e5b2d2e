// A block of bfloat16 rounded to E2M1 and straight on to what its codes decode to, code x block scale, which is exact
// in bfloat16: no code is made, so none is packed.
//
// To nearest: 2^22 times a magnitude, M, has its last place where E2M1 has it. Taken from the magnitude and added
// again, it rounds: |a - M| never leaves M's binade at the top, and where it does at the bottom, finer steps round to
// the same. Below 1, where E2M1's steps stay 1/2, M is that of 1 + 2^-20. Ties have few bits, so M is an even number of
// steps there, and they go to the even code. Stochastically: round.cuh's sum, whose code is left where a float32 has
// it, 2^-126 too small; it is held to 6 * s_b two at a time, in bfloat16.
#pragma once

#include "cuda/block/decode.cuh"
#include "cuda/block/round.cuh"

namespace nvfp4 {

// The number of E2M1's grid nearest to 0 <= a < 7, ties to even.
__device__ __forceinline__ float nearest_on_grid(float a) {
  constexpr float kShift = 4194304.0f;
  const float unit = fmaxf(a, 1.0f + 0x1p-20f);
  return __fmaf_rn(unit, kShift, __fmaf_rn(unit, -kShift, a));
}

// 2^-126 times what a >= 0 is rounded to; draw = r16 << 8.
__device__ __forceinline__ float stochastic_on_grid(float a, uint32_t draw) {
  float v;
  asm("mul.rz.sat.f32 %0, %1, 0f00800000;" : "=f"(v) : "f"(a));
  return bits_float((float_bits(v) + (draw >> 2)) & 0xFFC00000u);
}

__device__ __forceinline__ __nv_bfloat162 both(float v) { return __float2bfloat162_rn(v); }

// The values of a block, two a word, of its signs and what magnitude(i) gives. enc: that of its scale.
template <Fast mode, typename Magnitude>
__device__ __forceinline__ Elements<__nv_bfloat16, kBlock> block_values(const Elements<__nv_bfloat16, kBlock>& signs,
                                                                        Magnitude magnitude, float s_b, float enc,
                                                                        const DrawSource& source,
                                                                        uint64_t block_number) {
  constexpr bool nearest = mode == Fast::kNearestEven;
  Words4 words{};
  if constexpr (!nearest) words = source.key.block_words(block_number);
  // s_b * 2^126 would overflow: the last 2^8 come in bfloat16.
  const float factor = nearest ? s_b : mul(s_b, kCodeBias / 256.0f);
  const __nv_bfloat162 most = both(mul(s_b, kE2M1Max / 256.0f));
  Elements<__nv_bfloat16, kBlock> out;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    float v[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float a = mul(magnitude(2 * i + j), enc);
      v[j] = mul(nearest ? nearest_on_grid(fminf(a, kE2M1Max)) : stochastic_on_grid(a, draw_of<mode>(words, 2 * i + j)),
                 factor);
    }
    __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
    if constexpr (!nearest) pair = __hmul2(__hmin2(pair, most), both(256.0f));
    uint32_t word;
    memcpy(&word, &pair, 4);
    out.word[i] = word | (signs.word[i] & 0x80008000u);
  }
  return out;
}

template <Fast mode>
__device__ __forceinline__ Elements<__nv_bfloat16, kBlock> block_values(const Elements<__nv_bfloat16, kBlock>& x,
                                                                        float s_b, float enc, const DrawSource& source,
                                                                        uint64_t block_number) {
  return block_values<mode>(x, [&](int i) { return x.magnitude(i); }, s_b, enc, source, block_number);
}

}  // namespace nvfp4
