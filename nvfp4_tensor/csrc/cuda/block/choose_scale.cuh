// The scale of a block: by any spec, and by a search over scales (numerics contract, section 2), whose error takes
// seven or eight instructions an element.
#pragma once

#include "cuda/block/row_lanes.cuh"
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

// The elements of a block, unpacked once and not for each scale that is tried.
template <typename T>
__device__ __forceinline__ void separate_values(const Elements<T, kBlock>& x, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = x.value(i);
    asm volatile("" : "+f"(v[i]));
  }
}

// A scale that is tried, and what elements are multiplied by under it.
struct Tried {
  float s, enc;
};

// The byte `step` (-1 .. kSearched) beside the base's.
__device__ __forceinline__ uint8_t searched_byte(uint8_t base, int step) {
  return static_cast<uint8_t>(min(max(static_cast<int>(base) + step, 1), kE4M3Nan - 1));
}

// The scales beside each base, in shared memory: those of base + step at base + 1 + step.
struct SearchTable {
  Tried of[128 + kSearched + 1];

  // All threads of the thread block come here, and meet before they read it.
  __device__ __forceinline__ void fill(const TensorScale& tensor) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(of) / sizeof(Tried)); i += blockDim.x) {
      const float s = e4m3_value(searched_byte(0, i - 1));
      of[i] = {s, tensor.block_encode(s)};
    }
  }

  // Of a scale that was found; of NaN, whose codes are zero, that of another.
  __device__ __forceinline__ float enc(uint8_t s_bits) const { return s_bits ? of[s_bits + 1].enc : 0.0f; }
};

// The step to the first scale that is tried.
__device__ __forceinline__ int first_step(ScaleRounding rounding) { return rounding == ScaleRounding::kUp ? 0 : -1; }

// The scale of least error for a block, or with `reduce` over the rows of a tile, whose largest magnitude is amax and
// whose scale without a search would be base. All lanes of the warp come here together. tried(i): the i-th scale, that
// of searched_byte(base, first + i).
template <typename Scales, typename Reduce>
__device__ __forceinline__ uint8_t search_scale(const float (&v)[kBlock], float amax, uint8_t base, int first,
                                                Scales tried, Reduce reduce) {
  Tried now = tried(0);
  int best = 0;
  float least = mul(mul(reduce(squared_error<true>(v, now.enc)), now.s), now.s);
  const auto try_others = [&](auto saturates) {
#pragma unroll(saturates.value ? 1 : kSearched)
    for (int i = 1; i < kSearched; ++i) {
      now = tried(i);
      const float error = mul(mul(reduce(squared_error<saturates.value>(v, now.enc)), now.s), now.s);
      if (error < least) best = i, least = error;
    }
  };
  // The larger a scale, the less it saturates: from the second on none does but beside the ends of e4m3.
  if (__any_sync(0xFFFFFFFFu, !(mul(amax, tried(1).enc) < kRoundsBeyond6))) {
    try_others(std::true_type{});
  } else {
    try_others(std::false_type{});
  }
  return amax == 0.0f ? 0 : base == kE4M3Nan ? kE4M3Nan : searched_byte(base, first + best);
}

// The same by a table.
template <typename Reduce>
__device__ __forceinline__ uint8_t search_scale(const float (&v)[kBlock], float amax, uint8_t base,
                                                ScaleRounding rounding, const SearchTable& table, Reduce reduce) {
  const int first = first_step(rounding);
  const Tried* from = &table.of[base + 1 + first];
  return search_scale(v, amax, base, first, [=](int i) { return from[i]; }, reduce);
}

// The largest magnitude of a row of a block; NaN or Inf where it holds one.
__device__ __forceinline__ float largest_of(const float (&v)[kBlock]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float here = magnitude(v[i]);
    most = !(most <= kFloatMax) || most > here ? most : here;
  }
  return most;
}

// Over the 16 lanes of a tile where tile, else v itself.
__device__ __forceinline__ float tile_max(float v, bool tile) {
  if (!tile) return v;
#pragma unroll
  for (int half = 8; half; half /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, v, half);
    v = !(v <= kFloatMax) || v > other ? v : other;  // NaN and Inf win
  }
  return v;
}

// The scale of a block by any spec, straight from numerics/*.h.
__device__ __forceinline__ uint8_t choose_scale(const float (&v)[kBlock], const TensorScale& tensor,
                                                const QuantizeSpec& spec, bool tile) {
  const float most = tile_max(largest_of(v), tile);
  if (spec.scale_search != ScaleSearch::kNone) {
    const uint8_t base = tensor.block_scale(most, spec.scale_rounding);
    const int first = first_step(spec.scale_rounding);
    const auto tried = [&](int i) {
      const float s = e4m3_value(searched_byte(base, first + i));
      return Tried{s, tensor.block_encode(s)};
    };
    return search_scale(v, most, base, first, tried, [=](float sum) { return tile_sum(sum, tile); });
  }
  if (spec.four_over_six == FourOverSix::kNone) return tensor.block_scale(most, spec.scale_rounding);
  const uint8_t six = tensor.block_scale_for(most, false, spec.scale_rounding);
  const uint8_t four = tensor.block_scale_for(most, true, spec.scale_rounding);
  const float error6 = tile_sum(tensor.block_error(v, six, spec.four_over_six), tile);
  const float error4 = tile_sum(tensor.block_error(v, four, spec.four_over_six), tile);
  return error4 < error6 ? four : six;
}

}  // namespace nvfp4
