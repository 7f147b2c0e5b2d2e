// The product kernels in the vocabulary of sixteen lanes, included once for each instruction set.
//
// A chunk is 128 elements of a row: 64 bytes of codes, eight in each 4-byte lane, the codes of block b in lanes 2b and
// 2b+1. Shifting by 4v gives a register of code v of every lane, element 8 * lane + v, and one register of scales fits
// them all. So decoding permutes the depth within a chunk; x is permuted alike, once, when it is packed.
#pragma once

#include <cstring>
#include <utility>

#include "cpu/matmul/products.h"
#include "numerics/layout.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kChunk = 8 * kLanes;
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kChunkBytes = kChunk / 2;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

template <typename Function, int... v>
inline __attribute__((always_inline)) void each_of(std::integer_sequence<int, v...>, Function f) {
  (f(std::integral_constant<int, v>{}), ...);
}
// Calls f(0) .. f(n - 1), each with its number as a constant.
template <int n, typename Function>
inline __attribute__((always_inline)) void each(Function f) {
  each_of(std::make_integer_sequence<int, n>{}, f);
}

// --- the weight ------------------------------------------------------------------------------------------------------

struct WeightRow {
  const uint8_t* codes;
  const uint8_t* scales;  // of its first block; those of blocks 4t .. 4t+3 lie t tiles further
  int64_t blocks;

  WeightRow() = default;
  WeightRow(const Product& p, int64_t row)
      : codes(p.qdata + row * p.blocks * (kBlock / 2)),
        scales(p.scale + scale_offset(uint32_t(row), 0, uint32_t(p.column_tiles))),
        blocks(p.blocks) {}
};

struct Chunk {
  I codes;
  F scales;

  Chunk() = default;
  Chunk(const uint8_t* at, const uint8_t* first, const uint8_t* second)
      : codes(load_chunk(at)), scales(chunk_scales(first, second)) {}
  // Whole: eight blocks are there.
  static Chunk whole(const WeightRow& row, int64_t chunk) {
    const uint8_t* first = row.scales + chunk * 2 * kTileBytes;
    return Chunk(row.codes + chunk * kChunkBytes, first, first + kTileBytes);
  }
  // The last: blocks beyond the row have codes and scales of zero, whatever the tiles' padding holds.
  static Chunk last(const WeightRow& row, int64_t chunk) {
    const int count = int(row.blocks - chunk * kChunkBlocks);
    const uint8_t* first = row.scales + chunk * 2 * kTileBytes;
    uint8_t scales[kChunkBlocks] = {};
    std::memcpy(scales, first, kTileColumns);
    if (count > kTileColumns) std::memcpy(scales + kTileColumns, first + kTileBytes, kTileColumns);
    uint64_t bits;
    std::memcpy(&bits, scales, sizeof bits);
    bits &= ~uint64_t{0} >> 8 * (kChunkBlocks - count);
    std::memcpy(scales, &bits, sizeof bits);
    Chunk out;
    out.codes = load_part(row.codes + chunk * kChunkBytes, count * (kBlock / 2));
    out.scales = chunk_scales(scales, scales + kTileColumns);
    return out;
  }
  static Chunk of(const WeightRow& row, int64_t chunk) {
    return (chunk + 1) * kChunkBlocks <= row.blocks ? whole(row, chunk) : last(row, chunk);
  }

  template <int v>
  F values() const {
    return mul(code_values<v>(codes), scales);
  }  // exact
};

inline int64_t chunks_of(int64_t columns) { return ceil_div(columns, kChunk); }

// --- arithmetic ------------------------------------------------------------------------------------------------------

// What a 4-byte word holds, and how words multiply; bf16.h has another. `Value` is what x is packed to for few
// rows.
struct FloatMath {
  using Value = float;
  static constexpr int kPerWord = 1;
  static constexpr unsigned kRefusedByFew = kHuge, kRefusedByMany = 0;
  static constexpr int kMostFewRows = kMostFewFloatRows;

  // sum + a * b, lane by lane.
  static F dot(F sum, F a, F b) { return multiply_add(a, b, sum); }
  static constexpr int kHalves = 1;
  // Register v of a chunk's undivided codes in the order of packed x, 8 of them.
  static constexpr int kFewVectors = 8;
  template <int v>
  static F codes(I bytes) {
    return code_values<v>(bytes);
  }
  // Register u of a chunk's numbers, 8 of them.
  static constexpr int kVectors = 8;
  template <int u>
  static F numbers(const Chunk& chunk) {
    return chunk.values<u>();
  }
};

// --- x ---------------------------------------------------------------------------------------------------------------

inline int element_bytes(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }
inline const char* x_row(const Product& p, int64_t row) {
  return static_cast<const char*>(p.x) + row * p.depth() * element_bytes(p.x_dtype);
}

