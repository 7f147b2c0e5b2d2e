// Quantization with a scale a row (row_scaled).
#pragma once

#include "cuda/host/kernels.h"

namespace nvfp4 {

// The amax of each row, or where `given` is not null its magnitudes, to amax; and the rows' scales to factors.
void launch_row_amax(const Matrix& x, const float* given, float ceiling, float* amax, float* factors,
                     cudaStream_t stream);

// Of these, how.amax and how.per_tensor_scale have one number a row.
//
// Any spec of 1x16 blocks, any shape. how.per_tensor_scale is not written, the scales' padding is left alone.
void launch_quantize_any_rows(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);

// Whole blocks, to nearest even or stochastic, neither four-over-six nor a scale search; Hadamard where x is bfloat16
// and values is null. how.amax may be null: each row's own. Writes the scales' padding. values: where it is not null,
// code x block scale goes there, in bfloat16, in place of codes.
void launch_quantize_scaled_rows(const Matrix& x, const Quantization& how, const Codes& out, void* values,
                                 cudaStream_t stream);

}  // namespace nvfp4
