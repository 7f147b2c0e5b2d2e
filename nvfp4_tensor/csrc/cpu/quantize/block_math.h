// The contract on sixteen lanes: rounding, block scales, random bits, Hadamard. Included after a header of simd/, whose
// namespace NVFP4_ISA names. Two layouts are used: one lane a block (scales), and "pairs", where two registers hold the
// even and the odd elements of two neighbouring blocks, lanes 0-7 the first one's, 8-15 the second's: the two nibbles
// of a byte then meet in one lane, and bfloat16 splits into both registers without a shuffle.
#pragma once

#include <cmath>

#include "cpu/host/kernels.h"

namespace nvfp4::NVFP4_ISA {

constexpr int kPairs = kGroupBlocks / 2;
constexpr int32_t kInfBits = 0x7F800000;
constexpr int32_t kOneBits = 0x3F800000;

// --- rounding to E2M1 ------------------------------------------------------------------------------------------------

// What a rounding mode is to a kernel: stochastic rounding differs by its fraction bits.
enum class Rounding { kEven, kAway, kZero, kStochastic16, kStochastic8 };

inline Rounding rounding_of(const QuantizeSpec& spec) {
  if (spec.is_stochastic()) return spec.random_bits == 8 ? Rounding::kStochastic8 : Rounding::kStochastic16;
  if (spec.round_mode == RoundingMode::kNearestAway) return Rounding::kAway;
  return spec.round_mode == RoundingMode::kNearestZero ? Rounding::kZero : Rounding::kEven;
}

// 2^e, e the exponent of the binade of |v| on the grid: 0 below 2, 1 below 4, 2 to 6. A step there is 2^(e-1).
inline F grid_binade(F a) { return as_float(bit_and(max(bits(a), set(kOneBits)), set(kInfBits))); }

// 2^22 steps beside a, so that float addition rounds to whole steps; 6 more make the exponent's share of code_bits
// a multiple of 8. An even count of steps is an even code.
constexpr float kNearestMagic = 4194304.0f + 3.0f;

// The code is the count of steps plus 2e. The count stands in the low bits of `steps`, 2e in its exponent field.
inline I code_bits(I count, I steps) { return add(count, shift_right<22>(steps)); }

// Codes of v in the low three bits (what lies above them is noise); `random` is read by stochastic rounding only.
template <Rounding rounding>
inline I round_to_code(F v, I random) {
  F a = magnitude_to_6(v);
  if constexpr (rounding == Rounding::kEven) {
    const I steps = bits(add_exact_product(grid_binade(a), set(kNearestMagic), a));
    return code_bits(steps, steps);
  } else {
    // Ties: away from zero is half a step added before truncation; toward zero the same from the float just below.
    if constexpr (rounding == Rounding::kZero) a = as_float(max(sub(bits(a), set(1)), set(0)));
    if constexpr (rounding == Rounding::kAway || rounding == Rounding::kZero) random = set(0x8000);
    if constexpr (rounding == Rounding::kStochastic8) {
      const I steps = add(fixed_point<8>(grid_binade(a), a), shift_right<8>(random));
      return code_bits(shift_right<8>(steps), steps);
    }
    const I steps = add(fixed_point<16>(grid_binade(a), a), random);
    return code_bits(shift_right<16>(steps), steps);
  }
}

// The magnitude on the grid nearest to |v|.
inline F nearest_magnitude(F v) {
  const F a = magnitude_to_6(v), binade = grid_binade(a);
  return sub_exact_product(binade, kNearestMagic, add_exact_product(binade, set(kNearestMagic), a));
}

// --- block scales ----------------------------------------------------------------------------------------------------

// The values of bytes 0..0x7E; NaN for those above.
NVFP4_INLINE F e4m3_values(I bytes) {
  const F normal = as_float(shift_left<20>(add(bytes, set(120 << 3))));
  const F small = mul(to_float(bytes), set(1.0f / 512.0f));
  const F value = select(greater(set(8), bytes), small, normal);
  return select(greater(bytes, set(kE4M3Nan - 1)), as_float(set(0x7FC00000)), value);
}

NVFP4_INLINE I to_e4m3(F v, F block_amax, ScaleRounding rounding) {
  const Mask nan = is_nan(v);
  v = min(v, set(kE4M3Max));
  const I b = bits(v);
  const I normal = sub(shift_right<20>(add(add(b, set(0x7FFFF)), bit_and(shift_right<20>(b), set(1)))), set(120 << 3));
  const I small = sub(bits(add(v, set(16384.0f))), set(0x46800000));
  I bytes = select(less(v, set(1.0f / 64.0f)), small, normal);
  if (rounding == ScaleRounding::kUp) {
    const Mask zero = both(equal(bytes, set(0)), less(set(0.0f), block_amax));
    bytes = select(either(less(e4m3_values(bytes), v), zero), add(bytes, set(1)), bytes);
  }
  return select(nan, set(kE4M3Nan), bytes);
}

inline F block_encode(F s_b, const TensorScale& tensor) {
  const F enc = min(div(set(1.0f), mul(s_b, set(tensor.decode))), set(kFloatMax));
  return select(equal(bits(s_b), set(0)), set(0.0f), enc);
}

struct BlockScales {
  I bytes;
  F encode;
  uint32_t nan_lanes;
};

NVFP4_INLINE BlockScales finish_scales(I bytes, I magnitudes, const TensorScale& tensor) {
  bytes = select(greater(magnitudes, set(kInfBits - 1)), set(kE4M3Nan), bytes);
  return {bytes, block_encode(e4m3_values(bytes), tensor), lanes(equal(bytes, set(kE4M3Nan)))};
}

NVFP4_INLINE BlockScales block_scales(I magnitudes, const Plan& plan) {
  const F amax = as_float(magnitudes);
  return finish_scales(to_e4m3(mul(amax, set(plan.tensor.sixth)), amax, plan.spec.scale_rounding), magnitudes,
                       plan.tensor);
}

// Four-over-six: a lane's two candidates, the one for 6 and the one for 4.
struct Candidates {
  I bytes[2];
};

inline Candidates candidate_scales(I magnitudes, const Plan& plan) {
  const F amax = as_float(magnitudes);
  const F base = mul(div(amax, set(kE2M1Max)), set(plan.tensor.encode));
  return {
      {to_e4m3(base, amax, plan.spec.scale_rounding), to_e4m3(mul(base, set(1.5f)), amax, plan.spec.scale_rounding)}};
}

// The error of each lane's block with its scale; elements: 16 blocks of 16 in order.
inline F block_errors(const float* elements, I bytes, const Plan& plan) {
  const F s_b = e4m3_values(bytes), encode = block_encode(s_b, plan.tensor);
  F total = set(0.0f);
  for (int i = 0; i < kBlock; ++i) {
    const F x = gather_stride16(elements + i);
    const F value = div(mul(mul(nearest_magnitude(mul(x, encode)), s_b), set(plan.tensor.amax)),
                        set(plan.tensor.range));
    const F difference = abs(sub(value, abs(x)));
    const F error = plan.spec.four_over_six == FourOverSix::kSquared ? mul(difference, difference) : difference;
    total = i ? add(total, error) : error;
  }
  return total;
}

inline I choose(const Candidates& candidates, F error6, F error4) {
  return select(less(error4, error6), candidates.bytes[1], candidates.bytes[0]);
}

// --- random bits -----------------------------------------------------------------------------------------------------

struct PhiloxWords {
  I word[4];
};

// Philox of sixteen numbers, one per lane.
inline PhiloxWords philox(I number_low, I number_high, const RandomKey& key) {
  I c0 = number_low, c1 = number_high, c2 = set(int32_t(key.offset)), c3 = set(int32_t(key.stream));
  uint32_t key0 = key.seed_low, key1 = key.seed_high;
  for (int round = 0; round < 7; ++round) {
    I low0, high0, low1, high1;
    multiply_wide(c0, 0xD2511F53u, low0, high0);
    multiply_wide(c2, 0xCD9E8D57u, low1, high1);
    c0 = xor3(high1, c1, set(int32_t(key0)));
    c2 = xor3(high0, c3, set(int32_t(key1)));
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Of sixteen blocks.
inline RandomWindows random_windows(I block_low, I block_high, const RandomKey& key) {
  const I low = RandomWindows::lane_order(block_low), high = RandomWindows::lane_order(block_high);
  return RandomWindows(philox(low, high, key).word);
}

// Of the blocks from (row, block) on, in row-major order over rows of `blocks`.
inline RandomWindows random_windows(const Plan& plan, int64_t row, int64_t block, int64_t blocks) {
  uint64_t index = plan.first_block + row * plan.row_blocks + block;
  const uint64_t row_gap = plan.row_blocks - blocks;
  if ((row_gap == 0 || block + kGroupBlocks <= blocks) && uint32_t(index) <= 0xFFFFFFF0u) {
    const I low = add(load(kLaneNumbers), set(int32_t(uint32_t(index))));
    return random_windows(low, set(int32_t(uint32_t(index >> 32))), plan.key);
  }
  alignas(64) int32_t low[16], high[16];
  for (int lane = 0; lane < 16; ++lane) {
    low[lane] = int32_t(uint32_t(index));
    high[lane] = int32_t(uint32_t(index >> 32));
    ++index;
    if (++block == blocks) {
      index += row_gap;
      block = 0;
    }
  }
  return random_windows(load(low), load(high), plan.key);
}

// --- Hadamard --------------------------------------------------------------------------------------------------------

// v -> low + high in lanes without `bit`, low - high in the others.
template <int distance>
inline F butterfly(F v) {
  const I lane = load(kLaneNumbers);
  const Mask high = equal(bit_and(lane, set(distance)), set(distance));
  const F negated = as_float(bit_xor(bits(v), set(INT32_MIN)));
  return add(swap_lanes<distance>(v), select(high, negated, v));
}

// A NaN whose bits rounding to bfloat16 may add to: those of an NVIDIA GPU's, 0x7FFFFFFF, would become -0.
inline F plain_nan(F v) { return select(is_nan(v), set(__builtin_nanf("")), v); }

// 16 blocks, transformed and rounded to bfloat16; signs: +-0.25 for each element of a block, in pairs order.
template <typename T>
inline void hadamard_group(const T* x, F even_sign, F odd_sign, Bf16* out) {
  for (int p = 0; p < kPairs; ++p) {
    F even, odd;
    load_pairs(x + 32 * p, even, odd);
    even = mul(even, even_sign);
    odd = mul(odd, odd_sign);
    const F low = butterfly<4>(butterfly<2>(butterfly<1>(add(even, odd))));
    const F high = butterfly<4>(butterfly<2>(butterfly<1>(sub(even, odd))));
    store_pairs(out + 32 * p, plain_nan(low), plain_nan(high));
  }
}

struct HadamardSigns {
  F even, odd;
  explicit HadamardSigns(int mask) {
    float signs[2][16];
    for (int i = 0; i < 32; ++i) signs[i % 2][i / 2] = mask >> (i % 16) & 1 ? -0.25f : 0.25f;
    even = load(signs[0]);
    odd = load(signs[1]);
  }
};

}  // namespace nvfp4::NVFP4_ISA
