// The context of attention of one token: tiles of a cache in shared memory, and their products, which a warp adds up.
#pragma once

#include "cuda/attention/pairs.cuh"
#include "cuda/block/elements.cuh"
#include "cuda/generation/step.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {

constexpr int kHeads = 8;  // columns of an mma
constexpr int kTile = 16;  // tokens

// A tile of the context in shared memory. Its units of 16 bytes are permuted so that a warp's loads find all banks.
template <int kDim>
struct Tile {
  static constexpr int kUnits = (kDim + 63) / 64 * 8;  // of a token
  uint4 keys[kTile][kUnits], values[kTile][kUnits];

  static __device__ __forceinline__ int key_unit(int token, int unit) { return unit ^ ((token & 1) << 2); }
  static __device__ __forceinline__ int value_unit(int token, int unit) { return unit ^ ((token & 6)); }
};

// The tokens before the new one that a row sees, of those from `start` on: `count` in slots of the cache.
struct Seen {
  bool inside;     // the new token has a slot
  int slot;        // which
  int first_slot;  // of the first token seen; the others follow, from slot 0 again after the last
  int count;

  __device__ Seen(int64_t position, int64_t start, int length, int window) {
    const bool is_ring = window > 0 && window <= length;
    inside = position >= 0 && (is_ring || position < length);
    slot = !inside ? 0 : static_cast<int>(position < length ? position : position % length);
    const int64_t most = window > 0 ? window - 1 : length;
    count = inside ? static_cast<int>(max(min(position - start, most), int64_t{0})) : 0;
    first_slot = slot - count + (slot < count ? length : 0);
  }
  __device__ __forceinline__ int slot_of(int i, int length) const {
    const int at = first_slot + i;
    return at >= length ? at - length : at;
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Requests a tile, zeros where there is no token.
template <typename T, int kDim>
__device__ __forceinline__ void copy_tile(Tile<kDim>& to, const T* keys, const T* values, const Seen& seen,
                                          const Attend& p, int tile, int lane) {
  using At = Tile<kDim>;
  constexpr int kTokens = 32 / At::kUnits;  // by a copy
  const int unit = lane % At::kUnits;
#pragma unroll
  for (int i = 0; i < kTile; i += kTokens) {
    const int token = i + lane / At::kUnits, index = tile * kTile + token;
    const bool is_there = index < seen.count && unit * 8 < p.dim;
    const int64_t from = is_there ? static_cast<int64_t>(seen.slot_of(index, p.length)) * p.dim + unit * 8 : 0;
    const int bytes = is_there ? 16 : 0;
    cp_async_16(address_of(&to.keys[token][At::key_unit(token, unit)]), reinterpret_cast<const uint8_t*>(keys + from),
                bytes);
    cp_async_16(address_of(&to.values[token][At::value_unit(token, unit)]),
                reinterpret_cast<const uint8_t*>(values + from), bytes);
  }
}

// From a head's sums to the next one's, in shared memory: pairs of 16 lanes find all banks.
template <int kDim>
constexpr int kSumsStride = kDim + 2;

// What a warp has of its tiles: for heads 2 (lane % 4) and the next.
template <typename T, int kDim>
struct WarpSums {
  using At = Tile<kDim>;
  static constexpr int kKeyChunks = kDim / 32, kValueChunks = At::kUnits / 8;
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  float sum[kValueChunks * 4][4] = {};

  // Scores of tokens g and g + 8 by heads 2t and 2t + 1.
  __device__ __forceinline__ void score(const At& tile, const uint4 (&q)[kKeyChunks], const Attend& p, int left,
                                        int lane, float (&s)[4]) const {
    const int g = lane / 4, t = lane % 4;
    float odd[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = 0;
#pragma unroll
    for (int chunk = 0; chunk < kKeyChunks; ++chunk) {
      const int unit = At::key_unit(g, chunk * 4 + t);
      const uint4 a = tile.keys[g][unit], b = tile.keys[g + 8][unit];
      const uint32_t a0[4] = {a.x, b.x, a.y, b.y}, a1[4] = {a.z, b.z, a.w, b.w};
      mma(s, a0, q[chunk].x, q[chunk].y, T{});
      mma(odd, a1, q[chunk].z, q[chunk].w, T{});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = (s[i] + odd[i]) * p.scaling;
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = tanhf(s[i] / p.softcap) * p.softcap;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (g + i / 2 * 8 >= left) s[i] = -INFINITY;
    }
  }

  // Scores to weights, relative to the largest so far.
  __device__ __forceinline__ void weigh(float (&s)[4]) {
    using attention::kLog2E;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float now = fmaxf(s[head], s[head + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, step));
      now = fmaxf(now, most[head]);
      const float factor = most[head] == now ? 1.0f : exp2f((most[head] - now) * kLog2E);
      most[head] = now;
      s[head] = exp2f((s[head] - now) * kLog2E), s[head + 2] = exp2f((s[head + 2] - now) * kLog2E);
      total[head] = total[head] * factor + (s[head] + s[head + 2]);
#pragma unroll
      for (int i = 0; i < kValueChunks * 4; ++i) sum[i][head] *= factor, sum[i][head + 2] *= factor;
    }
  }

  __device__ __forceinline__ void add(const At& tile, const float (&s)[4], int lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const attention::Pair<T> rounded(packed_pair<T>(s[2 * i], s[2 * i + 1]));
      low[i] = transposed(packed_pair<T>(s[2 * i] - rounded.low(), s[2 * i + 1] - rounded.high()));
      high[i] = transposed(rounded.bits);
    }
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const int unit = At::value_unit(2 * t, chunk * 8 + g);  // of tokens 2 t, 2 t + 1, and of those 8 further
      const uint4 v[4] = {tile.values[2 * t][unit], tile.values[2 * t + 1][unit], tile.values[2 * t + 8][unit],
                          tile.values[2 * t + 9][unit]};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t w0 = word_of(v[0], j), w1 = word_of(v[1], j), w2 = word_of(v[2], j), w3 = word_of(v[3], j);
        const uint32_t a[4] = {__byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632), __byte_perm(w2, w3, 0x5410),
                               __byte_perm(w2, w3, 0x7632)};
        mma(sum[chunk * 4 + j], a, high[0], high[1], T{});
        mma(sum[chunk * 4 + j], a, low[0], low[1], T{});
      }
    }
  }

  // The sums of its tiles, as [kHeads][kSumsStride]; for each head most[head * step] and total[head * step].
  __device__ __forceinline__ void leave(float* sums, float* its_most, float* its_total, int step_of_heads, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total[head] += __shfl_xor_sync(0xFFFFFFFFu, total[head], step);
      const int at = (2 * t + head) * step_of_heads;
      if (g == 0) its_most[at] = most[head], its_total[at] = total[head];
#pragma unroll
      for (int i = 0; i < kValueChunks * 4; ++i) {
        const int d = i / 4 * 64 + g * 8 + i % 4 * 2;
        if (d < kDim) {
          *reinterpret_cast<float2*>(&sums[(2 * t + head) * kSumsStride<kDim> + d]) = make_float2(sum[i][head],
                                                                                                  sum[i][head + 2]);
        }
      }
    }
  }
};

}  // namespace step
}  // namespace nvfp4
