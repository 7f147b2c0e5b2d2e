// An AdamW step on moments of four bits (numerics contract, section 12), element by element.
#pragma once

#include <cmath>

#include "block.h"
#include "matrix.h"
#include "philox.h"

namespace nvfp4 {

constexpr int kNotFiniteExponent = 255, kLargestExponent = 254;  // where v ends, and r is 0
constexpr int kMostBelow = 15;                                   // what four bits of distance reach
constexpr float kRatioScale = 1.0f / 128.0f;                     // the per-tensor scale of r
constexpr float kRatioAmax = 21.0f;                              // the largest that it stores
// Of random bits: what is rounded by bits that decided its block's scale would not keep its mean. r and the weight
// decide none, so one stream has bits for both: the weight's are of the word after the element's own.
constexpr uint32_t kMomentStream = 1, kSecondMomentStream = 2, kGrowthStream = 3;
constexpr int kWeightWord = 1;
constexpr float kUnbiased = 0.87f;                     // what step sizes have for v in powers of two
constexpr float kShrunk = 0x1p-60f, kGrown = 0x1p60f;  // weights in codes are updated times 2^-60

// What a step multiplies by: `hyper`, in order.
struct AdamwNumbers {
  float grad_scale, beta1, rest1, beta2, rest2, step_size, decay, least_exponent;
};
constexpr int kAdamwNumbers = 8;

// The arguments of a step. All tensors are contiguous; first_block is the number of block (0, 0) for the random bits.
struct AdamwStep {
  int64_t rows, columns, blocks, first_block;  // blocks of a row
  const void* grad;
  Dtype grad_dtype;  // bfloat16 or float32
  uint8_t *r, *r_scale, *v, *v_exponent;
  const float* hyper;
  const int64_t* rng_state;
  // The weight: dense, bfloat16 or float32; or codes, where `scale` (swizzled) is not null.
  void* weight;
  Dtype weight_dtype;
  uint8_t* scale;
  const float* per_tensor_scale;
};

// The arguments of a step of `count` elements with float32 moments. The random bits of an element are those of the
// first element of a block of its own; that of element 0 is first_block.
struct VectorStep {
  int64_t count, first_block;
  const void* grad;
  Dtype grad_dtype;  // bfloat16 or float32
  void* weight;
  Dtype weight_dtype;
  float *m, *v;
  const float* hyper;
  const int64_t* rng_state;
};

// 2^((t - 254) / 2), with f32(sqrt 2) for odd t.
NVFP4_HD float half_power(int t) {
  const uint32_t u = static_cast<uint32_t>(t);
  return bits_float((u << 22) - (u & 1u) * (0x400000u - 0x3504F3u));
}
NVFP4_HD float root_of(int exponent) { return half_power(exponent + 127); }

NVFP4_HD float next_first_moment(float m, float g, const AdamwNumbers& n) {
  return add(mul(n.beta1, m), mul(n.rest1, g));
}
NVFP4_HD float next_second_moment(float v, float g, const AdamwNumbers& n) {
  return add(mul(n.beta2, v), mul(mul(n.rest2, g), g));
}
NVFP4_HD float stepped(float w, float r, float decay, float step_size) { return sub(mul(decay, w), mul(step_size, r)); }

// The new value of an element with float32 moments, which are updated. NaN in v stays; where v overflows by a finite
// gradient it is the largest number, and m is 0.
NVFP4_HD float stepped_exactly(float w, float gradient, float& m, float& v, const AdamwNumbers& n) {
  const float g = mul(gradient, n.grad_scale);
  m = next_first_moment(m, g, n);
  v = next_second_moment(v, g, n);
  if (v > kFloatMax && is_finite(m)) v = kFloatMax, m = 0.0f;
  const float least = bits_float(static_cast<uint32_t>(n.least_exponent) << 23);
  return stepped(w, div(m, root(v < least ? least : v)), n.decay, div(n.step_size, kUnbiased));
}

// bfloat16, rounded stochastically.
NVFP4_HD uint16_t stochastic_bfloat16(float v, uint32_t r16) {
  const uint32_t bits = float_bits(v), magnitude_bits = bits & 0x7FFFFFFFu;
  if (magnitude_bits > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + (magnitude_bits < 0x7F800000u ? r16 : 0u)) >> 16);
}

NVFP4_HD RandomKey with_stream(const RandomKey& key, uint32_t stream) {
  return {key.seed_low, key.seed_high, key.offset, stream};
}

// The 16 bits that decide whether a block of the weight grows. Only a block that has outgrown its scale asks for them.
struct GrowthBits {
  RandomKey key;
  uint64_t block;
  NVFP4_HD uint32_t operator()() const { return random16(with_stream(key, kGrowthStream).block_words(block), 0); }
};

// How a weight's block changes its scale: the byte, what its elements may reach unchanged, and what is kept beyond.
struct GrownScale {
  uint8_t bits;
  float scale, bound, kept;
};

// old: the value of the scale; inverse: 1 / old, rounded; largest: of the new magnitudes, in its units.
NVFP4_HD GrownScale next_scale(uint8_t old_bits, float old, float inverse, float largest, const GrowthBits& growth) {
  if (!is_finite(largest)) return {kE4M3Nan, 0.0f, 0.0f, 0.0f};
  if (largest > mul(12.0f, old)) {
    const uint8_t bits = to_e4m3(div(largest, kE2M1Max), ScaleRounding::kUp, largest);
    return {bits, e4m3_value(bits), bits_float(0x7F800000u), 0.0f};
  }
  const float full = mul(kE2M1Max, old), half = mul(0.5f, old), twice = mul(2.0f, old);
  if (largest > full) {
    const float need = mul(sub(largest, full), mul(0.5f, inverse));
    const float chances = need >= 1.0f ? 65536.0f : ceilf(mul(need, 65536.0f));
    if (twice <= kE4M3Max && static_cast<float>(growth()) < chances) {
      return {e4m3_nearest(twice), twice, full, div(65536.0f, chances)};
    }
    return {old_bits, old, full, 0.0f};
  }
  if (largest > 0.0f && largest <= mul(kE2M1Max, half)) {
    const uint8_t bits = e4m3_nearest(half);
    if (bits != 0 && e4m3_value(bits) == half) return {bits, half, full, 0.0f};
  }
  return {old_bits, old, full, 0.0f};
}

// The magnitude that an element keeps.
NVFP4_HD float fitted(float magnitude, const GrownScale& grown) {
  const float inside = magnitude < grown.bound ? magnitude : grown.bound, beyond = sub(magnitude, grown.bound);
  return add(inside, mul(beyond > 0.0f ? beyond : 0.0f, grown.kept));
}

}  // namespace nvfp4
