// Norms, gates and a dense product of a few rows, in the vocabulary of sixteen lanes, included once for each
// instruction set.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/generation/row_kernels.h"
#include "cpu/matmul/products.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kLanes = 16, kPair = 2 * kLanes;

// --- numbers ---------------------------------------------------------------------------------------------------------

// A pair of registers holds 32 neighbours, the even ones and the odd ones.
struct Pairs {
  F even, odd;

  Pairs() = default;
  Pairs(F even, F odd) : even(even), odd(odd) {}
  template <typename T>
  explicit Pairs(const T* p) {
    load_pairs(p, even, odd);
  }

  template <typename Function>
  Pairs each(const Pairs& other, Function f) const {
    return {f(even, other.even), f(odd, other.odd)};
  }
  void store_rounded(Bf16* p) const {
    const F nan = set(__builtin_nanf(""));
    store_pairs(p, select(is_nan(even), nan, even), select(is_nan(odd), nan, odd));
  }
};

inline Bf16 rounded(float x) { return bf16_of(x); }

inline float sum_of(F x) {
  float lane[kLanes], sum = 0.0f;
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) sum += lane[i];
  return sum;
}

inline float largest_of(F x) {
  float lane[kLanes];
  store(lane, x);
  float most = lane[0];
  for (int i = 1; i < kLanes; ++i) most = lane[i] > most ? lane[i] : most;
  return most;
}

// Sixteen neighbours, what a row or a head may have beyond its pairs.
inline F tail(const Bf16* p) { return load_floats(p); }
inline void store_tail(F x, Bf16* p) {
  float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) p[i] = rounded(lane[i]);
}
inline int64_t in_pairs(int64_t size) { return size / kPair * kPair; }

// bfloat16 as float32.
inline F rounded(F x) {
  const I b = bits(x), sum = add(add(b, set(0x7FFF)), bit_and(shift_right<16>(b), set(1)));
  return select(is_nan(x), set(__builtin_nanf("")), as_float(bit_and(sum, set(int32_t(0xFFFF0000)))));
}
inline F negative(F x) { return as_float(bit_xor(bits(x), set(int32_t(0x80000000)))); }

// e^x within 2 units of the last place, for x up to 88; 0 below -87.
NVFP4_INLINE F exp_of(F x) {
  constexpr float kMagic = 0x1.8p23f, kLog2E = 1.44269504f, kLn2High = 0x1.62e4p-1f, kLn2Low = 1.42860677e-6f;
  const F low = set(-87.5f), high = set(88.0f);
  const F clamped = select(less(x, low), low, select(less(high, x), high, x));
  const F shifted = add(mul(clamped, set(kLog2E)), set(kMagic)), n = sub(shifted, set(kMagic));
  const F r = sub(sub(clamped, mul(n, set(kLn2High))), mul(n, set(kLn2Low)));
  F p = set(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = add(mul(p, r), set(c));
  const I power = shift_left<23>(add(bits(shifted), set(int32_t(127 - float_bits(kMagic)))));
  return select(less(x, set(-87.0f)), set(0.0f), mul(p, as_float(power)));
}
inline float exp_of(float x) {
  float lane[kLanes];
  store(lane, exp_of(set(x)));
  return lane[0];
}

// --- rows ------------------------------------------------------------------------------------------------------------

inline void add_row(Bf16* sum, const Bf16* x, float factor, int64_t size) {
  if (factor != 1.0f) {
    for (int64_t i = 0; i < size; ++i) {
      sum[i] = rounded(float_of(sum[i]) + float_of(rounded(float_of(x[i]) * factor)));
    }
    return;
  }
  int64_t i = 0;
  for (; i < in_pairs(size); i += kPair) {
    Pairs(sum + i).each(Pairs(x + i), [](F a, F b) { return add(a, b); }).store_rounded(sum + i);
  }
  if (i < size) store_tail(add(tail(sum + i), tail(x + i)), sum + i);
}

// The reciprocal root mean square.
inline float scale_of(const Bf16* x, float eps, int64_t size) {
  F squares = set(0.0f);
  int64_t i = 0;
  for (; i < in_pairs(size); i += kPair) {
    const Pairs at(x + i);
    squares = multiply_add(at.odd, at.odd, multiply_add(at.even, at.even, squares));
  }
  if (i < size) squares = multiply_add(tail(x + i), tail(x + i), squares);
  return 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
}

// The same rounding as in PyTorch, for any style, size and dtype of the weight.
template <typename Weight>
inline void norm_elements(const Bf16* x, const Weight* weight, int style, float scale, Bf16* out, int64_t size) {
  const float offset = style & kPlusOne ? 1.0f : 0.0f;
  if (style & kRoundOnce) {
    for (int64_t i = 0; i < size; ++i) out[i] = rounded((float_of(weight[i]) + offset) * (float_of(x[i]) * scale));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = rounded((float_of(weight[i]) + offset) * float_of(rounded(float_of(x[i]) * scale)));
    }
  }
}

