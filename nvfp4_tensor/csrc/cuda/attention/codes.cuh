// Attention on the tensor cores (flash decoding): a warp has every kWarps-th tile of 16 tokens of its block's share,
// and up to 4 kTiles queries of one head of keys, which share what it decodes.
//
// Products are mma.m16n8k16 with the context as A: scores S^T = K q^T (16 tokens x 8 columns), sums O^T = V^T P^T
// (16 elements x 8 columns). The order of k inside an mma is free, and so is which element a row of O^T is. So lanes
// take codes as they lie, of K 1/4 of two tokens, of V 1/8 of four tokens, and decode them in registers to A fragments.
// Of V, the codes of two tokens are put into the halves of a word first, so that what decodes together is a pair of
// tokens.
//
// Codes come through shared memory, a ring of kStages tiles of a warp's own, so that enough of them is under way; dense
// tokens come from memory as fragments.
//
// Codes times block scales are exact in bfloat16. Queries and weights are two bfloat16 each, a rounded part and the
// rest of it, in columns 0 to 3 and 4 to 7: four queries fill one mma, and its sums are as if it had been float32. A
// row's factor (e8m0) multiplies a score, or a weight.
#pragma once

#include <cstddef>

#include "cuda/attention/plain.cuh"
#include "cuda/matmul/decode.cuh"
#include "cuda/ptx/mma.cuh"

namespace nvfp4 {
namespace attention {

using Bf16 = __nv_bfloat16;

// How far a score may exceed the largest so far before sums are scaled anew, in bits: weights stay below 2^kSlack.
constexpr float kSlack = 8.0f;

template <int kDim, int kTiles>
struct Shape {
  static constexpr int kRows = 4 * kTiles;
  static constexpr int kSums = kDim * kTiles / 4;  // registers of a lane
  static constexpr int kWarps = kSums <= 32 ? 8 : 4;
  static constexpr int kBlocksPerSm = kSums <= 32 || kTiles == 4 ? 2 : 3;
  static constexpr int kThreads = kWarps * 32;
};

constexpr int kStages = 4;  // tiles of a warp in shared memory

// A tile of codes as it lies in memory.
template <int kDim>
struct CodedStage {
  uint8_t codes[2][kCodeTile * kDim / 2];  // keys, values
  uint8_t scales[2][kCodeTile * kDim / 16];
  uint8_t factors[2][kCodeTile];
};

template <int kDim, int kTiles>
struct CodesShared {
  using Of = Shape<kDim, kTiles>;
  uint16_t q[2][8 * kTiles][kDim + 8];  // for codes: rounded and rest; for dense tokens
  union {
    CodedStage<kDim> stage[Of::kWarps][kStages];
    struct {
      float most[Of::kWarps][Of::kRows], total[Of::kWarps][Of::kRows];
      float sum[Of::kWarps][Of::kRows][kDim + 2];
    } left;
  };
};

__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

__device__ __forceinline__ float exp2_of(float v) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, Bf16>) return pack_bf16(low, high);
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Two packed elements.
template <typename T>
struct Pair {
  uint32_t bits;
  __device__ __forceinline__ explicit Pair(uint32_t packed) : bits(packed) {}
  __device__ __forceinline__ float low() const {
    if constexpr (std::is_same_v<T, Bf16>) return bits_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
  __device__ __forceinline__ float high() const {
    if constexpr (std::is_same_v<T, Bf16>) return bits_float(bits & 0xFFFF0000u);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits >> 16)));
  }
};

// Bytes to words: what is not a whole word has zeros above.
template <int kBytes, int kWords>
__device__ __forceinline__ void load_bytes(const uint8_t* from, uint32_t (&to)[kWords]) {
  if constexpr (kBytes == 1) {
    to[0] = *from;
  } else if constexpr (kBytes == 2) {
    to[0] = *reinterpret_cast<const uint16_t*>(from);
  } else if constexpr (kBytes == 4) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
}

