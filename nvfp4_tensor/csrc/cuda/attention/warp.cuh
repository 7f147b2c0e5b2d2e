// What a warp has of its tiles: scores, weights and sums of up to 4 kTiles queries.
#pragma once

#include "cuda/attention/coded_tile.cuh"
#include "cuda/matmul/decode.cuh"
#include "cuda/ptx/mma.cuh"

namespace nvfp4 {
namespace attention {

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

// What columns see of a stretch of the context, whose token 0 has the position `at`: indices of its tokens.
struct Mask {
  int64_t at;
  Range seen;                // by any query
  int free_begin, free_end;  // by all of them

  __device__ __forceinline__ Mask(const AttendCodes& p, const Sight& sight, int64_t position, int count)
      : at(position), seen(sight.seen(position, count)) {
    const Range free(sight.from(p.tokens - 1) - position, sight.to(0) + 1 - position, count);
    free_begin = free.begin, free_end = free.end;
  }
  __device__ __forceinline__ bool cuts(int token) const { return token < free_begin || token + kCodeTile > free_end; }
  __device__ __forceinline__ bool hides(const Sight& sight, int token, int own) const {
    return token < seen.begin || token >= seen.end || at + token < sight.from(own) || at + token > sight.to(own);
  }
};

// Scores are in units of log2(e): what they are multiplied by before a cap, and the cap.
__device__ __forceinline__ float log2_scale(float scale, float softcap) {
  return softcap != 0.0f ? scale : scale * kLog2E;
}
__device__ __forceinline__ float log2_capped(float score, float softcap) {
  return tanhf(score / softcap) * (softcap * kLog2E);
}

// 2^(score - most), 0 for -inf also where nothing has been seen yet.
__device__ __forceinline__ float weight_of(float score, float most) {
  return score == -INFINITY ? 0.0f : exp2f(score - most);
}

// A's registers of two products of the same B.
struct Fragments {
  uint32_t first[4], second[4];
};

// Products of tokens g and g + 8 by columns 2t and 2t + 1, in kPieces of the depth: keys(j) and query(n, j) are piece
// j's. kChains: of sums, which registers allow or not.
template <typename T, int kPieces, int kChains, int kTiles, typename Keys, typename Query>
__device__ __forceinline__ void multiply_keys(Keys keys, Query query, float (&s)[kTiles][4]) {
  float odd[kTiles][4] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0;
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const Fragments a = keys(j);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 q = query(n, j);
      mma(s[n], a.first, q.x, q.y, T{});
      mma(kChains == 2 ? odd[n] : s[n], a.second, q.z, q.w, T{});
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
  }
}

// Dense keys by queries: keys.key(which, d) and query(n, d) have 8 elements from d on.
template <typename T, int kDim, int kChains, int kTiles, typename Reader, typename Query>
__device__ __forceinline__ void score_dense(const Reader& keys, Query query, int lane, float (&s)[kTiles][4]) {
  const auto element = [&](int chunk) { return chunk * 32 + lane % 4 * 8; };
  multiply_keys<T, kDim / 32, kChains>(
      [&](int chunk) {
        const uint4 a = keys.key(0, element(chunk)), b = keys.key(1, element(chunk));
        return Fragments{{a.x, b.x, a.y, b.y}, {a.z, b.z, a.w, b.w}};
      },
      [&](int n, int chunk) { return query(n, element(chunk)); }, s);
}

// What a warp has of its tiles. kSplit: the 8 columns of an mma are four queries, each a rounded part and four columns
// behind what is left of it, else eight queries, whose weights' parts take two mmas. Lane: which elements a lane has.
template <typename Lane_, int kTiles, bool kSplit>
struct WarpSums {
  using Lane = Lane_;
  static constexpr int kParts = 2 * Lane::kValueHalves;  // of two elements for each lane g
  static constexpr int kTimes = kSplit ? 1 : 2;
  using Weights = uint32_t[kTiles][kTimes][2];

  float most[kTiles][2], total[kTiles][2], sum[kTiles][kParts][4];

