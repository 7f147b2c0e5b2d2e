// transpose_codes: transposes codes and scales in 16x16 tiles, whose scales serve both directions. Nothing is rounded;
// 9/16 bytes per element are read and written (decoding moves 2 9/16).
//
// A thread has one tile of 16x16 codes in registers; a thread block transposes 16 x 16 tiles in shared memory, so that
// 128 bytes of a row are loaded and stored together.
#include "cuda/block/block.cuh"
#include "numerics/layout.h"

namespace nvfp4 {
namespace {

constexpr int kSide = 16;  // tiles, of what a thread block has

struct Swap {
  Quantized in;  // in.blocks a row, of in.rows
  uint32_t row_blocks;
  uint8_t *qdata, *scale;  // of the transpose: in.blocks * 16 rows of row_blocks
};

// Eight words of eight codes: code j of word i to code i of word j, in halves, bytes and nibbles.
__device__ __forceinline__ void transpose8(uint32_t (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = w[i], b = w[i + 4];
    w[i] = __byte_perm(a, b, 0x5410), w[i + 4] = __byte_perm(a, b, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i & 2) continue;
    const uint32_t a = w[i], b = w[i + 2];
    w[i] = __byte_perm(a, b, 0x6240), w[i + 2] = __byte_perm(a, b, 0x7351);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t a = w[i], b = w[i + 1];
    w[i] = (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u), w[i + 1] = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
  }
}

// Columns 8 * right .. + 7 of rows 8 * lower .. + 7 of a tile, a row a word: word[right][lower].
struct TileCodes {
  uint32_t word[2][2][8];
};

// The tile whose first row is `row`; zeros past the last one.
__device__ __forceinline__ TileCodes load_tile(const Quantized& in, uint32_t row, uint32_t column) {
  TileCodes codes;
  const uint2* from = reinterpret_cast<const uint2*>(in.qdata) + (static_cast<int64_t>(row) * in.blocks + column);
#pragma unroll
  for (int i = 0; i < kBlock; ++i, from += in.blocks) {
    const uint2 v = row + i < in.rows ? __ldg(from) : make_uint2(0u, 0u);
    codes.word[0][i / 8][i % 8] = v.x, codes.word[1][i / 8][i % 8] = v.y;
  }
  return codes;
}

// The 16 bytes of scales of rows r, r + 32, r + 64 and r + 96 of one of the 2 x 4 tiles of scales that the thread
// block's results have. of_column[c][r]: that of the tile in row r and column c.
__device__ __forceinline__ void store_scales(const Swap& s, uint32_t first_column, uint32_t first_row,
                                             const uint8_t (&of_column)[kSide][kSide]) {
  const uint32_t tile = threadIdx.x / 32, r = threadIdx.x % 32;
  const uint32_t band = tile / 4, part = tile % 4;
  const uint32_t row = first_column * kBlock + band * kTileRows, column = first_row + part * kTileColumns;
  if (row >= s.in.blocks * kBlock || column >= s.row_blocks) return;
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = *reinterpret_cast<const uint32_t*>(&of_column[band * 8 + i * 2 + r / kBlock][part * kTileColumns]);
  }
  const uint32_t column_tiles = (s.row_blocks + kTileColumns - 1) / kTileColumns;
  *reinterpret_cast<uint4*>(s.scale + scale_offset(row + r, column, column_tiles)) = make_uint4(word[0], word[1],
                                                                                                word[2], word[3]);
}

__global__ void __launch_bounds__(kSide* kSide) transpose_codes(const Swap s) {
  __shared__ uint2 rows[kSide * kBlock][kSide];  // of the transpose: block r of a row of tile c lies at r ^ c
  __shared__ alignas(4) uint8_t scales[kSide][kSide];
  const uint32_t c = threadIdx.x % kSide, r = threadIdx.x / kSide;
  const uint32_t first_column = blockIdx.x * kSide, first_row = blockIdx.y * kSide;
  const uint32_t column = first_column + c, row = first_row + r;
  const bool inside = column < s.in.blocks && row < s.row_blocks;
  const uint32_t in_tiles = static_cast<uint32_t>(ceil_div(s.in.blocks, kTileColumns));
  scales[c][r] = inside ? __ldg(s.in.scale + scale_offset(row * kBlock, column, in_tiles)) : 0;
  if (inside) {
    TileCodes codes = load_tile(s.in, row * kBlock, column);
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      auto& [upper, lower] = codes.word[right];
      transpose8(upper);
      transpose8(lower);
#pragma unroll
      for (int i = 0; i < 8; ++i) rows[c * kBlock + right * 8 + i][r ^ c] = make_uint2(upper[i], lower[i]);
    }
  }
  __syncthreads();
  store_scales(s, first_column, first_row, scales);
  const uint32_t pair = threadIdx.x % 8;  // of blocks, 16 bytes
  const uint32_t to = first_row + pair * 2;
  if (to >= s.row_blocks) return;
  for (uint32_t i = threadIdx.x / 8; i < kSide * kBlock; i += kSide * kSide / 8) {
    const uint32_t tile = i / kBlock, out_row = first_column * kBlock + i;
    if (out_row >= s.in.blocks * kBlock) return;
    uint4 v = reinterpret_cast<const uint4*>(rows[i])[pair ^ tile / 2];
    if (tile % 2) v = make_uint4(v.z, v.w, v.x, v.y);
    uint2* at = reinterpret_cast<uint2*>(s.qdata) + (static_cast<int64_t>(out_row) * s.row_blocks + to);
    if (s.row_blocks % 2 == 0) {
      *reinterpret_cast<uint4*>(at) = v;
    } else {
      at[0] = make_uint2(v.x, v.y);
      if (to + 1 < s.row_blocks) at[1] = make_uint2(v.z, v.w);
    }
  }
}

}  // namespace

void launch_transpose_codes(const Quantized& in, const Codes& out, cudaStream_t stream) {
  if (in.rows * in.blocks == 0) return;
  const uint32_t row_blocks = static_cast<uint32_t>(ceil_div(in.rows, kBlock));
  const dim3 grid(static_cast<uint32_t>(ceil_div(in.blocks, kSide)),
                  static_cast<uint32_t>(ceil_div(row_blocks, kSide)));
  transpose_codes<<<grid, kSide * kSide, 0, stream>>>(Swap{in, row_blocks, out.qdata, out.scale});
}

}  // namespace nvfp4