// A warp's copies from memory to its stages. A lane copies 16 bytes of codes at a time, and one piece of the rest.
template <int kDim>
struct CodedCopy {
  static constexpr int kCodes = kCodeTile * kDim / 2, kScales = kCodeTile * kDim / 16;
  static constexpr int kScalePieces = kScales / 16;  // of keys, or of values
  static constexpr int kEach = kCodes / 16 / 32;     // pieces of codes of a lane
  static constexpr int kPieces = 2 * kScalePieces + 2;
  static constexpr int kRest = (kPieces + 31) / 32;
  static_assert(kCodes % 512 == 0 && kScales % 16 == 0);

  const uint8_t *keys, *values, *rest[kRest];
  uint32_t to, rest_to[kRest], rest_step[kRest];

  // first_token: of the head, of which tile 0 begins there. stage: address of the warp's first one.
  __device__ __forceinline__ CodedCopy(const AttendCodes& p, int64_t first_token, uint32_t stage, int lane) {
    keys = p.keys.codes + first_token * (kDim / 2) + lane * 16;
    values = p.values.codes + first_token * (kDim / 2) + lane * 16;
    to = stage + lane * 16;
#pragma unroll
    for (int i = 0; i < kRest; ++i) {
      const int piece = lane + 32 * i, of_values = piece >= kScalePieces, scale = piece - of_values * kScalePieces;
      const int factor = piece - 2 * kScalePieces;
      rest[i] = nullptr, rest_to[i] = 0, rest_step[i] = kScales;
      if (piece < 2 * kScalePieces) {
        rest[i] = (of_values ? p.values.scales : p.keys.scales) + first_token * (kDim / 16) + scale * 16;
        rest_to[i] = stage + offsetof(CodedStage<kDim>, scales) + piece * 16;
      } else if (piece < kPieces) {
        rest[i] = (factor ? p.values.factors : p.keys.factors) + first_token;
        rest_to[i] = stage + offsetof(CodedStage<kDim>, factors) + factor * 16, rest_step[i] = kCodeTile;
      }
    }
  }

  __device__ __forceinline__ void begin(int tile, int stage) const {
    const int64_t at = static_cast<int64_t>(tile) * kCodes;
    const uint32_t offset = stage * static_cast<uint32_t>(sizeof(CodedStage<kDim>));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      cp_async_16(to + offset + i * 512, keys + at + i * 512, 16);
      cp_async_16(to + offset + kCodes + i * 512, values + at + i * 512, 16);
    }
#pragma unroll
    for (int i = 0; i < kRest; ++i) {
      if (rest[i]) cp_async_16(rest_to[i] + offset, rest[i] + static_cast<int64_t>(tile) * rest_step[i], 16);
    }
  }
};

// A lane's part of a tile. Of K tokens g and g + 8, of V 2t, 2t + 1, 2t + 8 and 2t + 9 (lane = 4g + t).
template <int kDim>
struct CodedKeys {
  static constexpr int kWords = kDim / 32, kScales = kDim / 64;
  uint32_t code[2][kWords], scale[2];
  float factor[2];

  __device__ __forceinline__ CodedKeys(const CodedStage<kDim>& stage, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = g + 8 * i;
      uint32_t bytes[1];
      load_bytes<4 * kWords>(stage.codes[0] + token * (kDim / 2) + t * (kDim / 8), code[i]);
      load_bytes<kScales>(stage.scales[0] + token * (kDim / 16) + t * kScales, bytes);
      scale[i] = bytes[0];
      factor[i] = factor_of(stage.factors[0][token]);
    }
  }
};

template <int kDim>
struct CodedValues {
  static constexpr int kWords = kDim / 64, kScales = kDim == 256 ? 2 : 1;
  uint32_t code[4][kWords], scale[4];
  float factor[2];  // of tokens g and g + 8

  __device__ __forceinline__ CodedValues(const CodedStage<kDim>& stage, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + i % 2 + i / 2 * 8;
      uint32_t bytes[1];
      load_bytes<4 * kWords>(stage.codes[1] + token * (kDim / 2) + g * (kDim / 16), code[i]);
      load_bytes<kScales>(stage.scales[1] + token * (kDim / 16) + (kDim == 64 ? g / 2 : g * kScales), bytes);
      scale[i] = bytes[0];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = factor_of(stage.factors[1][g + 8 * i]);
  }
  // What lies outside of [begin, end) of the tile may hold NaN.
  __device__ __forceinline__ void clear_outside(int begin, int end, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + i % 2 + i / 2 * 8;
      if (token < begin || token >= end) scale[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (g + 8 * i < begin || g + 8 * i >= end) factor[i] = 0;
    }
  }
};

