// The error of a scale for the search over scales (numerics contract, section 2), seven or eight instructions an
// element.
#pragma once

#include "cuda/block/values.cuh"
#include "numerics/block.h"

namespace nvfp4 {

constexpr int kSearched = 7;  // scales tried

// From here on a value would be rounded to more than 6.
constexpr float kRoundsBeyond6 = 7.0f;

// sum(s): of the squares of what the magnitudes of v lose, times enc, in order.
template <bool saturates>
__device__ __forceinline__ float squared_error(const float (&v)[kBlock], float enc) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float u = mul(fabsf(v[i]), enc);
    const float difference = sub(nearest_on_grid(saturates ? fminf(u, kE2M1Max) : u), u);
    sum = __fmaf_rn(difference, difference, sum);
  }
  return sum;
}

// A scale: its byte and value, and what elements are multiplied by under it.
struct Searched {
  uint32_t s_bits;
  float s, enc;
};

// The byte `step` beside the base's.
template <typename Encode>
__device__ __forceinline__ Searched searched(uint32_t base, int step, Encode encode) {
  const uint32_t s_bits = static_cast<uint32_t>(min(max(static_cast<int>(base) + step, 1), kE4M3Nan - 1));
  return {s_bits, e4m3_value(static_cast<uint8_t>(s_bits)), encode(s_bits)};
}

// The scale of least error for a block, or with `reduce` over the rows of a tile, whose largest magnitude is amax. All
// lanes of the warp come here together. encode(s_bits): what elements are multiplied by under a scale.
template <typename Encode, typename Reduce>
__device__ __forceinline__ uint8_t search_scale(const float (&v)[kBlock], float amax, const TensorScale& tensor,
                                                ScaleRounding rounding, Encode encode, Reduce reduce) {
  const uint8_t base = tensor.block_scale(amax, rounding);
  const int first = rounding == ScaleRounding::kUp ? 0 : -1;
  Searched tried = searched(base, first, encode);
  uint32_t best = tried.s_bits;
  float least = mul(mul(reduce(squared_error<true>(v, tried.enc)), tried.s), tried.s);
  const auto try_others = [&](auto saturates) {
#pragma unroll(saturates.value ? 1 : kSearched)
    for (int i = 1; i < kSearched; ++i) {
      tried = searched(base, first + i, encode);
      const float error = mul(mul(reduce(squared_error<saturates.value>(v, tried.enc)), tried.s), tried.s);
      if (error < least) best = tried.s_bits, least = error;
    }
  };
  // The larger a scale, the less it saturates: from the second on none does but beside the ends of e4m3.
  if (__any_sync(0xFFFFFFFFu, !(mul(amax, searched(base, first + 1, encode).enc) < kRoundsBeyond6))) {
    try_others(std::true_type{});
  } else {
    try_others(std::false_type{});
  }
  return amax == 0.0f ? 0 : base == kE4M3Nan ? kE4M3Nan : static_cast<uint8_t>(best);
}

}  // namespace nvfp4
