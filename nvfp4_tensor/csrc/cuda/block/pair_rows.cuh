// Rows of a pair (pair_tile.cuh) in blocks of 16: how they are scaled, and rounded to values in place.
#pragma once

#include "cuda/block/choose_scale.cuh"
#include "cuda/block/pair_tile.cuh"
#include "cuda/block/values.cuh"

namespace nvfp4 {

// By a block's largest element,
template <Fast mode>
struct Encoder {
  static constexpr bool kDraws = false;
  static constexpr int kUnroll = 4;
  struct Table {
    float enc[128];
  };
  const float* enc;
  float sixth;
  DrawSource source;

  __device__ __forceinline__ Encoder(const Quantization& how, Table& table) : enc(table.enc) {
    const TensorScale tensor = tensor_scale_by_maxima(how);
    fill_encode_table(tensor, table.enc);
    sixth = tensor.sixth, source = draw_source(how, mode != Fast::kNearestEven);
  }

  __device__ __forceinline__ Elements<Bf16, kBlock> values(const Elements<Bf16, kBlock>& x, ScaleRounding rounding,
                                                           uint64_t number) const {
    const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), sixth, rounding);
    return block_values<mode>(x, e4m3_value(s_bits), enc[s_bits], source, number);
  }
};

// or by a search, to nearest.
struct SearchEncoder {
  static constexpr bool kDraws = false;
  static constexpr int kUnroll = 1;
  using Table = SearchTable;
  const SearchTable& table;
  float sixth;

  __device__ __forceinline__ SearchEncoder(const Quantization& how, Table& to) : table(to) {
    const TensorScale tensor = tensor_scale_by_maxima(how);
    to.fill(tensor);
    sixth = tensor.sixth;
  }

  // All lanes of the warp come here together.
  __device__ __forceinline__ Elements<Bf16, kBlock> values(const Elements<Bf16, kBlock>& x, ScaleRounding rounding,
                                                           uint64_t) const {
    float v[kBlock];
    separate_values(x, v);
    const uint32_t amax_bits = x.amax_bits();
    const uint8_t base = scale_from_bits<Bf16>(amax_bits, sixth, rounding);
    const float amax = Elements<Bf16, kBlock>::magnitude_of(amax_bits);
    const uint8_t s_bits = search_scale(v, amax, base, rounding, table, [](float sum) { return sum; });
    return block_values<Fast::kNearestEven>(
        x, [&](int i) { return fabsf(v[i]); }, e4m3_value(s_bits), table.enc(s_bits), DrawSource{}, 0);
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

// Calls take(turn, elements, number, low, high) for each of them, low and high the places of their chunks.
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

template <typename By, typename TileRows>
struct ValueRows : ValueRowsOf<By, TileRows> {
  __device__ __forceinline__ void quantize(const By& by, Chunks* x, ValueRows::Shared&, uint32_t row0,
                                           uint32_t column0) const {
    const Quantization& how = this->how;
    for_rows<TileRows, By::kUnroll>(how.random, TileRows(), x, row0, column0,
                                    [&](int, const auto& elements, uint64_t number, uint4* low, uint4* high) {
                                      store_chunks(by.values(elements, how.spec.scale_rounding, number), low, high);
                                    });
  }
};

}  // namespace nvfp4
