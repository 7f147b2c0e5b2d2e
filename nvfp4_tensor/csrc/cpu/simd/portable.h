// Sixteen lanes in plain C++ (GCC and Clang vector types, which become whatever the target has): the vocabulary of
// the kernels in its readable form. The other headers say the same in intrinsics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/host/kernels.h"

namespace nvfp4::portable {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
constexpr int kParts = 4;

}  // namespace nvfp4::portable

#include "cpu/simd/lanes.h"

namespace nvfp4::portable {

// Whether some twenty values of sixteen lanes stay in registers.
constexpr bool kManyRegisters = false;

// A lane, in memory: as elements of an array, loops over lanes become vectors again.
inline const float& at(const F& x, int lane) { return reinterpret_cast<const float*>(x.v)[lane]; }
inline const int32_t& at(const I& x, int lane) { return reinterpret_cast<const int32_t*>(x.v)[lane]; }
template <typename V, typename Function>
V each_lane(Function f) {
  using Element = std::remove_cvref_t<decltype(at(V{}, 0))>;
  V out;
  for (int lane = 0; lane < 16; ++lane) reinterpret_cast<Element*>(out.v)[lane] = f(lane);
  return out;
}
// p[0], p[16], ... p[240].
inline F gather_stride16(const float* p) {
  return each_lane<F>([&](int lane) { return p[16 * lane]; });
}

inline F select(Mask m, F yes, F no) {
  return map<F>([](Words m, Floats yes, Floats no) { return m ? yes : no; }, m, yes, no);
}
inline I select(Mask m, I yes, I no) { return bits(select(m, as_float(yes), as_float(no))); }
inline F min(F a, F b) { return select(less(a, b), a, b); }  // b where either is NaN
inline uint32_t lanes(Mask m) {
  uint32_t out = 0;
  for (int lane = 0; lane < 16; ++lane) out |= (at(m, lane) & 1) << lane;
  return out;
}

inline F fma(F a, F b, F c) {
  return each_lane<F>([&](int lane) { return std::fma(at(a, lane), at(b, lane), at(c, lane)); });
}
// a +- t * scale, where t * scale is exact, so that fusing changes nothing.
inline F add_exact_product(F t, F scale, F a) { return add(mul(t, scale), a); }
inline F sub_exact_product(F t, float scale, F a) { return sub(a, mul(t, set(scale))); }

// Lane i gets lane i xor distance.
template <int distance>
inline F swap_lanes(F a) {
  return each_lane<F>([&](int lane) { return at(a, lane ^ distance); });
}

// --- 32 elements as even and odd ones --------------------------------------------------------------------------------

inline uint16_t float_to_half(float value) {
  const uint32_t magnitude = float_bits(value) & 0x7FFFFFFF, sign = float_bits(value) >> 16 & 0x8000;
  if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return uint16_t(sign | 0x7C00);  // rounds to 2^16 or more
  if (magnitude < 0x38800000) {  // subnormal: steps of 2^-24 are what float addition rounds to around 0.5
    return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
  }
  return uint16_t(sign | ((magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

// 16 elements in order.
template <typename T>
F load_floats(const T* p) {
  return each_lane<F>([&](int lane) { return float_of(p[lane]); });
}

inline I upper_halves(I low, I high) { return bit_or(shift_right<16>(low), bit_and(high, set(int32_t(0xFFFF0000)))); }
template <typename T>
void load_pairs(const T* p, F& even, F& odd) {
  even = each_lane<F>([&](int lane) { return float_of(p[2 * lane]); });
  odd = each_lane<F>([&](int lane) { return float_of(p[2 * lane + 1]); });
}

inline void convert(float x, Fp16& out) { out.bits = float_to_half(x); }
inline void convert(float x, float& out) { out = x; }

template <typename T>
void store_pairs(T* p, F even, F odd) {
  for (int lane = 0; lane < 16; ++lane) {
    convert(at(even, lane), p[2 * lane]);
    convert(at(odd, lane), p[2 * lane + 1]);
  }
}

// Eight registers of a byte per lane.
inline void store_codes(uint8_t* out, const I* pairs) {
  for (int i = 0; i < kGroupBytes; ++i) out[i] = uint8_t(at(pairs[i / 16], i % 16));
}
inline void load_codes(const uint8_t* bytes, I& even, I& odd) {
  even = each_lane<I>([&](int lane) { return bytes[lane] & 0xF; });
  odd = each_lane<I>([&](int lane) { return bytes[lane] >> 4; });
}
inline F e2m1_values(I codes) {
  static constexpr float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return each_lane<F>([&](int lane) { return table[at(codes, lane)]; });
}

inline I load_bytes(const uint8_t* p) {
  return each_lane<I>([&](int lane) { return int32_t(p[lane]); });
}
inline void store_bytes(uint8_t* out, I x) {
  for (int lane = 0; lane < 16; ++lane) out[lane] = uint8_t(at(x, lane));
}

// Bits of the largest magnitude of each of 16 blocks; one that is not finite is larger than all that are.
template <typename T>
I block_magnitudes(const T* p) {
  return each_lane<I>([&](int lane) {
    uint32_t most = 0;
    for (int i = 0; i < kBlock; ++i) most = std::max(most, float_bits(float_of(p[16 * lane + i])) & 0x7FFFFFFF);
    return int32_t(most);
  });
}

// --- random bits -----------------------------------------------------------------------------------------------------

// Low and high words of the 64-bit products.
inline void multiply_wide(I a, uint32_t constant, I& low, I& high) {
  const auto product = [&](int lane) { return uint64_t(uint32_t(at(a, lane))) * constant; };
  low = each_lane<I>([&](int lane) { return int32_t(uint32_t(product(lane))); });
  high = each_lane<I>([&](int lane) { return int32_t(uint32_t(product(lane) >> 32)); });
}
// The 16-bit windows of sixteen blocks' random words; lane_order is the lanes in which the words should come.
struct RandomWindows {
  uint32_t words[16][4];
  static I lane_order(I x) { return x; }
  RandomWindows() = default;
  explicit RandomWindows(const I* word) {
    for (int lane = 0; lane < 16; ++lane) {
      for (int i = 0; i < 4; ++i) words[lane][i] = uint32_t(at(word[i], lane));
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
