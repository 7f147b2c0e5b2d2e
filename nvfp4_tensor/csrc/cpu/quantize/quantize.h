// Quantization: scales, then codes, of batches of groups; where they go is the business of a Sink.
#pragma once

#include "cpu/quantize/group_io.h"
#include "cpu/quantize/search.h"

namespace nvfp4::NVFP4_ISA {

template <Rounding rounding, typename T>
NVFP4_INLINE void quantize_group(const T* x, const BlockScales& scales, const RandomWindows* random, uint8_t* codes) {
  const Spread encode(scales.encode);
  I bytes[kPairs];
  for (int p = 0; p < kPairs; ++p) {
    F even, odd;
    load_pairs(x + 32 * p, even, odd);
    even = mul(even, encode.pair(p));
    odd = mul(odd, encode.pair(p));
    I even_random, odd_random;
    if (rounding == Rounding::kStochastic16 || rounding == Rounding::kStochastic8) {
      random->pair(p, even_random, odd_random);
    } else {
      even_random = odd_random = set(0);
    }
    bytes[p] = pack_codes(round_to_code<rounding>(even, even_random), round_to_code<rounding>(odd, odd_random), even,
                          odd);
  }
  store_codes(codes, bytes);
  if (__builtin_expect(scales.nan_lanes != 0, 0)) {
    for (int lane = 0; lane < kGroupBlocks; ++lane) {
      if (scales.nan_lanes >> lane & 1) std::memset(codes + lane * 8, 0, 8);
    }
  }
}

template <typename T>
void as_floats(const T* x, float* out) {
  for (int p = 0; p < kPairs; ++p) {
    F even, odd;
    load_pairs(x + 32 * p, even, odd);
    store_pairs(out + 32 * p, even, odd);
  }
}

template <typename T>
BlockScales four_over_six_scales(const T* x, const Plan& plan) {
  alignas(64) float elements[kGroupElements];
  as_floats(x, elements);
  const I magnitudes = block_magnitudes(x);
  const Candidates candidates = candidate_scales(magnitudes, plan);
  const F error6 = block_errors(elements, candidates.bytes[0], plan);
  const F error4 = block_errors(elements, candidates.bytes[1], plan);
  return finish_scales(choose(candidates, error6, error4), magnitudes, plan.tensor);
}

// The scales of each group's blocks.
template <typename T>
void group_scales(const T* const* x, int count, const Plan& plan, BlockScales* scales) {
  if (plan.spec.scale_search != ScaleSearch::kNone) {
    for (int i = 0; i < count; ++i) scales[i] = search_scales(x[i], plan);
  } else if (plan.spec.four_over_six != FourOverSix::kNone) {
    for (int i = 0; i < count; ++i) scales[i] = four_over_six_scales(x[i], plan);
  } else {
    for (int i = 0; i < count; ++i) scales[i] = block_scales(block_magnitudes(x[i]), plan);
  }
}

// The scales of 16 tiles, each 16 rows of one block; absent rows of the last band count as zeros.
template <typename T>
BlockScales tile_scales(const T* const* x, int rows, const Plan& plan) {
  I magnitudes = block_magnitudes(x[0]);
  for (int i = 1; i < rows; ++i) magnitudes = max(magnitudes, block_magnitudes(x[i]));
  if (plan.spec.scale_search != ScaleSearch::kNone) return search_tile_scales(x, rows, magnitudes, plan);
  if (plan.spec.four_over_six == FourOverSix::kNone) return block_scales(magnitudes, plan);
  alignas(64) float elements[kGroupElements];
  const Candidates candidates = candidate_scales(magnitudes, plan);
  F errors[2][kBlock];
  for (int i = 0; i < kBlock; ++i) {
    if (i < rows) as_floats(x[i], elements);
    for (int k = 0; k < 2; ++k) {
      errors[k][i] = i < rows ? block_errors(elements, candidates.bytes[k], plan) : set(0.0f);
    }
  }
  return finish_scales(choose(candidates, add_in_halves(errors[0]), add_in_halves(errors[1])), magnitudes, plan.tensor);
}

// A Sink takes (group, scales, encode) and says where encode(codes) may put the codes. This one stores both.
struct ToMemory {
  const Quantized& out;
  int64_t blocks;

