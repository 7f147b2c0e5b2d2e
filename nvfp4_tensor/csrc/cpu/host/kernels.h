// The interface between quantize/ops.cpp and the kernels: one table of functions per instruction set.
//
// The unit of work is a group, 16 blocks of 16 elements in row-major block order: one register of 16 lanes then holds
// one number of each block, so that the scales of 16 blocks cost what those of one do.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/block.h"
#include "numerics/matrix.h"
#include "numerics/philox.h"
#include "numerics/spec.h"

// For what runs once per group: inlined, its constants stay in registers from group to group.
#define NVFP4_INLINE inline __attribute__((always_inline))

#define NVFP4_STRING_(x) #x
#define NVFP4_STRING(x) NVFP4_STRING_(x)

namespace nvfp4 {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// Never functions of their own, of which a linker could keep one that is compiled for another CPU.
NVFP4_INLINE float float_of(float x) { return x; }
NVFP4_INLINE float float_of(Bf16 x) { return bits_float(uint32_t{x.bits} << 16); }
NVFP4_INLINE float float_of(Fp16 x) {
  const uint32_t magnitude = x.bits & 0x7FFF;
  float value = magnitude < 0x400 ? float(magnitude) * 0x1p-24f : bits_float((magnitude << 13) + (112u << 23));
  if (magnitude >= 0x7C00) value = bits_float(0x7F800000u | (magnitude & 0x3FF) << 13);
  return x.bits & 0x8000 ? -value : value;
}
NVFP4_INLINE Bf16 bf16_of(float x) {
  const uint32_t b = float_bits(x), sum = b + 0x7FFF + (b >> 16 & 1);
  return {uint16_t((x != x ? 0x7FC00000u : sum) >> 16)};
}

constexpr int kGroupBlocks = 16;
constexpr int kGroupElements = kGroupBlocks * kBlock;
constexpr int kGroupBytes = kGroupElements / 2;

// How to quantize a matrix, and its offset in the logical matrix that it is part of.
struct Plan {
  QuantizeSpec spec;
  TensorScale tensor;
  RandomKey key;
  int64_t first_block;       // the random-bits index of block (0, 0), or of the first rotation
  int64_t row_blocks;        // and the step from row to row
  bool banded;               // work units are bands of 16 rows, not groups
  std::vector<float> signs;  // EDEN: see rotation_signs in quantize/ops.cpp
};

// (rows, blocks * 8) codes, and scales in the 128x4 layout.
struct Quantized {
  uint8_t* qdata;
  uint8_t* scale;
  int64_t column_tiles;
};

// Codes and scales as above, to be decoded to `columns` values per row; factors: none, one, or one per row.
struct Encoded {
  const uint8_t* qdata;
  const uint8_t* scale;
  int64_t column_tiles;
  int64_t rows, blocks, columns;
  const float* factors;
  bool factor_per_row;
};

// e4m3 codes of rows [first, first + rows) of each of some matrices, and the scales of all their rows, one for every
// height x width elements.
struct Fp8Codes {
  const uint8_t* codes;
  const float* scale;
  int64_t rows, columns, first, height, width, scale_rows, scale_columns;
};

// Work units: amax, transforms, row quantization and dequantization count groups (with EDEN, of rows padded to a
// multiple of the rotation); 16x16 tiles count bands of 16 rows; the pair counts rectangles of kPairRows x
// kPairColumns. `sign` is a Hadamard mask or -1.
constexpr int64_t kPairRows = kGroupElements, kPairColumns = 512;

struct Kernels {
  // Bits of the largest finite magnitude; maxima of bits are maxima of values.
  uint32_t (*amax)(const Matrix&, int sign, int64_t begin, int64_t end);
  void (*amax_pair)(const Matrix&, int sign, int64_t begin, int64_t end, uint32_t* row, uint32_t* column);
  void (*hadamard)(const Matrix&, int sign, uint16_t* out, int64_t begin, int64_t end);
  uint32_t (*amax_rotated)(const Matrix&, const float* signs, int64_t begin, int64_t end);
  void (*rotate)(const Matrix&, const float* signs, bool inverse, float* out, int64_t begin, int64_t end);
  void (*quantize)(const Matrix&, const Plan&, const Quantized&, int64_t begin, int64_t end);
  void (*quantize_pair)(const Matrix&, const Plan&, const Quantized&, const Plan&, const Quantized&, int64_t begin,
                        int64_t end);
  void (*dequantize)(const Encoded&, Dtype, void* out, int64_t begin, int64_t end);
  void (*decode_fp8)(const Fp8Codes&, Dtype, void* out, int64_t begin, int64_t end);  // of rows
  // Values at a row stride of `columns`, times the factor unless that is null.
  void (*fake_quantize)(const Matrix&, const Plan&, const float* factor, Dtype, void* out, int64_t columns,
                        int64_t begin, int64_t end);
};

}  // namespace nvfp4