inline void norm_row(const Bf16* x, const Norm& norm, Bf16* out, int64_t size) {
  const float scale = scale_of(x, norm.eps, size);
  if (norm.is_wide) return norm_elements(x, static_cast<const float*>(norm.weight), norm.style, scale, out, size);
  const Bf16* weight = static_cast<const Bf16*>(norm.weight);
  int64_t i = 0;
  if (norm.style == 0) {  // Llama's
    const F factor = set(scale);
    const auto times = [](F a, F b) { return mul(a, b); };
    for (; i < in_pairs(size); i += kPair) {
      Pairs(x + i).each({factor, factor}, times).store_rounded(out + i);
      Pairs(weight + i).each(Pairs(out + i), times).store_rounded(out + i);
    }
  }
  norm_elements(x + i, weight + i, norm.style, scale, out + i, size - i);
}

// --- gates -----------------------------------------------------------------------------------------------------------

constexpr float kTiny = 0x1p-100f;
static_assert(kSmallestExponent == -100);

// A number of bfloat16, or 0 of its sign where products do not support it.
inline F flushed(F x) {
  return select(less(abs(x), set(kTiny)), as_float(bit_and(bits(x), set(int32_t(0x80000000)))), x);
}

inline F silu(F x) { return div(x, add(set(1.0f), exp_of(negative(x)))); }

// x times its probability under a normal distribution, by tanh: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
inline F gelu_tanh(F x) {
  constexpr float kRoot8OverPi = 1.59576912f;
  const F cube = mul(mul(mul(set(0.044715f), x), x), x);
  return div(x, add(set(1.0f), exp_of(mul(set(-kRoot8OverPi), add(x, cube)))));
}

// By the error function.
inline F gelu(F x) {
  float lane[kLanes];
  store(lane, x);
  for (float& each : lane) each *= 0.5f * std::erfc(-0.70710678f * each);
  return load(lane);
}

// gpt-oss's.
inline F clamped_glu(F gate, F up, const Gate& g) {
  const F limit = set(g.limit), least = set(-g.limit);
  gate = rounded(select(less(limit, gate), limit, gate));
  up = rounded(select(less(limit, up), limit, select(less(up, least), least, up)));
  const F sigmoid = rounded(div(set(1.0f), add(set(1.0f), exp_of(negative(rounded(mul(gate, set(g.alpha))))))));
  return flushed(rounded(mul(rounded(add(up, set(1.0f))), rounded(mul(gate, sigmoid)))));
}

// 32 elements of act(gate) * up.
template <typename Function>
inline void gate_pair(const Bf16* gate, const Bf16* up, Bf16* out, Function act) {
  const auto gated = [&](F x, F y) { return flushed(rounded(mul(rounded(act(x)), y))); };
  const Pairs y = Pairs(gate).each(Pairs(up), gated);
  store_pairs(out, y.even, y.odd);
}
template <typename Function>
inline void gate_elements(const Bf16* gate, const Bf16* up, Bf16* out, int64_t size, Function act) {
  int64_t i = 0;
  for (; i < in_pairs(size); i += kPair) gate_pair(gate + i, up + i, out + i, act);
  if (i == size) return;
  Bf16 last[3][kPair] = {};
  std::memcpy(last[0], gate + i, (size - i) * sizeof *gate);
  std::memcpy(last[1], up + i, (size - i) * sizeof *up);
  gate_pair(last[0], last[1], last[2], act);
  std::memcpy(out + i, last[2], (size - i) * sizeof *out);
}

