// Attention in one pass (online softmax): tiles of keys and values are decoded once for all rows, sums are float32.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/attention/tile.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
// Rows of queries and tokens whose products are summed in registers side by side.
constexpr int kSideRows = kManyRegisters ? 4 : 2, kSideTokens = kManyRegisters ? 4 : 2;

// What the stages of a unit share.
struct AttendScratch {
  float *q, *tile, *scores, *lanes, *totals, *corrections;

  AttendScratch(const AttendUnit& u, float* at) {
    const int64_t key = padded_head(u.key_size), value = padded_head(u.value_size);
    q = at, at += kMostRows * key;
    tile = at, at += kTileTokens * (key > value ? key : value);
    scores = at, at += kMostRows * kTileTokens;
    lanes = at, at += 4 * 16 * 16;
    totals = at, at += kMostRows * kLanes;
    corrections = at;
  }
};

// lanes[r][t]: a register whose lanes add up to q_r k_t, for kRows rows and 16 tokens.
template <int kRows, int kTokens>
inline void multiply_keys(const float* q, const float* keys, int64_t size, float* lanes) {
  for (int64_t token = 0; token < kLanes; token += kTokens) {
    F sums[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTokens; ++t) sums[r][t] = set(0.0f);
    }
    const float* key = keys + token * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      F at[kTokens];
      for (int t = 0; t < kTokens; ++t) at[t] = load(key + t * size + i);
      for (int r = 0; r < kRows; ++r) {
        const F x = load(q + r * size + i);
        for (int t = 0; t < kTokens; ++t) sums[r][t] = multiply_add(x, at[t], sums[r][t]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTokens; ++t) store(lanes + (r * kLanes + token + t) * kLanes, sums[r][t]);
    }
  }
}

// scores (rows, kTileTokens) of the tile's first `count` tokens, up to a multiple of 16.
inline void score_rows(const AttendScratch& s, int64_t rows, int64_t size, int64_t count) {
  for (int64_t first = 0; first < count; first += kLanes) {
    const float* keys = s.tile + first * size;
    int64_t row = 0;
    const auto finish = [&](int64_t side) {
      for (int64_t r = 0; r < side; ++r) {
        store(s.scores + (row + r) * kTileTokens + first, sums_of_lanes(s.lanes + r * kLanes * kLanes, kLanes));
      }
      row += side;
    };
    while (row + kSideRows <= rows) {
      multiply_keys<kSideRows, kSideTokens>(s.q + row * size, keys, size, s.lanes);
      finish(kSideRows);
    }
    while (row < rows) {
      multiply_keys<1, 4>(s.q + row * size, keys, size, s.lanes);
      finish(1);
    }
  }
}

// cap * tanh(score / cap), of the magnitude: e^x of what is large is not needed, and NaN stays.
inline F capped(F score, float cap) {
  const F x = mul(score, set(1.0f / cap)), size = abs(x);
  const F power = exp_of(mul(set(-2.0f), size));
  const F near = div(sub(set(1.0f), power), add(set(1.0f), power));
  const F small = mul(size, sub(set(1.0f), mul(mul(size, size), set(1.0f / 3.0f))));  // cancels nothing
  const F tanh = select(less(size, set(0.01f)), small, near);
  return as_float(bit_or(bits(mul(tanh, set(cap))), bit_and(bits(x), set(int32_t(0x80000000)))));
}

