// Tiles of keys or values as float32, from codes or dense tokens: each 32 elements as 16 even and 16 odd ones.
#pragma once

#include <cstring>

#include "cpu/attention/kernels.h"
#include "cpu/generation/rows.h"
#include "cpu/quantize/block_math.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// Elements [0, size) of a row, zeros behind them.
template <typename T>
inline void load_row(const T* x, int64_t size, float factor, float* out) {
  const int64_t whole = size / kPair * kPair;
  const auto put = [&](const T* from, float* to) {
    F even, odd;
    load_pairs(from, even, odd);
    store(to, mul(even, set(factor)));
    store(to + kLanes, mul(odd, set(factor)));
  };
  for (int64_t i = 0; i < whole; i += kPair) put(x + i, out + i);
  if (whole == size) return;
  T last[kPair] = {};
  std::memcpy(last, x + whole, (size - whole) * sizeof(T));
  put(last, out + whole);
}

// 32 bytes, 64 codes, as two pairs: even, odd, even, odd. A template, so that an instruction set's own comes first.
template <typename Byte>
inline void code_pairs(const Byte* bytes, F* out) {
  for (int pair = 0; pair < 2; ++pair) {
    I even, odd;
    load_codes(bytes + 16 * pair, even, odd);
    out[2 * pair] = e2m1_values(even), out[2 * pair + 1] = e2m1_values(odd);
  }
}

// 16 blocks of 16: 128 bytes of codes, times 16 scales. out: 8 pairs.
inline void decode_blocks(const uint8_t* codes, const float* scales, float* out) {
  const Spread spread(load(scales));
  for (int quarter = 0; quarter < 4; ++quarter) {
    F values[4];
    code_pairs(codes + 32 * quarter, values);
    const F first = spread.pair(2 * quarter), second = spread.pair(2 * quarter + 1);
    store(out + 64 * quarter, mul(values[0], first));
    store(out + 64 * quarter + 16, mul(values[1], first));
    store(out + 64 * quarter + 32, mul(values[2], second));
    store(out + 64 * quarter + 48, mul(values[3], second));
  }
}

// The scale of each block of `count` tokens, times the factor of its row. Each step reads what the one before has
// written long ago: a load waits for stores that are still on their way.
inline void load_scales(const uint8_t* bytes, const uint8_t* exponents, int64_t blocks, int64_t count, float* out) {
  for (int64_t t = 0; t < count; ++t) {
    const float factor = bits_float(uint32_t{exponents[t]} << 23);
    for (int64_t b = 0; b < blocks; ++b) out[t * blocks + b] = factor;
  }
  for (int64_t b = 0; b < count * blocks; b += kGroupBlocks) {
    store(out + b, mul(e4m3_values(load_bytes(bytes + b)), load(out + b)));
  }
}

// Tokens [first, first + count) of codes. first, count and the capacity are multiples of kTokenStep.
inline void decode_tile(const Stretch& s, int64_t size, int64_t first, int64_t count, float* out) {
  const int64_t blocks = ceil_div(size, kBlock), padded = padded_head(size);
  alignas(64) float scales[kMostHeadSize / kBlock * kTileTokens + kGroupBlocks];
  load_scales(s.scales + first * blocks, s.factors + first, blocks, count, scales);
  const uint8_t* codes = s.codes + first * blocks * 8;
  if (blocks % 2 == 0) {
    for (int64_t b = 0; b < blocks * count; b += kGroupBlocks) {
      decode_blocks(codes + 8 * b, scales + b, out + b * kBlock);
    }
    return;
  }
  // Rows of an odd number of blocks do not end with a pair: they are decoded one by one.
  alignas(64) uint8_t row[kMostHeadSize / 2 + kGroupBytes] = {};
  alignas(64) float row_scales[kMostHeadSize / kBlock + kGroupBlocks] = {}, decoded[kMostHeadSize + kGroupElements];
  for (int64_t t = 0; t < count; ++t) {
    std::memcpy(row, codes + t * blocks * 8, blocks * 8);
    std::memcpy(row_scales, scales + t * blocks, blocks * sizeof *scales);
    for (int64_t b = 0; b < blocks; b += kGroupBlocks) {
      decode_blocks(row + 8 * b, row_scales + b, decoded + b * kBlock);
    }
    std::memcpy(out + t * padded, decoded, padded * sizeof *out);
  }
}

// Tokens [first, first + count) of a stretch, row by row.
template <typename T>
inline void load_tile(const Stretch& s, int64_t size, int64_t first, int64_t count, float* out) {
  if (!s.dense) return decode_tile(s, size, first, ceil_div(count, kTokenStep) * kTokenStep, out);
  const T* x = static_cast<const T*>(s.dense);
  for (int64_t t = 0; t < count; ++t) load_row(x + (first + t) * s.stride, size, 1.0f, out + t * padded_head(size));
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
