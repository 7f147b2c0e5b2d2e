// Operands of FP8 products (numerics contract, section 13): rows of x, and the codes of a weight.
#pragma once

#include "cuda/host/kernels.h"

namespace nvfp4 {

// e4m3 values (rows, columns padded to 16), and a factor per row.
struct Fp8 {
  uint8_t* values;
  float* factor;
};

// x to e4m3, zeros in the padding, with 2^p of each row; and code x block scale to e4m3, with each row's 2^p times its
// per-tensor scale. Rows of both have the same columns.
void launch_fp8_operands(const Matrix& x, const Quantized& w, const Fp8& to_x, const Fp8& to_w, cudaStream_t stream);

}  // namespace nvfp4
