// The vocabulary of simd/tiles_amx.h in plain C++, with the same results: for tests on machines without AMX.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/simd/decoded_words.h"
#include "cpu/simd/products/portable.h"

namespace nvfp4::portable {
namespace {

inline thread_local float emulated_tiles[8][16][16];

struct TileRegisters {
  TileRegisters() { std::memset(emulated_tiles, 0xFF, sizeof emulated_tiles); }  // NaN: what is not set shows
};

template <int t>
void tile_zero() {
  std::memset(emulated_tiles[t], 0, sizeof emulated_tiles[t]);
}
template <int t>
void tile_load(const float* p) {
  std::memcpy(emulated_tiles[t], p, sizeof emulated_tiles[t]);
}
template <int t>
void tile_store(float* p) {
  std::memcpy(p, emulated_tiles[t], sizeof emulated_tiles[t]);
}

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float half_of_word(float word, int half) {
  uint32_t bits;
  std::memcpy(&bits, &word, sizeof bits);
  bits = half ? bits & 0xFFFF0000 : bits << 16;
  std::memcpy(&word, &bits, sizeof word);
  return flushed(word);
}

// TDPBF16PS: even and odd products are summed apart, from zero, subnormal numbers are zeros.
template <int sum, int a, int b>
void tile_multiply() {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      float sums[2] = {};
      for (int word = 0; word < 16; ++word) {
        for (int half = 0; half < 2; ++half) {
          const float left = half_of_word(emulated_tiles[a][row][word], half);
          const float right = half_of_word(emulated_tiles[b][word][column], half);
          sums[half] = flushed(sums[half] + left * right);
        }
      }
      float& out = emulated_tiles[sum][row][column];
      out = flushed(flushed(out) + flushed(sums[0] + sums[1]));
    }
  }
}

inline uint16_t number_of(const uint8_t* codes, uint8_t scale, int element) {
  return kDecodedWords.of[scale][codes[element / 2] >> element % 2 * 4 & 15];
}
// Where an element of two blocks is in a decoded row, and a column of a block in decoded pairs of rows.
inline int place_in_row(int element) { return element % 16 / 4 * 8 + element / 16 * 4 + element % 4; }
inline int place_of_column(int column) { return column % 8 / 2 * 4 + column / 8 * 2 + column % 2; }

inline void decode_row(const uint8_t* codes, const uint8_t* first, const uint8_t* second, float* out, int64_t step) {
  for (int n = 0; n < 4; ++n) {
    uint16_t words[32];
    for (int e = 0; e < 32; ++e) {
      const int block = 2 * n + e / 16;
      words[place_in_row(e)] = number_of(codes + 16 * n, block < 4 ? first[block] : second[block - 4], e);
    }
    std::memcpy(out + n * step, words, sizeof words);
  }
}

inline void decode_row_pair(const uint8_t* const (&codes)[2], const uint8_t* const (&first)[2],
                            const uint8_t* const (&second)[2], float* out, int64_t step) {
  for (int block = 0; block < 8; ++block) {
    uint16_t words[32];
    for (int n = 0; n < 32; ++n) {
      const int row = n % 2, column = n / 2;
      const uint8_t scale = block < 4 ? first[row][block] : second[row][block - 4];
      words[2 * place_of_column(column) + row] = number_of(codes[row] + 8 * block, scale, column);
    }
    std::memcpy(out + block * step, words, sizeof words);
  }
}

inline F arrange_blocks(F words) {
  uint16_t from[32], to[32];
  std::memcpy(from, &words, sizeof from);
  for (int e = 0; e < 32; ++e) to[place_in_row(e)] = from[e];
  std::memcpy(&words, to, sizeof words);
  return words;
}

inline F restore_block(F values) {
  return each_lane<F>([&](int lane) { return at(values, place_of_column(lane)); });
}

}  // namespace
}  // namespace nvfp4::portable
