// The error of a scale for the search over scales (numerics contract, section 2), seven or eight instructions an
// element.
#pragma once

#include "cuda/block/values.cuh"
#include "numerics/block.h"

namespace nvfp4 {

constexpr int kSearched = 7;  // scales tried

// From here on a value rounds to more than 6 on a grid that goes on.
constexpr float kRoundsBeyond6 = 7.0f;

// sum(s): of the squares of what the magnitudes lose, v times enc, in order.
template <bool saturates>
__device__ __forceinline__ float squared_error(const float (&v)[kBlock], float enc) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float u = mul(v[i], enc);
    float q = nearest_on_grid(u);
    if constexpr (saturates) q = fminf(q, kE2M1Max);  // 6 where it is NaN
    const float difference = sub(q, u);
    sum = __fmaf_rn(difference, difference, sum);
  }
  return sum;
}

// A scale among those tried: the byte of `base`, moved.
__device__ __forceinline__ uint32_t searched_scale(uint32_t base, int step) {
  return static_cast<uint32_t>(min(max(static_cast<int>(base) + step, 1), kE4M3Nan - 1));
}

// The scale of least error for a block, or with `reduce` over the rows of a tile, whose largest magnitude is amax. All
// lanes of the warp come here together. encode(s_bits): what elements are multiplied by under a scale.
template <typename Encode, typename Reduce>
__device__ __forceinline__ uint8_t search_scale(const float (&v)[kBlock], float amax, const TensorScale& tensor,
                                                ScaleRounding rounding, Encode encode, Reduce reduce) {
  const uint8_t base = tensor.block_scale(amax, rounding);
  const int first = rounding == ScaleRounding::kUp ? 0 : -1;
  uint32_t best = 0;
  float least = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kSearched; ++i) {
    const uint32_t s_bits = searched_scale(base, first + i);
    const float block_enc = encode(s_bits), s = e4m3_value(static_cast<uint8_t>(s_bits));
    // Only a scale below the base, or one that cannot follow its block, needs the bound of 6.
    const bool saturates = !(mul(amax, block_enc) < kRoundsBeyond6);
    const float sum = __any_sync(0xFFFFFFFFu, saturates) ? squared_error<true>(v, block_enc)
                                                         : squared_error<false>(v, block_enc);
    const float error = mul(mul(reduce(sum), s), s);
    if (i == 0 || error < least) best = s_bits, least = error;
  }
  return amax == 0.0f ? 0 : base == kE4M3Nan ? kE4M3Nan : static_cast<uint8_t>(best);
}

}  // namespace nvfp4
