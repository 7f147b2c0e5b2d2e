// The scale of a block by any spec, straight from numerics/*.h.
#pragma once

#include "cuda/block/row_lanes.cuh"
#include "cuda/block/search.cuh"

namespace nvfp4 {

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
