// nvfp4.adamw_step: decode the moments of a block (and the weight, where that is codes), update, and write all back;
// one thread a block, one pass, nothing but the parameter's own bytes.
//
// With a bfloat16 weight and gradient 8.25 bytes an element move, with codes 5.4, so what an element costs in
// instructions decides: powers of two as second moments make square roots and divisions shifts.
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

// r16 of an element in the low half, PRMTs of its block's words.
__device__ __forceinline__ uint32_t low_draw(const Words4& words, int element) {
  const uint32_t byte = element % 4, word = words.word[element / 4], next = words.word[(element / 4 + 1) % 4];
  if (byte < 3) return __byte_perm(word, 0, 0x4400u | (byte + 1) << 4 | byte);
  return __byte_perm(__byte_perm(word, next, 0x0043), 0, 0x4410u);
}

__device__ __forceinline__ uint32_t draw32(const Words4& words, int element) {
  return __funnelshift_r(words.word[element / 4 % 4], words.word[(element / 4 + 1) % 4], 8 * (element % 4));
}

struct Moments {
  uint2 r, v;
  uint32_t r_scale, v_exponent;
};

__device__ __forceinline__ uint32_t half_of(const uint2& word, int i) { return i < 8 ? word.x : word.y; }

// g to r = m / root(v), the moments to their next ones.
__device__ __forceinline__ void next_moments(const float (&g)[kBlock], Moments& moments, const AdamwNumbers& n,
                                             const TensorScale& ratio, const float* enc, const Words4& words,
                                             Elements<float, kBlock>& r) {
  const bool lost = moments.v_exponent == kNotFiniteExponent;
  const uint2 below = lost ? make_uint2(0, 0) : moments.v;
  // The scale times 2^126, of decoding codes, and 2^-7; at most 1.75 * 2^127.
  const float factor = mul(e4m3_value(static_cast<uint8_t>(min(moments.r_scale, uint32_t{kE4M3Nan}))), 0x1p119f);
  const int old_top = static_cast<int>(moments.v_exponent), least = static_cast<int>(n.least_exponent);
  float m[kBlock];
  int exponent[kBlock], top = least;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int old = max(old_top - static_cast<int>(half_of(below, i) >> (4 * (i % 8)) & 15u), 0);
    const float decoded = mul(biased_value(half_of(moments.r, i), i % 8), factor);
    m[i] = next_first_moment(mul(decoded, root_of(old)), g[i], n);
    const float v = next_second_moment(bits_float(static_cast<uint32_t>(old) << 23), g[i], n);
    exponent[i] = static_cast<int>((float_bits(v) + (draw32(words, i + kSecondMomentElement) >> 9)) >> 23);
    top = max(top, exponent[i]);
  }
  const bool finite = top < kNotFiniteExponent;
  const int cap = min(top - least, kMostBelow);
  uint32_t packed[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int distance = min(top - exponent[i], cap);
    packed[i / 8] += static_cast<uint32_t>(distance) << (4 * (i % 8));
    r.word[i] = float_bits(mul(m[i], half_power(381 - top + distance)));
  }
  moments.v = make_uint2(packed[0], packed[1]);
  moments.v_exponent = static_cast<uint32_t>(top);
  if (!finite) {
    moments.v = make_uint2(0, 0), moments.v_exponent = kNotFiniteExponent;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) r.word[i] = 0x7FFFFFFFu;
  }
  const uint8_t s_bits = scale_from_bits<float>(r.amax_bits(), ratio.sixth, ScaleRounding::kUp);
  moments.r_scale = s_bits;
  const float encode = enc[s_bits];
  moments.r = make_uint2(encode8_software<Fast::kStochastic16>(r, 0, encode, words),
                         encode8_software<Fast::kStochastic16>(r, 8, encode, words));
  if (s_bits == kE4M3Nan) moments.r = make_uint2(0, 0);
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
      w.word[i / 2] = __byte_perm(float_bits(next[i]) + low_draw(words, i),
                                  float_bits(next[i + 1]) + low_draw(words, i + 1), 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      w.word[i / 2] = stochastic_bfloat16(next[i], low_draw(words, i)) |
                      static_cast<uint32_t>(stochastic_bfloat16(next[i + 1], low_draw(words, i + 1))) << 16;
    }
  }
}

struct Kernel {
  AdamwNumbers n;
  TensorScale ratio;
  const float* enc;
  RandomKey moment_key, weight_key;

  __device__ __forceinline__ explicit Kernel(const AdamwStep& a)
      : n(load_numbers(a.hyper)),
        ratio(TensorScale::of(kRatioAmax, kE4M3Max)),
        enc(encode_table(ratio)),
        moment_key(RandomKey::of(a.rng_state[0], a.rng_state[1], kMomentStream)),
        weight_key(RandomKey::of(a.rng_state[0], a.rng_state[1], kWeightStream)) {}

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
  __device__ __forceinline__ void moments_of(const Elements<G, kBlock>& grad, Moments& moments, const Words4& words,
                                             Elements<float, kBlock>& r) const {
    float g[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) g[i] = mul(grad.value(i), n.grad_scale);
    next_moments(g, moments, n, ratio, enc, words, r);
  }
};

