// From a stage in shared memory to A fragments: a lane's two rows of w, 64 elements of K (half a stage) at a time,
// registers of four products. Lane t of a quad has elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16.
//
// Two ways. On an H200 at 14336 x 8192, M = 32, 64 and 128, with x permuted by a kernel before 42, 43 and 58 us; with x
// unpermuted 49, 48 and 62. With 4096 rows the permutation would be 28 of 1200 us, and the further instructions of the
// other way hide behind the products. (Permuted while it is copied: permute.cuh.)
#pragma once

#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/many_rows_sm90/schedule.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace many_rows {

// Of w, of a warp's 16; the lane's other row is kToOtherRow further.
__device__ __forceinline__ int first_row(int lane) { return lane / 4; }
constexpr int kToOtherRow = 8;
constexpr int kToOtherCodes = kToOtherRow * 64, kToOtherScales = kToOtherRow * 16;  // bytes of a stage: swizzled alike

// Where a stage has the scales of a row of the tile for its first half, or its second.
template <typename S>
__device__ __forceinline__ int scales_at(int row, int half) {
  return S::kScalesAt + row / kBand * 1024 + half * 512 + row % 32 * 16 + row % kBand / 32 * 4;
}

// x permuted: a lane has 32 elements of a stage, its quad's 32 t on, and decodes whole words.
template <typename S>
class PermutedStage {
 public:
  __device__ __forceinline__ PermutedStage() {
    const int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x / 32 * 16 + first_row(lane);
    codes_at_ = S::kCodesAt + row * 64 + (t ^ row / 2 % 4) * 16;
    scales_at_ = scales_at<S>(row, t / 2);
    selector_ = t % 2 ? 0x7362 : 0x5140;
    keep(codes_at_, scales_at_, selector_);
  }
  __device__ __forceinline__ void load_first(uint32_t stage) {
    const uint32_t code = stage + codes_at_, scale = stage + scales_at_;
    codes_[0] = load_shared_16(code);
    codes_[1] = load_shared_16(code + kToOtherCodes);
    const uint32_t first = load_shared_4(scale), other = load_shared_4(scale + kToOtherScales);
    scales_ = __byte_perm(first, other, selector_);
  }
  __device__ __forceinline__ void load_second(uint32_t) {}  // came with the first
  template <typename T>
  __device__ __forceinline__ void decode_first(uint32_t (&a)[16]) {
    scale_factors<T>(scales_, factors_);
#pragma unroll
    for (int row = 0; row < 2; ++row) decode_row<T>(row, codes_[row].x, codes_[row].y, factors_[row], a);
  }
  template <typename T>
  __device__ __forceinline__ void decode_second(uint32_t (&a)[16]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) decode_row<T>(row, codes_[row].z, codes_[row].w, factors_[2 + row], a);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void decode_row(int row, uint32_t low, uint32_t high, uint32_t factor,
                                                    uint32_t (&a)[16]) {
    const uint32_t words[2] = {low, high};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t w[4];
      decode_word<T>(words[word], factor, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[word * 8 + i / 2 * 4 + i % 2 * 2 + row] = w[i];
    }
  }

  uint32_t codes_at_, scales_at_, selector_;
  uint4 codes_[2];
  uint32_t scales_;      // of blocks 2 t and 2 t + 1: both rows' of one, then of the other
  uint32_t factors_[4];  // likewise
};

// x unpermuted: a lane needs byte t of each word of codes, so all four of a quad have the same words. Its two codes go
// to the two halves of a register, both into bits 4 to 7: 24 instructions for 8 codes, not 15.
template <typename S>
class PlainStage {
 public:
  __device__ __forceinline__ PlainStage() {
    const int row = threadIdx.x / 32 * 16 + first_row(threadIdx.x % 32), swizzle = row / 2 % 4 * 16;
    codes_at_ = S::kCodesAt + row * 64 + swizzle;
    scales_at_ = scales_at<S>(row, 0);
    my_byte_ = threadIdx.x % 4 * 0x0101 + 0x0400;  // the shifted word's to byte 0, the word's to 2
    keep(codes_at_, scales_at_, my_byte_);
  }
  __device__ __forceinline__ void load_first(uint32_t stage) { load(stage, 0); }
  __device__ __forceinline__ void load_second(uint32_t stage) { load(stage, 1); }
  template <typename T>
  __device__ __forceinline__ void decode_first(uint32_t (&a)[16]) const {
    decode<T>(a);
  }
  template <typename T>
  __device__ __forceinline__ void decode_second(uint32_t (&a)[16]) const {
    decode<T>(a);
  }

 private:
  __device__ __forceinline__ void load(uint32_t stage, int half) {
    const uint32_t first = (stage + codes_at_) ^ half * 32, second = first ^ 16;  // of 64 bytes that begin at such
    const uint32_t scale = stage + scales_at_ + half * 512;
    codes_[0][0] = load_shared_16(first), codes_[0][1] = load_shared_16(second);
    codes_[1][0] = load_shared_16(first + kToOtherCodes), codes_[1][1] = load_shared_16(second + kToOtherCodes);
    scales_[0] = load_shared_4(scale), scales_[1] = load_shared_4(scale + kToOtherScales);
  }
  template <typename T>
  __device__ __forceinline__ void decode(uint32_t (&a)[16]) const {
    uint32_t factors[2][2];  // of each 16 elements for both rows
    scale_factor_pairs<T>(__byte_perm(scales_[0], scales_[1], 0x5140), factors[0]);
    scale_factor_pairs<T>(__byte_perm(scales_[0], scales_[1], 0x7362), factors[1]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint4 c[2] = {codes_[row][0], codes_[row][1]};
      const uint32_t words[8] = {c[0].x, c[0].y, c[0].z, c[0].w, c[1].x, c[1].y, c[1].z, c[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t both = __byte_perm(words[i] << 4, words[i], my_byte_), pair = factors[i / 4][i / 2 % 2];
        const uint32_t factor = row == 0 ? low_in_both(pair) : high_in_both(pair);
        a[i / 2 * 4 + i % 2 * 2 + row] = Decoder<T>::multiply(Decoder<T>::spread_second(both), factor);
      }
    }
  }

  uint32_t codes_at_, scales_at_, my_byte_;
  uint4 codes_[2][2];  // of the half that was loaded last
  uint32_t scales_[2];
};

}  // namespace many_rows
}  // namespace nvfp4
