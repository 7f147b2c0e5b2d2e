// A rectangle and its transpose, for 16- and 32-bit elements: 128-bit unpacks, which every x86-64 and AArch64 has.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nvfp4::NVFP4_ISA {

template <typename T>
inline void transpose_plain(const T* x, int64_t stride, int64_t rows, int64_t columns, T* out, int64_t out_stride) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) out[c * out_stride + r] = x[r * stride + c];
  }
}

#if defined(__SSE2__)
using Bits128 = __m128i;
inline Bits128 load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store128(void* p, Bits128 x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
// The lower halves of two registers, numbers of so many bits in turn, and the upper halves.
inline Bits128 low16(Bits128 a, Bits128 b) { return _mm_unpacklo_epi16(a, b); }
inline Bits128 high16(Bits128 a, Bits128 b) { return _mm_unpackhi_epi16(a, b); }
inline Bits128 low32(Bits128 a, Bits128 b) { return _mm_unpacklo_epi32(a, b); }
inline Bits128 high32(Bits128 a, Bits128 b) { return _mm_unpackhi_epi32(a, b); }
inline Bits128 low64(Bits128 a, Bits128 b) { return _mm_unpacklo_epi64(a, b); }
inline Bits128 high64(Bits128 a, Bits128 b) { return _mm_unpackhi_epi64(a, b); }
#elif defined(__aarch64__)
using Bits128 = uint64x2_t;
inline Bits128 load128(const void* p) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline void store128(void* p, Bits128 x) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u64(x)); }
inline uint16x8_t words16(Bits128 x) { return vreinterpretq_u16_u64(x); }
inline uint32x4_t words32(Bits128 x) { return vreinterpretq_u32_u64(x); }
inline Bits128 low16(Bits128 a, Bits128 b) { return vreinterpretq_u64_u16(vzip1q_u16(words16(a), words16(b))); }
inline Bits128 high16(Bits128 a, Bits128 b) { return vreinterpretq_u64_u16(vzip2q_u16(words16(a), words16(b))); }
inline Bits128 low32(Bits128 a, Bits128 b) { return vreinterpretq_u64_u32(vzip1q_u32(words32(a), words32(b))); }
inline Bits128 high32(Bits128 a, Bits128 b) { return vreinterpretq_u64_u32(vzip2q_u32(words32(a), words32(b))); }
inline Bits128 low64(Bits128 a, Bits128 b) { return vzip1q_u64(a, b); }
inline Bits128 high64(Bits128 a, Bits128 b) { return vzip2q_u64(a, b); }
#endif

#if defined(__SSE2__) || defined(__aarch64__)

// 8x8 of 16 bits: after each stage twice as many rows stand side by side.
template <typename T>
inline void transpose_square(const T* x, int64_t stride, T* out, int64_t out_stride)
  requires(sizeof(T) == 2)
{
  Bits128 r[8], pairs[8], fours[8];
  for (int i = 0; i < 8; ++i) r[i] = load128(x + i * stride);
  for (int i = 0; i < 4; ++i) {
    pairs[i] = low16(r[2 * i], r[2 * i + 1]);
    pairs[i + 4] = high16(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 2) {
    fours[i] = low32(pairs[i], pairs[i + 1]);
    fours[i + 1] = high32(pairs[i], pairs[i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const int first = i / 2 * 4 + i % 2;
    store128(out + 2 * i * out_stride, low64(fours[first], fours[first + 2]));
    store128(out + (2 * i + 1) * out_stride, high64(fours[first], fours[first + 2]));
  }
}

// 4x4 of 32 bits.
template <typename T>
inline void transpose_square(const T* x, int64_t stride, T* out, int64_t out_stride)
  requires(sizeof(T) == 4)
{
  const Bits128 a = load128(x), b = load128(x + stride), c = load128(x + 2 * stride), d = load128(x + 3 * stride);
  const Bits128 ab = low32(a, b), AB = high32(a, b);
  const Bits128 cd = low32(c, d), CD = high32(c, d);
  store128(out, low64(ab, cd));
  store128(out + out_stride, high64(ab, cd));
  store128(out + 2 * out_stride, low64(AB, CD));
  store128(out + 3 * out_stride, high64(AB, CD));
}

// rows x columns to out[column * out_stride + row].
template <typename T>
void transpose(const T* x, int64_t stride, int64_t rows, int64_t columns, T* out, int64_t out_stride) {
  constexpr int64_t side = 16 / sizeof(T);
  const int64_t whole_rows = rows / side * side, whole_columns = columns / side * side;
  for (int64_t r = 0; r < whole_rows; r += side) {
    for (int64_t c = 0; c < whole_columns; c += side) {
      transpose_square(x + r * stride + c, stride, out + c * out_stride + r, out_stride);
    }
  }
  transpose_plain(x + whole_rows * stride, stride, rows - whole_rows, columns, out + whole_rows, out_stride);
  transpose_plain(x + whole_columns, stride, whole_rows, columns - whole_columns, out + whole_columns * out_stride,
                  out_stride);
}
#else
template <typename T>
void transpose(const T* x, int64_t stride, int64_t rows, int64_t columns, T* out, int64_t out_stride) {
  transpose_plain(x, stride, rows, columns, out, out_stride);
}
#endif

}  // namespace nvfp4::NVFP4_ISA
