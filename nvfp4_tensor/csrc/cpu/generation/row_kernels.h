// Kernels of a decoder layer on one row of bfloat16, products aside: a table of functions per instruction set.
//
// Each function rounds to bfloat16 where a model in PyTorch stores a tensor; attention is summed in float32.
#pragma once

#include <cstdint>

#include "cpu/host/kernels.h"

namespace nvfp4 {

constexpr int64_t kRowStep = 32;  // rows, and heads, are multiples of so many elements

// One token's queries, keys and values, not yet rotated, and the cache to append them to.
struct Attention {
  const Bf16 *q, *k, *v;  // (heads, dim), (kv_heads, dim), (kv_heads, dim)
  const Bf16 *cos, *sin;  // (dim): of this token's position
  Bf16 *keys, *values;    // (kv_heads, length, dim), of which `position` tokens are there
  Bf16* out;              // (heads, dim)
  int64_t heads, kv_heads, dim, length, position;
  float scaling;

  int64_t scratch_words() const { return 2 * dim + (position / 16 + 1) * 16 + 16 * 16; }
};

struct RowKernels {
  void (*add)(Bf16* sum, const Bf16* x, int64_t size);  // sum += x
  // out = weight * (x / root mean square of x)
  void (*norm)(const Bf16* x, const Bf16* weight, float eps, Bf16* out, int64_t size);
  // gate = silu(gate) * up. A magnitude below 2^-100 becomes 0: bfloat16 products do not support it (XRange).
  void (*gate)(const Bf16* gate, const Bf16* up, Bf16* out, int64_t size);
  // Head `head` of the output; the first head of a group appends the group's key and value to the cache.
  void (*attend)(const Attention&, int64_t head, float* scratch);
  // Elements [begin, end) of y = w x, w dense (.., size).
  void (*multiply)(const Bf16* x, const Bf16* w, int64_t size, Bf16* y, int64_t begin, int64_t end);
};

const RowKernels& portable_row_kernels();
const RowKernels* avx2_row_kernels();  // null where the build has none
const RowKernels* avx512_row_kernels();

}  // namespace nvfp4
