// AMX's tile registers, and codes decoded into what they hold: 16 rows of 16 words, each two numbers in bfloat16.
//
// Assembly instead of intrinsics: those of GCC do not tell the compiler that they read memory.
#pragma once

#include "cpu/simd/decoded_words.h"
#include "cpu/simd/products/avx512.h"

namespace nvfp4::avx512 {
namespace {

// While it lives, this thread's tiles are of 16 rows of 64 bytes. What another library has configured comes back.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } own;
    static_assert(sizeof own == 64);
    asm volatile("sttilecfg %0" : "=m"(before_));
    asm volatile("ldtilecfg %0" ::"m"(own));
  }
  ~TileRegisters() {
    if (before_.bytes[0]) {
      asm volatile("ldtilecfg %0" ::"m"(before_));
    } else {
      asm volatile("tilerelease");
    }
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  struct alignas(64) {
    uint8_t bytes[64];
  } before_;
};

template <int t>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(t));
}
// 16 x 16 words.
template <int t>
void tile_load(const float* p) {
  asm volatile("tileloadd (%1, %2, 1), %%tmm%c0" ::"i"(t), "r"(p), "r"(int64_t{64}) : "memory");
}
template <int t>
void tile_store(float* p) {
  asm volatile("tilestored %%tmm%c0, (%1, %2, 1)" ::"i"(t), "r"(p), "r"(int64_t{64}) : "memory");
}
// sum += a @ b: words (rows, depth) and (depth, columns).
template <int sum, int a, int b>
void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

// --- decoding --------------------------------------------------------------------------------------------------------
//
// 32 numbers are one lookup of 64 bytes in the two rows of a table that two block scales choose. VPERMB is one
// instruction of Intel's port 5, VPERMW two. The index of a byte is a code times two, plus one for the upper byte, plus
// 32 in the second row: VPMULTISHIFTQB puts any eight bits of eight bytes into a byte, a code into bits 1 to 4. What is
// loaded are 16 bytes of codes in each quarter of a register, so that the order of the numbers is one that this allows.

inline __m256i words_of(uint8_t scale) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(kDecodedWords.of[scale]));
}

// Of each byte of a register: where its code is in eight bytes of codes, and what else its index has.
struct TileLookup {
  alignas(64) uint8_t shifts[64] = {};
  alignas(64) uint8_t rows[64] = {};

  // Word t (0 to 7) of quarter q. is_pair: codes of two rows alternate.
  constexpr explicit TileLookup(bool is_pair) {
    for (int byte = 0; byte < 64; ++byte) {
      const int quarter = byte / 16, word = byte % 16 / 2, half = word / 4, number = word % 4;
      const int code = is_pair ? 8 * (number % 2) + 2 * quarter + number / 2 : 4 * quarter + number;
      shifts[byte] = uint8_t((4 * code + 63) % 64);
      rows[byte] = uint8_t(32 * (is_pair ? number % 2 : half) + byte % 2);
    }
  }
};
inline constexpr TileLookup kRowLookup(false), kPairLookup(true);

// 32 numbers of 16 bytes of codes, in four copies.
inline __attribute__((always_inline)) __m512i look_up(__m512i codes, const TileLookup& lookup, __m256i first,
                                                      __m256i second) {
  const __m512i shifted = _mm512_multishift_epi64_epi8(_mm512_load_si512(lookup.shifts), codes);
  constexpr int kMaskThenAdd = 0xEA;  // (a & b) | c
  const __m512i index = _mm512_ternarylogic_epi64(shifted, _mm512_set1_epi8(0x1E), _mm512_load_si512(lookup.rows),
                                                  kMaskThenAdd);
  return _mm512_permutexvar_epi8(index, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}
inline __m512i four_copies(const uint8_t* codes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// A chunk of a row of the weight: two blocks to 16 words at out + n * step, a quarter of each block in turn.
inline __attribute__((always_inline)) void decode_row(const uint8_t* codes, const uint8_t* first, const uint8_t* second,
                                                      float* out, int64_t step) {
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const uint8_t* scales = n < 2 ? first + 2 * n : second + 2 * n - 4;
    _mm512_storeu_si512(out + n * step,
                        look_up(four_copies(codes + 16 * n), kRowLookup, words_of(scales[0]), words_of(scales[1])));
  }
}

// A chunk of two rows, whose numbers alternate: block b to 16 words at out + b * step, in the order of restore_block.
inline void decode_row_pair(const uint8_t* const (&codes)[2], const uint8_t* const (&first)[2],
                            const uint8_t* const (&second)[2], float* out, int64_t step) {
  const __m512i low = _mm512_loadu_si512(codes[0]), high = _mm512_loadu_si512(codes[1]);
  alignas(64) uint8_t alternating[2][64];  // four bytes of one row, four of the other: even blocks, and odd ones
  _mm512_store_si512(alternating[0], _mm512_unpacklo_epi32(low, high));
  _mm512_store_si512(alternating[1], _mm512_unpackhi_epi32(low, high));
#pragma GCC unroll 8
  for (int block = 0; block < 8; ++block) {
    const auto table_of = [&](int row) { return words_of(block < 4 ? first[row][block] : second[row][block - 4]); };
    _mm512_storeu_si512(out + block * step, look_up(four_copies(alternating[block % 2] + block / 2 * 16), kPairLookup,
                                                    table_of(0), table_of(1)));
  }
}

// Two blocks in bfloat16, in the order of a decoded row: a quarter of each in turn.
inline F arrange_blocks(F words) {
  return as_float(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bits(words)));
}
// Columns of a product with decoded pairs of rows, in their own order.
inline F restore_block(F values) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15), values);
}

}  // namespace
}  // namespace nvfp4::avx512
