// The scale search (numerics contract, section 2): of seven e4m3 numbers a block, the one of least squared error.
#pragma once

#include "cpu/quantize/block_math.h"
#include "cpu/simd/transpose.h"

namespace nvfp4::NVFP4_ISA {

constexpr int kCandidates = 7;

// A lane's candidates, and what its elements are multiplied by to be rounded.
struct Search {
  I bytes[kCandidates];
  F encode[kCandidates];

  Search(I base, const Plan& plan) {
    const int first = plan.spec.scale_rounding == ScaleRounding::kUp ? 0 : -1;
    for (int c = 0; c < kCandidates; ++c) {
      const I moved = max(add(base, set(first + c)), set(1));
      bytes[c] = select(greater(moved, set(kE4M3Nan - 1)), set(kE4M3Nan - 1), moved);
      encode[c] = block_encode(e4m3_values(bytes[c]), plan.tensor);
    }
  }

  // sum(s) of each lane's block, for `count` candidates; elements: element e of 16 blocks from 16 e on.
  template <int first, int count, typename T>
  NVFP4_INLINE void add_errors(const T* elements, F* sums) const {
    F sum[count];
    for (int c = 0; c < count; ++c) sum[c] = set(0.0f);
    for (int e = 0; e < kBlock; ++e) {
      const F x = abs(load_floats(elements + kBlock * e));
      for (int c = 0; c < count; ++c) {
        const F u = mul(x, encode[first + c]), difference = sub(nearest_magnitude(u), u);
        sum[c] = fma(difference, difference, sum[c]);
      }
    }
    for (int c = 0; c < count; ++c) sums[first + c] = sum[c];
  }

  // x: 16 blocks in order. As many candidates at a time as there are registers for.
  template <typename T>
  NVFP4_INLINE void errors(const T* x, F* sums) const {
    alignas(64) T elements[kGroupElements];
    transpose(x, kBlock, kGroupBlocks, kBlock, elements, kGroupBlocks);
    if constexpr (kManyRegisters) {
      add_errors<0, kCandidates>(elements, sums);
    } else {
      add_errors<0, 3>(elements, sums);
      add_errors<3, 2>(elements, sums);
      add_errors<5, 2>(elements, sums);
    }
  }

  // The first of the least errors.
  I best(const F* sums) const {
    I chosen = bytes[0];
    F least = set(0.0f);
    for (int c = 0; c < kCandidates; ++c) {
      const F s = e4m3_values(bytes[c]), error = mul(mul(sums[c], s), s);
      const Mask better = less(error, least);
      chosen = c ? select(better, bytes[c], chosen) : chosen;
      least = c ? select(better, error, least) : error;
    }
    return chosen;
  }
};

inline I base_scales(I magnitudes, const Plan& plan) {
  const F amax = as_float(magnitudes);
  return to_e4m3(mul(amax, set(plan.tensor.sixth)), amax, plan.spec.scale_rounding);
}

inline BlockScales finish_search(I best, I base, I magnitudes, const TensorScale& tensor) {
  best = select(equal(base, set(kE4M3Nan)), base, best);
  return finish_scales(select(equal(magnitudes, set(0)), set(0), best), magnitudes, tensor);
}

template <typename T>
BlockScales search_scales(const T* x, const Plan& plan) {
  const I magnitudes = block_magnitudes(x), base = base_scales(magnitudes, plan);
  const Search search(base, plan);
  F sums[kCandidates];
  search.errors(x, sums);
  return finish_search(search.best(sums), base, magnitudes, plan.tensor);
}

// Rows' errors added in halves: row i + row i+8, then +4, +2, +1.
inline F add_in_halves(F* rows) {
  for (int half = 8; half; half /= 2) {
    for (int i = 0; i < half; ++i) rows[i] = add(rows[i], rows[i + half]);
  }
  return rows[0];
}

// Of 16 tiles, each 16 rows of one block, of which `rows` are there.
template <typename T>
BlockScales search_tile_scales(const T* const* x, int rows, I magnitudes, const Plan& plan) {
  const I base = base_scales(magnitudes, plan);
  const Search search(base, plan);
  F of_rows[kCandidates][kBlock], sums[kCandidates];
  for (int row = 0; row < kBlock; ++row) {
    for (int c = 0; c < kCandidates; ++c) sums[c] = set(0.0f);
    if (row < rows) search.errors(x[row], sums);
    for (int c = 0; c < kCandidates; ++c) of_rows[c][row] = sums[c];
  }
  for (int c = 0; c < kCandidates; ++c) sums[c] = add_in_halves(of_rows[c]);
  return finish_search(search.best(sums), base, magnitudes, plan.tensor);
}

}  // namespace nvfp4::NVFP4_ISA
