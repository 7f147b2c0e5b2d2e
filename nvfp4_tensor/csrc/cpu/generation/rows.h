// Norms, gates and attention of one token, in the vocabulary of sixteen lanes, included once for each instruction set.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/generation/row_kernels.h"
#include "cpu/matmul/products.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kLanes = 16;

// --- numbers ---------------------------------------------------------------------------------------------------------

// A pair of registers holds 32 neighbours, the even ones and the odd ones.
struct Pairs {
  F even, odd;

  Pairs() = default;
  Pairs(F even, F odd) : even(even), odd(odd) {}
  explicit Pairs(const Bf16* p) { load_pairs(p, even, odd); }

  template <typename Function>
  Pairs each(const Pairs& other, Function f) const {
    return {f(even, other.even), f(odd, other.odd)};
  }
  void store_rounded(Bf16* p) const {
    const F nan = set(__builtin_nanf(""));
    store_pairs(p, select(is_nan(even), nan, even), select(is_nan(odd), nan, odd));
  }
};

inline float sum_of(F x) {
  float lane[kLanes], sum = 0.0f;
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) sum += lane[i];
  return sum;
}

inline float widened(Bf16 x) { return bits_float(uint32_t{x.bits} << 16); }
inline Bf16 rounded(float x) {
  const uint32_t b = float_bits(x), sum = b + 0x7FFF + (b >> 16 & 1);
  return {uint16_t((x != x ? 0x7FC00000u : sum) >> 16)};
}

// e^x within 2 units of the last place, for x up to 88; 0 below -87. No branches: loops of it are vectorized.
inline float exp_of(float x) {
  constexpr float kMagic = 0x1.8p23f, kLog2E = 1.44269504f, kLn2High = 0x1.62e4p-1f, kLn2Low = 1.42860677e-6f;
  const float clamped = x < -87.5f ? -87.5f : x > 88.0f ? 88.0f : x;
  const float shifted = clamped * kLog2E + kMagic, n = shifted - kMagic;
  const float r = clamped - n * kLn2High - n * kLn2Low;
  float p = 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  const float power = bits_float((float_bits(shifted) - float_bits(kMagic) + 127) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

// --- rows ------------------------------------------------------------------------------------------------------------

inline void add_row(Bf16* sum, const Bf16* x, int64_t size) {
  for (int64_t i = 0; i < size; i += kRowStep) {
    Pairs(sum + i).each(Pairs(x + i), [](F a, F b) { return add(a, b); }).store_rounded(sum + i);
  }
}

inline void norm_row(const Bf16* x, const Bf16* weight, float eps, Bf16* out, int64_t size) {
  F squares = set(0.0f);
  for (int64_t i = 0; i < size; i += kRowStep) {
    const Pairs at(x + i);
    squares = multiply_add(at.odd, at.odd, multiply_add(at.even, at.even, squares));
  }
  const F factor = set(1.0f / std::sqrt(sum_of(squares) / float(size) + eps));
  const auto times = [](F a, F b) { return mul(a, b); };
  for (int64_t i = 0; i < size; i += kRowStep) {
    Pairs(x + i).each({factor, factor}, times).store_rounded(out + i);
    Pairs(weight + i).each(Pairs(out + i), times).store_rounded(out + i);
  }
}

inline void gate_row(const Bf16* gate, const Bf16* up, Bf16* out, int64_t size) {
  constexpr int kTinyBits = (127 + kSmallestExponent) << 7;
  for (int64_t i = 0; i < size; ++i) {
    const float g = widened(gate[i]);
    const Bf16 silu = rounded(g / (1.0f + exp_of(-g)));
    const Bf16 y = rounded(widened(silu) * widened(up[i]));
    out[i].bits = (y.bits & 0x7FFF) < kTinyBits ? uint16_t(y.bits & 0x8000) : y.bits;
  }
}

// --- attention -------------------------------------------------------------------------------------------------------

// x cos + rotate_half(x) sin, each product and their sum rounded.
inline void rotate_head(const Bf16* x, const Attention& a, Bf16* out) {
  const int64_t half = a.dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = widened(x[i]), high = widened(x[half + i]);
    const float low_cos = widened(rounded(low * widened(a.cos[i])));
    const float low_sin = widened(rounded(-high * widened(a.sin[i])));
    const float high_cos = widened(rounded(high * widened(a.cos[half + i])));
    const float high_sin = widened(rounded(low * widened(a.sin[half + i])));
    out[i] = rounded(low_cos + low_sin);
    out[half + i] = rounded(high_cos + high_sin);
  }
}

// Scaled products of a query with all keys, up to a multiple of 16.
inline void score(const Attention& a, const Bf16* q, const Bf16* keys, const Bf16* last, float* tile, float* scores) {
  for (int64_t first = 0; first <= a.position; first += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const Bf16* key = first + j < a.position ? keys + (first + j) * a.dim : last;
      F even = set(0.0f), odd = set(0.0f);
      for (int64_t i = 0; i < a.dim; i += kRowStep) {
        const Pairs of_query(q + i), of_key(key + i);
        even = multiply_add(of_query.even, of_key.even, even);
        odd = multiply_add(of_query.odd, of_key.odd, odd);
      }
      store(tile + j * kLanes, add(even, odd));
    }
    store(scores + first, mul(sums_of_lanes(tile, kLanes), set(a.scaling)));
  }
}

