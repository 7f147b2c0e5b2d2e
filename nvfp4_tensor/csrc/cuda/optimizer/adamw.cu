// nvfp4.adamw_step: decode the moments of a block (and the weight, where that is codes), update, and write all back;
// one thread a block, one pass, nothing but the parameter's own bytes.
//
// With a bfloat16 weight and gradient 8.25 bytes an element move, with codes 5.4, so what an element costs in
// instructions decides, and most of all in those of logic, shifts and minima, whose pipe takes one every other cycle.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "cuda/optimizer/kernels.h"
#include "numerics/adamw.h"
#include "numerics/layout.h"

namespace nvfp4 {
namespace {

__device__ __forceinline__ AdamwNumbers load_numbers(const float* hyper) {
  return {hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5], hyper[6], hyper[7]};
}

// Of an element's word so many further on, rotated by whole bytes: the lower 24 bits, or the upper 16 of those.
template <int bits>
__device__ __forceinline__ uint32_t rotated_draw(const Words4& words, int element, int further) {
  const uint32_t word = words.word[(element / 4 + further) % 4], byte = element % 4;
  const uint32_t low = (byte + 1) % 4, middle = (byte + 2) % 4, high = (byte + 3) % 4;
  return __byte_perm(word, 0, bits == 24 ? 0x4000u | high << 8 | middle << 4 | low : 0x4400u | high << 4 | middle);
}

// x / 2 + bits, by a multiplication, whose pipe is less busy than that of shifts.
__device__ __forceinline__ uint32_t half_plus(uint32_t x, uint32_t bits) {
  uint32_t sum;
  asm("mad.hi.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(0x80000000u), "r"(bits));
  return sum;
}

struct Moments {
  uint2 r, v;
  uint32_t r_scale, v_exponent;
};

__device__ __forceinline__ uint32_t half_of(const uint2& word, int i) { return i < 8 ? word.x : word.y; }

// The root of a power of two; NaN and 0 stay. Hopper's approximation is exact for all of them (compared), and one
// instruction of a pipe that is idle otherwise, where half_power is four. Its approximation of 1 / sqrt is not.
__device__ __forceinline__ float root_of_power(float v) {
#if __CUDA_ARCH__ == 900
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v));
  return root;
#else
  return float_bits(v) - 1 >= 0x7F800000u ? v : root_of(static_cast<int>(float_bits(v) >> 23));
#endif
}

// top - 2^23 times nibble i, by a multiplication: its pipe is less busy than that of shifts.
__device__ __forceinline__ uint32_t below_top(uint32_t top, const uint2& nibbles, int i) {
  const uint32_t shift = 4 * (i % 8), word = i % 8 < 6 ? half_of(nibbles, i) : half_of(nibbles, i) >> 8;
  const uint32_t at = i % 8 < 6 ? shift : shift - 8;
  uint32_t bits;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(bits) : "r"(word & (15u << at)), "r"(0u - (1u << (23 - at))), "r"(top));
  return bits;
}

// Eight codes in top bytes to 32 bits, element 0 lowest.
__device__ __forceinline__ uint32_t pack_top_bytes(const uint32_t (&t)[8]) {
  const auto four = [&](int i) {
    return __byte_perm(__byte_perm(t[i], t[i + 2], 0x0073), __byte_perm(t[i + 4], t[i + 6], 0x0073), 0x5410);
  };
  return four(1) * 16u + four(0);
}

// The codes of r, none of which is clipped.
__device__ __forceinline__ uint32_t encode_ratios(const Elements<float, kBlock>& r, int first, float enc,
                                                  const Words4& words) {
  uint32_t t[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    t[i] = stochastic_bits(mul(r.magnitude(first + i), enc), draw_of<Fast::kStochastic16>(words, first + i));
  }
  return pack_top_bytes(t) | r.signs(first);
}

__device__ __forceinline__ float largest_magnitude(const Elements<float, kBlock>& x) {
  float most = fabsf(bits_float(x.word[0]));
#pragma unroll
  for (int i = 1; i < kBlock; ++i) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(bits_float(x.word[i]))));
  }
  return most;
}

