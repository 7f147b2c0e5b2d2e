// Sixteen lanes in plain C++ (GCC and Clang vector types, which become whatever the target has): the vocabulary of
// the kernels in its readable form. avx2.h and avx512.h say the same in intrinsics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/host/kernels.h"

namespace nvfp4::portable {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
using Mask = I;  // all ones or all zeros

// Whether some twenty values of sixteen lanes stay in registers.
constexpr bool kManyRegisters = false;
alignas(64) inline constexpr int32_t kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline F set(float x) { return F{} + x; }
inline I set(int32_t x) { return I{} + x; }
inline I bits(F x) { return reinterpret_cast<I>(x); }
inline F as_float(I x) { return reinterpret_cast<F>(x); }

template <typename V, typename Function>
V each_lane(Function f) {
  V out;
  for (int lane = 0; lane < 16; ++lane) out[lane] = f(lane);
  return out;
}
inline F to_float(I x) {
  return each_lane<F>([&](int lane) { return float(x[lane]); });
}

template <typename V, typename E>
V load_as(const E* p) {
  V out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline F load(const float* p) { return load_as<F>(p); }
inline I load(const int32_t* p) { return load_as<I>(p); }
// Lanes 0-7 from one address, 8-15 from another.
inline F load_halves(const float* low, const float* high) {
  F out;
  std::memcpy(&out, low, 32);
  std::memcpy(reinterpret_cast<char*>(&out) + 32, high, 32);
  return out;
}
inline void store(int32_t* p, I x) { std::memcpy(p, &x, sizeof x); }
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
// p[0], p[16], ... p[240].
inline F gather_stride16(const float* p) {
  return each_lane<F>([&](int lane) { return p[16 * lane]; });
}

inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F min(F a, F b) { return a < b ? a : b; }  // b where either is NaN
inline F abs(F a) { return as_float(bits(a) & 0x7FFFFFFF); }
inline I add(I a, I b) { return a + b; }
inline I sub(I a, I b) { return a - b; }
inline I max(I a, I b) { return a > b ? a : b; }
inline I bit_and(I a, I b) { return a & b; }
inline I bit_or(I a, I b) { return a | b; }
inline I bit_xor(I a, I b) { return a ^ b; }
template <int n>
inline I shift_left(I a) {
  return a << n;
}
template <int n>
inline I shift_right(I a) {  // logical
  return (a >> n) & int32_t(~0u >> n);
}

inline Mask less(F a, F b) { return a < b; }
inline Mask is_nan(F a) { return a != a; }
inline Mask equal(I a, I b) { return a == b; }
inline Mask greater(I a, I b) { return a > b; }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline F select(Mask m, F yes, F no) { return m ? yes : no; }
inline I select(Mask m, I yes, I no) { return m ? yes : no; }
inline uint32_t lanes(Mask m) {
  uint32_t out = 0;
  for (int lane = 0; lane < 16; ++lane) out |= (m[lane] & 1) << lane;
  return out;
}

// min(|a|, 6).
inline F magnitude_to_6(F a) { return min(abs(a), set(6.0f)); }
inline F fma(F a, F b, F c) {
  return each_lane<F>([&](int lane) { return std::fma(a[lane], b[lane], c[lane]); });
}
// a +- t * scale, where t * scale is exact, so that fusing changes nothing.
inline F add_exact_product(F t, F scale, F a) { return t * scale + a; }
inline F sub_exact_product(F t, float scale, F a) { return a - t * scale; }

// For a in [0, 6] and t = 2^e its grid_binade: floor(a / 2^(e-1) * 2^fraction_bits) in the low bits, 6 more steps, and
// an exponent field of e + 5 modulo 8, as the float sum t * (2^k + 3) + a rounded toward zero has them.
template <int fraction_bits>
inline I fixed_point(F t, F a) {
  const I inverse_t = set(254 << 23) - bits(t);
  const F steps = a * (as_float(inverse_t) * float(2 << fraction_bits));
  const I count = each_lane<I>([&](int lane) { return int32_t(steps[lane]); });
  return count + bits(t) + ((6 << fraction_bits) + (6 << 23));
}

// Lane i gets lane i xor distance.
template <int distance>
inline F swap_lanes(F a) {
  return each_lane<F>([&](int lane) { return a[lane ^ distance]; });
}

// --- 32 elements as even and odd ones --------------------------------------------------------------------------------

inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFF;
  float value = magnitude < 0x400 ? magnitude * 0x1p-24f : bits_float((magnitude << 13) + (112u << 23));
  if (magnitude >= 0x7C00) value = bits_float(0x7F800000u | (magnitude & 0x3FF) << 13);
  return half & 0x8000 ? -value : value;
}

inline uint16_t float_to_half(float value) {
  const uint32_t magnitude = float_bits(value) & 0x7FFFFFFF, sign = float_bits(value) >> 16 & 0x8000;
  if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return uint16_t(sign | 0x7C00);  // rounds to 2^16 or more
  if (magnitude < 0x38800000) {  // subnormal: steps of 2^-24 are what float addition rounds to around 0.5
    return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
  }
  return uint16_t(sign | ((magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

inline float to_float(Bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
inline float to_float(Fp16 x) { return half_to_float(x.bits); }
inline float to_float(float x) { return x; }

// 16 elements in order.
template <typename T>
F load_floats(const T* p) {
  return each_lane<F>([&](int lane) { return to_float(p[lane]); });
}

template <typename T>
void load_pairs(const T* p, F& even, F& odd) {
  even = each_lane<F>([&](int lane) { return to_float(p[2 * lane]); });
  odd = each_lane<F>([&](int lane) { return to_float(p[2 * lane + 1]); });
}

inline void convert(float x, Bf16& out) {
  const uint32_t b = float_bits(x);
  out.bits = uint16_t((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
inline void convert(float x, Fp16& out) { out.bits = float_to_half(x); }
inline void convert(float x, float& out) { out = x; }

template <typename T>
void store_pairs(T* p, F even, F odd) {
  for (int lane = 0; lane < 16; ++lane) {
    convert(even[lane], p[2 * lane]);
    convert(odd[lane], p[2 * lane + 1]);
  }
}

// Two nibbles per lane: the low three bits of each code, and the sign bits of the values they came from.
inline I pack_codes(I even_code, I odd_code, F even_value, F odd_value) {
  const I codes = (even_code & 7) | (odd_code & 7) << 4;
  return codes | (shift_right<28>(bits(even_value)) & 8) | (shift_right<24>(bits(odd_value)) & 0x80);
}
// Eight registers of a byte per lane.
inline void store_codes(uint8_t* out, const I* pairs) {
  for (int i = 0; i < kGroupBytes; ++i) out[i] = uint8_t(pairs[i / 16][i % 16]);
}
inline void load_codes(const uint8_t* bytes, I& even, I& odd) {
  even = each_lane<I>([&](int lane) { return bytes[lane] & 0xF; });
  odd = each_lane<I>([&](int lane) { return bytes[lane] >> 4; });
}
inline F e2m1_values(I codes) {
  static constexpr float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return each_lane<F>([&](int lane) { return table[codes[lane]]; });
}

// 32 bytes, 64 codes, as two pairs: even, odd, even, odd.
inline void code_pairs(const uint8_t* bytes, F* out) {
  for (int pair = 0; pair < 2; ++pair) {
    I even, odd;
    load_codes(bytes + 16 * pair, even, odd);
    out[2 * pair] = e2m1_values(even), out[2 * pair + 1] = e2m1_values(odd);
  }
}

inline I load_bytes(const uint8_t* p) {
  return each_lane<I>([&](int lane) { return int32_t(p[lane]); });
}
inline void store_bytes(uint8_t* out, I x) {
  for (int lane = 0; lane < 16; ++lane) out[lane] = uint8_t(x[lane]);
}

// Whether looking a code's value up in a row of 16 words (lookup_pair) beats computing it.
constexpr bool kDecodesByTable = false;
inline void lookup_pair(const uint8_t*, const uint16_t*, const uint16_t*, void*) {}

// One number a block, given to the lanes of a pair of blocks.
struct Spread {
  F values;
  explicit Spread(F x) : values(x) {}
  F pair(int p) const {
    return each_lane<F>([&](int lane) { return values[2 * p + lane / 8]; });
  }
};

// Bits of the largest magnitude of each of 16 blocks; one that is not finite is larger than all that are.
template <typename T>
I block_magnitudes(const T* p) {
  return each_lane<I>([&](int lane) {
    uint32_t most = 0;
    for (int i = 0; i < kBlock; ++i) most = std::max(most, float_bits(to_float(p[16 * lane + i])) & 0x7FFFFFFF);
    return int32_t(most);
  });
}

// --- random bits -----------------------------------------------------------------------------------------------------

// Low and high words of the 64-bit products.
inline void multiply_wide(I a, uint32_t constant, I& low, I& high) {
  for (int lane = 0; lane < 16; ++lane) {
    const uint64_t product = uint64_t(uint32_t(a[lane])) * constant;
    low[lane] = int32_t(uint32_t(product));
    high[lane] = int32_t(uint32_t(product >> 32));
  }
}
inline I xor3(I a, I b, I c) { return a ^ b ^ c; }

// The 16-bit windows of sixteen blocks' random words; lane_order is the lanes in which the words should come.
struct RandomWindows {
  uint32_t words[16][4];
  static I lane_order(I x) { return x; }
  RandomWindows() = default;
  explicit RandomWindows(const I* word) {
    for (int lane = 0; lane < 16; ++lane) {
      for (int i = 0; i < 4; ++i) words[lane][i] = uint32_t(word[i][lane]);
    }
  }
  int32_t window(int block, int element) const {
    const uint32_t low = words[block][element / 4], high = words[block][(element / 4 + 1) % 4];
    return int32_t((uint64_t(high) << 32 | low) >> 8 * (element % 4) & 0xFFFF);
  }
  void pair(int p, I& even, I& odd) const {
    even = each_lane<I>([&](int lane) { return window(2 * p + lane / 8, lane % 8 * 2); });
    odd = each_lane<I>([&](int lane) { return window(2 * p + lane / 8, lane % 8 * 2 + 1); });
  }
};

}  // namespace nvfp4::portable