// Scores become e^(score - the largest); returns their sum.
inline float exponentials(float* scores, int64_t count) {
  float most = scores[0], sum = 0.0f;
  for (int64_t t = 1; t < count; ++t) most = scores[t] > most ? scores[t] : most;
  for (int64_t t = 0; t < count; ++t) scores[t] = exp_of(scores[t] - most);
  for (int64_t t = 0; t < count; ++t) sum += scores[t];
  return sum;
}

inline void attend_head(const Attention& a, int64_t head, float* scratch) {
  const int64_t group = head / (a.heads / a.kv_heads), at = group * a.length * a.dim;
  float *tile = scratch, *scores = scratch + kLanes * kLanes;
  Bf16* q = reinterpret_cast<Bf16*>(scores + (a.position / kLanes + 1) * kLanes);
  Bf16* k = q + a.dim;
  const Bf16* v = a.v + group * a.dim;
  rotate_head(a.q + head * a.dim, a, q);
  rotate_head(a.k + group * a.dim, a, k);
  if (head % (a.heads / a.kv_heads) == 0) {
    std::memcpy(a.keys + at + a.position * a.dim, k, a.dim * sizeof *k);
    std::memcpy(a.values + at + a.position * a.dim, v, a.dim * sizeof *v);
  }
  score(a, q, a.keys + at, k, tile, scores);
  const F factor = set(1.0f / exponentials(scores, a.position + 1));
  for (int64_t i = 0; i < a.dim; i += kRowStep) {
    Pairs sum(set(0.0f), set(0.0f));
    for (int64_t t = 0; t <= a.position; ++t) {
      const F weight = set(scores[t]);
      const Pairs value(t < a.position ? a.values + at + t * a.dim + i : v + i);
      sum = value.each(sum, [&](F x, F y) { return multiply_add(weight, x, y); });
    }
    sum.each({factor, factor}, [](F x, F y) { return mul(x, y); }).store_rounded(a.out + head * a.dim + i);
  }
}

// --- a dense product of one row --------------------------------------------------------------------------------------

// Rows [begin, end) of w (.., size) times x. Rows of w are read in memory order: the hardware prefetches them.
inline void multiply_rows(const Bf16* x, const Bf16* w, int64_t size, Bf16* y, int64_t begin, int64_t end) {
  float tile[kLanes * kLanes] = {}, sums[kLanes];
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = first + kLanes < end ? kLanes : end - first;
    for (int64_t r = 0; r < count; ++r) {
      const Bf16* row = w + (first + r) * size;
      F even = set(0.0f), odd = set(0.0f);
      for (int64_t i = 0; i < size; i += kRowStep) {
        const Pairs of_x(x + i), of_w(row + i);
        even = multiply_add(of_w.even, of_x.even, even);
        odd = multiply_add(of_w.odd, of_x.odd, odd);
      }
      store(tile + r * kLanes, add(even, odd));
    }
    store(sums, sums_of_lanes(tile, kLanes));
    for (int64_t r = 0; r < count; ++r) y[first + r] = rounded(sums[r]);
  }
}

constexpr RowKernels kRowKernels = {add_row, norm_row, gate_row, attend_head, multiply_rows};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
