// Elements in registers: 16-byte loads of bfloat16, float16 and float32, a block's amax, its values and its signs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "numerics/platform.h"

namespace nvfp4 {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same_v<T, float>) return v;
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(v);
}

// Two of T in a word, to nearest; a in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t packed_pair(float a, float b) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    memcpy(&word, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    memcpy(&word, &pair, 4);
  }
  return word;
}

// The magnitude bits of infinity: below it, all is finite.
template <typename T>
constexpr uint32_t kInfinity = std::is_same_v<T, float>    ? 0x7F800000u
                               : std::is_same_v<T, __half> ? 0x7C00u
                                                           : 0x7F80u;

// The magnitudes of two packed elements. For bfloat16 nvcc makes it an HFMA2, which leaves the busier ALU pipe alone.
template <typename T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 v;
    memcpy(&v, &pair, 4);
    v = __habs2(v);
    memcpy(&pair, &v, 4);
    return pair;
  } else {
    return pair & 0x7FFF7FFFu;
  }
}

// kConstant: no kernel writes the memory while this one runs, so the compiler may move the load. kAfterWait: the
// previous kernel may still write it when this one begins, so the load stays after the wait.
enum class Read { kConstant, kAfterWait };

// N consecutive elements, in memory order.
template <typename T, int N>
struct Elements {
  static constexpr bool kPacked = sizeof(T) == 2;  // two elements a word
  static constexpr int kWords = N * sizeof(T) / 4;
  uint32_t word[kWords];

  template <Read read = Read::kConstant>
  __device__ __forceinline__ static Elements load(const T* from) {
    Elements e;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4* at = reinterpret_cast<const uint4*>(from) + i;
      const uint4 v = read == Read::kConstant ? __ldg(at) : *at;
      e.word[4 * i] = v.x, e.word[4 * i + 1] = v.y, e.word[4 * i + 2] = v.z, e.word[4 * i + 3] = v.w;
    }
    return e;
  }

  __device__ __forceinline__ static Elements zero() {
    Elements e;
#pragma unroll
    for (int i = 0; i < kWords; ++i) e.word[i] = 0;
    return e;
  }

  // Of bfloat16, rounded.
  __device__ __forceinline__ static Elements of(const float (&v)[N]) {
    Elements e;
#pragma unroll
    for (int i = 0; i < kWords; ++i) e.word[i] = packed_pair<T>(v[2 * i], v[2 * i + 1]);
    return e;
  }

  // Where 16-byte stores take them.
  __device__ __forceinline__ void store(uint4* to) const {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i)
      to[i] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
  }

  __device__ __forceinline__ float value(int i) const {
    if constexpr (!kPacked) {
      return bits_float(word[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return bits_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
    } else {
      return to_float(__ushort_as_half(static_cast<uint16_t>(i % 2 ? word[i / 2] >> 16 : word[i / 2])));
    }
  }

  // The magnitude of element i of a block without NaN or Inf. Of bfloat16's odd elements the lower half of the word is
  // multiplied away, by a pipe that is less busy than the one with logic: 1 to 3 % of the stochastic kernels' time.
  __device__ __forceinline__ float magnitude(int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (i % 2) {
        uint32_t high;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(word[i / 2]), "r"(0x3F800000u), "r"(0u));
        return fabsf(bits_float(high));
      }
    }
    return fabsf(value(i));
  }

  // The bits of the largest magnitude, as an integer of T's width: ordered like the magnitudes, NaN and Inf on top.
  __device__ __forceinline__ uint32_t amax_bits() const {
    if constexpr (kPacked) {
      uint32_t most = magnitudes<T>(word[0]);
#pragma unroll
      for (int i = 1; i < kWords; ++i) most = __vmaxu2(most, magnitudes<T>(word[i]));
      return max(most & 0xFFFFu, most >> 16);
    } else {
      uint32_t most = word[0] & 0x7FFFFFFFu;
#pragma unroll
      for (int i = 1; i < kWords; ++i) most = max(most, word[i] & 0x7FFFFFFFu);
      return most;
    }
  }

  __device__ __forceinline__ static float magnitude_of(uint32_t bits) {
    if constexpr (!kPacked) return bits_float(bits);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return bits_float(bits << 16);
    return to_float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }

  // The signs of elements first .. first + 7 in bits 3, 7, ..., 31.
  __device__ __forceinline__ uint32_t signs(int first) const {
    uint32_t even, odd;  // one element a byte, its sign in bit 7
    if constexpr (kPacked) {
      const uint32_t* w = word + first / 2;
      const uint32_t a = __byte_perm(w[0], w[1], 0x7351), b = __byte_perm(w[2], w[3], 0x7351);
      even = __byte_perm(a, b, 0x5410), odd = __byte_perm(a, b, 0x7632);
    } else {
      const uint32_t* w = word + first;
      even = __byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[4], w[6], 0x0073), 0x5410);
      odd = __byte_perm(__byte_perm(w[1], w[3], 0x0073), __byte_perm(w[5], w[7], 0x0073), 0x5410);
    }
    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
  }
};

// The largest finite magnitude, as bits of T's width. Only a group that shows a NaN or Inf is looked through element by
// element.
template <typename T, int N>
__device__ __forceinline__ uint32_t finite_amax_bits(const Elements<T, N>& x) {
  const uint32_t most = x.amax_bits();
  if (most < kInfinity<T>) return most;
  uint32_t finite = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = Elements<T, N>::kPacked ? x.word[i / 2] >> (i % 2 * 16) & 0x7FFFu : x.word[i] & 0x7FFFFFFFu;
    if (bits < kInfinity<T>) finite = max(finite, bits);
  }
  return finite;
}

}  // namespace nvfp4
