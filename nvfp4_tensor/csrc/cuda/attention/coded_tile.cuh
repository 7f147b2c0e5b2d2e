// A tile of codes: copied to shared memory as it lies in memory, and a lane's part of it.
#pragma once

#include <cstddef>

#include "cuda/attention/pairs.cuh"
#include "cuda/attention/plain.cuh"

namespace nvfp4 {
namespace attention {

constexpr int kStages = 4;  // tiles of a warp in shared memory

// A tile of codes as it lies in memory.
template <int kDim>
struct CodedStage {
  uint8_t codes[2][kCodeTile * kDim / 2];  // keys, values
  uint8_t scales[2][kCodeTile * kDim / 16];
  uint8_t factors[2][kCodeTile];
};

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

}  // namespace attention
}  // namespace nvfp4