// Scores of the tile's tokens [begin, count) become exponentials, those that a row does not see 0. position: of token
// 0.
inline void soften(const AttendUnit& u, const AttendScratch& s, int64_t row, int64_t position, int64_t begin,
                   int64_t count) {
  float* scores = s.scores + row * kTileTokens;
  const int64_t first = std::max(u.first_of(row) - position, begin), behind = u.last_of(row) + 1 - position;
  const int64_t whole = ceil_div(count, int64_t{kLanes}) * kLanes;
  if (u.softcap != 0.0f) {
    for (int64_t t = 0; t < whole; t += kLanes) store(scores + t, capped(load(scores + t), u.softcap));
  }
  for (int64_t t = 0; t < first && t < whole; ++t) scores[t] = kMinusInf;
  for (int64_t t = behind < count ? (behind > 0 ? behind : 0) : count; t < whole; ++t) scores[t] = kMinusInf;
  F tops = set(u.most[row]);
  for (int64_t t = 0; t < whole; t += kLanes) {
    const F at = load(scores + t);
    tops = select(less(tops, at), at, tops);
  }
  const float top = largest_of(tops), reference = top == kMinusInf ? 0.0f : top;
  s.corrections[row] = u.most[row] == top ? 1.0f : exp_of(u.most[row] - reference);
  u.most[row] = top;
  F total = mul(load(s.totals + row * kLanes), set(s.corrections[row]));
  for (int64_t t = 0; t < whole; t += kLanes) {
    const F power = exp_of(sub(load(scores + t), set(reference)));
    store(scores + t, power);
    total = add(total, power);
  }
  store(s.totals + row * kLanes, total);
}

// sums = correction * sums + exponentials x values, for kRows rows.
template <int kRows>
inline void add_values(const AttendScratch& s, int64_t row, int64_t size, int64_t begin, int64_t end, float* sums) {
  const float* weights = s.scores + row * kTileTokens;
  for (int64_t i = 0; i < size; i += kLanes) {
    F sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = mul(load(sums + r * size + i), set(s.corrections[row + r]));
    for (int64_t t = begin; t < end; ++t) {
      const F value = load(s.tile + t * size + i);
      for (int r = 0; r < kRows; ++r) sum[r] = multiply_add(set(weights[r * kTileTokens + t]), value, sum[r]);
    }
    for (int r = 0; r < kRows; ++r) store(sums + r * size + i, sum[r]);
  }
}

inline void add_rows(const AttendUnit& u, const AttendScratch& s, int64_t begin, int64_t end) {
  const int64_t size = u.row_size();
  int64_t row = 0;
  for (; row + 4 <= u.rows; row += 4) add_values<4>(s, row, size, begin, end, u.sums + row * size);
  float* sums = u.sums + row * size;
  switch (u.rows - row) {
    case 3: return add_values<3>(s, row, size, begin, end, sums);
    case 2: return add_values<2>(s, row, size, begin, end, sums);
    case 1: return add_values<1>(s, row, size, begin, end, sums);
  }
}

template <typename T>
inline void load_queries(const AttendUnit& u, const AttendScratch& s) {
  const int64_t padded = padded_head(u.key_size);
  for (int64_t row = 0; row < u.rows; ++row) {
    load_row(static_cast<const T*>(u.q) + row * u.key_size, u.key_size, u.scale, s.q + row * padded);
  }
}

// Butterflies over rotation_size() elements of each query. Of 32 elements the even ones come first: the first distance
// is 16, and the others are halved up to there.
inline void rotate_queries(const AttendUnit& u, const AttendScratch& s) {
  const int64_t size = u.rows * padded_head(u.key_size), count = rotation_size(u.key_size);
  for (int64_t step = 1; step < count; step *= 2) {
    const int64_t distance = step == 1 ? kLanes : step <= kLanes ? step / 2 : step;
    for (int64_t block = 0; block < size; block += 2 * distance) {
      for (float* low = s.q + block; low < s.q + block + distance; ++low) {
        const float x = low[0], y = low[distance];
        low[0] = x + y, low[distance] = x - y;
      }
    }
  }
}

// Tokens [begin, end) of one stretch.
template <typename T>
inline void attend_stretch(const AttendUnit& u, const AttendScratch& s, int which, int64_t begin, int64_t end) {
  const int64_t key_size = padded_head(u.key_size);
  const bool is_coded = !u.keys[which].dense;
  for (int64_t token = is_coded ? begin / kTokenStep * kTokenStep : begin; token < end; token += kTileTokens) {
    const int64_t count = end - token < kTileTokens ? end - token : kTileTokens;
    const int64_t position = u.begins[which] + token;
    load_tile<T>(u.keys[which], u.key_size, token, count, s.tile);
    score_rows(s, u.rows, key_size, count);
    const int64_t skipped = begin > token ? begin - token : 0;
    for (int64_t row = 0; row < u.rows; ++row) soften(u, s, row, position, skipped, count);
    load_tile<T>(u.values[which], u.value_size, token, count, s.tile);
    add_rows(u, s, skipped, count);
  }
}