  __device__ __forceinline__ WarpSums() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) most[n][i] = kNothing, total[n][i] = 0;
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][m][i] = 0;
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

  // Weights of tokens g and g + 8 times a factor, as B fragments: rounded, and what rounding leaves.
  template <typename T>
  __device__ __forceinline__ static void split_weights(const float (&s)[kTiles][4], const float (&of)[2], int lane,
                                                       Weights& weights) {
    const uint32_t rest = kSplit && lane % 4 < 2 ? 0 : 0xFFFFFFFFu;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = s[n][2 * i] * of[i], b = s[n][2 * i + 1] * of[i];
        const Pair<T> rounded(packed_pair<T>(a, b) & rest);
        if constexpr (!kSplit) weights[n][0][i] = transposed(rounded.bits);
        weights[n][kTimes - 1][i] = transposed(packed_pair<T>(a - rounded.low(), b - rounded.high()));
      }
    }
  }

  // Values of half a word's elements, of tokens 2t, 2t + 1, 2t + 8 and 2t + 9, times weights.
  template <typename T>
  __device__ __forceinline__ void add_half(int half, const Fragments& a, const Weights& weights) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        mma(sum[n][2 * half], a.first, weights[n][i][0], weights[n][i][1], T{});
        mma(sum[n][2 * half + 1], a.second, weights[n][i][0], weights[n][i][1], T{});
      }
    }
  }

  // Of dense tokens: values.value<fours>(i, d) are 4 or 8 elements of the i-th of them from d on.
  template <typename T, typename Reader>
  __device__ __forceinline__ void add_dense(const Reader& values, const float (&s)[kTiles][4], int lane) {
    const float ones[2] = {1.0f, 1.0f};
    Weights weights;
    split_weights<T>(s, ones, lane, weights);
    constexpr int kAtOnce = Lane::kValueHalves % 2 ? 1 : 2;  // fours that lie side by side
#pragma unroll
    for (int half = 0; half < Lane::kValueHalves; half += kAtOnce) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = values.template value<kAtOnce>(i, Lane::value(lane / 4, half));
#pragma unroll
      for (int four = 0; four < kAtOnce; ++four) {
        Fragments a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto word = [&](int token, int which) { return (&v[token].x)[2 * four + which]; };
          const uint32_t pair = i % 2 ? 0x7632 : 0x5410;  // of tokens
          a.first[i] = __byte_perm(word(i / 2 * 2, 0), word(i / 2 * 2 + 1, 0), pair);
          a.second[i] = __byte_perm(word(i / 2 * 2, 1), word(i / 2 * 2 + 1, 1), pair);
        }
        add_half<T>(half + four, a, weights);
      }
    }
  }

  // leave_row(row, most, total), and leave_pair(row, d, two sums).
  template <typename LeaveRow, typename LeavePair>
  __device__ __forceinline__ void leave(int lane, LeaveRow leave_row, LeavePair leave_pair) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = kSplit ? 4 * n + t % 2 * 2 + i : 8 * n + 2 * t + i;
        const bool leaves = !kSplit || t < 2;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total[n][i] += __shfl_xor_sync(0xFFFFFFFFu, total[n][i], step);
        if (g == 0 && leaves) leave_row(row, most[n][i], total[n][i]);
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          const float a = whole(sum[n][m][i]), b = whole(sum[n][m][i + 2]);
          if (leaves) leave_pair(row, Lane::value(g, m / 2) + m % 2 * 2, make_float2(a, b));
        }
      }
    }
  }

  // Both columns of a sum. A value that is infinite makes the rest NaN, 0 times it.
  __device__ __forceinline__ static float whole(float part) {
    if constexpr (!kSplit) return part;
    const float rest = __shfl_xor_sync(0xFFFFFFFFu, part, 2);
    return fabsf(part) < INFINITY ? part + rest : part;
  }
};

template <int kDim, int kTiles>
struct CodesWarp : WarpSums<LaneElements<kDim>, kTiles, true> {
  using Keys = CodedKeys<kDim>;
  using Values = CodedValues<kDim>;
  using Lane = LaneElements<kDim>;
  using QueryRow = uint16_t[kDim + 8];
  static constexpr int kKeyWords = Keys::kWords;

  uint4 q[kTiles][kKeyWords];

