// A lane's blocks of a rotation by EDEN: their codes, or the values that they stand for, and their scales (numerics
// contract, section 9).
#pragma once

#include "cuda/block/rotation.cuh"
#include "cuda/block/values.cuh"

namespace nvfp4 {

// What a tensor's blocks share.
struct EdenScale {
  float encode;     // S_enc
  float onto_grid;  // what a block's largest magnitude is multiplied by for its first scale
  bool no_amax;     // a NaN was given: all is NaN

  __device__ __forceinline__ static EdenScale of(const TensorScale& tensor) {
    return {tensor.encode, mul(tensor.encode, kOntoGrid), tensor.encode != tensor.encode};
  }
};

// The sums over a block, or a rotation, of v^2 and of v times what v is rounded to.
struct EdenSums {
  float a = 0.0f, b = 0.0f;

  __device__ __forceinline__ void add_element(float v, float w) {
    a = __fmaf_rn(v, v, a);
    b = __fmaf_rn(v, w, b);
  }
};

// The codes of 16 elements under their first scale s1.
__device__ __forceinline__ uint2 eden_codes(const float (&y)[kBlock], float s1, float enc, float tensor_encode,
                                            EdenSums& sums) {
  Elements<float, kBlock> words;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) words.word[i] = float_bits(y[i]);
  uint32_t packed[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float magnitude = fabsf(y[8 * half + i]);
      bits[i] = nearest_even_bits(mul(magnitude, enc));
      sums.add_element(mul(magnitude, tensor_encode), mul(mul(bits_float(bits[i] << 22), kCodeBias), s1));
    }
    packed[half] = pack_codes<Fast::kNearestEven>(bits) | words.signs(8 * half);
  }
  return make_uint2(packed[0], packed[1]);
}

// y becomes the values of its codes, signs included, without a scale.
__device__ __forceinline__ void eden_values(float (&y)[kBlock], float s1, float enc, float tensor_encode,
                                            EdenSums& sums) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = fabsf(y[i]);
    const float value = nearest_on_grid(fminf(mul(magnitude, enc), kE2M1Max));
    sums.add_element(mul(magnitude, tensor_encode), mul(value, s1));
    y[i] = bits_float(float_bits(value) | (float_bits(y[i]) & 0x80000000u));
  }
}

// What a lane's blocks are rounded to: codes, or y to values without a scale.
template <int blocks>
struct RoundedLane {
  uint2 codes[blocks];
  uint8_t s_bits[blocks];
};

// enc: that of each block scale. draw(block): the random bits of the lane's blocks.
template <bool values, typename Lane, typename Draw>
__device__ __forceinline__ RoundedLane<Lane::kBlocks> round_lane(const Lane&, float (&y)[Lane::kBlocks][kBlock],
                                                                 const EdenScale& scale, const float* enc, Draw draw) {
  float s1[Lane::kBlocks], a[Lane::kBlocks], b[Lane::kBlocks];
  RoundedLane<Lane::kBlocks> out{};
  bool finite = !scale.no_amax;
#pragma unroll
  for (int block = 0; block < Lane::kBlocks; ++block) {
    const float most = magnitude_or_nan(y[block]);
    const uint8_t first_bits = e4m3_nearest(mul(most, scale.onto_grid));
    const float block_enc = enc[first_bits];
    s1[block] = e4m3_value(first_bits);
    finite &= is_finite(most);
    EdenSums sums;
    if constexpr (values) {
      eden_values(y[block], s1[block], block_enc, scale.encode, sums);
    } else {
      out.codes[block] = eden_codes(y[block], s1[block], block_enc, scale.encode, sums);
    }
    a[block] = sums.a, b[block] = sums.b;
  }
  const bool broken = Lane::is_broken(finite);
  const float correction = div(Lane::sum(a), Lane::sum(b));
#pragma unroll
  for (int block = 0; block < Lane::kBlocks; ++block) {
    const uint8_t s_bits = round_scale(corrected_scale(s1[block], correction), draw(block));
    out.s_bits[block] = broken ? kE4M3Nan : s_bits;
    if (!values && broken) out.codes[block] = make_uint2(0u, 0u);
  }
  return out;
}

}  // namespace nvfp4
