// A tile of codes: copied to shared memory as it lies in memory, and a lane's part of it.
#pragma once

#include "cuda/attention/pairs.cuh"
#include "cuda/attention/plain.cuh"

namespace nvfp4 {
namespace attention {

constexpr int kStages = 4;  // tiles of a warp in shared memory

// Which elements a lane has. Of keys, words of 8 elements, which t = lane % 4 has side by side; of values, halves of
// words, 4 elements, which g = lane / 4 has side by side. Heads of 96, whose quarters and eighths are no whole blocks
// or words, deal both out in turn.
template <int kDim>
struct LaneElements {
  static constexpr bool kInTurn = kDim == 96;
  static constexpr int kKeyWords = kDim / 32, kValueHalves = kDim / 32;

  __device__ __forceinline__ static int key(int t, int word) {
    return kInTurn ? 32 * word + 8 * t : t * (kDim / 4) + 8 * word;
  }
  __device__ __forceinline__ static int value(int g, int half) {
    return kInTurn ? 32 * half + 4 * g : g * (kDim / 8) + 4 * half;
  }
};

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
  static constexpr int kScalePieces = kScales / 16;      // of keys, or of values
  static constexpr int kEach = (kCodes / 16 + 31) / 32;  // pieces of codes of a lane
  static constexpr bool kAreWhole = kCodes % 512 == 0;   // of each lane as many
  static constexpr int kPieces = 2 * kScalePieces + 2;
  static constexpr int kRest = (kPieces + 31) / 32;
  static_assert(kCodes % 16 == 0 && kScales % 16 == 0);

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
      if (!kAreWhole && i == kEach - 1 && threadIdx.x % 32 >= kCodes / 16 % 32) break;
      cp_async_16(to + offset + i * 512, keys + at + i * 512, 16);
      cp_async_16(to + offset + kCodes + i * 512, values + at + i * 512, 16);
    }
#pragma unroll
    for (int i = 0; i < kRest; ++i) {
      if (rest[i]) cp_async_16(rest_to[i] + offset, rest[i] + static_cast<int64_t>(tile) * rest_step[i], 16);
    }
  }
};

// Of a token's codes and scales, what a lane has: kPieces of kBytes, element(i) the first of a piece. Unless they are
// dealt out in turn, they lie side by side, and so do their scales.
template <int kDim, int kPieces, int kBytes, int kScales, int kWords, typename Element>
__device__ __forceinline__ void load_token(const uint8_t* codes, const uint8_t* scales, Element element,
                                           uint32_t (&code)[kWords], uint32_t& scale) {
  uint32_t bytes[1];
  if constexpr (!LaneElements<kDim>::kInTurn) {
    load_bytes<kPieces * kBytes>(codes + element(0) / 2, code);
    load_bytes<kScales>(scales + element(0) / kBlock, bytes);
    scale = bytes[0];
  } else {
    scale = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) code[j] = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_bytes<kBytes>(codes + element(i) / 2, bytes);
      code[i * kBytes / 4] |= bytes[0] << (8 * (i * kBytes % 4));
      scale |= static_cast<uint32_t>(scales[element(i) / kBlock]) << (8 * i);
    }
  }
}

// A lane's part of a tile. Of K tokens g and g + 8, of V 2t, 2t + 1, 2t + 8 and 2t + 9 (lane = 4g + t).
template <int kDim>
struct CodedKeys {
  using Lane = LaneElements<kDim>;
  static constexpr int kWords = Lane::kKeyWords, kScales = Lane::kInTurn ? kWords : kDim / 64;
  uint32_t code[2][kWords], scale[2];  // the bytes of the scales of the words, or of two words each
  uint32_t factor_byte[2];

  __device__ __forceinline__ CodedKeys() {}
  __device__ __forceinline__ CodedKeys(const CodedStage<kDim>& stage, int lane) {
    load(stage.codes[0], stage.scales[0], stage.factors[0], lane);
  }
  __device__ __forceinline__ float factor(int i) const { return factor_of(factor_byte[i]); }

  // Of a tile that begins there.
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scales, const uint8_t* factors, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane / 4 + 8 * i;
      load_token<kDim, kWords, 4, kScales>(
          codes + token * (kDim / 2), scales + token * (kDim / kBlock),
          [&](int word) { return Lane::key(lane % 4, word); }, code[i], scale[i]);
      factor_byte[i] = factors[token];
    }
  }
};

template <int kDim>
struct CodedValues {
  using Lane = LaneElements<kDim>;
  static constexpr int kHalves = Lane::kValueHalves, kWords = (kHalves + 1) / 2;
  static constexpr int kScales = Lane::kInTurn ? kHalves : kDim == 256 ? 2 : 1;
  uint32_t code[4][kWords], scale[4];
  uint32_t factor_byte[2];  // of tokens g and g + 8

  __device__ __forceinline__ CodedValues() {}
  __device__ __forceinline__ CodedValues(const CodedStage<kDim>& stage, int lane) {
    load(stage.codes[1], stage.scales[1], stage.factors[1], lane);
  }
  __device__ __forceinline__ float factor(int i) const { return factor_of(factor_byte[i]); }
  __device__ __forceinline__ static int token(int i, int lane) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; }

  // Of a tile that begins there.
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scales, const uint8_t* factors, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_token<kDim, kHalves, 2, kScales>(
          codes + token(i, lane) * (kDim / 2), scales + token(i, lane) * (kDim / kBlock),
          [&](int half) { return Lane::value(lane / 4, half); }, code[i], scale[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor_byte[i] = factors[lane / 4 + 8 * i];
  }
  // What lies outside of [begin, end) of the tile may hold NaN.
  __device__ __forceinline__ void clear_outside(int begin, int end, int lane) {
    const auto clear = [&](int token, uint32_t& its) {
      if (token < begin || token >= end) its = 0;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) clear(token(i, lane), scale[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) clear(lane / 4 + 8 * i, factor_byte[i]);
  }
};

}  // namespace attention
}  // namespace nvfp4