  template <typename Encode>
  void operator()(const Group& group, const BlockScales& scales, Encode encode) const {
    CodeTarget target(out.qdata + (group.row * blocks + group.block) * 8, group.count);
    encode(target.data());
    target.flush();
    store_scales(out.scale, out.column_tiles, group, blocks, scales.bytes);
  }
};

// What a Sink still has to do when a batch is encoded: nothing, where it has no overload.
template <typename Sink>
void end_batch(Sink&) {}

// Groups x[i] with their scales; tiles share scales[0].
template <Rounding rounding, typename T, typename Sink>
void encode_groups(const T* const* x, const Group* groups, int count, const BlockScales* scales, int64_t blocks,
                   const Plan& plan, Sink& sink) {
  for (int i = 0; i < count; ++i) {
    const BlockScales& own = scales[plan.spec.block_rows == 1 ? i : 0];
    sink(groups[i], own, [&](uint8_t* codes) {
      if constexpr (rounding == Rounding::kStochastic16 || rounding == Rounding::kStochastic8) {
        const RandomWindows random = random_windows(plan, groups[i].row, groups[i].block, blocks);
        quantize_group<rounding>(x[i], own, &random, codes);
      } else {
        quantize_group<rounding>(x[i], own, nullptr, codes);
      }
    });
  }
}

template <typename T, typename Sink>
void encode_groups(const T* const* x, const Group* groups, int count, const BlockScales* scales, int64_t blocks,
                   const Plan& plan, Sink& sink) {
  switch (rounding_of(plan.spec)) {
    case Rounding::kEven: return encode_groups<Rounding::kEven>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kAway: return encode_groups<Rounding::kAway>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kZero: return encode_groups<Rounding::kZero>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kStochastic16:
      return encode_groups<Rounding::kStochastic16>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kStochastic8:
      return encode_groups<Rounding::kStochastic8>(x, groups, count, scales, blocks, plan, sink);
  }
}

// Up to 16 groups at a time: 16 rows of a column of tiles, or neighbours with scales of their own. All scales are made
// before the first code: a group's scales are one long chain of dependent instructions, and the chains of neighbours
// run side by side (4.2 -> 2.4 ms for 2^24 elements in the cache, one thread).
constexpr int kBatch = 16;

template <typename T>
struct Batch {
  Group groups[kBatch];
  int count = 0;
  const T* plain[kBatch];
  const Bf16* transformed[kBatch];
  BlockScales scales[kBatch];
  alignas(64) T gathered[kBatch][kGroupElements];
  alignas(64) Bf16 hadamard[kBatch][kGroupElements];

  void add(const Group& group) { groups[count++] = group; }
};

template <typename T, typename U, typename Sink>
void quantize_loaded(const U* const* x, Batch<T>& batch, int64_t blocks, const Plan& plan, Sink& sink) {
  if (plan.spec.block_rows == 1) {
    group_scales(x, batch.count, plan, batch.scales);
  } else {
    batch.scales[0] = tile_scales(x, batch.count, plan);
  }
  encode_groups(x, batch.groups, batch.count, batch.scales, blocks, plan, sink);
}

// Quantizes the batch and empties it.
template <typename T, typename Sink>
void quantize_batch(const Matrix& x, Batch<T>& batch, const Plan& plan, const HadamardSigns& signs, Sink& sink) {
  for (int i = 0; i < batch.count; ++i) {
    batch.plain[i] = fetch(x, batch.groups[i], batch.gathered[i]);
    if (plan.spec.hadamard_sign < 0) continue;
    hadamard_group(batch.plain[i], signs.even, signs.odd, batch.hadamard[i]);
    batch.transformed[i] = batch.hadamard[i];
  }
  if (plan.spec.hadamard_sign < 0) {
    quantize_loaded(batch.plain, batch, x.blocks(), plan, sink);
  } else {
    quantize_loaded(batch.transformed, batch, x.blocks(), plan, sink);
  }
  end_batch(sink);
  batch.count = 0;
}

// Units [begin, end) of Kernels::quantize.
template <typename T, typename Sink>
void quantize_units(const Matrix& x, const Plan& plan, int64_t begin, int64_t end, Sink& sink) {
  Batch<T> batch;
  const HadamardSigns signs(plan.spec.hadamard_sign);
  if (!plan.banded) {
    for (int64_t first = begin; first < end; first += kBatch) {
      for (int64_t unit = first; unit < std::min(end, first + kBatch); ++unit) {
        batch.add(Group::at(unit, x.rows, x.blocks()));
      }
      quantize_batch(x, batch, plan, signs, sink);
    }
    return;
  }
  for (int64_t band = begin; band < end; ++band) {
    const int64_t row0 = band * kBlock, last = std::min<int64_t>(row0 + kBlock, x.rows);
    for (int64_t block = 0; block < x.blocks(); block += kGroupBlocks) {
      const int count = int(std::min<int64_t>(kGroupBlocks, x.blocks() - block));
      for (int64_t row = row0; row < last; ++row) batch.add({row, block, count});
      quantize_batch(x, batch, plan, signs, sink);
    }
  }
}

template <typename T>
void quantize(const Matrix& x, const Plan& plan, const Quantized& out, int64_t begin, int64_t end) {
  ToMemory sink{out, x.blocks()};
  quantize_units<T>(x, plan, begin, end, sink);
}

}  // namespace nvfp4::NVFP4_ISA
