// Where a block scale lies: cuBLAS's 128x4 layout (numerics contract, section 1).
#pragma once

#include "platform.h"

namespace nvfp4 {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 4;  // scales
constexpr int kTileBytes = 512;

NVFP4_HD int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Offset of the scale of (row, block column) where a row has `column_tiles` tiles.
NVFP4_HD uint64_t scale_offset(uint32_t row, uint32_t column, uint32_t column_tiles) {
  const uint64_t tile = static_cast<uint64_t>(row / kTileRows) * column_tiles + column / kTileColumns;
  return tile * kTileBytes + row % 32 * 16 + row % kTileRows / 32 * 4 + column % kTileColumns;
}

}  // namespace nvfp4
