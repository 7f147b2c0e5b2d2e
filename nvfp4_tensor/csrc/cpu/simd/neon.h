// Sixteen lanes in four NEON registers, what every AArch64 has: the vocabulary of the kernels; lanes.h and
// portable.h say what each word means. Its functions are of the namespace of the file that includes it: those of a file
// for CPUs with more than NEON run nowhere else, whichever of two inline functions a linker keeps.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace nvfp4::NVFP4_ISA {

using Floats = float32x4_t;
using Ints = int32x4_t;
constexpr int kParts = 4;

}  // namespace nvfp4::NVFP4_ISA

#include "cpu/simd/lanes.h"

namespace nvfp4::NVFP4_ISA {

constexpr bool kManyRegisters = false;
inline uint32x4_t unsigned_of(int32x4_t x) { return vreinterpretq_u32_s32(x); }
inline int32x4_t signed_of(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline uint16x8_t words_of(int32x4_t x) { return vreinterpretq_u16_s32(x); }

// p[0], p[16], ... p[240].
inline F gather_stride16(const float* p) {
  const auto four = [](const float* p) {
    float32x4_t x = vld1q_dup_f32(p);
    x = vld1q_lane_f32(p + 16, x, 1);
    x = vld1q_lane_f32(p + 32, x, 2);
    return vld1q_lane_f32(p + 48, x, 3);
  };
  return {{four(p), four(p + 64), four(p + 128), four(p + 192)}};
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

inline F min(F a, F b) {  // NEON's own is a NaN where either is
  return map<F>([](float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }, a, b);
}
inline I select(Mask m, I yes, I no) {
  return map<I>([](int32x4_t m, int32x4_t yes, int32x4_t no) { return vbslq_s32(unsigned_of(m), yes, no); }, m, yes,
                no);
}
inline F select(Mask m, F yes, F no) { return as_float(select(m, bits(yes), bits(no))); }

// The low bytes of sixteen lanes, in order.
inline uint8x16_t bytes_of(I x) {
  const uint16x8_t low = vuzp1q_u16(words_of(x.v[0]), words_of(x.v[1]));
  const uint16x8_t high = vuzp1q_u16(words_of(x.v[2]), words_of(x.v[3]));
  return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}
inline uint32_t lanes(Mask m) {
  alignas(16) static constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t own = vandq_u8(bytes_of(m), vld1q_u8(kBits));
  return uint32_t(vaddv_u8(vget_low_u8(own))) | uint32_t(vaddv_u8(vget_high_u8(own))) << 8;
}

// Magnitudes compare as integers: a NaN is larger than 6.
inline F magnitude_to_6(F a) {
  return map<F>(
      [](float32x4_t a) {
        const uint32x4_t six = vreinterpretq_u32_f32(vdupq_n_f32(6.0f));
        return vreinterpretq_f32_u32(vminq_u32(vreinterpretq_u32_f32(vabsq_f32(a)), six));
      },
      a);
}
inline F fma(F a, F b, F c) {
  return map<F>([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }, a, b, c);
}
inline F add_exact_product(F t, F scale, F a) { return fma(t, scale, a); }
inline F sub_exact_product(F t, float scale, F a) {
  return map<F>([&](float32x4_t t, float32x4_t a) { return vfmsq_f32(a, t, vdupq_n_f32(scale)); }, t, a);
}
template <int distance>
inline F swap_lanes(F a) {
  if constexpr (distance == 4) return {{a.v[1], a.v[0], a.v[3], a.v[2]}};
  return map<F>([](float32x4_t x) { return distance == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }, a);
}

// --- 32 elements as even and odd ones --------------------------------------------------------------------------------

inline const uint16_t* words_at(const void* p) { return static_cast<const uint16_t*>(p); }

// Sixteen numbers of 16 bits, as the low or the upper halves of lanes.
inline I lanes_of(uint16x8_t low, uint16x8_t high) {
  return {{signed_of(vmovl_u16(vget_low_u16(low))), signed_of(vmovl_high_u16(low)),
           signed_of(vmovl_u16(vget_low_u16(high))), signed_of(vmovl_high_u16(high))}};
}
inline F floats_of_halves(uint16x8_t low, uint16x8_t high) {
  const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}
inline uint16x8_t halves_of(float32x4_t low, float32x4_t high) {
  return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
}

inline F load_floats(const Bf16* p) {
  return as_float(shift_left<16>(lanes_of(vld1q_u16(words_at(p)), vld1q_u16(words_at(p + 8)))));
}
inline F load_floats(const Fp16* p) { return floats_of_halves(vld1q_u16(words_at(p)), vld1q_u16(words_at(p + 8))); }
inline void load_pairs(const Fp16* p, F& even, F& odd) {
  const uint16x8x2_t low = vld2q_u16(words_at(p)), high = vld2q_u16(words_at(p + 16));
  even = floats_of_halves(low.val[0], high.val[0]);
  odd = floats_of_halves(low.val[1], high.val[1]);
}
inline void load_pairs(const float* p, F& even, F& odd) {
  for (int i = 0; i < 4; ++i) {
    const float32x4x2_t x = vld2q_f32(p + 8 * i);
    even.v[i] = x.val[0];
    odd.v[i] = x.val[1];
  }
}

inline I upper_halves(I low, I high) {
  return map<I>([](int32x4_t a, int32x4_t b) { return vsriq_n_s32(b, a, 16); }, low, high);
}
inline void store_pairs(Fp16* p, F even, F odd) {
  for (int i = 0; i < 4; i += 2) {
    const uint16x8x2_t both = {{halves_of(even.v[i], even.v[i + 1]), halves_of(odd.v[i], odd.v[i + 1])}};
    vst2q_u16(&p[8 * i].bits, both);
  }
}
inline void store_pairs(float* p, F even, F odd) {
  for (int i = 0; i < 4; ++i) {
    const float32x4x2_t both = {{even.v[i], odd.v[i]}};
    vst2q_f32(p + 8 * i, both);
  }
}

inline I pack_codes(I even_code, I odd_code, F even_value, F odd_value) {
  const auto chosen = [](int32_t mask, int32x4_t yes, int32x4_t no) {
    return vbslq_s32(vdupq_n_u32(uint32_t(mask)), yes, no);
  };
  I out;
  for (int i = 0; i < 4; ++i) {
    const int32x4_t codes = vsliq_n_s32(even_code.v[i], odd_code.v[i], 4);
    const uint32x4_t even = vreinterpretq_u32_f32(even_value.v[i]), odd = vreinterpretq_u32_f32(odd_value.v[i]);
    const int32x4_t signs = chosen(0xF, signed_of(vshrq_n_u32(even, 28)), signed_of(vshrq_n_u32(odd, 24)));
    out.v[i] = chosen(0x77, codes, signs);
  }
  return out;
}

inline void store_codes(uint8_t* out, const I* pairs) {
  for (int i = 0; i < 8; ++i) vst1q_u8(out + 16 * i, bytes_of(pairs[i]));
}
inline I lanes_of(uint8x16_t bytes) { return lanes_of(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)); }
inline I load_bytes(const uint8_t* p) { return lanes_of(vld1q_u8(p)); }
inline void store_bytes(uint8_t* out, I x) { vst1q_u8(out, bytes_of(x)); }
inline void load_codes(const uint8_t* bytes, I& even, I& odd) {
  const uint8x16_t both = vld1q_u8(bytes);
  even = lanes_of(vandq_u8(both, vdupq_n_u8(15)));
  odd = lanes_of(vshrq_n_u8(both, 4));
}

// The upper halves of the 16 numbers' float32, whose lower ones are zero: a byte each, the upper bytes first.
template <int exponent>
inline uint8x16x2_t e2m1_table() {
  static constexpr struct Table {
    alignas(16) uint8_t bytes[2][16];
    constexpr Table() : bytes() {
      constexpr uint16_t magnitudes[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
      for (int code = 0; code < 16; ++code) {
        const uint16_t magnitude = magnitudes[code % 8] ? uint16_t(magnitudes[code % 8] + (exponent << 7)) : 0;
        bytes[0][code] = uint8_t(code / 8 << 7 | magnitude >> 8);
        bytes[1][code] = uint8_t(magnitude);
      }
    }
  } table;
  return {{vld1q_u8(table.bytes[0]), vld1q_u8(table.bytes[1])}};
}
// The numbers of codes (0 to 15), times 2^exponent. An index beyond the table gives a byte of zero.
template <int exponent>
inline F e2m1_numbers(I codes) {
  const uint8x16x2_t table = e2m1_table<exponent>();
  return map<F>(
      [&](int32x4_t code) {
        const uint32x4_t index = vmlaq_n_u32(vdupq_n_u32(0x0010FFFF), unsigned_of(code), 0x01010000);
        return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(index)));
      },
      codes);
}
inline F e2m1_values(I codes) { return e2m1_numbers<0>(codes); }

inline void lookup_pair(const uint8_t* codes, const uint16_t* first_row, const uint16_t* second_row, void* out) {
  const uint8x16_t both = vld1q_u8(codes), even = vandq_u8(both, vdupq_n_u8(15)), odd = vshrq_n_u8(both, 4);
  const auto look_up = [](const uint16_t* row, uint8x16_t index, uint8_t* out) {
    const uint8x16x2_t bytes = vld2q_u8(reinterpret_cast<const uint8_t*>(row));
    const uint8x16x2_t values = {{vqtbl1q_u8(bytes.val[0], index), vqtbl1q_u8(bytes.val[1], index)}};
    vst2q_u8(out, values);
  };
  look_up(first_row, vzip1q_u8(even, odd), static_cast<uint8_t*>(out));
  look_up(second_row, vzip2q_u8(even, odd), static_cast<uint8_t*>(out) + 32);
}

// --- block maxima ----------------------------------------------------------------------------------------------------

// partial(b): what is left of block b; halving(a, b) leaves the halves of both, a's first. Lane b of the result is one
// value of block b.
template <int count, typename Partial, typename Halving>
NVFP4_INLINE auto reduce_blocks(int first, Partial partial, Halving halving) {
  if constexpr (count == 1) {
    return partial(first);
  } else {
    return halving(reduce_blocks<count / 2>(first, partial, halving),
                   reduce_blocks<count / 2>(first + count / 2, partial, halving));
  }
}

inline void block_magnitudes16(const void* p, uint16x8_t& low, uint16x8_t& high) {
  const auto partial = [&](int block) {
    const uint16x8_t mask = vdupq_n_u16(0x7FFF);
    const uint16_t* at = words_at(p) + 16 * block;
    return vmaxq_u16(vandq_u16(vld1q_u16(at), mask), vandq_u16(vld1q_u16(at + 8), mask));
  };
  const auto halving = [](uint16x8_t a, uint16x8_t b) { return vpmaxq_u16(a, b); };
  low = reduce_blocks<8>(0, partial, halving);
  high = reduce_blocks<8>(8, partial, halving);
}
inline I block_magnitudes(const Bf16* p) {
  uint16x8_t low, high;
  block_magnitudes16(p, low, high);
  return shift_left<16>(lanes_of(low, high));
}
inline I block_magnitudes(const Fp16* p) {
  uint16x8_t low, high;
  block_magnitudes16(p, low, high);
  return bits(floats_of_halves(low, high));
}
inline I block_magnitudes(const float* p) {
  const auto partial = [&](int block) {
    const F x = load(p + 16 * block);
    const I m = bits(abs(x));
    return vmaxq_s32(vmaxq_s32(m.v[0], m.v[1]), vmaxq_s32(m.v[2], m.v[3]));
  };
  const auto halving = [](int32x4_t a, int32x4_t b) { return vpmaxq_s32(a, b); };
  return {{reduce_blocks<4>(0, partial, halving), reduce_blocks<4>(4, partial, halving),
           reduce_blocks<4>(8, partial, halving), reduce_blocks<4>(12, partial, halving)}};
}

// --- random bits -----------------------------------------------------------------------------------------------------

inline void multiply_wide(I a, uint32_t constant, I& low, I& high) {
  const uint32x4_t b = vdupq_n_u32(constant);
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t x = unsigned_of(a.v[i]);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(b)));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(x, b));
    low.v[i] = signed_of(vuzp1q_u32(first, second));
    high.v[i] = signed_of(vuzp2q_u32(first, second));
  }
}
// Each block's 16 bytes in order.
struct RandomWindows {
  alignas(64) uint32_t words[16][4];
  static I lane_order(I x) { return x; }
  RandomWindows() = default;
  explicit RandomWindows(const I* word) {
    for (int i = 0; i < 4; ++i) {
      const uint32x4x4_t four = {
          {unsigned_of(word[0].v[i]), unsigned_of(word[1].v[i]), unsigned_of(word[2].v[i]), unsigned_of(word[3].v[i])}};
      vst4q_u32(words[4 * i], four);
    }
  }
  void pair(int p, I& even, I& odd) const {
    const uint8x16_t a = block(2 * p), b = block(2 * p + 1);
    even = lanes_of(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b));
    odd = lanes_of(vreinterpretq_u16_u8(vextq_u8(a, a, 1)), vreinterpretq_u16_u8(vextq_u8(b, b, 1)));
  }

 private:
  uint8x16_t block(int i) const { return vreinterpretq_u8_u32(vld1q_u32(words[i])); }
};

}  // namespace nvfp4::NVFP4_ISA