// g to r = m / root(v), the moments to their next ones.
__device__ __forceinline__ void next_moments(const float (&g)[kBlock], Moments& moments, const AdamwNumbers& n,
                                             const TensorScale& ratio, const float* enc, const RandomKey& key,
                                             uint64_t number, const Words4& words, Elements<float, kBlock>& r) {
  const bool lost = moments.v_exponent == kNotFiniteExponent;
  const uint2 below = lost ? make_uint2(0, 0) : moments.v;
  // The scale times 2^126, of decoding codes, and 2^-7; at most 1.75 * 2^127.
  const float factor = mul(e4m3_value(static_cast<uint8_t>(min(moments.r_scale, uint32_t{kE4M3Nan}))), 0x1p119f);
  const uint32_t old_top = moments.v_exponent << 23, least = static_cast<uint32_t>(n.least_exponent) + 1 << 23;
  // The new v is computed twice as large: the complement of its exponent e + 1 is then 254 - e, which is that of 1 / v.
  AdamwNumbers doubled = n;
  doubled.beta2 = mul(2.0f, n.beta2), doubled.rest2 = mul(2.0f, n.rest2);
  const Words4 of_v = with_stream(key, kSecondMomentStream).block_words(number);
  float m[kBlock];
  uint32_t v[kBlock], top = least;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float old = bits_float(below_top(old_top, below, i));
    const float decoded = mul(biased_value(half_of(moments.r, i), i % 8), factor);
    m[i] = next_first_moment(mul(decoded, root_of_power(old)), g[i], n);
    v[i] = half_plus(rotated_draw<24>(of_v, i, 0), float_bits(next_second_moment(old, g[i], doubled)));
    top = max(top, v[i]);  // of NaN it is above infinity
  }
  top &= 0x7F800000u;
  const uint32_t floor = max(least, top - min(top, uint32_t{kMostBelow} << 23));
  uint64_t inverses[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t inverse = ~max(v[i], floor) & 0x7F800000u;     // 0 where v overflows
    inverses[i / 8] += wide_product(inverse, 1u << 4 * (i % 8));  // from bit 23 on
    r.word[i] = float_bits(mul(m[i], root_of_power(bits_float(inverse))));
  }
  top >>= 23;
  const uint32_t most_below = (255u - top) * 0x11111111u;
  moments.v_exponent = top - 1;
  moments.v = make_uint2(static_cast<uint32_t>(inverses[0] >> 23) - most_below,
                         static_cast<uint32_t>(inverses[1] >> 23) - most_below);
  const float most = largest_magnitude(r);
  if (most != most) {  // where an m is not finite
    moments.v = make_uint2(0, 0), moments.v_exponent = kNotFiniteExponent;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) r.word[i] = 0x7FFFFFFFu;
  }
  const uint8_t s_bits = scale_from_bits<float>(float_bits(most) & 0x7FFFFFFFu, ratio.sixth, ScaleRounding::kUp);
  moments.r_scale = s_bits;
  const float encode = enc[s_bits];
  if (most <= kRatioAmax) {
    moments.r = make_uint2(encode_ratios(r, 0, encode, words), encode_ratios(r, 8, encode, words));
  } else {
    moments.r = make_uint2(encode8_software<Fast::kStochastic16>(r, 0, encode, words),
                           encode8_software<Fast::kStochastic16>(r, 8, encode, words));
    if (s_bits == kE4M3Nan) moments.r = make_uint2(0, 0);
  }
}

// Elements of a block that may end before its 16th.
template <typename T, bool whole>
__device__ __forceinline__ Elements<T, kBlock> load_elements(const T* from, uint32_t count) {
  if constexpr (whole) return Elements<T, kBlock>::template load<Read::kAfterWait>(from);
  Elements<T, kBlock> e = Elements<T, kBlock>::zero();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (i >= count) continue;
    if constexpr (sizeof(T) == 4) {
      memcpy(&e.word[i], from + i, 4);
    } else {
      uint16_t bits;
      memcpy(&bits, from + i, 2);
      e.word[i / 2] |= static_cast<uint32_t>(bits) << (16 * (i % 2));
    }
  }
  return e;
}

