// Rows of a tile of a pair (pair_tile.cuh) as decoded values, in place, and tiles of values to memory.
#pragma once

#include "cuda/block/pair_tile.cuh"
#include "cuda/block/search.cuh"
#include "cuda/block/values.cuh"

namespace nvfp4 {

// A side that leaves as values, so many rows of so many columns.
struct ValueSide {
  Quantization how;
  Bf16* out;
  uint32_t rows, columns;
};

__device__ __forceinline__ void store_chunks(const Elements<Bf16, kBlock>& v, uint4* low, uint4* high) {
  *low = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
  *high = make_uint4(v.word[4], v.word[5], v.word[6], v.word[7]);
}

// How the rows of a tile are scaled: by their largest element, or by a search.
template <bool searched>
struct RowTable {
  float enc[128];
};
template <>
struct RowTable<true> {
  SearchTable search;
};

struct SearchEncoder {
  const SearchTable* table;
  float sixth;
  DrawSource source;
};

// For all threads of the block, which meet before they read the table.
template <Fast mode>
__device__ __forceinline__ Encoder row_encoder(const Quantization& how, RowTable<false>& table) {
  return make_encoder<mode>(how, table.enc);
}
template <Fast mode>
__device__ __forceinline__ SearchEncoder row_encoder(const Quantization& how, RowTable<true>& table) {
  const TensorScale tensor = tensor_scale(how);
  table.search.fill(tensor);
  return {&table.search, tensor.sixth, draw_source(how, mode != Fast::kNearestEven)};
}

template <Fast mode>
__device__ __forceinline__ Elements<Bf16, kBlock> values_of(const Elements<Bf16, kBlock>& x, const Encoder& encoder,
                                                            ScaleRounding rounding, uint64_t number) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  return block_values<mode>(x, e4m3_value(s_bits), encoder.enc[s_bits], encoder.source, number);
}

// All lanes of the warp come here together.
template <Fast mode>
__device__ __forceinline__ Elements<Bf16, kBlock> values_of(const Elements<Bf16, kBlock>& x,
                                                            const SearchEncoder& encoder, ScaleRounding rounding,
                                                            uint64_t number) {
  float v[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    v[i] = x.value(i);
    asm volatile("" : "+f"(v[i]));  // else each scale tried would unpack it again
  }
  const uint32_t amax_bits = x.amax_bits();
  const uint8_t base = scale_from_bits<Bf16>(amax_bits, encoder.sixth, rounding);
  const float amax = Elements<Bf16, kBlock>::magnitude_of(amax_bits);
  const uint8_t s_bits = search_scale(v, amax, base, rounding, *encoder.table, [](float sum) { return sum; });
  return block_values<mode>(
      x, [&](int i) { return fabsf(v[i]); }, e4m3_value(s_bits), encoder.table->enc(s_bits), encoder.source, number);
}

// A thread's blocks of a tile: four of one block column, kStep rows apart. Eight lanes read, at a time, chunks of one
// parity of a row and of the other parity of another.
struct PairRows {
  static constexpr int kStep = 4;
  uint32_t block, first, swizzle;

  __device__ __forceinline__ PairRows() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    block = lane % 4 + 4 * (warp % 2), swizzle = lane / 4 % 2 + 2 * (warp / 2);
    first = swizzle * kBlock + lane / 8;
  }
};

// In place. RowEncoder: Encoder, or SearchEncoder.
template <Fast mode, typename TileRows, typename RowEncoder>
__device__ __forceinline__ void values_by_rows(const Quantization& how, const RowEncoder& encoder, uint32_t row0,
                                               uint32_t block0, uint4 (*x)[kChunks]) {
  constexpr int kTurns = 4, kUnroll = std::is_same_v<RowEncoder, SearchEncoder> ? 1 : kTurns;
  const TileRows at;
  uint4* low = &x[at.first][(2 * at.block) ^ at.swizzle];
  uint4* high = &x[at.first][(2 * at.block + 1) ^ at.swizzle];
  uint64_t number = block_number(how.random, row0 + at.first, block0 + at.block);
#pragma unroll(kUnroll)
  for (int turn = 0; turn < kTurns; ++turn) {
    const uint4 a = *low, b = *high;
    const Elements<Bf16, kBlock> elements = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    store_chunks(values_of<mode>(elements, encoder, how.spec.scale_rounding, number), low, high);
    low += TileRows::kStep * kChunks, high += TileRows::kStep * kChunks, number += TileRows::kStep * how.random.width;
  }
}

// A tile of values to its place. Each thread reads the chunks that load_tile will have it overwrite. place(row, chunk):
// where in its row of the tile a chunk lies.
template <typename Place>
__device__ __forceinline__ void store_tile(const uint4 (*from)[kChunks], const ValueSide& side, uint32_t row0,
                                           uint32_t column0, Place place) {
  constexpr int kRowsAThread = kTile * kChunks / kThreads;
  const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks * kRowsAThread;
  const uint32_t column = column0 + chunk * 8;
  const uint32_t rows = column < side.columns ? rows_left(side.rows, row0 + first) : 0;
  Bf16* to = side.out + (static_cast<int64_t>(row0 + first) * side.columns + column);
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i, to += side.columns) {
    const uint4 v = from[first + i][place(first + i, chunk)];
    if (i < rows) *reinterpret_cast<uint4*>(to) = v;
  }
  asm volatile("" ::: "memory");
}

}  // namespace nvfp4
