// What the products of 16-bit numbers, two a word, share on NEON.
#pragma once

#include "cpu/matmul/common.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// Code v of each two bytes' four, as the 16 bits whose upper and lower bytes two tables hold.
template <int v>
F code_words(I bytes, uint8x16x2_t table) {
  return map<F>(
      [&](int32x4_t x) {
        const uint8x16_t b = vreinterpretq_u8_s32(x), code = v % 2 ? vshrq_n_u8(b, 4) : vandq_u8(b, vdupq_n_u8(15));
        const uint8x16_t upper = vqtbl1q_u8(table.val[0], code), lower = vqtbl1q_u8(table.val[1], code);
        return vreinterpretq_f32_u8(v / 2 ? vtrn2q_u8(lower, upper) : vtrn1q_u8(lower, upper));
      },
      bytes);
}

// Of the codes of a pair of chunks, half 0 or 1 of each block, a block per lane.
template <int half>
I half_of_chunks(I first, I second) {
  return map<I>([](int32x4_t a, int32x4_t b) { return half ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b); }, first, second);
}
// Their scales in that order, from the tile of the first on.
inline F scales_of_chunks(const uint8_t* at) {
  const auto eight = [](const uint8_t* p) {
    return vcreate_u16(load_word(p) | uint64_t{load_word(p + kTileBytes)} << 32);
  };
  const uint16x4_t first = eight(at), second = eight(at + 2 * kTileBytes);
  F out;
  scale_values(vmovl_u8(vreinterpret_u8_u16(vzip1_u16(first, second))), out.v[0], out.v[1]);
  scale_values(vmovl_u8(vreinterpret_u8_u16(vzip2_u16(first, second))), out.v[2], out.v[3]);
  return out;
}

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
