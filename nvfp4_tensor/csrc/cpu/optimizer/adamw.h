// An AdamW step on sixteen lanes, which are the elements of a block. Included after a header of simd/.
#pragma once

#include "cpu/optimizer/kernels.h"
#include "cpu/quantize/block_math.h"
#include "numerics/layout.h"

namespace nvfp4::NVFP4_ISA {

// --- nibbles, random bits --------------------------------------------------------------------------------------------

// Bytes 0..3 of x to eight bytes of a nibble each, the low one first; and back.
inline uint64_t spread_nibbles(uint32_t bytes) {
  uint64_t x = bytes;
  x = (x | x << 16) & 0x0000FFFF0000FFFFull;
  x = (x | x << 8) & 0x00FF00FF00FF00FFull;
  return (x | x << 4) & 0x0F0F0F0F0F0F0F0Full;
}
inline uint32_t gather_nibbles(uint64_t x) {
  x = (x | x >> 4) & 0x00FF00FF00FF00FFull;
  x = (x | x >> 8) & 0x0000FFFF0000FFFFull;
  return uint32_t(x | x >> 16);
}

inline I load_nibbles(const uint8_t* bytes) {
  uint32_t half[2];
  std::memcpy(half, bytes, 8);
  const uint64_t spread[2] = {spread_nibbles(half[0]), spread_nibbles(half[1])};
  uint8_t each[16];
  std::memcpy(each, spread, 16);
  return load_bytes(each);
}
inline void store_nibbles(uint8_t* bytes, I codes) {
  uint8_t each[16];
  store_bytes(each, codes);
  uint64_t spread[2];
  std::memcpy(spread, each, 16);
  const uint32_t half[2] = {gather_nibbles(spread[0]), gather_nibbles(spread[1])};
  std::memcpy(bytes, half, 8);
}

// The random words of sixteen blocks from `number` on, and windows of a block's 128 bits.
struct BlockRandom {
  alignas(64) int32_t word[4][16];

  BlockRandom(uint64_t number, const RandomKey& key) {
    alignas(64) int32_t low[16], high[16];
    for (int lane = 0; lane < 16; ++lane) {
      low[lane] = int32_t(uint32_t(number + lane));
      high[lane] = int32_t(uint32_t((number + lane) >> 32));
    }
    const PhiloxWords words = philox(load(low), load(high), key);
    for (int i = 0; i < 4; ++i) store(word[i], words.word[i]);
  }

  // Bits [8e, 8e + 16) for lane e.
  I windows(int block) const {
    uint8_t bytes[20];
    const uint32_t words[4] = {uint32_t(word[0][block]), uint32_t(word[1][block]), uint32_t(word[2][block]),
                               uint32_t(word[3][block])};
    std::memcpy(bytes, words, 16);
    std::memcpy(bytes + 16, words, 4);
    alignas(64) int32_t out[16];
    for (int e = 0; e < 16; ++e) std::memcpy(out + e, bytes + e, 4);
    return bit_and(load(out), set(0xFFFF));
  }