// What columns see of a stretch of the context, whose token 0 has the position `at`: indices of its tokens.
struct Mask {
  int at;
  Range seen;                // by any query
  int free_begin, free_end;  // by all of them

  __device__ __forceinline__ Mask(const AttendCodes& p, const Sight& sight, int position, int count)
      : at(position), seen(sight.from(0) - position, sight.to(p.tokens - 1) + 1 - position, count) {
    const Range free(sight.from(p.tokens - 1) - position, sight.to(0) + 1 - position, count);
    free_begin = free.begin, free_end = free.end;
  }
  __device__ __forceinline__ bool cuts(int token) const { return token < free_begin || token + kCodeTile > free_end; }
  __device__ __forceinline__ bool hides(const Sight& sight, int token, int own) const {
    return token < seen.begin || token >= seen.end || at + token < sight.from(own) || at + token > sight.to(own);
  }
};

template <int kDim, int kTiles>
struct CodesWarp {
  using Keys = CodedKeys<kDim>;
  using Values = CodedValues<kDim>;
  using Shared = CodesShared<kDim, kTiles>;
  static constexpr int kKeyWords = Keys::kWords, kValueWords = Values::kWords;
  static constexpr int kParts = kDim / 16;  // of 16 elements of values

  uint4 q[kTiles][kKeyWords];
  float most[kTiles][2], total[kTiles][2], sum[kTiles][kParts][4];

  __device__ __forceinline__ CodesWarp(const Shared& shared, int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kKeyWords; ++j) {
        const uint16_t* from = &shared.q[0][8 * n + lane / 4][lane % 4 * (kDim / 4) + 8 * j];
        q[n][j] = to_fragment(*reinterpret_cast<const uint4*>(from));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) most[n][i] = kNothing, total[n][i] = 0;
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][m][i] = 0;
      }
    }
  }

  // Products of tokens g and g + 8 by columns 2t and 2t + 1, times kUnit.
  __device__ __forceinline__ void score(const Keys& keys, float (&s)[kTiles][4]) const {
    uint32_t factor[2][(Keys::kScales + 1) / 2 * 2];
    if constexpr (Keys::kScales == 4) {
      scale_factors<Bf16>(keys.scale[0], factor[0]);
      scale_factors<Bf16>(keys.scale[1], factor[1]);
    } else {
      uint32_t out[4];
      scale_factors<Bf16>(keys.scale[0] | keys.scale[1] << 16, out);
      factor[0][0] = out[0], factor[0][1] = out[1], factor[1][0] = out[2], factor[1][1] = out[3];
    }
    float odd[kTiles][4];  // two chains of sums
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0;
    }
