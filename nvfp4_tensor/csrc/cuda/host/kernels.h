// What the op registrations and the CUDA kernels agree on: plain structs and one launcher a kernel.
//
// Every launcher only enqueues work on the stream it is given: nothing here waits for the device, reads a value back
// from it or allocates, so all of it can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <functional>

#include "numerics/matrix.h"
#include "numerics/spec.h"

namespace nvfp4 {

// The source of a matrix's random bits: block (EDEN: rotation) (r, c) is number first + r * width + c of the logical
// tensor.
struct RandomOffset {
  const int64_t* rng_state;  // (seed, offset) on the device, null where nothing is random
  int64_t first, width;
  int64_t first_group;  // of EDEN: the number of the first column's rotation in its row
  int stream;
};

// An amax, whose sign is left out; or maxima of parts of a tensor, one of each thread block of the kernel that looks
// for it: the kernel that quantizes takes the largest, so that no kernel has to clear an amax first.
struct Amax {
  const float* at;
  int maxima = 1;
};

// The arguments of a quantization, except the matrix and its results.
struct Quantization {
  QuantizeSpec spec;
  const float* amax;
  int maxima;    // at amax; those that say so take more than one
  bool per_row;  // amax and per_tensor_scale have one number a row
  float* per_tensor_scale;
  RandomOffset random;
};

// Results of a quantization, with the strides that the shape of the matrix implies.
struct Codes {
  uint8_t* qdata;
  uint8_t* scale;  // swizzled
};

struct Values {
  void* data;
  Dtype dtype;
  int64_t columns;  // of the output; the input's, or rounded up to 16 after a Hadamard transform
  bool scaled;
};

// a and b (where not null) to zero; a kernel that is launched next may begin beside it (Begins::kBesideClear). A memset
// would be a node of another kind: in a CUDA graph on an H200 two of them and the way back to a kernel take 6 us.
void launch_clear(float* a, float* b, cudaStream_t stream);

// Codes, block scales and factor of x; the padding of the scales is left alone.
using LaunchQuantize = void(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);

void launch_amax(const Matrix& x, int hadamard_sign, float* out, cudaStream_t stream);
void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream);

// The maxima of parts of x, and, for a pair, of its Hadamard-transformed transpose after them. scratch gives the
// memory; none takes an empty matrix. fits: contiguous and aligned. Few: at most kFewBlocks, of whole blocks, by a
// kernel that lets the next one begin. A pair is bfloat16 in whole blocks.
bool fits_maxima(const Matrix& x);
Amax launch_maxima(const Matrix& x, const std::function<void*(int64_t)>& scratch, cudaStream_t stream);
Amax launch_few_maxima(const Matrix& x, const std::function<void*(int64_t)>& scratch, cudaStream_t stream);
std::array<Amax, 2> launch_maxima_of_pair(const Matrix& x, int hadamard_sign,
                                          const std::function<void*(int64_t)>& scratch, cudaStream_t stream);

void launch_hadamard(const Matrix& x, uint32_t sign, void* out, cudaStream_t stream);

// Whole blocks to their transpose (columns, rows padded to 16): of x's dtype, or Hadamard-transformed bfloat16 where
// hadamard_sign >= 0.
void launch_transpose(const Matrix& x, int hadamard_sign, void* out, cudaStream_t stream);

// Any spec but EDEN, any shape: 1x16 blocks or 16x16 tiles. Where how.per_row, how.per_tensor_scale is not written.
LaunchQuantize launch_quantize_any;
void launch_fake_quantize_any(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream);

// The fast kernels: whole blocks, to nearest even or stochastic, neither four-over-six nor Hadamard on this side but
// for rows. They write the padding of the scales, and take maxima of parts.
LaunchQuantize launch_quantize_rows, launch_quantize_tiles;
void launch_fake_quantize_rows(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream);

// The same with four-over-six or a search over scales, 1x16 or 16x16, and without Hadamard.
LaunchQuantize launch_quantize_chosen;

// With a scale a row. The amax of each, or where `given` is not null its magnitudes, to amax; and the rows' scales to
// factors.
void launch_row_amax(const Matrix& x, const float* given, float ceiling, float* amax, float* factors,
                     cudaStream_t stream);
// Whole blocks, to nearest even or stochastic, neither four-over-six nor a scale search; Hadamard where x is bfloat16
// and values is null. how.amax may be null: each row's own. Writes the scales' padding. values: where it is not null,
// code x block scale goes there, in bfloat16, in place of codes.
void launch_quantize_scaled_rows(const Matrix& x, const Quantization& how, const Codes& out, void* values,
                                 cudaStream_t stream);