template <typename U, int kFractionBits, int kBias>
unsigned range_of(const U* x, int count) {
  constexpr U mask = U(~U(0)) >> 1, infinite = U(U(2 * kBias + 1) << kFractionBits);
  constexpr U tiny = U(U(kBias + kSmallestExponent) << kFractionBits);
  constexpr U huge = U(U(kBias + kLargestExponent) << kFractionBits);
  U is_tiny = 0, is_huge = 0;
  for (int i = 0; i < count; ++i) {
    const U magnitude = x[i] & mask;
    is_tiny |= U(magnitude - 1) < U(tiny - 1);
    is_huge |= U(magnitude - huge) < U(infinite - huge);
  }
  return (is_tiny ? unsigned{kTiny} : 0) | (is_huge ? unsigned{kHuge} : 0);
}

template <typename T>
void to_floats(const T* x, float* out, int count) {
  for (int i = 0; i < count; i += 32) {
    F even, odd;
    load_pairs(x + i, even, odd);
    store_pairs(out + i, even, odd);
  }
}

// Elements [first, first + kChunk) of a row of x, zeros beyond its end; returns their XRange.
inline unsigned load_x(const Product& p, int64_t row, int64_t first, float* out) {
  const int size = element_bytes(p.x_dtype);
  const int count = int(least(kChunk, p.depth() - first));
  alignas(64) char buffer[kChunk * sizeof(float)];
  const char* x = x_row(p, row) + first * size;
  if (count < kChunk) {
    std::memset(buffer, 0, sizeof buffer);
    if (count > 0) std::memcpy(buffer, x, count * size);
    x = buffer;
  }
  switch (p.x_dtype) {
    case Dtype::kBf16: to_floats(reinterpret_cast<const Bf16*>(x), out, kChunk); break;
    case Dtype::kFp16: to_floats(reinterpret_cast<const Fp16*>(x), out, kChunk); return 0;
    default: std::memcpy(out, x, kChunk * sizeof(float));
  }
  uint32_t words[kChunk];
  std::memcpy(words, out, sizeof words);
  return range_of<uint32_t, 23, 127>(words, kChunk);
}

// The same of x in bfloat16, as it is.
inline unsigned load_x(const Product& p, int64_t row, int64_t first, uint16_t* out) {
  const int64_t count = least(kChunk, p.depth() - first);
  if (count < kChunk) std::memset(out, 0, kChunk * sizeof *out);
  if (count > 0) std::memcpy(out, x_row(p, row) + first * sizeof *out, count * sizeof *out);
  return range_of<uint16_t, 7, 127>(out, kChunk);
}

// --- y ---------------------------------------------------------------------------------------------------------------

template <typename T>
void round_to(const float* values, T* out, int64_t count) {
  const F nan = set(__builtin_nanf(""));
  const auto store_rounded = [&](const float* from, T* to) {
    F even, odd;
    load_pairs(from, even, odd);
    store_pairs(to, select(is_nan(even), nan, even), select(is_nan(odd), nan, odd));
  };
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) store_rounded(values + i, out + i);
  if (i == count) return;
  T rest[32];
  store_rounded(values + i, rest);
  std::memcpy(out + i, rest, (count - i) * sizeof(T));
}

// Sums of columns [column, column + count) of a row of y, to what it stores. sums: readable to a multiple of 32.
inline void finish(const Product& p, int64_t batch, int64_t row, int64_t column, int64_t count, float* sums) {
  const int64_t flat_row = batch * p.x_rows + row;
  const float x_scale = p.x_scale ? p.x_scale[flat_row * p.x_scale_step] : 1.0f;
  if (p.factors && p.factor_step) {
    const float* factors = p.factors + batch * p.width() + column;
    for (int64_t i = 0; i < count; ++i) sums[i] *= factors[i] * x_scale;
  } else {
    const float alpha = p.factors ? *p.factors * x_scale : x_scale;
    for (int64_t i = 0; i < count; ++i) sums[i] *= alpha;
  }
  if (p.bias) {
    const float* bias = p.bias + p.bias_rows.offset(flat_row) + column * p.bias_step;
    for (int64_t i = 0; i < count; ++i) sums[i] += bias[i * p.bias_step];
  }
  const int64_t at = flat_row * p.width() + column;
  switch (p.out_dtype) {
    case Dtype::kBf16: return round_to(sums, static_cast<Bf16*>(p.out) + at, count);
    case Dtype::kFp16: return round_to(sums, static_cast<Fp16*>(p.out) + at, count);
    case Dtype::kFloat: std::memcpy(static_cast<float*>(p.out) + at, sums, count * sizeof(float));
  }
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
