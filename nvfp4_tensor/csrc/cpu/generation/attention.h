// Attention of one token of a text to its cache, float32 from the queries to the sums.
#pragma once

#include "cpu/generation/rows.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// x cos + rotate_half(x) sin of the first elements of a head; what is left stays. kWide: rounded once.
template <bool kWide>
inline void rotate_head(const Bf16* x, const Rotation& r, Bf16* out) {
  const auto stored = [](float x) { return kWide ? x : float_of(rounded(x)); };
  const int64_t half = r.size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = float_of(x[i]), high = float_of(x[half + i]);
    const float low_cos = stored(low * r.cos[i]), low_sin = stored(-high * r.sin[i]);
    const float high_cos = stored(high * r.cos[half + i]), high_sin = stored(low * r.sin[half + i]);
    out[i] = rounded(low_cos + low_sin);
    out[half + i] = rounded(high_cos + high_sin);
  }
}

// A head of q or k as attention sees it.
inline void prepare_head(const Bf16* x, const Norm& norm, const Attention& a, Bf16* out) {
  Bf16 normed[kMostHeadDim];
  if (norm.weight) norm_row(x, norm, normed, a.dim), x = normed;
  const int64_t rotated = a.rotation.size;
  if (rotated) a.rotation.is_wide ? rotate_head<true>(x, a.rotation, out) : rotate_head<false>(x, a.rotation, out);
  std::memcpy(out + rotated, x + rotated, (a.dim - rotated) * sizeof *x);
}

// Scaled products of a query with the keys that are seen and with `last`, up to a multiple of 16. kTail: the size of a
// head is an odd multiple of 16.
template <bool kTail>
inline void score(const Attention& a, const Bf16* q, const Bf16* keys, const Bf16* last, float* tile, float* scores) {
  const int64_t pairs = in_pairs(a.dim);
  for (int64_t first = 0; first <= a.count; first += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const Bf16* key = first + j < a.count ? keys + (first + j) * a.dim : last;
      F even = set(0.0f), odd = set(0.0f);
      for (int64_t i = 0; i < pairs; i += kPair) {
        const Pairs of_query(q + i), of_key(key + i);
        even = multiply_add(of_query.even, of_key.even, even);
        odd = multiply_add(of_query.odd, of_key.odd, odd);
      }
      if constexpr (kTail) even = multiply_add(tail(q + pairs), tail(key + pairs), even);
      store(tile + j * kLanes, add(even, odd));
    }
    store(scores + first, mul(sums_of_lanes(tile, kLanes), set(a.scaling)));
  }
}

// cap * tanh(score / cap). Scores are whole registers.
inline void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t t = 0; t < count; t += kLanes) {
    const F power = exp_of(mul(set(2.0f / cap), load(scores + t)));
    store(scores + t, sub(set(cap), div(set(2.0f * cap), add(set(1.0f), power))));
  }
}

// Scores become e^(score - the largest); returns their sum, with that of the sink. What lies behind them in the last
// register is as large as the last of them, and becomes 0.
inline float exponentials(float* scores, int64_t count, const Bf16* sink) {
  F mosts = set(sink ? float_of(*sink) : scores[0]);
  for (int64_t t = 0; t < count; t += kLanes) {
    const F at = load(scores + t);
    mosts = select(less(mosts, at), at, mosts);
  }
  const float most = largest_of(mosts);
  F sum = set(0.0f);
  for (int64_t t = 0; t < count; t += kLanes) {
    store(scores + t, exp_of(sub(load(scores + t), set(most))));
    for (int64_t behind = count; behind < t + kLanes; ++behind) scores[behind] = 0.0f;
    sum = add(sum, load(scores + t));
  }
  return sum_of(sum) + (sink ? exp_of(float_of(*sink) - most) : 0.0f);
}

// Values times the exponentials, divided by their sum.
inline void sum_values(const Attention& a, const float* scores, float factor, const Bf16* values, const Bf16* last,
                       Bf16* out) {
  int64_t i = 0;
  for (; i < in_pairs(a.dim); i += kPair) {
    Pairs sum(set(0.0f), set(0.0f));
    for (int64_t t = 0; t <= a.count; ++t) {
      const F weight = set(scores[t]);
      const Pairs value(t < a.count ? values + t * a.dim + i : last + i);
      sum = value.each(sum, [&](F x, F y) { return multiply_add(weight, x, y); });
    }
    sum.each({set(factor), set(factor)}, [](F x, F y) { return mul(x, y); }).store_rounded(out + i);
  }
  if (i == a.dim) return;
  F sum = set(0.0f);
  for (int64_t t = 0; t <= a.count; ++t) {
    sum = multiply_add(set(scores[t]), tail(t < a.count ? values + t * a.dim + i : last + i), sum);
  }
  store_tail(mul(sum, set(factor)), out + i);
}

inline void attend_head(const Attention& a, int64_t head, float* scratch) {
  const int64_t group = head / (a.heads / a.kv_heads), at = (group * a.length + a.first) * a.dim;
  float *tile = scratch, *scores = scratch + kLanes * kLanes;
  Bf16* q = reinterpret_cast<Bf16*>(scores + (a.count / kLanes + 1) * kLanes);
  Bf16* k = q + a.dim;
  const Bf16* v = a.v + group * a.dim;
  prepare_head(a.q + head * a.dim, a.q_norm, a, q);
  prepare_head(a.k + group * a.dim, a.k_norm, a, k);
  if (head % (a.heads / a.kv_heads) == 0) {
    Bf16* new_key = a.later ? a.later + group * 2 * a.dim : a.keys + at + a.count * a.dim;
    Bf16* new_value = a.later ? a.later + (group * 2 + 1) * a.dim : a.values + at + a.count * a.dim;
    std::memcpy(new_key, k, a.dim * sizeof *k);
    std::memcpy(new_value, v, a.dim * sizeof *v);
  }
  if (a.dim % kPair) {
    score<true>(a, q, a.keys + at, k, tile, scores);
  } else {
    score<false>(a, q, a.keys + at, k, tile, scores);
  }
  if (a.softcap != 0.0f) cap_scores(scores, a.count + 1, a.softcap);
  const float sum = exponentials(scores, a.count + 1, a.sinks ? a.sinks + head : nullptr);
  sum_values(a, scores, 1.0f / sum, a.values + at, v, a.out + head * a.dim);
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