// EDEN, any shape. Columns are padded to 128.
LaunchQuantize launch_quantize_eden;

// Where EDEN's rotations have their signs from; first_group: the number of the first column's.
struct Rotation {
  const int64_t* rng_state;
  int64_t first_group;
};
// The rotation, or that taken back, as float32; and the largest magnitude of it.
void launch_rotate(const Matrix& x, const Rotation& rotation, bool inverse, float* out, cudaStream_t stream);
// The rotation taken back, the first `columns` of it as bfloat16. x: whole rotations, on 16 bytes.
void launch_rotate_back(const Matrix& x, const Rotation& rotation, int64_t columns, void* out, cudaStream_t stream);
void launch_amax_rotated(const Matrix& x, const Rotation& rotation, float* out, cudaStream_t stream);

// What x decodes to after quantization by its own amax, in its own dtype, without the per-tensor scale, which goes to
// `factor`. Whole blocks, to nearest even, at most 2^18 of them. scratch: memory of so many bytes, which lives as long
// as the stream needs it.
bool fits_quantize_activation(const Matrix& x, const QuantizeSpec& spec);
void launch_quantize_activation(const Matrix& x, const QuantizeSpec& spec, float* factor, void* out,
                                const std::function<void*(int64_t)>& scratch, cudaStream_t stream);

// A matrix and its transpose, quantized in one pass over it.
struct PairQuantization {
  Quantization rows, columns;
};

// Where they go: the rows as codes where values is null, else as bfloat16 code x block scale; the transpose likewise
// (its rows of values padded to 16).
struct PairOutputs {
  void *values, *values_transposed;
  Codes codes, codes_transposed;
};

// bfloat16, both sides rounded alike; the transposed side may be Hadamard-transformed. Codes of both, or values of the
// rows, which take maxima of parts. Writes the scales' padding.
void launch_quantize_pair(const Matrix& x, const PairQuantization& how, const PairOutputs& out, cudaStream_t stream);

// The same where the transpose is EDEN's. The rows are EDEN's too, then both leave as values; or 1x16, to nearest even,
// perhaps with a search, and the transpose leaves as codes. Columns are padded to 128. rotates_back: the values of the
// rows are rotated back, as launch_rotate_back does it, and cut to x's columns. fits: whether the device has the shared
// memory.
bool fits_quantize_pair_eden(bool codes_t);
void launch_quantize_pair_eden(const Matrix& x, const PairQuantization& how, bool rotates_back, const PairOutputs& out,
                               cudaStream_t stream);
// bfloat16, whole blocks: the amax of x, or of its rotation, and of the rotation of its transpose; or the maxima of
// parts, as launch_maxima_of_pair leaves them.
void launch_amax_pair_eden(const Matrix& x, bool rotates_rows, const Rotation& rows, const Rotation& columns,
                           float* out, float* out_transposed, cudaStream_t stream);
std::array<Amax, 2> launch_maxima_of_pair_eden(const Matrix& x, bool rotates_rows,
                                               const std::array<Rotation, 2>& rotations,
                                               const std::function<void*(int64_t)>& scratch, cudaStream_t stream);

struct Quantized {
  const uint8_t* qdata;
  const uint8_t* scale;
  const float* per_tensor_scale;  // one, or one per row, or null
  bool per_row;
  int64_t rows, blocks;  // blocks in a row
};

// Two factors, and where their product goes: what the kernel after this one scales by. out null: nothing.
struct Alpha {
  const float *a, *b;
  float* out;
};

void launch_dequantize(const Quantized& in, int64_t columns, Dtype dtype, void* out, cudaStream_t stream,
                       const Alpha& alpha = {});

// Operands of FP8 products (numerics contract, section 13): e4m3 values (rows, columns padded to 16), and a factor per
// row.
struct Fp8 {
  uint8_t* values;
  float* factor;
};

// x to e4m3, zeros in the padding, with 2^p of each row; and code x block scale to e4m3, with each row's 2^p times its
// per-tensor scale. Rows of both have the same columns.
void launch_fp8_operands(const Matrix& x, const Quantized& w, const Fp8& to_x, const Fp8& to_w, cudaStream_t stream);

// Codes in 16x16 tiles and their scales as those of the transpose, rows padded to 16; writes the scales' padding.
void launch_transpose_codes(const Quantized& in, const Codes& out, cudaStream_t stream);

}  // namespace nvfp4
