// What quantize_pair and quantize_pair_values share: a tile of 128 x 128 bfloat16 in shared memory, quantized by
// columns.
//
// 16-byte chunk c of row r lies at chunk c ^ (r / 16): eight groups of 16 rows by four words then fall into 32
// different banks, and so do four even chunks of a row and of the row 16 below it.
#pragma once

#include <atomic>

#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"

namespace nvfp4 {

using Bf16 = __nv_bfloat16;

constexpr int kTile = 128;
constexpr int kChunks = kTile * 2 / 16;      // 16-byte chunks of a row
constexpr int kTileBlocks = kTile / kBlock;  // of a row
constexpr int kScaleBytes = kTile * kTileBlocks;
constexpr int kPairBlocksPerSm = 2;  // with 128 registers a thread: 2 % ahead of 3 with 80
constexpr int kPairWaves = 4;        // a static share each leaves some warps to end alone

// One side of the pair.
struct Side {
  Quantization how;
  Codes out;
  uint32_t rows, blocks;  // blocks in a row of codes
};

// What a side's blocks need that is the same for all of them.
struct Encoder {
  const float* enc;
  float sixth;
  DrawSource source;
};

// Rows of `rows` from `first` on.
__device__ __forceinline__ uint32_t rows_left(uint32_t rows, uint32_t first) { return rows - min(rows, first); }

__device__ __forceinline__ void copy_chunk(uint4* to, const void* from, bool inside) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(inside ? 16 : 0));
}

// Starts the copy of the tile at (row0, column0); one commit group, empty past the last tile. A thread copies a chunk
// of each of eight neighbouring rows, so that their addresses are one register and constants. swizzle(first, i): what
// the chunk's number is xored with in row first + i, first a multiple of 8.
template <typename Swizzle>
__device__ __forceinline__ void load_tile(const Matrix& x, uint32_t row0, uint32_t column0, uint4 (*to)[kChunks],
                                          Swizzle swizzle) {
  constexpr int kRowsAThread = kTile * kChunks / kThreads;
  const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks * kRowsAThread;
  const uint32_t column = column0 + chunk * 8;
  const uint32_t rows = column < x.columns ? rows_left(static_cast<uint32_t>(x.rows), row0 + first) : 0;
  const Bf16* from = element_at<Bf16>(x, row0 + first, column);
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i, from += x.row_stride) {
    copy_chunk(&to[first + i][chunk ^ swizzle(first, i)], from, i < rows);
  }
}
__device__ __forceinline__ void load_tile(const Matrix& x, uint32_t row0, uint32_t column0, uint4 (*to)[kChunks]) {
  load_tile(x, row0, column0, to, [](uint32_t first, int) { return first / kBlock; });
}

template <Fast mode>
__device__ __forceinline__ void quantize_one(const Elements<Bf16, kBlock>& x, const Encoder& encoder,
                                             ScaleRounding rounding, uint64_t number, bool inside, uint2* codes,
                                             uint8_t* scale) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  const uint2 coded = encode16<mode>(x, s_bits, encoder.enc[s_bits], encoder.source, number);
  if (inside) *codes = coded;
  *scale = inside ? s_bits : 0;
}

// Where block (row, block) of a side has its codes.
__device__ __forceinline__ uint2* codes_at(const Side& side, uint32_t row, uint32_t block) {
  return reinterpret_cast<uint2*>(side.out.qdata) + (static_cast<int64_t>(row) * side.blocks + block);
}

// Both walks, by rows and by columns, keep a thread within one group of 16 rows, so that all its shared memory lies at
// constants from one place.
template <Fast mode, bool transform>
__device__ __forceinline__ void quantize_by_columns(const Side& side, const Encoder& encoder,
                                                    const HadamardFactors& factors, uint32_t row0, uint32_t block0,
                                                    const uint4 (*x)[kChunks], uint8_t* scale) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t group = lane / 4;  // of 16 rows: a block of the transpose
  const uint32_t first = warp * 8 + lane % 4 * 2;
  constexpr int kColumnsATurn = kThreads / 32 * 8;
  const uint32_t columns = block0 + group < side.blocks ? rows_left(side.rows, row0 + first) : 0;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&x[group * kBlock][warp ^ group]) + lane % 4;
  uint2* codes = codes_at(side, row0 + first, block0 + group);
  uint64_t number = block_number(side.how.random, row0 + first, block0 + group);
  scale += scale_offset(first, group, kTileBlocks / kTileColumns);
#pragma unroll
  for (int column = 0; column < kTile; column += kColumnsATurn) {
    uint32_t word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) word[i] = words[(i * kChunks + column / 8) * 4];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      quantize_one<mode>(column_block<transform>(word, which, factors), encoder, side.how.spec.scale_rounding,
                         number + which * side.how.random.width, column < columns,
                         codes + which * static_cast<int64_t>(side.blocks), scale + column / 32 * 4 + which * 16);
    }
    codes += kColumnsATurn * static_cast<int64_t>(side.blocks), number += kColumnsATurn * side.how.random.width;
  }
}

// The tile's scales, 1024 bytes in place order, to where the two tiles of scales lie; the second may not exist.
__device__ __forceinline__ void store_scales(const uint8_t* scale, const Side& side, uint32_t row0, uint32_t block0) {
  const uint32_t column_tiles = (side.blocks + kTileColumns - 1) / kTileColumns;
  const uint32_t bytes = min(2u, column_tiles - block0 / kTileColumns) * kTileBytes;
  const uint32_t at = threadIdx.x * 16;
  if (at >= bytes) return;
  uint8_t* to = side.out.scale + scale_offset(row0, block0, column_tiles);
  *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(scale + at);
}

template <Fast mode>
__device__ __forceinline__ Encoder make_encoder(const Quantization& how, float* enc) {
  const TensorScale tensor = tensor_scale(how);
  if (threadIdx.x < 128) enc[threadIdx.x] = tensor.block_encode(e4m3_value(static_cast<uint8_t>(threadIdx.x)));
  return {enc, tensor.sixth, draw_source(how, mode != Fast::kNearestEven)};
}

// Once a kernel and device: the call takes as long as an allocation.
template <auto kernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << device % 64;
  if (device < 64 && allowed & bit) return;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
  allowed |= bit;
}

}  // namespace nvfp4