template <typename G, typename W, bool whole>
__global__ void __launch_bounds__(kThreads, 3) adamw_dense(const AdamwStep a) {
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
    kernel.moments_of(grad, moments, kernel.moment_key.block_words(number), r);
    Kernel::store(a, block, moments);
    Words4 words{};
    if constexpr (sizeof(W) == 2) words = kernel.weight_key.block_words(number);
    step_dense<W>(w, r, kernel.n, words);
    store_elements<W, whole>(static_cast<W*>(a.weight) + element, w, count);
  }
}

// 0 <= y <= 6 to a code 0..7: round_e2m1_32 by the encoding of 2^-126 y (cuda/block/round.cuh), whose bits from 22 on
// are the code, and those below the fraction. Below 1, where they would be subnormal, the fraction is that of 2 y.
__device__ __forceinline__ uint32_t code32(float y, uint32_t r32) {
  float encoded;
  asm("mul.rz.sat.f32 %0, %1, 0f00800000;" : "=f"(encoded) : "f"(y));
  const uint32_t bits = float_bits(encoded);
  const uint32_t fraction = y < 1.0f ? __float2uint_rz(mul(y, 4294967296.0f)) << 1 : bits << 10;
  return (bits >> 22) + (fraction + r32 < r32);
}

// n / s, correctly rounded: enc is 1 / s rounded, and s has four bits.
__device__ __forceinline__ float exact_quotient(float n, float s, float enc) {
  const float q = mul(n, enc);
  return __fmaf_rn(__fmaf_rn(-q, s, n), enc, q);
}

template <typename G, bool whole>
__global__ void __launch_bounds__(kThreads, 3) adamw_codes(const AdamwStep a) {
  const Kernel kernel(a);
  const uint32_t blocks = static_cast<uint32_t>(a.blocks);
  const uint32_t column_tiles = static_cast<uint32_t>(ceil_div(a.blocks, kTileColumns));
  const float step_size = div(kernel.n.step_size, *a.per_tensor_scale), decay = mul(kernel.n.decay, 256.0f);
  for (Walk at(a.rows, a.blocks); at.inside(); at.step()) {
    const int64_t block = static_cast<int64_t>(at.row) * blocks + at.column;
    const uint32_t count = whole ? kBlock : min(static_cast<uint32_t>(a.columns) - at.column * kBlock, 16u);
    const auto grad = load_elements<G, whole>(
        static_cast<const G*>(a.grad) + static_cast<int64_t>(at.row) * a.columns + at.column * kBlock, count);
    Moments moments = Kernel::load(a, block);
    const uint2 codes = static_cast<const uint2*>(a.weight)[block];
    uint8_t* scale = a.scale + scale_offset(at.row, at.column, column_tiles);
    const uint8_t old_bits = *scale;
    const uint64_t number = static_cast<uint64_t>(a.first_block + block);
    const Words4 moment_words = kernel.moment_key.block_words(number);
    Elements<float, kBlock> next;
    kernel.moments_of(grad, moments, moment_words, next);
    Kernel::store(a, block, moments);
    const float old = e4m3_value(static_cast<uint8_t>(min(uint32_t{old_bits}, uint32_t{kE4M3Nan})));
    const float factor = mul(old, 0x1p118f);  // times 2^126, in two steps: 448 * 2^126 is beyond float32
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float w = mul(biased_value(half_of(codes, i), i % 8), factor);
      next.word[i] = float_bits(stepped(w, bits_float(next.word[i]), decay, step_size));
    }
    const GrownScale grown = next_scale(old_bits, old, bits_float(next.amax_bits()), random16(moment_words, 0));
    const Words4 words = kernel.weight_key.block_words(number);
    const float enc = grown.scale > 0.0f ? reciprocal(grown.scale) : 0.0f;
    if (grown.kept > 0.0f) {  // rarely; what is clipped without growth, the limit of 6 below clips
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const float n = bits_float(next.word[i]);
        next.word[i] = float_bits(copysignf(fitted(fabsf(n), grown), n));
      }
    }
    uint32_t packed[2] = {next.signs(0), next.signs(8)};
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float y = fminf(exact_quotient(fabsf(bits_float(next.word[i])), grown.scale, enc), kE2M1Max);
      packed[i / 8] += code32(y, draw32(words, i)) << (4 * (i % 8));
    }
    const bool lost = grown.bits == kE4M3Nan;
    static_cast<uint2*>(a.weight)[block] = lost ? make_uint2(0, 0) : make_uint2(packed[0], packed[1]);
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

bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

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
