// Amaxes and transforms of a tensor as functions, for the ops that quantize it.
#pragma once

#include <optional>
#include <tuple>

#include "cuda/host/kernels.h"
#include "cuda/host/tensors.h"

namespace nvfp4 {

inline float* floats(Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

inline Tensor empty_scalar(const Tensor& like) { return empty({}, ScalarType::Float, like); }

// The Hadamard transform of rows of whole blocks, padded perhaps, in bfloat16.
Tensor hadamard(const Tensor& x, int64_t sign);

// x^T, rows padded to 16 perhaps; Hadamard-transformed, in bfloat16, where sign >= 0. m is the matrix of x.
Tensor transposed(const Tensor& x, const Matrix& m, int sign);

// What training takes back before dgrad; x is what quantize_pair_values made, so always whole.
Tensor rotate_back(const Tensor& x, const Tensor& rng_state, int64_t columns, int64_t col0);

// The amax of what the spec quantizes: of x, of its Hadamard transform, or of its rotation.
Tensor own_amax(const Tensor& x, const QuantizeSpec& spec, const std::optional<Tensor>& rng_state, int64_t col0);

// That of x by spec, and of x^T by spec_t.
std::tuple<Tensor, Tensor> amax_pair_by_spec(const Tensor& x, const std::optional<Tensor>& rng_state, int64_t spec,
                                             int64_t spec_t, int64_t row0, int64_t col0);

// Whether the kernels of pair_eden.cu know the transforms: EDEN of the transpose, EDEN or none of the rows.
inline bool rotates_pair(const Matrix& m, const QuantizeSpec& rows, const QuantizeSpec& columns) {
  return m.dtype == Dtype::kBf16 && m.whole_blocks() && columns.is_eden() && (rows.is_eden() || rows.hadamard_sign < 0);
}

}  // namespace nvfp4
