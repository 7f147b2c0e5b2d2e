// The context of attention of one token: tiles of a cache in shared memory, and how lanes read them.
#pragma once

#include "cuda/generation/step.h"
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

// Which elements of values lane g has: fours, so that eight lanes find all banks of a tile.
template <int kDim>
struct TileElements {
  static constexpr int kValueHalves = kDim / 32;
  __device__ __forceinline__ static int value(int g, int half) {
    return kValueHalves % 2 ? 32 * half + 4 * g : half / 2 * 64 + 8 * g + half % 2 * 4;
  }
};

// A tile as a lane reads it.
template <int kDim>
struct TileReader {
  using At = Tile<kDim>;
  const At& tile;
  int g, t;

  __device__ __forceinline__ TileReader(const At& at, int lane) : tile(at), g(lane / 4), t(lane % 4) {}
  __device__ __forceinline__ uint4 key(int which, int d) const {
    return tile.keys[g + 8 * which][At::key_unit(g, d / 8)];
  }
  template <int kFours>
  __device__ __forceinline__ uint4 value(int i, int d) const {
    const uint4& unit = tile.values[2 * t + i % 2 + i / 2 * 8][At::value_unit(2 * t, d / 8)];
    if constexpr (kFours == 2) return unit;
    const uint2 four = reinterpret_cast<const uint2*>(&unit)[d / 4 % 2];
    return make_uint4(four.x, four.y, 0, 0);
  }
};

}  // namespace step
}  // namespace nvfp4