template <typename T>
inline void attend_rows(const AttendUnit& u, float* scratch) {
  const AttendScratch s(u, scratch);
  int64_t first = u.end, behind = u.begin;
  load_queries<T>(u, s);
  for (int64_t row = 0; row < u.rows; ++row) {
    u.most[row] = kMinusInf;
    if (u.first_of(row) < first) first = u.first_of(row);
    if (u.last_of(row) + 1 > behind) behind = u.last_of(row) + 1;
  }
  std::memset(u.sums, 0, u.rows * u.row_size() * sizeof *u.sums);
  std::memset(s.totals, 0, u.rows * kLanes * sizeof *s.totals);
  if (first < u.begin) first = u.begin;
  if (behind > u.end) behind = u.end;
  for (int which = 0; which < kStretches; ++which) {
    const int64_t from = first > u.begins[which] ? first : u.begins[which];
    const int64_t to = behind < u.begins[which + 1] ? behind : u.begins[which + 1];
    if (from >= to) continue;
    const bool is_rotated = u.is_rotated && !u.keys[which].dense;
    if (is_rotated) rotate_queries(u, s);
    attend_stretch<T>(u, s, which, from - u.begins[which], to - u.begins[which]);
    if (is_rotated) load_queries<T>(u, s);
  }
  for (int64_t row = 0; row < u.rows; ++row) u.total[row] = sum_of(load(s.totals + row * kLanes));
}

inline void attend(const AttendUnit& u, float* scratch) {
  switch (u.dtype) {
    case Dtype::kBf16: return attend_rows<Bf16>(u, scratch);
    case Dtype::kFp16: return attend_rows<Fp16>(u, scratch);
    case Dtype::kFloat: return attend_rows<float>(u, scratch);
  }
}

template <typename T>
inline void store_row(const float* x, int64_t size, T* out) {
  const F nan = set(__builtin_nanf(""));
  for (int64_t i = 0; i < size; i += kPair) {
    const F even = load(x + i), odd = load(x + i + kLanes);
    T last[kPair];
    T* to = i + kPair <= size ? out + i : last;
    store_pairs(to, select(is_nan(even), nan, even), select(is_nan(odd), nan, odd));
    if (to == last) std::memcpy(out + i, last, (size - i) * sizeof(T));
  }
}

inline void finish(const float* sums, const float* most, const float* total, int64_t count, int64_t sums_step,
                   int64_t row_step, int64_t size, bool sees_any, Dtype dtype, void* out, float* scratch) {
  const int64_t padded = padded_head(size);
  float top = kMinusInf, divisor = 0.0f;
  for (int64_t i = 0; i < count; ++i) top = top < most[i * row_step] ? most[i * row_step] : top;
  const float reference = top == kMinusInf ? 0.0f : top;
  std::memset(scratch, 0, padded * sizeof *scratch);
  for (int64_t i = 0; i < count; ++i) {
    const float weight = count == 1 ? 1.0f : exp_of(most[i * row_step] - reference);
    divisor += weight * total[i * row_step];
    for (int64_t at = 0; at < padded; at += kLanes) {
      store(scratch + at, multiply_add(set(weight), load(sums + i * sums_step + at), load(scratch + at)));
    }
  }
  const float factor = sees_any ? 1.0f / divisor : 0.0f;
  for (int64_t at = 0; at < padded; at += kLanes) store(scratch + at, mul(load(scratch + at), set(factor)));
  switch (dtype) {
    case Dtype::kBf16: return store_row(scratch, size, static_cast<Bf16*>(out));
    case Dtype::kFp16: return store_row(scratch, size, static_cast<Fp16*>(out));
    case Dtype::kFloat: return store_row(scratch, size, static_cast<float*>(out));
  }
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
