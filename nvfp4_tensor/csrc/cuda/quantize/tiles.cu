// quantize, 16x16 tiles: the fast kernel. A warp takes 8 tiles side by side; lane 8g + t has rows g, g + 4, g + 8 and
// g + 12 of tile t, so that eight lanes read 256 bytes of a row of bfloat16 and two shuffles end a tile's maximum.
#include "cuda/block/block.cuh"

namespace nvfp4 {
namespace {

constexpr int kTilesAWarp = 8, kRowsAThread = 4;

// Of a walk along a column, the padding of the scales included.
__host__ __device__ __forceinline__ int64_t tiles_down(int64_t rows) {
  return ceil_div(rows, kTileRows) * (kTileRows / kBlock);
}

// The scales of a warp's tiles: those of four tiles side by side are one word for each of their 16 rows, two such words
// a row, and each lane writes one. Zeros, the padding, where a tile of scales goes on past the last block or row.
__device__ __forceinline__ void store_scales(uint32_t s_bits, const Walk& at, uint32_t lane, const Matrix& x,
                                             uint8_t* scale) {
  uint32_t word = s_bits << (8 * (lane % kTileColumns));
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  const uint32_t row = at.row * kBlock + lane / kTilesAWarp + kRowsAThread * (lane % kTileColumns);
  const uint32_t column = at.column * kTilesAWarp + lane % kTilesAWarp / kTileColumns * kTileColumns;
  if (column >= x.blocks()) return;
  *reinterpret_cast<uint32_t*>(
      scale + scale_offset(row, column, static_cast<uint32_t>(x.column_tiles()))) = row < x.rows ? word : 0;
}

template <typename T, Fast mode>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3)
    quantize_tiles(Matrix x, Quantization how, Codes out) {
  const TensorScale tensor = tensor_scale_by_maxima(how);
  const float* enc = encode_table(tensor);
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const uint32_t blocks = static_cast<uint32_t>(x.blocks());
  const uint32_t lane = threadIdx.x % 32, warps = kThreads / 32;
  const uint32_t first = blockIdx.x * warps + threadIdx.x / 32;
  for (Walk at(tiles_down(x.rows), ceil_div(blocks, kTilesAWarp), first, gridDim.x * warps); at.inside(); at.step()) {
    const uint32_t column = at.column * kTilesAWarp + lane % kTilesAWarp;
    const uint32_t row0 = at.row * kBlock + lane / kTilesAWarp;
    Elements<T, kBlock> block[kRowsAThread];
#pragma unroll
    for (int i = 0; i < kRowsAThread; ++i) {
      const uint32_t row = row0 + kRowsAThread * i;
      block[i] = column < blocks && row < x.rows ? Elements<T, kBlock>::load(element_at<T>(x, row, column * kBlock))
                                                 : Elements<T, kBlock>::zero();
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kRowsAThread; ++i) most = max(most, block[i].amax_bits());
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 8));
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 16));

    const uint8_t s_bits = scale_from_bits<T>(most, tensor.sixth, how.spec.scale_rounding);
    const float block_enc = enc[s_bits];
#pragma unroll
    for (int i = 0; i < kRowsAThread; ++i) {
      const uint32_t row = row0 + kRowsAThread * i;
      if (column >= blocks || row >= x.rows) continue;
      const uint2 codes = encode16<mode>(block[i], s_bits, block_enc, source, block_number(how.random, row, column));
      reinterpret_cast<uint2*>(out.qdata)[static_cast<int64_t>(row) * blocks + column] = codes;
    }
    store_scales(column < blocks ? s_bits : 0, at, lane, x, out.scale);
  }
}

}  // namespace

void launch_quantize_tiles(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  const int64_t warps = tiles_down(x.rows) * ceil_div(x.blocks(), kTilesAWarp);
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      launch_walk<quantize_tiles<decltype(type), mode.value>>(warps * 32, stream, x, how, out);
    });
  });
}

}  // namespace nvfp4