#pragma unroll
    for (int j = 0; j < kKeyWords; ++j) {
      uint32_t a[4], b[4];
      decode_word<Bf16>(keys.code[0][j], factor[0][j / 2], a);
      decode_word<Bf16>(keys.code[1][j], factor[1][j / 2], b);
      const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma(s[n], first, q[n][j].x, q[n][j].y, Bf16{});
        mma(odd[n], second, q[n][j].z, q[n][j].w, Bf16{});
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    }
  }

  // The two parts of a query together (of dense tokens it has one), times unit and a factor of tokens g and g + 8, in
  // units of log2(e).
  template <bool kIsSplit>
  __device__ __forceinline__ static void scale(const AttendCodes& p, float unit, const float (&factor)[2], int lane,
                                               float (&s)[kTiles][4]) {
    const float by = unit * (p.softcap != 0.0f ? 1.0f : kLog2E);
    const float of[2] = {factor[0] * by, factor[1] * by};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, s[n][i], 2);
        if constexpr (kIsSplit) {
          s[n][i] += other;
        } else if (lane % 4 >= 2) {
          s[n][i] = other;
        }
        s[n][i] *= of[i / 2];
      }
    }
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = tanhf(s[n][i] / p.softcap) * (p.softcap * kLog2E);
      }
    }
  }

  __device__ __forceinline__ static void hide(const AttendCodes& p, const Sight& sight, const Mask& mask, int first_row,
                                              int token, int lane, float (&s)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * n + (lane % 2 * 2 + i % 2);
        if (mask.hides(sight, token + lane / 4 + i / 2 * 8, (first_row + row) % p.tokens)) s[n][i] = -INFINITY;
      }
    }
  }

  // Scores to weights, relative to the largest so far or one a little smaller.
  __device__ __forceinline__ void weigh(float (&s)[kTiles][4]) {
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grows |= s[n][i] > most[n][i % 2] + kSlack;
    }
    if (__any_sync(0xFFFFFFFFu, grows)) raise(s);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = exp2_of(s[n][i] - most[n][i % 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) total[n][i] += s[n][i] + s[n][i + 2];
    }
  }
  __device__ __forceinline__ void raise(const float (&s)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float now = fmaxf(s[n][i], s[n][i + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, step));
        now = fmaxf(now, most[n][i]);
        const float correction = exp2_of(most[n][i] - now);
        most[n][i] = now;
        total[n][i] *= correction;
#pragma unroll
        for (int m = 0; m < kParts; ++m) sum[n][m][i] *= correction, sum[n][m][i + 2] *= correction;
      }
    }
  }

  // Weights of tokens g and g + 8 times a factor, as B fragments: columns 4 to 7 have what rounding leaves.
  template <typename T>
  __device__ __forceinline__ static void split_weights(const float (&s)[kTiles][4], const float (&of)[2], int lane,
                                                       uint32_t (&weights)[kTiles][2]) {
    const uint32_t rest = lane % 4 < 2 ? 0 : 0xFFFFFFFFu;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = s[n][2 * i] * of[i], b = s[n][2 * i + 1] * of[i];
        const Pair<T> rounded(pack_pair<T>(a, b) & rest);
        weights[n][i] = transposed(pack_pair<T>(a - rounded.low(), b - rounded.high()));
      }
    }
  }

  __device__ __forceinline__ void add(const Values& values, const float (&s)[kTiles][4], int lane) {
    constexpr float kUnit = 1.0f / Decoder<Bf16>::kUnit;
    const float of[2] = {values.factor[0] * kUnit, values.factor[1] * kUnit};
    uint32_t weights[kTiles][2];
    split_weights<Bf16>(s, of, lane, weights);
    uint32_t factor[Values::kScales][2];
    const uint32_t low = __byte_perm(values.scale[0], values.scale[1], 0x5140);  // first bytes, then second ones
    const uint32_t high = __byte_perm(values.scale[2], values.scale[3], 0x5140);
    scale_factor_pairs<Bf16>(__byte_perm(low, high, 0x5410), factor[0]);
    if constexpr (Values::kScales == 2) scale_factor_pairs<Bf16>(__byte_perm(low, high, 0x7632), factor[1]);
#pragma unroll
    for (int j = 0; j < kValueWords; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t which = half ? 0x7632 : 0x5410;
        uint32_t a[4], b[4];
        decode_word<Bf16>(__byte_perm(values.code[0][j], values.code[1][j], which), factor[j / 2][0], a);
        decode_word<Bf16>(__byte_perm(values.code[2][j], values.code[3][j], which), factor[j / 2][1], b);
        const uint32_t first[4] = {a[0], a[1], b[0], b[1]}, second[4] = {a[2], a[3], b[2], b[3]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma(sum[n][4 * j + 2 * half], first, weights[n][0], weights[n][1], Bf16{});
          mma(sum[n][4 * j + 2 * half + 1], second, weights[n][0], weights[n][1], Bf16{});
        }
      }
    }
  }

  __device__ __forceinline__ void leave(Shared& shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 4 * n + t % 2 * 2 + i;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total[n][i] += __shfl_xor_sync(0xFFFFFFFFu, total[n][i], step);
        if (g == 0 && t < 2) shared.left.most[warp][row] = most[n][i], shared.left.total[warp][row] = total[n][i];
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          const float a = whole(sum[n][m][i]), b = whole(sum[n][m][i + 2]);
          if (t < 2) {
            *reinterpret_cast<float2*>(&shared.left.sum[warp][row][g * (kDim / 8) + 2 * m]) = make_float2(a, b);
          }
        }
      }
    }
  }

  // Both columns of a sum. A value that is infinite makes the rest NaN, 0 times it.
  __device__ __forceinline__ static float whole(float part) {
    const float rest = __shfl_xor_sync(0xFFFFFFFFu, part, 2);
    return fabsf(part) < INFINITY ? part + rest : part;
  }
};

