// What the ops of quantization on CUDA share: the arguments of kernels, outputs, and amaxes and transforms as
// functions.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/tensors.h"
#include "quantization.h"

namespace nvfp4 {

inline float* floats(Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

inline Tensor empty_scalar(const Tensor& like) { return empty({}, ScalarType::Float, like); }

inline Amax amax_given(const Tensor& amax, const Tensor& x) { return {amax_of(amax, x)}; }

// Where x lies in a larger tensor: at (row0, col0) of one of so many columns (0: of x's own).
struct Place {
  int64_t row0 = 0, col0 = 0, full_width = 0;
};

// Of x, or of what is made of it, as a matrix of so many rows and columns.
inline Quantization quantization(const QuantizeSpec& spec, const Amax& amax, const std::optional<Tensor>& rng_state,
                                 int64_t stream, const Tensor& x, int64_t rows, int64_t columns, const Place& place,
                                 Tensor& factor) {
  const int multiple = spec.column_multiple();
  const auto [first, width] = block_numbers(rows, columns, place.row0, place.col0, place.full_width, multiple);
  Quantization how{};
  how.spec = spec, how.amax = amax.at, how.maxima = amax.maxima;
  how.per_tensor_scale = floats(factor);
  how.random = {rng_state_of(rng_state, spec, x), first, width, place.col0 / multiple, static_cast<int>(stream)};
  return how;
}

// Whether the fast kernels know the rounding mode, on a side whose Hadamard transform (if any) they take care of.
inline bool is_fast_mode(const QuantizeSpec& spec) {
  return spec.round_mode == RoundingMode::kNearestEven || spec.is_stochastic();
}

// Whether a block's scale follows from its largest element alone.
inline bool is_plain(const QuantizeSpec& spec) {
  return spec.four_over_six == FourOverSix::kNone && spec.scale_search == ScaleSearch::kNone;
}

inline bool is_fast(const QuantizeSpec& spec) { return is_fast_mode(spec) && is_plain(spec); }

// The packed spec of what is already transformed.
inline int64_t without_hadamard(int64_t spec) { return spec & ~(int64_t{0xFFFF} << 16 | 1 << 9); }

struct CodeOutputs : CodeTensors {
  using CodeTensors::CodeTensors;

  Codes operator()() { return {codes(), scales()}; }

  // For a kernel that leaves the padding alone.
  void clear_padding(cudaStream_t stream) {
    if (is_padded()) cudaMemsetAsync(scales(), 0, static_cast<size_t>(scale.numel()), stream);
  }
};

// Codes and scales as kernels read them, with one factor, one per row or none.
struct CodeInputs {
  CodedShape shape;
  Tensor qdata, scale;
  std::optional<Tensor> factor;

  CodeInputs(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& factors, int64_t columns)
      : shape(check_coded(codes, scales, columns)), qdata(aligned_codes(codes)), scale(aligned_scales(scales)) {
    NVFP4_CHECK(shape.rows < INT32_MAX - kBlock && shape.blocks * kBlock < INT32_MAX,
                "qdata has more than 2^31 - 32 rows or columns: split it");
    if (factors.has_value()) factor = factors_of(*factors, "per_tensor_scale", shape.rows, codes, "qdata");
  }

  Quantized operator()() const {
    return {static_cast<const uint8_t*>(qdata.const_data_ptr()),
            static_cast<const uint8_t*>(scale.const_data_ptr()),
            factor ? static_cast<const float*>(factor->const_data_ptr()) : nullptr,
            factor && factor->numel() != 1,
            shape.rows,
            shape.blocks};
  }
};

// Codes, block scales and factor of x. Without amax: that of x (or of its transform).
std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, std::optional<Tensor> amax,
                                            const std::optional<Tensor>& rng_state, int64_t spec, int64_t row0,
                                            int64_t col0, int64_t full_width, int64_t random_stream);

Tensor dequantize(const Tensor& qdata, const Tensor& scale, const std::optional<Tensor>& per_tensor_scale,
                  int64_t columns, ScalarType type);

// The Hadamard transform of rows of whole blocks, padded perhaps, in bfloat16.
Tensor hadamard(const Tensor& x, int64_t sign);

// x^T, rows padded to 16 perhaps; Hadamard-transformed, in bfloat16, where sign >= 0. m is the matrix of x.
Tensor transposed(const Tensor& x, const Matrix& m, int sign);

// What training takes back before dgrad; x is what quantize_pair_values made, so always whole.
Tensor rotate_back(const Tensor& x, const Tensor& rng_state, int64_t columns, int64_t col0);

// The amax of what the spec quantizes: of x, of its Hadamard transform, or of its rotation.
Tensor own_amax(const Tensor& x, const QuantizeSpec& spec, const std::optional<Tensor>& rng_state, int64_t col0);

// That of x by spec, and of x^T by spec_t.
std::tuple<Tensor, Tensor> amax_pair(const Tensor& x, const std::optional<Tensor>& rng_state, int64_t spec,
                                     int64_t spec_t, int64_t row0, int64_t col0);

// The rotations of a pair that rotates_pair, x at (row0, col0): of the rows (not used where they are not EDEN's), and
// of the transpose.
inline std::array<Rotation, 2> rotations_of_pair(const Tensor& x, const std::optional<Tensor>& rng_state,
                                                 const QuantizeSpec& rows, const QuantizeSpec& columns, int64_t row0,
                                                 int64_t col0) {
  check_rotation_offset(row0);
  if (rows.is_eden()) check_rotation_offset(col0);
  const int64_t* state = rng_state_of(rng_state, columns, x);
  return {Rotation{state, col0 / kRotation}, Rotation{state, row0 / kRotation}};
}

// Whether the kernels of pairs with EDEN know the transforms: EDEN of the transpose, EDEN or none of the rows.
inline bool rotates_pair(const Matrix& m, const QuantizeSpec& rows, const QuantizeSpec& columns) {
  return m.dtype == Dtype::kBf16 && m.whole_blocks() && columns.is_eden() && (rows.is_eden() || rows.hadamard_sign < 0);
}

}  // namespace nvfp4
