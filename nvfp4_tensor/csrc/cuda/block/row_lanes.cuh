// One lane a row of 16 elements of a block, 1x16 or 16x16. With 16x16 tiles, 16 lanes are the 16 rows of one tile, and
// what the tile shares (its maximum, its errors added in halves) goes through shuffles among them.
#pragma once

#include "cuda/block/block.cuh"

namespace nvfp4 {

// Where a lane's next row of a block lies. Tiles are walked by half-warps, rows of blocks by lanes.
struct RowCoord {
  uint32_t row, column;
  bool inside;
};

struct RowLanes {
  Walk at;
  bool tile;

  // padding: whether to walk that of the scales, too.
  __device__ RowLanes(const Matrix& x, bool is_tile, bool padding = false)
      : at(rows(x, is_tile, padding) / (is_tile ? kBlock : 1), columns(x, padding),
           (blockIdx.x * blockDim.x + threadIdx.x) / (is_tile ? kBlock : 1),
           gridDim.x * blockDim.x / (is_tile ? kBlock : 1)),
        tile(is_tile) {}

  __device__ bool any() const { return __any_sync(0xFFFFFFFFu, at.inside()); }

  __device__ RowCoord coord(const Matrix& x) const {
    const uint32_t row = tile ? at.row * kBlock + threadIdx.x % kBlock : at.row;
    return {row, at.column, at.inside() && row < x.rows && at.column < x.blocks()};
  }

  // So many threads walk a matrix once.
  static int64_t threads(const Matrix& x, const QuantizeSpec& spec, bool padding = false) {
    return rows(x, spec.block_rows != 1, padding) * columns(x, padding);
  }

 private:
  __host__ __device__ static int64_t rows(const Matrix& x, bool is_tile, bool padding) {
    const int64_t together = padding ? kTileRows : is_tile ? kBlock : 1;
    return ceil_div(x.rows, together) * together;
  }
  __host__ __device__ static int64_t columns(const Matrix& x, bool padding) {
    return padding ? x.column_tiles() * kTileColumns : x.blocks();
  }
};

// Over the 16 lanes of a tile where tile, else v itself.
__device__ __forceinline__ float tile_sum(float v, bool tile) {
  if (!tile) return v;
#pragma unroll
  for (int half = 8; half; half /= 2) v = add(v, __shfl_xor_sync(0xFFFFFFFFu, v, half));
  return v;
}

}  // namespace nvfp4