// Queries to shared memory, rotated where keys are, a row at a time by each warp: two bfloat16 in rows four apart, and
// as they are. The first row is loaded early.
template <int kDim, int kTiles>
struct Queries {
  using Of = Shape<kDim, kTiles>;
  static constexpr int kEach = kDim / 32, kWords = kEach / 2;
  uint32_t first[kWords];
  int warp, lane;

  __device__ __forceinline__ Queries(const AttendCodes& p, const Place& at) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    load(p, at, warp, first);
  }
  __device__ __forceinline__ void load(const AttendCodes& p, const Place& at, int row,
                                       uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (row >= at.rows) return;
    const auto* const from = static_cast<const uint8_t*>(p.q) + (at.q_row(p, row) * kDim + lane * kEach) * 2;
    load_bytes<4 * kWords>(from, words);
  }
  __device__ __forceinline__ void place(const AttendCodes& p, const Place& at,
                                        CodesShared<kDim, kTiles>& shared) const {
#pragma unroll 1
    for (int row = warp; row < Of::kRows; row += Of::kWarps) {
      uint32_t words[kWords];
      if (row == warp) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = first[i];
      } else {
        load(p, at, row, words);
      }
      place_row(p, row / 4 * 8 + row % 4, words, shared);
    }
  }
  __device__ __forceinline__ void place_row(const AttendCodes& p, int to, const uint32_t (&words)[kWords],
                                            CodesShared<kDim, kTiles>& shared) const {
    float v[kEach];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      *reinterpret_cast<uint32_t*>(&shared.q[1][to][lane * kEach + 2 * i]) = words[i];
      *reinterpret_cast<uint32_t*>(&shared.q[1][to + 4][lane * kEach + 2 * i]) = 0;
      const Pair<Bf16> bf16(words[i]);
      const Pair<__half> half(words[i]);
      v[2 * i] = p.dtype == Dtype::kBf16 ? bf16.low() : half.low();
      v[2 * i + 1] = p.dtype == Dtype::kBf16 ? bf16.high() : half.high();
    }
    if (p.is_rotated) rotate(v);
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const uint32_t rounded = pack_bf16(v[i], v[i + 1]);
      const Pair<Bf16> taken(rounded);
      *reinterpret_cast<uint32_t*>(&shared.q[0][to][lane * kEach + i]) = rounded;
      *reinterpret_cast<uint32_t*>(&shared.q[0][to + 4][lane * kEach + i]) = pack_bf16(v[i] - taken.low(),
                                                                                       v[i + 1] - taken.high());
    }
  }
  __device__ __forceinline__ void rotate(float (&v)[kEach]) const {
#pragma unroll
    for (int distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i & distance) continue;
        const float a = v[i], b = v[i + distance];
        v[i] = a + b, v[i + distance] = a - b;
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const bool second = lane & distance;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
        v[i] = second ? other - v[i] : v[i] + other;
      }
    }
  }
};