template <typename T, bool whole>
__device__ __forceinline__ void store_elements(T* to, const Elements<T, kBlock>& e, uint32_t count) {
  if constexpr (whole) {
#pragma unroll
    for (int i = 0; i < Elements<T, kBlock>::kWords / 4; ++i) {
      reinterpret_cast<uint4*>(to)[i] = make_uint4(e.word[4 * i], e.word[4 * i + 1], e.word[4 * i + 2],
                                                   e.word[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (i >= count) continue;
      if constexpr (sizeof(T) == 4) {
        memcpy(to + i, &e.word[i], 4);
      } else {
        const uint16_t bits = static_cast<uint16_t>(e.word[i / 2] >> (16 * (i % 2)));
        memcpy(to + i, &bits, 2);
      }
    }
  }
}

// The new elements of a dense weight.
template <typename W>
__device__ __forceinline__ void step_dense(Elements<W, kBlock>& w, const Elements<float, kBlock>& r,
                                           const AdamwNumbers& n, const Words4& words) {
  float next[kBlock];
  float not_finite = 0.0f;  // becomes NaN
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    next[i] = stepped(w.value(i), bits_float(r.word[i]), n.decay, n.step_size);
    not_finite = __fmaf_rn(next[i], 0.0f, not_finite);
  }
  if constexpr (sizeof(W) == 4) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) w.word[i] = float_bits(next[i]);
  } else if (not_finite == 0.0f) {
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      w.word[i / 2] = __byte_perm(float_bits(next[i]) + rotated_draw<16>(words, i, kWeightWord),
                                  float_bits(next[i + 1]) + rotated_draw<16>(words, i + 1, kWeightWord), 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      w.word[i / 2] =
          stochastic_bfloat16(next[i], rotated_draw<16>(words, i, kWeightWord)) |
          static_cast<uint32_t>(stochastic_bfloat16(next[i + 1], rotated_draw<16>(words, i + 1, kWeightWord))) << 16;
    }
  }
}

struct Kernel {
  AdamwNumbers n;
  TensorScale ratio;
  const float* enc;
  RandomKey key;

  __device__ __forceinline__ explicit Kernel(const AdamwStep& a)
      : n(load_numbers(a.hyper)),
        ratio(TensorScale::of(kRatioAmax, kE4M3Max)),
        enc(encode_table(ratio)),
        key(RandomKey::of(a.rng_state[0], a.rng_state[1], kMomentStream)) {}

  __device__ __forceinline__ static Moments load(const AdamwStep& a, int64_t block) {
    return {reinterpret_cast<const uint2*>(a.r)[block], reinterpret_cast<const uint2*>(a.v)[block], a.r_scale[block],
            a.v_exponent[block]};
  }

  __device__ __forceinline__ static void store(const AdamwStep& a, int64_t block, const Moments& moments) {
    reinterpret_cast<uint2*>(a.r)[block] = moments.r;
    reinterpret_cast<uint2*>(a.v)[block] = moments.v;
    a.r_scale[block] = static_cast<uint8_t>(moments.r_scale);
    a.v_exponent[block] = static_cast<uint8_t>(moments.v_exponent);
  }

  template <typename G>
  __device__ __forceinline__ void moments_of(const Elements<G, kBlock>& grad, Moments& moments, uint64_t number,
                                             const Words4& words, Elements<float, kBlock>& r) const {
    float g[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) g[i] = mul(grad.value(i), n.grad_scale);
    next_moments(g, moments, n, ratio, enc, key, number, words, r);
  }
};

template <typename G, typename W, bool whole>
__global__ void __launch_bounds__(kThreads, sizeof(W) == 2 && whole ? 4 : 3) adamw_dense(const AdamwStep a) {
  const Kernel kernel(a);
  const int64_t total = a.rows * a.blocks, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; block < total; block += stride) {
    int64_t element = block * kBlock;
    uint32_t count = kBlock;
    if constexpr (!whole) {
      const int64_t row = block / a.blocks, first = (block - row * a.blocks) * kBlock;
      element = row * a.columns + first;
      count = static_cast<uint32_t>(min(a.columns - first, int64_t{kBlock}));
    }
    const auto grad = load_elements<G, whole>(static_cast<const G*>(a.grad) + element, count);
    auto w = load_elements<W, whole>(static_cast<const W*>(a.weight) + element, count);
    Moments moments = Kernel::load(a, block);
    const uint64_t number = static_cast<uint64_t>(a.first_block + block);
    Elements<float, kBlock> r;
    const Words4 words = kernel.key.block_words(number);
    kernel.moments_of(grad, moments, number, words, r);
    Kernel::store(a, block, moments);
    step_dense<W>(w, r, kernel.n, words);
    store_elements<W, whole>(static_cast<W*>(a.weight) + element, w, count);
  }
}

// 1 / s of every block scale, in shared memory.
__device__ __forceinline__ const float* reciprocal_table() {
  __shared__ float table[128];
  if (threadIdx.x < 128) {
    table[threadIdx.x] = threadIdx.x ? reciprocal(e4m3_value(static_cast<uint8_t>(threadIdx.x))) : 0.0f;
  }
  __syncthreads();
  return table;
}

// Weights are computed times 2^-60 (kShrunk), so that multiplying by 1 / s times 2^-66 ends in the encoding of 2^-126 y
// (cuda/block/round.cuh), whose bits from 22 on are the code: the product is cut off once, at 2^-22 of a step.
constexpr float kToEncoding = 0x1p-66f;

