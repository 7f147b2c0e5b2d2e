// Rows of a pair (pair_tile.cuh) in blocks of 16: how they are scaled, and rounded to values in place.
#pragma once

#include "cuda/block/pair_tile.cuh"
#include "cuda/block/search.cuh"
#include "cuda/block/values.cuh"

namespace nvfp4 {

// How a side's blocks are scaled: by their largest element,
struct Encoder {
  struct Table {
    float enc[128];
  };
  const float* enc;
  float sixth;
  DrawSource source;

  // For all threads of the block, which meet before they read the table.
  template <Fast mode>
  __device__ __forceinline__ static Encoder of(const Quantization& how, Table& table) {
    const TensorScale tensor = tensor_scale_by_maxima(how);
    fill_encode_table(tensor, table.enc);
    return {table.enc, tensor.sixth, draw_source(how, mode != Fast::kNearestEven)};
  }

  template <Fast mode>
  __device__ __forceinline__ Elements<Bf16, kBlock> values(const Elements<Bf16, kBlock>& x, ScaleRounding rounding,
                                                           uint64_t number) const {
    const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), sixth, rounding);
    return block_values<mode>(x, e4m3_value(s_bits), enc[s_bits], source, number);
  }
};

// or by a search.
struct SearchEncoder {
  using Table = SearchTable;
  const SearchTable* table;
  float sixth;
  DrawSource source;

  template <Fast mode>
  __device__ __forceinline__ static SearchEncoder of(const Quantization& how, Table& table) {
    const TensorScale tensor = tensor_scale_by_maxima(how);
    table.fill(tensor);
    return {&table, tensor.sixth, draw_source(how, mode != Fast::kNearestEven)};
  }

  // All lanes of the warp come here together.
  template <Fast mode>
  __device__ __forceinline__ Elements<Bf16, kBlock> values(const Elements<Bf16, kBlock>& x, ScaleRounding rounding,
                                                           uint64_t number) const {
    float v[kBlock];
    separate_values(x, v);
    const uint32_t amax_bits = x.amax_bits();
    const uint8_t base = scale_from_bits<Bf16>(amax_bits, sixth, rounding);
    const float amax = Elements<Bf16, kBlock>::magnitude_of(amax_bits);
    const uint8_t s_bits = search_scale(v, amax, base, rounding, *table, [](float sum) { return sum; });
    return block_values<mode>(
        x, [&](int i) { return fabsf(v[i]); }, e4m3_value(s_bits), table->enc(s_bits), source, number);
  }
};

// A thread's blocks of a tile: four of one block column, kStep rows apart. Eight lanes read, at a time, chunks of one
// parity of a row and of the other parity of another.
struct PairRows : BlockOrder {
  static constexpr int kStep = 4;
  uint32_t block, first;

  __device__ __forceinline__ PairRows() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    block = lane % 4 + 4 * (warp % 2), first = (lane / 4 % 2 + 2 * (warp / 2)) * kBlock + lane / 8;
  }
};

// Calls take(elements, number, low, high) for each of them, low and high the places of their chunks.
template <typename TileRows, int kUnroll = 4, typename Take>
__device__ __forceinline__ void for_rows(const RandomOffset& random, const TileRows& at, Chunks* x, uint32_t row0,
                                         uint32_t column0, Take take) {
  const uint32_t swizzle = TileRows::swizzle(at.first);
  uint4* low = &x[at.first][(2 * at.block) ^ swizzle];
  uint4* high = &x[at.first][(2 * at.block + 1) ^ swizzle];
  uint64_t number = block_number(random, row0 + at.first, column0 / kBlock + at.block);
#pragma unroll(kUnroll)
  for (int turn = 0; turn < 4; ++turn) {
    const uint4 a = *low, b = *high;
    take(turn, Elements<Bf16, kBlock>{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}}, number, low, high);
    low += TileRows::kStep * kChunks, high += TileRows::kStep * kChunks, number += TileRows::kStep * random.width;
  }
}

// Rows that leave as values.
template <Fast mode, typename By, typename TileRows>
struct ValueRows : ValueSide {
  static constexpr bool kValues = true, kDraws = false;
  using Shared = typename By::Table;

  __device__ __forceinline__ By begin(Shared& shared) const { return By::template of<mode>(how, shared); }

  __device__ __forceinline__ void quantize(const By& encoder, Chunks* x, Shared&, uint32_t row0,
                                           uint32_t column0) const {
    constexpr int kUnroll = std::is_same_v<By, SearchEncoder> ? 1 : 4;
    for_rows<TileRows, kUnroll>(how.random, TileRows(), x, row0, column0,
                                [&](int, const auto& elements, uint64_t number, uint4* low, uint4* high) {
                                  store_chunks(encoder.template values<mode>(elements, how.spec.scale_rounding, number),
                                               low, high);
                                });
  }

  __device__ __forceinline__ void store(const Chunks* x, Shared&, uint32_t row0, uint32_t column0) const {
    store_tile(x, row0, column0, [](uint32_t row, uint32_t chunk) { return chunk ^ TileRows::swizzle(row); });
  }
};

}  // namespace nvfp4