// The sums of a block's warps, in their order.
template <int kDim, int kTiles>
__device__ __forceinline__ void leave_block(const AttendCodes& p, const Place& at,
                                            const CodesShared<kDim, kTiles>& shared) {
  using Of = Shape<kDim, kTiles>;
  float* const to = at.partial(p);
  float* const most_to = to + p.block_rows * kDim;
  for (int i = threadIdx.x; i < at.rows * kDim; i += Of::kThreads) {
    const int row = i / kDim, d = i % kDim;
    float most = kNothing, total = 0, sum = 0;
#pragma unroll
    for (int warp = 0; warp < Of::kWarps; ++warp) most = fmaxf(most, shared.left.most[warp][row]);
#pragma unroll
    for (int warp = 0; warp < Of::kWarps; ++warp) {
      const float weight = exp2_of(shared.left.most[warp][row] - most);
      total = __fmaf_rn(weight, shared.left.total[warp][row], total);
      sum = __fmaf_rn(weight, shared.left.sum[warp][row][d], sum);
    }
    to[i] = sum;
    if (d == 0) most_to[row] = most, most_to[p.block_rows + row] = total;
  }
}

// The share of a block: tiles of dense tokens, each of which counts as kDenseCost, and then tiles of codes.
constexpr int kDenseCost = 3;

struct TileShare {
  int begin, end, dense_begin, dense_end;

  __device__ TileShare(const AttendCodes& p, const Range& seen) {
    const int first = seen.begin / kCodeTile;
    const int coded = seen.begin < seen.end ? (seen.end + kCodeTile - 1) / kCodeTile - first : 0;
    const int dense = kDenseCost * (dense_tiles(p.front) + dense_tiles(p.latest));
    const int from = share_begin(coded + dense, p.splits, blockIdx.x);
    const int to = share_begin(coded + dense, p.splits, blockIdx.x + 1);
    begin = first + max(from - dense, 0), end = first + max(to - dense, 0);
    dense_begin = begins(min(from, dense)), dense_end = begins(min(to, dense));
  }
  // Dense tiles that begin before this cost.
  __device__ static int begins(int cost) { return (cost + kDenseCost - 1) / kDenseCost; }
  __device__ static int dense_tiles(int tokens) { return (tokens + kCodeTile - 1) / kCodeTile; }
};

// A tile of dense tokens of a stretch, by a warp: fragments straight from memory.
template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void attend_dense_tile(const AttendCodes& p, const Place& at, const Sight& sight,
                                                  const Mask& mask, const DenseRows& key_rows,
                                                  const DenseRows& value_rows, int first,
                                                  const CodesShared<kDim, kTiles>& shared,
                                                  CodesWarp<kDim, kTiles>& mine, int lane) {
  using Warp = CodesWarp<kDim, kTiles>;
  const int g = lane / 4, t = lane % 4;
  const auto row = [&](const DenseRows& rows, int token) {  // null for what no query sees: it may be anything
    if (token < mask.seen.begin || token >= mask.seen.end) return static_cast<const T*>(nullptr);
    return static_cast<const T*>(rows.data) + at.b * rows.batch_step + at.kv_head * rows.head_step +
           token * rows.token_step;
  };
  const auto load = [](const T* from, int d) {
    return from ? *reinterpret_cast<const uint4*>(from + d) : make_uint4(0, 0, 0, 0);
  };
  float s[kTiles][4] = {};
  {
    const T *const a = row(key_rows, first + g), *const b = row(key_rows, first + g + 8);
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
      const int d = t * (kDim / 4) + 8 * j;
      const uint4 low = to_fragment(load(a, d)), high = to_fragment(load(b, d));
      const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 q = to_fragment(*reinterpret_cast<const uint4*>(&shared.q[1][8 * n + g][d]));
        mma(s[n], even, q.x, q.y, T{});
        mma(s[n], odd, q.z, q.w, T{});
      }
    }
  }
  const float ones[2] = {1.0f, 1.0f};
  Warp::template scale<false>(p, p.scale, ones, lane, s);
  if (mask.cuts(first)) Warp::hide(p, sight, mask, at.first_row, first, lane, s);
  mine.weigh(s);
  uint32_t weights[kTiles][2];
  Warp::template split_weights<T>(s, ones, lane, weights);
  const T* from[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) from[i] = row(value_rows, first + 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
  for (int j = 0; j < kDim / 64; ++j) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = load(from[i], g * (kDim / 8) + 8 * j);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const auto pair = [&](int i, uint32_t which) {
        const auto of = [&](const uint4& w) { return word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w; };
        return __byte_perm(of(v[i]), of(v[i + 1]), which);
      };
      const uint32_t a[4] = {pair(0, 0x5410), pair(0, 0x7632), pair(2, 0x5410), pair(2, 0x7632)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(mine.sum[n][4 * j + word], a, weights[n][0], weights[n][1], T{});
    }
  }
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void attend_dense_tiles(const AttendCodes& p, const Place& at, const Sight& sight,
                                                   const TileShare& share, const CodesShared<kDim, kTiles>& shared,
                                                   CodesWarp<kDim, kTiles>& mine, int warp, int lane) {
  const int fronts = TileShare::dense_tiles(p.front);
  for (int tile = share.dense_begin + warp; tile < share.dense_end; tile += Shape<kDim, kTiles>::kWarps) {
    const bool is_front = tile < fronts;
    const Mask mask(p, sight, is_front ? 0 : p.front + sight.length, is_front ? p.front : p.latest);
    attend_dense_tile<T>(p, at, sight, mask, is_front ? p.front_keys : p.latest_keys,
                         is_front ? p.front_values : p.latest_values, (is_front ? tile : tile - fronts) * kCodeTile,
                         shared, mine, lane);
  }
}

