// Kernels of a block on one row of bfloat16, products aside: a table of functions per instruction set.
//
// Each function rounds to bfloat16 where a model in PyTorch stores a tensor; attention is summed in float32.
#pragma once

#include <cstdint>

#include "cpu/host/kernels.h"

namespace nvfp4 {

constexpr int64_t kRowStep = 16;    // rows, and heads, are multiples of so many elements
constexpr int64_t kDenseStep = 32;  // and rows of a dense weight
constexpr int64_t kMostHeadDim = 1024;

// As in ops/composite/decode_step.py and step.py.
enum NormStyle : int { kPlusOne = 1, kRoundOnce = 2 };
enum class Activation : int { kSilu, kGeluTanh, kGelu, kClampedGlu };

// RMS norm: weight, or with kPlusOne weight + 1, times x / root mean square of x.
struct Norm {
  const void* weight = nullptr;  // null: no norm
  bool is_wide = false;          // float32, not bfloat16
  int style = 0;
  float eps = 0;
};

struct Gate {
  Activation activation;
  float alpha, limit;  // of kClampedGlu
};

// cos and sin of the first `size` elements of a head: all of it, or a part. 0: none.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int64_t size = 0;
  int64_t step = 0;      // from one text to the next: 0 where all have the same
  bool is_wide = false;  // rounded once; otherwise each product and their sum
};

// One text's queries, keys and values, and the cache to append them to. Norms of heads and the rotation come first.
struct Attention {
  const Bf16 *q, *k, *v;  // (heads, dim), (kv_heads, dim), (kv_heads, dim)
  Norm q_norm, k_norm;    // over a head
  Rotation rotation;
  const Bf16* sinks;    // (heads,): scores without a value; null: none
  Bf16 *keys, *values;  // (kv_heads, length, dim), of which [first, first + count) are seen
  Bf16* out;            // (heads, dim)
  // (kv_heads, 2, dim), where a cache that is full keeps the new key and value until it has moved; null: they are
  // written behind the tokens that are seen.
  Bf16* later;
  int64_t heads, kv_heads, dim, length, first, count;
  float scaling, softcap;  // 0: no cap

  int64_t scratch_words() const { return 2 * dim + (count / 16 + 1) * 16 + 16 * 16; }
};

// y (x_rows, rows) = x (x_rows, size) @ w (rows, size)^T + bias, which is null for none.
struct DenseProduct {
  const Bf16 *x, *w, *bias;
  int64_t x_rows, rows, size;
  Bf16* y;
};

struct RowKernels {
  // sum += factor * x, the product rounded where it is not x.
  void (*add)(Bf16* sum, const Bf16* x, float factor, int64_t size);
  void (*norm)(const Bf16* x, const Norm&, Bf16* out, int64_t size);
  // out = act(gate) * up. A magnitude below 2^-100 becomes 0: bfloat16 products do not support it (XRange). For
  // kClampedGlu both alternate, from `gate` on.
  void (*gate)(const Bf16* gate, const Bf16* up, const Gate&, Bf16* out, int64_t size);
  // Head `head` of the output; the first head of a group appends the group's key and value to the cache.
  void (*attend)(const Attention&, int64_t head, float* scratch);
  // Columns [begin, end) of a dense product.
  void (*multiply)(const DenseProduct&, int64_t begin, int64_t end);
};

}  // namespace nvfp4
