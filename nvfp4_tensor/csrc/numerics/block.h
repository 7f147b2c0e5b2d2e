// From amax to the scales, and from a block's amax to its scale (numerics contract, section 2).
#pragma once

#include "e2m1.h"
#include "e4m3.h"
#include "platform.h"
#include "spec.h"

namespace nvfp4 {

// S_enc = min(6 * ceiling / amax, FLT_MAX), 1 where amax is 0.
NVFP4_HD float encode_scale(float amax, float ceiling) {
  return amax == 0.0f ? 1.0f : clamp_max(div(mul(kE2M1Max, ceiling), amax), kFloatMax);
}

// amax / (6 * ceiling), 1 where amax is 0.
NVFP4_HD float per_tensor_scale(float amax, float ceiling) {
  return amax == 0.0f ? 1.0f : div(amax, mul(kE2M1Max, ceiling));
}

// What depends on the tensor's amax alone, computed once for all its blocks.
struct TensorScale {
  float amax;    // of the tensor
  float range;   // 6 * ceiling
  float encode;  // S_enc
  float decode;  // S_dec = 1 / S_enc
  float sixth;   // S_enc * f32(1/6)

  NVFP4_HD static TensorScale of(float amax, float ceiling) {
    const float encode = encode_scale(amax, ceiling);
    return {amax, mul(kE2M1Max, ceiling), encode, reciprocal(encode), mul(encode, 1.0f / 6.0f)};
  }

  // enc: what the elements of a block with scale s_b are multiplied by.
  NVFP4_HD float block_encode(float s_b) const {
    return s_b == 0.0f ? 0.0f : clamp_max(reciprocal(mul(s_b, decode)), kFloatMax);
  }

  // s_b of a block without four-over-six. A block_amax that is NaN or Inf says that the block holds one.
  NVFP4_HD uint8_t block_scale(float block_amax, ScaleRounding rounding) const {
    if (!is_finite(block_amax)) return kE4M3Nan;
    return to_e4m3(mul(block_amax, sixth), rounding, block_amax);
  }

  // With four-over-six: the scale that maps the block's largest element to 6 (or, to_four, to 4).
  NVFP4_HD uint8_t block_scale_for(float block_amax, bool to_four, ScaleRounding rounding) const {
    if (!is_finite(block_amax)) return kE4M3Nan;
    const float base = mul(div(block_amax, kE2M1Max), encode);
    return to_e4m3(to_four ? mul(base, 1.5f) : base, rounding, block_amax);
  }

  // One element's share of the error by which four-over-six chooses; enc = block_encode(s_b).
  NVFP4_HD float element_error(float x, float s_b, float enc, FourOverSix kind) const {
    const float value = e2m1_value(round_e2m1(mul(x, enc), RoundingMode::kNearestEven, 0));
    const float difference = magnitude(sub(div(mul(mul(value, s_b), amax), range), x));
    return kind == FourOverSix::kSquared ? mul(difference, difference) : difference;
  }

  // err(s) of one row's 16 elements, added in order.
  NVFP4_HD float block_error(const float* x, uint8_t s_bits, FourOverSix kind) const {
    const float s_b = e4m3_value(s_bits), enc = block_encode(s_b);
    float total = element_error(x[0], s_b, enc, kind);
    for (int i = 1; i < kBlock; ++i) total = add(total, element_error(x[i], s_b, enc, kind));
    return total;
  }
};

// (code * s_b) * per-tensor scale; the first product is exact.
NVFP4_HD float decode_element(uint32_t code, float s_b, float factor) {
  return mul(mul(e2m1_value(code), s_b), factor);
}

}  // namespace nvfp4
