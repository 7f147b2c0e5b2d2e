// What the ops of a cache in NVFP4 and their CUDA kernels agree on. Launchers only enqueue: a CUDA graph can hold them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "numerics/matrix.h"
#include "numerics/spec.h"

namespace nvfp4 {
namespace attention {

constexpr float kLog2E = 1.4426950408889634f;

constexpr int kCodeTile = 16;   // tokens: a tile of the tensor cores; the capacity of codes is a multiple of it
constexpr int kPlainTile = 32;  // tokens of the plain kernel, 16 for heads of more than 256 elements

// Keys or values, row by row (batch, kv_heads, capacity): size / 2 bytes, a byte of e4m3 per block, a byte of e8m0.
struct CodedRows {
  uint8_t *codes, *scales, *factors;
};

// Dense rows (batch, kv_heads, tokens, size), the elements of a row side by side; steps in elements.
struct DenseRows {
  const void* data;
  int64_t batch_step, head_step, token_step;
};

// What blocks leave of their rows, of any cache: the largest score in units of log2(e), the sum of the exponentials of
// the differences from it, and the sums (rows, size) of values times these. A block has up to so many rows of a head of
// keys and one of `splits` shares of their context, `passes` times `splits` of them all rows and all of it.
struct Partials {
  float* at;
  int rows, size, passes, splits;

  __host__ __device__ int floats() const { return rows * (size + 2); }
  __host__ __device__ float* of(int64_t unit, int pass, int split) const {
    return at + ((unit * passes + pass) * splits + split) * floats();
  }
  __host__ __device__ int most() const { return rows * size; }  // from sums to the scores, and so many more to totals
  __host__ __device__ int total() const { return rows * (size + 1); }
};

// Their outputs (batch, heads of keys, rows of a head, size), of which partial sums may be wider.
struct Combine {
  Partials partials;
  int rows, size;
  Dtype dtype;
  void* out;
};
void launch_combine(const Combine& p, int kv_heads, int batch, cudaStream_t stream);

// In how many shares blocks divide what is seen of a context, by its tiles: more from some lengths on, where they come
// in more waves. Not by what a cache could hold, so that room in it changes no bit.
struct ShareCounts {
  static constexpr int kMost = 4;
  int from[kMost], shares[kMost];
  int at_once;  // tiles of a block

  __host__ __device__ int of(int tiles) const {
    int best = shares[0];
    for (int i = 1; i < kMost; ++i) best = tiles >= from[i] ? shares[i] : best;
    const int useful = (tiles + at_once - 1) / at_once;
    return useful < best ? (useful > 1 ? useful : 1) : best;
  }
};

struct AttendCodes {
  Dtype dtype;  // of q, out and dense tokens
  const void* q;
  void* out;
  CodedRows keys, values;
  DenseRows front_keys, front_values, latest_keys, latest_values;
  const int64_t *lengths, *first;  // (batch,); first may be null
  int batch, kv_heads, group, tokens, key_size, value_size, capacity, front, latest;
  int64_t window;  // 0: all
  float scale, softcap;
  bool is_rotated;
  bool is_settled;  // no kernel under way writes lengths, or the codes that they count

  // The plan: a block has `block_rows` queries of one head of keys, of which there are `passes`, and a share of the
  // context, of `splits` at most.
  int block_rows, passes, splits;
  ShareCounts counts;
  bool is_fast;
  float* partial;

  __host__ __device__ int rows() const { return group * tokens; }
  __host__ __device__ Partials partials() const { return {partial, block_rows, value_size, passes, splits}; }
};

// Decides the plan; returns the floats of `partial`.
int64_t plan_attend_codes(AttendCodes& p);
void launch_attend_codes(const AttendCodes& p, cudaStream_t stream);

struct AppendCodes {
  Dtype dtype;
  QuantizeSpec spec;
  DenseRows x[2];    // keys, values
  CodedRows out[2];  // with the capacity of the codes
  int size[2];
  const int64_t* starts;  // (batch,)
  int batch, kv_heads, tokens, capacity;
  bool rotates;     // keys
  bool is_wide[2];  // blocks are whole and begin on 16 bytes
  // Where x is a ring of so many slots: what is appended is the slot behind that of this position. 0: x is not.
  int ring;
  const int64_t* position;
  int position_step;  // from a sequence's to the next's
};

void launch_append_codes(const AppendCodes& p, cudaStream_t stream);

}  // namespace attention
}  // namespace nvfp4
