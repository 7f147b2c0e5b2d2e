// Sixteen lanes as kParts registers: what the vector types of GCC and Clang say for every target. Included by a header
// that has named the registers (Floats, Ints, kParts); its namespace is that of the file that includes it.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

#include "cpu/host/kernels.h"

namespace nvfp4::NVFP4_ISA {

constexpr int kPartLanes = 16 / kParts;
alignas(64) inline constexpr int32_t kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct F {
  Floats v[kParts];
};
struct I {
  Ints v[kParts];
};
using Mask = I;  // all ones or all zeros

typedef int32_t Words __attribute__((vector_size(sizeof(Ints))));
typedef uint32_t Naturals __attribute__((vector_size(sizeof(Ints))));

// f(i) of each register i, or f of each register of its arguments.
template <typename V, typename Function>
NVFP4_INLINE V each_part(Function f) {
  if constexpr (kParts == 2) return {{f(0), f(1)}};
  if constexpr (kParts == 4) return {{f(0), f(1), f(2), f(3)}};
}
template <typename V, typename Function, typename... Args>
NVFP4_INLINE V map(Function f, const Args&... a) {
  return each_part<V>([&](int i) { return f(a.v[i]...); });
}
// The same of words.
template <typename Function, typename... Args>
NVFP4_INLINE I map_words(Function f, const Args&... a) {
  return each_part<I>([&](int i) { return Ints(f(Words(a.v[i])...)); });
}

NVFP4_INLINE F set(float x) {
  return each_part<F>([&](int) { return x - Floats{}; });
}
NVFP4_INLINE I set(int32_t x) {
  return each_part<I>([&](int) { return Ints(x + Words{}); });
}
NVFP4_INLINE I bits(F x) {
  return map<I>([](Floats a) { return Ints(a); }, x);
}
NVFP4_INLINE F as_float(I x) {
  return map<F>([](Ints a) { return Floats(a); }, x);
}
NVFP4_INLINE F to_float(I x) {
  return map<F>([](Ints a) { return Floats(__builtin_convertvector(Words(a), Floats)); }, x);
}

// Registers at any address.
typedef Floats LooseFloats __attribute__((aligned(1), may_alias));
typedef Ints LooseInts __attribute__((aligned(1), may_alias));
NVFP4_INLINE F load(const float* p) {
  return each_part<F>([&](int i) { return Floats(*reinterpret_cast<const LooseFloats*>(p + i * kPartLanes)); });
}
NVFP4_INLINE I load(const int32_t* p) {
  return each_part<I>([&](int i) { return Ints(*reinterpret_cast<const LooseInts*>(p + i * kPartLanes)); });
}
NVFP4_INLINE void store(float* p, F x) {
  for (int i = 0; i < kParts; ++i) *reinterpret_cast<LooseFloats*>(p + i * kPartLanes) = x.v[i];
}
NVFP4_INLINE void store(int32_t* p, I x) {
  for (int i = 0; i < kParts; ++i) *reinterpret_cast<LooseInts*>(p + i * kPartLanes) = x.v[i];
}

inline F load_floats(const float* p) { return load(p); }

// Lanes 0-7 from one address, 8-15 from another.
NVFP4_INLINE F load_halves(const float* low, const float* high) {
  return each_part<F>([&](int i) {
    const int lane = i * kPartLanes;
    return Floats(*reinterpret_cast<const LooseFloats*>(lane < 8 ? low + lane : high + lane - 8));
  });
}

// One number a block, given to the lanes of a pair of blocks.
struct Spread {
  alignas(64) float values[16];
  explicit Spread(F x) { store(values, x); }
  NVFP4_INLINE F pair(int p) const {
    return each_part<F>([&](int i) { return values[2 * p + i * kPartLanes / 8] - Floats{}; });
  }
};

// 64 bytes of codes, and the first `count` of them, 1 to 63, and zeros. Little-endian, as every target of torch is.
NVFP4_INLINE I load_chunk(const uint8_t* codes) { return load(reinterpret_cast<const int32_t*>(codes)); }
inline I load_part(const uint8_t* codes, int count) {
  uint8_t bytes[64] = {};
  std::memcpy(bytes, codes, count);
  return load_chunk(bytes);
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

NVFP4_INLINE F add(F a, F b) { return map<F>(std::plus<>{}, a, b); }
NVFP4_INLINE F sub(F a, F b) { return map<F>(std::minus<>{}, a, b); }
NVFP4_INLINE F mul(F a, F b) { return map<F>(std::multiplies<>{}, a, b); }
NVFP4_INLINE F div(F a, F b) { return map<F>(std::divides<>{}, a, b); }
NVFP4_INLINE I add(I a, I b) { return map_words(std::plus<>{}, a, b); }
NVFP4_INLINE I sub(I a, I b) { return map_words(std::minus<>{}, a, b); }
NVFP4_INLINE I max(I a, I b) {
  return map_words([](Words a, Words b) { return a > b ? a : b; }, a, b);
}
NVFP4_INLINE I bit_and(I a, I b) { return map_words(std::bit_and<>{}, a, b); }
NVFP4_INLINE I bit_or(I a, I b) { return map_words(std::bit_or<>{}, a, b); }
NVFP4_INLINE I bit_xor(I a, I b) { return map_words(std::bit_xor<>{}, a, b); }
NVFP4_INLINE I xor3(I a, I b, I c) { return bit_xor(bit_xor(a, b), c); }
NVFP4_INLINE F abs(F a) { return as_float(bit_and(bits(a), set(0x7FFFFFFF))); }
template <int n>
NVFP4_INLINE I shift_left(I a) {
  return map_words([](Words a) { return a << n; }, a);
}
template <int n>
NVFP4_INLINE I shift_right(I a) {  // logical
  return map_words([](Words a) { return Words(Naturals(a) >> n); }, a);
}

NVFP4_INLINE Mask less(F a, F b) {
  return map<I>([](Floats a, Floats b) { return Ints(a < b); }, a, b);
}
NVFP4_INLINE Mask is_nan(F a) {
  return map<I>([](Floats a) { return Ints(a != a); }, a);
}
NVFP4_INLINE Mask equal(I a, I b) { return map_words(std::equal_to<>{}, a, b); }
NVFP4_INLINE Mask greater(I a, I b) { return map_words(std::greater<>{}, a, b); }
NVFP4_INLINE Mask both(Mask a, Mask b) { return bit_and(a, b); }
NVFP4_INLINE Mask either(Mask a, Mask b) { return bit_or(a, b); }

// For a in [0, 6] and t = 2^e its grid_binade: floor(a / 2^(e-1) * 2^fraction_bits) in the low bits, 6 more steps, and
// an exponent field of e + 5 modulo 8, as the float sum t * (2^k + 3) + a rounded toward zero has them.
template <int fraction_bits>
NVFP4_INLINE I fixed_point(F t, F a) {
  const I inverse_t = sub(set(254 << 23), bits(t));
  const F steps = mul(a, mul(as_float(inverse_t), set(float(2 << fraction_bits))));
  const I count = map<I>([](Floats x) { return Ints(__builtin_convertvector(x, Words)); }, steps);
  return add(add(count, bits(t)), set((6 << fraction_bits) + (6 << 23)));
}

// --- bfloat16 as upper halves of float32 -----------------------------------------------------------------------------

inline void load_pairs(const Bf16* p, F& even, F& odd) {
  const I x = load(reinterpret_cast<const int32_t*>(p));
  even = as_float(shift_left<16>(x));
  odd = as_float(bit_and(x, set(int32_t(0xFFFF0000))));
}

// The upper half of each lane of both, those of `low` below.
inline I upper_halves(I low, I high);
inline void store_pairs(Bf16* p, F even, F odd) {
  const auto rounded = [](F x) { return add(add(bits(x), set(0x7FFF)), bit_and(shift_right<16>(bits(x)), set(1))); };
  store(reinterpret_cast<int32_t*>(p), upper_halves(rounded(even), rounded(odd)));
}

// --- templates, so that an instruction set's own come first ---------------------------------------------------------

// min(|a|, 6).
template <typename V>
inline F magnitude_to_6(V a) {
  return min(abs(a), set(6.0f));
}

// Two nibbles per lane: the low three bits of each code, and the sign bits of the values they came from.
template <typename V>
inline I pack_codes(I even_code, I odd_code, V even_value, V odd_value) {
  const I codes = bit_or(bit_and(even_code, set(7)), bit_and(shift_left<4>(odd_code), set(0x70)));
  const I even = bit_and(shift_right<28>(bits(even_value)), set(8));
  return bit_or(codes, bit_or(even, bit_and(shift_right<24>(bits(odd_value)), set(0x80))));
}

}  // namespace nvfp4::NVFP4_ISA
