// Which experts tokens go to, and how much of each they take.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cpu/host/kernels.h"
#include "numerics/platform.h"

namespace nvfp4 {

// As in ops/composite/decode_step.py.
enum Routing : int64_t { kOfChosen = 1, kNormalized = 2, kRounded = 4 };

struct Chosen {
  std::vector<int64_t> experts;
  std::vector<float> weights;
};

inline void softmax(std::vector<float>& x) {
  const float most = *std::max_element(x.begin(), x.end());
  float sum = 0.0f;
  for (float& each : x) sum += each = std::exp(each - most);
  for (float& each : x) each /= sum;
}

// Of equal scores, the first expert's is the larger; NaN is the largest, as in PyTorch.
inline Chosen route(const Bf16* logits, int64_t experts, int64_t count, int64_t kind) {
  std::vector<float> scores(experts);
  for (int64_t e = 0; e < experts; ++e) scores[e] = float_of(logits[e]);
  if (!(kind & kOfChosen)) softmax(scores);
  Chosen chosen{std::vector<int64_t>(experts), std::vector<float>(count)};
  std::iota(chosen.experts.begin(), chosen.experts.end(), 0);
  const auto is_larger = [&](int64_t a, int64_t b) {
    const float x = scores[a], y = scores[b];
    const bool x_nan = x != x, y_nan = y != y;
    if (x_nan != y_nan) return x_nan;
    return x > y || (!(y > x) && a < b);
  };
  std::partial_sort(chosen.experts.begin(), chosen.experts.begin() + count, chosen.experts.end(), is_larger);
  chosen.experts.resize(count);
  for (int64_t i = 0; i < count; ++i) chosen.weights[i] = scores[chosen.experts[i]];
  if (kind & kOfChosen) softmax(chosen.weights);
  if (kind & kNormalized) {
    const float sum = std::accumulate(chosen.weights.begin(), chosen.weights.end(), 0.0f);
    for (float& each : chosen.weights) each /= sum;
  }
  if (kind & kRounded) {
    for (float& each : chosen.weights) each = float_of(bf16_of(each));
  }
  return chosen;
}

// What tokens take of experts, in slots of ascending experts, so that those of an expert lie one behind the other.
struct Routes {
  struct Slot {
    int64_t row, expert;
  };
  std::vector<Chosen> rows;
  std::vector<Slot> slots;
  std::vector<int64_t> slot_of;  // the i-th expert of a row: slot_of[row * chosen + i]

  // logits: (count, experts).
  Routes(const Bf16* logits, int64_t count, int64_t experts, int64_t chosen, int64_t kind) : slot_of(count * chosen) {
    std::vector<int64_t> order(count * chosen);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t row = 0; row < count; ++row) rows.push_back(route(logits + row * experts, experts, chosen, kind));
    const auto expert_of = [&](int64_t i) { return rows[i / chosen].experts[i % chosen]; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return expert_of(a) < expert_of(b); });
    for (const int64_t i : order) {
      slot_of[i] = int64_t(slots.size());
      slots.push_back({i / chosen, expert_of(i)});
    }
  }
};

}  // namespace nvfp4