  // Queries for codes, as rows of a product: word j of tile n.
  __device__ __forceinline__ static uint4 query(const QueryRow* rows, int n, int j, int lane) {
    return to_fragment(*reinterpret_cast<const uint4*>(rows[8 * n + lane / 4] + Lane::key(lane % 4, j)));
  }
  __device__ __forceinline__ void load_queries(const QueryRow* rows, int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kKeyWords; ++j) q[n][j] = query(rows, n, j, lane);
    }
  }

  // Products of tokens g and g + 8 by columns 2t and 2t + 1, times kUnit.
  __device__ __forceinline__ void score(const Keys& keys, float (&s)[kTiles][4]) const {
    score(keys, [&](int n, int j) { return q[n][j]; }, s);
  }
  template <typename Query>
  __device__ __forceinline__ static void score(const Keys& keys, Query query, float (&s)[kTiles][4]) {
    uint32_t factor[2][Keys::kScales >= 3 ? 4 : 2];
    if constexpr (Keys::kScales >= 3) {
      scale_factors<Bf16>(keys.scale[0], factor[0]);
      scale_factors<Bf16>(keys.scale[1], factor[1]);
    } else {
      uint32_t out[4];
      scale_factors<Bf16>(keys.scale[0] | keys.scale[1] << 16, out);
      factor[0][0] = out[0], factor[0][1] = out[1], factor[1][0] = out[2], factor[1][1] = out[3];
    }
    multiply_keys<Bf16, kKeyWords, 2>(
        [&](int j) {
          uint32_t a[4], b[4];
          constexpr int kOfScale = Lane::kInTurn ? 1 : 2;  // words
          decode_word<Bf16>(keys.code[0][j], factor[0][j / kOfScale], a);
          decode_word<Bf16>(keys.code[1][j], factor[1][j / kOfScale], b);
          return Fragments{{a[0], b[0], a[1], b[1]}, {a[2], b[2], a[3], b[3]}};
        },
        query, s);
  }

  // The two parts of a query together (of dense tokens it has one), times unit and a factor of tokens g and g + 8, in
  // units of log2(e).
  template <bool kIsSplit>
  __device__ __forceinline__ static void scale(float softcap, float unit, const float (&factor)[2], int lane,
                                               float (&s)[kTiles][4]) {
    const float by = log2_scale(unit, softcap);
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
    if (softcap != 0.0f) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = log2_capped(s[n][i], softcap);
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

  __device__ __forceinline__ void add(const Values& values, const float (&s)[kTiles][4], int lane) {
    constexpr float kUnit = 1.0f / Decoder<Bf16>::kUnit;
    const float of[2] = {values.factor(0) * kUnit, values.factor(1) * kUnit};
    typename CodesWarp::Weights weights;
    CodesWarp::template split_weights<Bf16>(s, of, lane, weights);
    uint32_t factor[Values::kScales][2];
    const uint32_t low = __byte_perm(values.scale[0], values.scale[1], 0x5140);  // first bytes, then second ones
    const uint32_t high = __byte_perm(values.scale[2], values.scale[3], 0x5140);
    scale_factor_pairs<Bf16>(__byte_perm(low, high, 0x5410), factor[0]);
    if constexpr (Values::kScales >= 2) scale_factor_pairs<Bf16>(__byte_perm(low, high, 0x7632), factor[1]);
    if constexpr (Values::kScales == 3) {
      const uint32_t thirds[2] = {__byte_perm(values.scale[0], values.scale[1], 0x0062),
                                  __byte_perm(values.scale[2], values.scale[3], 0x0062)};
      scale_factor_pairs<Bf16>(__byte_perm(thirds[0], thirds[1], 0x5410), factor[2]);
    }
    constexpr int kOfScale = Lane::kInTurn ? 1 : 4;  // halves
#pragma unroll
    for (int half = 0; half < Values::kHalves; ++half) {
      const uint32_t which = half % 2 ? 0x7632 : 0x5410;
      const int word = half / 2;
      uint32_t a[4], b[4];
      decode_word<Bf16>(__byte_perm(values.code[0][word], values.code[1][word], which), factor[half / kOfScale][0], a);
      decode_word<Bf16>(__byte_perm(values.code[2][word], values.code[3][word], which), factor[half / kOfScale][1], b);
      this->template add_half<Bf16>(half, {{a[0], a[1], b[0], b[1]}, {a[2], a[3], b[2], b[3]}}, weights);
    }
  }
};

}  // namespace attention
}  // namespace nvfp4