__device__ __forceinline__ uint32_t code_of(float shrunk, float inverse, uint32_t draw24) {
  float v;
  asm("mul.rz.sat.f32 %0, %1, %2;" : "=f"(v) : "f"(fabsf(shrunk)), "f"(inverse));
  return float_bits(v) * 4u + draw24;
}

__device__ __forceinline__ uint32_t encode_weights(const Elements<float, kBlock>& w, int first, float inverse,
                                                   const Words4& words) {
  uint32_t t[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    t[i] = code_of(bits_float(w.word[first + i]), inverse, rotated_draw<24>(words, first + i, kWeightWord));
  }
  return pack_codes<Fast::kStochastic16>(t) | w.signs(first);
}

template <typename G, bool whole>
__global__ void __launch_bounds__(kThreads, 3) adamw_codes(const AdamwStep a) {
  const Kernel kernel(a);
  const float* reciprocals = reciprocal_table();
  const uint32_t blocks = static_cast<uint32_t>(a.blocks);
  const uint32_t column_tiles = static_cast<uint32_t>(ceil_div(a.blocks, kTileColumns));
  const float step_size = mul(div(kernel.n.step_size, *a.per_tensor_scale), kShrunk);
  for (Walk at(a.rows, a.blocks); at.inside(); at.step()) {
    const int64_t block = static_cast<int64_t>(at.row) * blocks + at.column;
    const uint32_t count = whole ? kBlock : min(static_cast<uint32_t>(a.columns) - at.column * kBlock, 16u);
    const auto grad = load_elements<G, whole>(
        static_cast<const G*>(a.grad) + static_cast<int64_t>(at.row) * a.columns + at.column * kBlock, count);
    Moments moments = Kernel::load(a, block);
    const uint2 codes = static_cast<const uint2*>(a.weight)[block];
    uint8_t* scale = a.scale + scale_offset(at.row, at.column, column_tiles);
    const uint8_t old_bits = min(uint32_t{*scale}, uint32_t{kE4M3Nan});
    const uint64_t number = static_cast<uint64_t>(a.first_block + block);
    const Words4 words = kernel.key.block_words(number);
    Elements<float, kBlock> next;
    kernel.moments_of(grad, moments, number, words, next);
    Kernel::store(a, block, moments);
    const float old = e4m3_value(old_bits), factor = mul(old, 0x1p66f);  // 2^126 of decoding, times kShrunk
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float w = mul(biased_value(half_of(codes, i), i % 8), factor);
      next.word[i] = float_bits(stepped(w, bits_float(next.word[i]), kernel.n.decay, step_size));
    }
    const float largest = mul(largest_magnitude(next), kGrown);
    const GrowthBits growth = {kernel.key, number};
    const GrownScale grown = next_scale(old_bits, old, reciprocals[old_bits], largest, growth);
    if (grown.kept > 0.0f) {  // rarely; what is clipped without growth, the limit of code 7 clips
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const float n = bits_float(next.word[i]);
        next.word[i] = float_bits(copysignf(mul(fitted(mul(fabsf(n), kGrown), grown), kShrunk), n));
      }
    }
    const float inverse = mul(reciprocals[grown.bits], kToEncoding);
    const bool lost = grown.bits == kE4M3Nan;
    static_cast<uint2*>(a.weight)[block] = lost ? make_uint2(0, 0)
                                                : make_uint2(encode_weights(next, 0, inverse, words),
                                                             encode_weights(next, 8, inverse, words));
    *scale = grown.bits;
  }
}

template <typename G, bool whole>
void launch_with(const AdamwStep& a, cudaStream_t stream) {
  const int64_t blocks = a.rows * a.blocks;
  if (a.scale) {
    launch_walk<adamw_codes<G, whole>>(blocks, stream, a);
  } else if (a.weight_dtype == Dtype::kFloat) {
    launch_walk<adamw_dense<G, float, whole>>(blocks, stream, a);
  } else {
    launch_walk<adamw_dense<G, __nv_bfloat16, whole>>(blocks, stream, a);
  }
}

}  // namespace

void launch_adamw(const AdamwStep& a, cudaStream_t stream) {
  if (a.rows * a.blocks == 0) return;
  const bool whole = a.columns % kBlock == 0 && on_16_bytes(a.grad) && (a.scale || on_16_bytes(a.weight));
  if (a.grad_dtype == Dtype::kFloat) {
    whole ? launch_with<float, true>(a, stream) : launch_with<float, false>(a, stream);
  } else {
    whole ? launch_with<__nv_bfloat16, true>(a, stream) : launch_with<__nv_bfloat16, false>(a, stream);
  }
}

}  // namespace nvfp4