// gate and up alternate.
inline void clamped_row(const Bf16* gate_up, const Gate& g, Bf16* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = i + kLanes < size ? kLanes : size - i;
    Bf16 pairs[kPair] = {};
    std::memcpy(pairs, gate_up + 2 * i, 2 * count * sizeof *pairs);
    const Pairs at(pairs);
    float lane[kLanes];
    store(lane, clamped_glu(at.even, at.odd, g));
    for (int64_t j = 0; j < count; ++j) out[i + j] = rounded(lane[j]);
  }
}

inline void gate_row(const Bf16* gate, const Bf16* up, const Gate& g, Bf16* out, int64_t size) {
  switch (g.activation) {
    case Activation::kSilu: return gate_elements(gate, up, out, size, [](F x) { return silu(x); });
    case Activation::kGeluTanh: return gate_elements(gate, up, out, size, [](F x) { return gelu_tanh(x); });
    case Activation::kGelu: return gate_elements(gate, up, out, size, [](F x) { return gelu(x); });
    case Activation::kClampedGlu: return clamped_row(gate, g, out, size);
  }
}

// --- a dense product -------------------------------------------------------------------------------------------------

constexpr int kMostDenseRows = 4;  // of x, that meet a row of w together

// Rows [first, first + count) of w, 16 at most, with kX rows of x from `row` on. Rows of w are read in memory order:
// the hardware prefetches them. Each sum has the same order whatever kX is.
template <int kX>
inline void multiply_tile(const DenseProduct& p, int64_t row, int64_t first, int64_t count) {
  float tiles[kX][kLanes * kLanes] = {}, sums[kLanes];
  const Bf16* x = p.x + row * p.size;
  for (int64_t r = 0; r < count; ++r) {
    const Bf16* weight = p.w + (first + r) * p.size;
    F even[kX], odd[kX];
    for (int m = 0; m < kX; ++m) even[m] = odd[m] = set(0.0f);
    for (int64_t i = 0; i < p.size; i += kPair) {
      const Pairs of_w(weight + i);
#pragma GCC unroll 4
      for (int m = 0; m < kX; ++m) {
        const Pairs of_x(x + m * p.size + i);
        even[m] = multiply_add(of_w.even, of_x.even, even[m]);
        odd[m] = multiply_add(of_w.odd, of_x.odd, odd[m]);
      }
    }
    for (int m = 0; m < kX; ++m) store(tiles[m] + r * kLanes, add(even[m], odd[m]));
  }
  for (int m = 0; m < kX; ++m) {
    store(sums, sums_of_lanes(tiles[m], kLanes));
    Bf16* y = p.y + (row + m) * p.rows + first;
    for (int64_t r = 0; r < count; ++r) y[r] = rounded(sums[r] + (p.bias ? float_of(p.bias[first + r]) : 0.0f));
  }
}

// The same with 1 to kX rows of x.
template <int kX>
inline void multiply_tile(const DenseProduct& p, int64_t x_rows, int64_t row, int64_t first, int64_t count) {
  if (x_rows == kX) return multiply_tile<kX>(p, row, first, count);
  if constexpr (kX > 1) multiply_tile<kX - 1>(p, x_rows, row, first, count);
}

inline void multiply_dense(const DenseProduct& p, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = first + kLanes < end ? kLanes : end - first;
    for (int64_t row = 0; row < p.x_rows; row += kMostDenseRows) {
      const int64_t x_rows = row + kMostDenseRows < p.x_rows ? kMostDenseRows : p.x_rows - row;
      multiply_tile<kMostDenseRows>(p, x_rows, row, first, count);
    }
  }
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
