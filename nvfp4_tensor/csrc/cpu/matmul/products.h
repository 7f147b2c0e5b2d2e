// The interface between matmul.cpp and the product kernels: y = round_once(x_scale * factor * sum + bias), where the
// float32 sum runs along the weight's blocks (x @ w^T) or across them (x @ w) (numerics contract, section 6).
//
// Three kernels, each in float32 and, where the machine multiplies bfloat16, in bfloat16:
//   few      up to 31 rows of x: the weight's codes are looked up in registers for 8 rows at a time, its block scales
//            applied to the sums over blocks or halves of them.
//   many     x @ w^T: panels of weight rows are decoded (exactly), each number then meets 16 to 64 rows of x at a time.
//   across   x @ w: blocks of the weight are decoded with 128 columns in lanes, each number of x meets all of them.
#pragma once

#include <cstdint>

#include "cpu/host/kernels.h"

namespace nvfp4 {

constexpr int kMostDims = 16;
constexpr int kMostFewRows = 31;  // of x, with any instruction set

// How the rows of y (leading dimensions flattened) find their row of the bias.
struct BiasRows {
  int dims;  // those with a stride other than 0 and a size other than 1
  int64_t repeat[kMostDims], size[kMostDims], stride[kMostDims];

  int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (int i = 0; i < dims; ++i) at += row / repeat[i] % size[i] * stride[i];
    return at;
  }
};

struct Product {
  // The weight (batches, rows, columns): codes of `blocks` blocks per row, scales in the 128x4 layout of all rows.
  const uint8_t* qdata;
  const uint8_t* scale;
  int64_t column_tiles, blocks;
  int64_t batches, rows, columns;
  // x (batches, x_rows, depth()), contiguous.
  const void* x;
  Dtype x_dtype;
  int64_t x_rows;
  bool transposed;
  int64_t workers;               // among whom the work is divided; the result does not depend on it
  const float* summand_factors;  // transposed, one per row of the weight: a factor of each summand; else null
  // The epilogue. A null pointer is a factor of one, or no bias; a step is 0 where one number serves all.
  const float* x_scale;
  int64_t x_scale_step;
  const float* factors;  // of the columns of y
  int64_t factor_step;
  const float* bias;
  int64_t bias_step;
  BiasRows bias_rows;
  void* out;
  Dtype out_dtype;

  int64_t depth() const { return transposed ? rows : columns; }
  int64_t width() const { return transposed ? columns : rows; }  // of y
};

// Numbers in x that a kernel does not support. bfloat16 instructions flush subnormals: with every |x| at least 2^-100
// (or 0) no product and no sum is one, since code * s_b is a multiple of 2^-10 and x one of 2^-107. Sums over parts of
// a block before the block scale is applied overflow early: with |x| below 2^100 they do not.
enum XRange : unsigned { kTiny = 1, kHuge = 2 };
constexpr int kSmallestExponent = -100, kLargestExponent = 100;

// A product kernel. x is packed into 4-byte words first: `pack` returns what it saw (XRange).
struct ProductKernel {
  unsigned refuses;
  int64_t scratch_words;  // of one thread
  int64_t (*packed_words)(const Product&);
  int64_t (*pack_units)(const Product&);
  unsigned (*pack)(const Product&, float* packed, int64_t begin, int64_t end);
  int64_t (*units)(const Product&);
  void (*multiply)(const Product&, const float* packed, float* scratch, int64_t begin, int64_t end);
};

struct ProductKernels {
  int64_t most_few_rows;  // of x: beyond, many is faster
  ProductKernel few, many, across;
};

// Beside those of an instruction set; null where the build or the CPU has none.
const ProductKernels* avx512_bf16_products();  // for x in bfloat16
const ProductKernels* amx_products();          // for x in bfloat16, where the process may use AMX
const ProductKernels* neon_bf16_products();    // for x in bfloat16, where the CPU has BFDOT and BFMMLA
const ProductKernels* neon_fp16_products();    // for x in float16, where it has FMLAL

}  // namespace nvfp4
