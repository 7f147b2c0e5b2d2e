// A dense matrix as the kernels of either device take it.
#pragma once

#include "layout.h"

namespace nvfp4 {

enum class Dtype { kBf16, kFp16, kFloat };

inline int bytes_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

// Its last stride is 1.
struct Matrix {
  const void* data;
  int64_t rows, columns, row_stride;  // elements
  Dtype dtype;

  NVFP4_HD int64_t blocks() const { return ceil_div(columns, kBlock); }  // in a row
  NVFP4_HD int64_t column_tiles() const { return ceil_div(blocks(), kTileColumns); }

  // Every block is whole and begins on 16 bytes, so that 16-byte loads serve.
  bool whole_blocks() const {
    const int64_t row_bytes = row_stride * bytes_of(dtype);
    return columns % kBlock == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && (rows <= 1 || row_bytes % 16 == 0);
  }
};

}  // namespace nvfp4
