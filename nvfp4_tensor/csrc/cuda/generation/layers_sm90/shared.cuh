// Barriers and tagged words of the persistent kernel, and the order in which x lies in shared memory.
#pragma once

#include "cuda/generation/layers_sm90/step.h"
#include "cuda/ptx/lanes.cuh"

namespace nvfp4 {
namespace layers_sm90 {

constexpr int kWarps = 16;  // that multiply and attend
constexpr int kAdders = 3;  // that add the sums of the others, and write results; one more warp copies weights
constexpr int kMultiplying = kWarps * 32, kThreads = kMultiplying + (kAdders + 1) * 32;
constexpr int kMultiplyingRegisters = 104, kAddingRegisters = 64;  // (16 * 104 + 4 * 64) * 32 = 20 * 96 * 32
constexpr int kTileRows = 16, kSlots = 6;
constexpr int kUnitElements = few_rows_sm90::kUnitElements, kUnitCodes = few_rows_sm90::kUnitCodes,
              kUnitScales = few_rows_sm90::kUnitScales;
constexpr int kStageCodes = kWarps * kUnitCodes, kStageScales = kWarps * kUnitScales;
constexpr int kZeros = 512;                   // bytes that are x where a lane has none
constexpr int kStaticBytes = 2 * kWarps * 4;  // of shared memory, beside the layout: sums of squares

// Shared memory, from a multiple of 1024 on.
struct Layout {
  uint32_t codes, scales, slots, x, zeros, copied, used, full, empty;

  __host__ __device__ Layout(uint32_t base, int depth, int x_bytes) {
    codes = base;
    scales = codes + depth * kStageCodes;
    slots = scales + depth * kStageScales;
    x = slots + kSlots * kWarps * kTileRows * 4;
    zeros = x + x_bytes;
    copied = zeros + kZeros;
    used = copied + 8 * depth;
    full = used + 8 * depth;
    empty = full + 8 * kSlots;
  }
  __host__ __device__ uint32_t end() const { return empty + 8 * kSlots; }
};

// Where element k of x lies, in elements: a lane's 16 bytes of codes are its A fragment, and x is permuted alike. Eight
// elements from k on are the 16 bytes from fragment_index(k) on, in the order 0 4 1 5 2 6 3 7.
__host__ __device__ inline int fragment_index(int k) {
  const int piece = k / 8, i = k % 8;
  return piece / 16 * 128 + piece % 4 * 32 + piece / 4 % 4 * 8 + i % 4 * 2 + i / 4;
}

#if NVFP4_LARGE_SHARED_MEMORY

template <int kBarrier, int kCount>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kCount) : "memory");
}
__device__ __forceinline__ void multiplying_barrier() { named_barrier<2, kMultiplying>(); }
// A value and the last 16 bits of its tag.
__device__ __forceinline__ uint32_t word_of(__nv_bfloat16 v, uint32_t tag) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(v)) << 16 | (tag & 0xFFFFu);
}
__device__ __forceinline__ bool has(uint32_t word, uint32_t tag) { return ((word ^ tag) & 0xFFFFu) == 0; }
__device__ __forceinline__ bool has(uint4 words, uint32_t tag) {
  return has(words.x, tag) && has(words.y, tag) && has(words.z, tag) && has(words.w, tag);
}
__device__ __forceinline__ float value_of(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ __forceinline__ void store_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_words(void* to, uint32_t a, uint32_t b) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_two_words(const void* from) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_words(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float await_value(const uint32_t* from, uint32_t tag) {
  uint32_t word = load_word(from);
  while (!has(word, tag)) word = load_word(from);
  return value_of(word);
}

__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_float(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared_bf16(uint32_t to, __nv_bfloat16 v) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(__bfloat16_as_ushort(v)) : "memory");
}

__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
// The values of four words.
__device__ __forceinline__ uint2 values_of(uint4 words) {
  return make_uint2(__byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632));
}
__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

#endif

}  // namespace layers_sm90
}  // namespace nvfp4