// Grid (splits, heads of keys x passes, batch).
template <int kDim, int kTiles>
__global__ void __launch_bounds__(Shape<kDim, kTiles>::kThreads, Shape<kDim, kTiles>::kBlocksPerSm)
    attend_codes_kernel(const __grid_constant__ AttendCodes p) {
  using Of = Shape<kDim, kTiles>;
  using Warp = CodesWarp<kDim, kTiles>;
  extern __shared__ __align__(16) float memory[];
  auto& shared = *reinterpret_cast<CodesShared<kDim, kTiles>*>(memory);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Place at(p);
  const Queries<kDim, kTiles> queries(p, at);
  const Sight sight(p, at.b);
  const Mask mask(p, sight, p.front, sight.length);
  const TileShare share(p, mask.seen);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const CodedCopy<kDim> copy(p, static_cast<int64_t>(at.unit) * p.capacity, address_of(&shared.stage[warp][0]), lane);
  int tile = share.begin + warp;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (tile + i * Of::kWarps < share.end) copy.begin(tile + i * Of::kWarps, i);
    cp_async_commit();
  }
  queries.place(p, at, shared);
  __syncthreads();
  Warp mine(shared, lane);
  if (share.dense_begin < share.dense_end) {  // while the first codes are under way
    if (p.dtype == Dtype::kBf16) {
      attend_dense_tiles<Bf16>(p, at, sight, share, shared, mine, warp, lane);
    } else {
      attend_dense_tiles<__half>(p, at, sight, share, shared, mine, warp, lane);
    }
  }
  int stage = 0;
#pragma unroll 1
  for (; tile < share.end; tile += Of::kWarps) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // and all lanes have read the tile before, which the next copy overwrites
    const int next = tile + (kStages - 1) * Of::kWarps;
    if (next < share.end) copy.begin(next, (stage + kStages - 1) % kStages);
    cp_async_commit();
    const CodedStage<kDim>& here = shared.stage[warp][stage];
    float s[kTiles][4];
    const CodedKeys<kDim> keys(here, lane);
    mine.score(keys, s);
    Warp::template scale<true>(p, p.scale * (1.0f / Decoder<Bf16>::kUnit), keys.factor, lane, s);
    CodedValues<kDim> values(here, lane);
    if (mask.cuts(tile * kCodeTile)) {
      Warp::hide(p, sight, mask, at.first_row, tile * kCodeTile, lane, s);
      values.clear_outside(mask.seen.begin - tile * kCodeTile, mask.seen.end - tile * kCodeTile, lane);
    }
    mine.weigh(s);
    mine.add(values, s, lane);
    stage = (stage + 1) % kStages;
  }
  __syncthreads();
  mine.leave(shared, warp, lane);
  __syncthreads();
  leave_block<kDim, kTiles>(p, at, shared);
}

}  // namespace attention
}  // namespace nvfp4
