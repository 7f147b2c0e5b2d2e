// What the op registrations and the CUDA kernels agree on: plain structs and one launcher a kernel.
//
// Every launcher only enqueues work on the stream it is given: nothing here waits for the device, reads a value back
// from it or allocates, so all of it can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#include "numerics/matrix.h"
#include "numerics/spec.h"

namespace nvfp4 {

// The source of a matrix's random bits: block (r, c) is number first + r * width + c of the logical tensor.
struct RandomOffset {
  const int64_t* rng_state;  // (seed, offset) on the device, null where the mode is not stochastic
  int64_t first, width;
  int stream;
};

// The arguments of a quantization, except the matrix and its results.
struct Quantization {
  QuantizeSpec spec;
  const float* amax;
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

void launch_amax(const Matrix& x, int hadamard_sign, float* out, cudaStream_t stream);
void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream);

void launch_hadamard(const Matrix& x, uint32_t sign, void* out, cudaStream_t stream);

// Whole blocks to their transpose (columns, rows padded to 16): of x's dtype, or Hadamard-transformed bfloat16 where
// hadamard_sign >= 0.
void launch_transpose(const Matrix& x, int hadamard_sign, void* out, cudaStream_t stream);

// Any spec, any shape: 1x16 blocks or 16x16 tiles. The padding of the scales is left alone.
void launch_quantize_any(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);
void launch_fake_quantize_any(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream);

// The fast kernels: whole blocks, to nearest even or stochastic, neither four-over-six nor Hadamard on this side. That
// of rows writes the padding of the scales, that of tiles leaves it alone.
void launch_quantize_rows(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);
void launch_quantize_tiles(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);
void launch_fake_quantize_rows(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream);

// Whole blocks, 1x16 or 16x16, to nearest even or stochastic, with four-over-six. Leaves the scales' padding alone.
void launch_quantize_four_over_six(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);

// The same with a search over scales.
void launch_quantize_search(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream);

// EDEN, any shape. how.random counts rotations, not blocks; first_group: that of the first column. Columns are padded
// to 128; leaves the scales' padding of rows alone.
void launch_quantize_eden(const Matrix& x, const Quantization& how, int64_t first_group, const Codes& out,
                          cudaStream_t stream);
// Its rotation, or that taken back, as float32; and the largest magnitude of it.
void launch_rotate(const Matrix& x, const int64_t* rng_state, int64_t first_group, bool inverse, float* out,
                   cudaStream_t stream);
// The rotation taken back, the first `columns` of it as bfloat16. x: whole rotations, on 16 bytes.
void launch_rotate_back(const Matrix& x, const int64_t* rng_state, int64_t first_group, int64_t columns, void* out,
                        cudaStream_t stream);
void launch_amax_rotated(const Matrix& x, const int64_t* rng_state, int64_t first_group, float* out,
                         cudaStream_t stream);

// What x decodes to after quantization by its own amax, in its own dtype, without the per-tensor scale, which goes to
// `factor`. Whole blocks, to nearest even, at most 2^18 of them. scratch: memory of so many bytes, which lives as long
// as the stream needs it.
bool fits_quantize_activation(const Matrix& x, const QuantizeSpec& spec);
void launch_quantize_activation(const Matrix& x, const QuantizeSpec& spec, float* factor, void* out,
                                const std::function<void*(int64_t)>& scratch, cudaStream_t stream);

// bfloat16, both sides rounded alike; the transposed side may be Hadamard-transformed. Writes its scale padding.
void launch_quantize_pair(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                          const Codes& out, const Codes& out_transposed, cudaStream_t stream);

// The same, the rows as bfloat16 code x block scale, the transpose too where values_transposed is not null (its rows
// padded to 16), else as codes. fits: whether the device has the shared memory.
bool fits_quantize_pair_values(bool codes_t);
void launch_quantize_pair_values(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                                 void* values, void* values_transposed, const Codes& codes_transposed,
                                 cudaStream_t stream);

// The same where the transpose is EDEN's. The rows are EDEN's too, then both leave as values; or 1x16, to nearest even,
// perhaps with a search, and the transpose leaves as codes. The `random` of a rotated side counts rotations, and
// first_group is the number of its first one in a line, as for launch_quantize_eden; columns are padded to 128.
// rotates_back: the values of the rows are rotated back, as launch_rotate_back does it, and cut to x's columns.
struct EdenPair {
  Quantization rows, columns;
  int64_t first_group, first_group_t;
  bool rotates_back;
};
bool fits_quantize_pair_eden(bool codes_t);
void launch_quantize_pair_eden(const Matrix& x, const EdenPair& how, void* values, void* values_transposed,
                               const Codes& codes_transposed, cudaStream_t stream);
// bfloat16, whole blocks: the amax of x, or of its rotation, and of the rotation of its transpose.
void launch_amax_pair_eden(const Matrix& x, bool rotates_rows, const int64_t* rng_state, int64_t first_group,
                           int64_t first_group_t, float* out, float* out_transposed, cudaStream_t stream);

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

// Codes in 16x16 tiles and their scales as those of the transpose, rows padded to 16; writes the scales' padding.
void launch_transpose_codes(const Quantized& in, const Codes& out, cudaStream_t stream);

}  // namespace nvfp4