  // The lower 24 bits of word e / 4 + further, rotated to the right by 8 (e % 4 + 1), for lane e.
  I rotations(int block, int further) const {
    alignas(64) int32_t out[16];
    for (int i = 0; i < 4; ++i) {
      const uint64_t twice = uint64_t(uint32_t(word[(i + further) % 4][block])) * 0x100000001ull;
      for (int byte = 0; byte < 4; ++byte) out[4 * i + byte] = int32_t(twice >> 8 * (byte + 1));
    }
    return bit_and(load(out), set(0xFFFFFF));
  }
};

inline int32_t largest_lane(I x) {
  alignas(64) int32_t lane[16];
  store(lane, x);
  int32_t most = lane[0];
  for (int i = 1; i < 16; ++i) most = most > lane[i] ? most : lane[i];
  return most;
}

// half_power of numerics/adamw.h.
inline F half_powers(I t) {
  const I odd = sub(set(0), bit_and(t, set(1)));
  return as_float(sub(shift_left<22>(t), bit_and(odd, set(0x400000 - 0x3504F3))));
}

// --- a block ---------------------------------------------------------------------------------------------------------

struct BlockMoments {
  uint8_t *r, *r_scale, *v, *v_exponent;
};

// Codes of magnitudes, with the signs of the values.
inline I signed_codes(I code, F value) {
  return bit_or(bit_and(code, set(7)), bit_and(shift_right<28>(bits(value)), set(8)));
}

// The new r = m / root(v); the moments to their next ones. Random bits: 16 of r, 24 of v, whose upper 23 count.
inline F next_moments(F g, const BlockMoments& at, const AdamwNumbers& n, const TensorScale& ratio, I of_r, I of_v) {
  const int old_top = *at.v_exponent, least = int(n.least_exponent);
  const I old = old_top == kNotFiniteExponent ? set(old_top) : max(sub(set(old_top), load_nibbles(at.v)), set(0));
  const float s = e4m3_value(std::min<uint8_t>(*at.r_scale, kE4M3Nan));
  const F root = mul(half_powers(add(old, set(127))), set(kRatioScale));
  const F decoded = mul(mul(e2m1_values(load_nibbles(at.r)), set(s)), root);
  const F m = add(mul(set(n.beta1), decoded), mul(set(n.rest1), g));
  const F v = add(mul(set(n.beta2), as_float(shift_left<23>(old))), mul(mul(set(n.rest2), g), g));
  const I v_bits = bit_and(bits(v), set(0x7FFFFFFF));
  const I draws = shift_right<1>(of_v);
  I exponent = max(shift_right<23>(add(v_bits, draws)), set(least));  // of NaN it is 255 or 256
  int top = largest_lane(exponent);
  const bool saturated = __builtin_expect(top >= kLargestExponent, 0);
  if (saturated) {
    if (largest_lane(bit_and(bits(m), set(0x7FFFFFFF))) >= kInfBits) {
      *at.v_exponent = kNotFiniteExponent;
      std::memset(at.v, 0, 8);
      std::memset(at.r, 0, 8);
      *at.r_scale = kE4M3Nan;
      return set(__builtin_nanf(""));
    }
    top = kLargestExponent;
    exponent = select(greater(exponent, set(top)), set(top), exponent);
  }
  *at.v_exponent = uint8_t(top);
  I below = sub(set(top), exponent);
  below = select(greater(below, set(kMostBelow)), set(kMostBelow), below);
  store_nibbles(at.v, below);
  F r = mul(m, half_powers(add(set(381 - top), below)));
  if (saturated) r = select(equal(exponent, set(kLargestExponent)), mul(r, set(0.0f)), r);
  const float most = bits_float(uint32_t(largest_lane(bit_and(bits(r), set(0x7FFFFFFF)))));
  *at.r_scale = ratio.block_scale(most, ScaleRounding::kUp);
  if (*at.r_scale == kE4M3Nan) {
    std::memset(at.r, 0, 8);
    return r;
  }
  const F y = mul(r, set(ratio.block_encode(e4m3_value(*at.r_scale))));
  store_nibbles(at.r, signed_codes(round_to_code<Rounding::kStochastic16>(y, of_r), r));
  return r;
}

// Elements of a block that may end before its 16th.
template <typename T>
F load_elements(const T* from, int count) {
  if (count == kBlock) return load_floats(from);
  T padded[kBlock] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_floats(padded);
}

inline void store_elements(float* to, F w, I, int count) {
  alignas(64) float each[16];
  store(each, w);
  std::memcpy(to, each, count * sizeof(float));
}

// Rounded stochastically.
inline void store_elements(Bf16* to, F w, I r16s, int count) {
  const I w_bits = bits(w), magnitude_bits = bit_and(w_bits, set(0x7FFFFFFF));
  I rounded = select(greater(set(kInfBits), magnitude_bits), add(w_bits, r16s), w_bits);
  rounded = select(greater(magnitude_bits, set(kInfBits)), set(0x7FC00000), rounded);
  alignas(64) int32_t words[16];
  store(words, shift_right<16>(rounded));
  uint16_t each[16];
  for (int i = 0; i < 16; ++i) each[i] = uint16_t(words[i]);
  std::memcpy(to, each, count * sizeof(uint16_t));
}

// Codes of magnitude * inverse, at most 6, in whole steps of 2^-22, with 24 random bits. The exact product is cut off:
// one ulp less than the rounded one where that is above it. Likewise 1 + y, whose bits count in steps of 2^-23.
inline I round_to_code_24(F magnitude, float inverse, I random) {
  const F rounded = mul(magnitude, set(inverse)), rest = fma(magnitude, set(inverse), sub(set(0.0f), rounded));
  const I above = bit_and(select(less(rest, set(0.0f)), set(1), set(0)), set(1));
  const F y = min(as_float(sub(bits(rounded), above)), set(kE2M1Max));
  const F plus_one = add(y, set(1.0f));
  const I too_much = select(less(y, sub(plus_one, set(1.0f))), set(1), set(0));
  const I below_one = sub(sub(bits(plus_one), set(127 << 23)), too_much);
  const I c = select(less(y, set(1.0f)), below_one, sub(bits(y), set(126 << 23)));
  return shift_right<24>(add(shift_left<2>(c), random));
}

inline void step_codes(uint8_t* codes, uint8_t* scale, F r, float decay, float step_size, const GrowthBits& growth,
                       I random) {
  const uint8_t old_bits = std::min<uint8_t>(*scale, kE4M3Nan);
  const float old = e4m3_value(old_bits);
  const F w = mul(e2m1_values(load_nibbles(codes)), set(old * kShrunk));
  const F next = sub(mul(set(decay), w), mul(set(step_size), r));
  F magnitude = mul(abs(next), set(kGrown));
  const float largest = bits_float(uint32_t(largest_lane(bits(magnitude))));
  const GrownScale grown = next_scale(old_bits, old, reciprocal(old), largest, growth);
  *scale = grown.bits;
  if (grown.bits == kE4M3Nan || grown.bits == 0) {
    store_nibbles(codes, grown.bits ? set(0) : bit_and(shift_right<28>(bits(next)), set(8)));
    return;
  }
  if (grown.kept > 0.0f) {
    const F bound = set(grown.bound), beyond = sub(magnitude, bound);
    const F kept = mul(select(less(set(0.0f), beyond), beyond, set(0.0f)), set(grown.kept));
    magnitude = add(min(magnitude, bound), kept);
  }
  store_nibbles(codes, signed_codes(round_to_code_24(magnitude, reciprocal(grown.scale), random), next));
}

// --- the parameter ---------------------------------------------------------------------------------------------------

// draws: whether the weight is rounded with random bits.
template <bool draws, typename G, typename Weight>
void step_blocks(const AdamwStep& a, int64_t begin, int64_t end, Weight weight) {
  AdamwNumbers n;
  std::memcpy(&n, a.hyper, sizeof n);
  int64_t random[2];
  std::memcpy(random, a.rng_state, sizeof random);
  const RandomKey key = RandomKey::of(random[0], random[1], kMomentStream);
  const TensorScale ratio = TensorScale::of(kRatioAmax, kE4M3Max);
  for (int64_t first = begin; first < end; first += kGroupBlocks) {
    const uint64_t number = uint64_t(a.first_block + first);
    const BlockRandom words(number, key), of_v(number, with_stream(key, kSecondMomentStream));
    int64_t row = first / a.blocks, column = first % a.blocks;
    for (int lane = 0; lane < std::min<int64_t>(kGroupBlocks, end - first); ++lane) {
      const int64_t block = first + lane, element = row * a.columns + column * kBlock;
      const int count = int(std::min<int64_t>(kBlock, a.columns - column * kBlock));
      const F g = mul(load_elements(static_cast<const G*>(a.grad) + element, count), set(n.grad_scale));
      const BlockMoments at{a.r + block * 8, a.r_scale + block, a.v + block * 8, a.v_exponent + block};
      const F r = next_moments(g, at, n, ratio, words.windows(lane), of_v.rotations(lane, 0));
      const GrowthBits growth = {key, uint64_t(a.first_block + block)};
      weight(n, r, row, column, element, count, growth, draws ? words.rotations(lane, kWeightWord) : set(0));
      if (++column == a.blocks) column = 0, ++row;
    }
  }
}

template <typename G, typename W>
void step_dense(const AdamwStep& a, int64_t begin, int64_t end) {
  step_blocks<sizeof(W) == 2, G>(
      a, begin, end,
      [&](const AdamwNumbers& n, F r, int64_t, int64_t, int64_t element, int count, const GrowthBits&, I random) {
        W* w = static_cast<W*>(a.weight) + element;
        const F next = sub(mul(set(n.decay), load_elements(w, count)), mul(set(n.step_size), r));
        store_elements(w, next, shift_right<8>(random), count);
      });
}

template <typename G>
void step(const AdamwStep& a, int64_t begin, int64_t end) {
  if (!a.scale) {
    const auto run = a.weight_dtype == Dtype::kFloat ? step_dense<G, float> : step_dense<G, Bf16>;
    return run(a, begin, end);
  }
  const int64_t column_tiles = ceil_div(a.blocks, kTileColumns);
  step_blocks<true, G>(
      a, begin, end,
      [&](const AdamwNumbers& n, F r, int64_t row, int64_t column, int64_t, int, const GrowthBits& growth, I random) {
        uint8_t* codes = static_cast<uint8_t*>(a.weight) + (row * a.blocks + column) * 8;
        uint8_t* scale = a.scale + scale_offset(uint32_t(row), uint32_t(column), uint32_t(column_tiles));
        step_codes(codes, scale, r, n.decay, n.step_size / *a.per_tensor_scale * kShrunk, growth, random);
      });
}

}  // namespace nvfp4::NVFP4_ISA
