// What the sources of a CUDA kernel need to run on a CPU, lane by lane: a fiber for each thread of a block, and
// stand-ins for the instructions and headers that are not there. Warps meet at their collective instructions only, so
// that an access to shared memory which lacks a barrier may still read what it should: this finds wrong indices, masks
// and sums, and no races.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Index {
  int x, y, z;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- fibers ---------------------------------------------------------------------------------------------------------

namespace fibers {

constexpr int kThreads = 512, kStack = 1 << 17, kMostTurns = 2000000;
inline ucontext_t scheduler, contexts[kThreads];
inline std::vector<std::vector<char>> stacks(kThreads, std::vector<char>(kStack));
inline bool done[kThreads];
inline int current;
inline std::function<void()> body;

inline void give_way() { swapcontext(&contexts[current], &scheduler); }
inline void enter() { body(), done[current] = true; }

struct Barrier {
  int threads, arrived = 0;
  unsigned phase = 0;

  void wait() {
    const unsigned mine = phase;
    if (++arrived == threads) {
      arrived = 0, ++phase;
    } else {
      while (phase == mine) give_way();
    }
  }
};

inline Barrier of_warp[kThreads / 32], of_block;

}  // namespace fibers

inline Index threadIdx, blockIdx;
alignas(1024) inline uint8_t shared_memory[227 * 1024];

inline void run_block(int block, std::function<void()> body) {
  using namespace fibers;
  fibers::body = std::move(body), blockIdx = {block, 0, 0};
  for (Barrier& each : of_warp) each = {32};
  of_block = {kThreads};
  std::memset(shared_memory, 0xFF, sizeof(shared_memory));  // NaN
  for (int i = 0; i < kThreads; ++i) {
    done[i] = false;
    getcontext(&contexts[i]);
    contexts[i].uc_stack = {stacks[i].data(), 0, stacks[i].size()};
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], enter, 0);
  }
  for (int turn = 0; std::count(done, done + kThreads, true) < kThreads; ++turn) {
    if (turn == kMostTurns) std::puts("threads wait for each other"), std::exit(1);
    for (int i = 0; i < kThreads; ++i) {
      if (done[i]) continue;
      current = i, threadIdx = {i, 0, 0};
      swapcontext(&scheduler, &contexts[i]);
    }
  }
}

// --- a warp's instructions ------------------------------------------------------------------------------------------

namespace warp {

inline uint32_t words[fibers::kThreads / 32][32][6];
inline int lane() { return threadIdx.x % 32; }
inline void meet() { fibers::of_warp[threadIdx.x / 32].wait(); }
inline uint32_t (&mine())[32][6] { return words[threadIdx.x / 32]; }

template <typename T>
T from_lane(T v, int lane_of) {
  std::memcpy(mine()[lane()], &v, sizeof(T));
  meet();
  T other;
  std::memcpy(&other, mine()[lane_of], sizeof(T));
  meet();
  return other;
}

}  // namespace warp

inline void __syncwarp() { warp::meet(); }
template <typename T>
T __shfl_xor_sync(uint32_t, T v, int distance) {
  return warp::from_lane(v, warp::lane() ^ distance);
}
template <typename T>
T __shfl_sync(uint32_t, T v, int lane) {
  return warp::from_lane(v, lane);
}
inline bool __any_sync(uint32_t, bool v) {
  warp::mine()[warp::lane()][0] = v;
  warp::meet();
  const bool any = std::any_of(warp::mine(), warp::mine() + 32, [](const auto& its) { return its[0] != 0; });
  warp::meet();
  return any;
}

// --- arithmetic -----------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half) { std::abort(); }  // the kernel is bfloat16's
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}

namespace nvfp4 {

constexpr int kBlock = 16;

inline float bits_float(uint32_t bits) { return __uint_as_float(bits); }
inline uint32_t pack(float low, float high) {
  return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
inline float half_of(uint32_t pair, int which) { return __uint_as_float(which ? pair & 0xFFFF0000u : pair << 16); }
inline float e4m3(uint32_t byte) {
  if (byte >= 0x7F) return NAN;
  const int exponent = byte >> 3;
  return exponent ? std::ldexp(1.0f + byte % 8 / 8.0f, exponent - 7) : std::ldexp(byte % 8 / 8.0f, -6);
}
inline float e2m1(uint32_t code) {
  constexpr float kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

// cuda/matmul/decode.cuh: E2M1 x block scale x kUnit, exact in bfloat16. A factor is what the scale is times 2^118.
template <typename T>
struct Decoder {
  static constexpr float kUnit = 0x1p-8f;
};
template <typename T>
void decode_word(uint32_t word, uint32_t factor, uint32_t (&out)[4]) {
  for (int i = 0; i < 4; ++i) {
    const auto value = [&](int code, int which) {
      return e2m1(word >> 4 * code & 15) * std::ldexp(half_of(factor, which), -126);
    };
    out[i] = pack(value(i, 0), value(i + 4, 1));
  }
}
template <typename T>
void scale_factor_pairs(uint32_t bytes, uint32_t (&out)[2]) {
  const auto factor = [&](int i) { return std::ldexp(e4m3(bytes >> 8 * i & 0xFF), 118); };
  out[0] = pack(factor(0), factor(1)), out[1] = pack(factor(2), factor(3));
}
template <typename T>
void scale_factors(uint32_t bytes, uint32_t (&out)[4]) {
  for (int i = 0; i < 4; ++i) {
    const float factor = std::ldexp(e4m3(bytes >> 8 * i & 0xFF), 118);
    out[i] = pack(factor, factor);
  }
}
inline uint4 to_fragment(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

// mma.m16n8k16, by PTX's tables of fragments.
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  auto& words = warp::mine();
  std::copy(a, a + 4, words[warp::lane()]), words[warp::lane()][4] = b0, words[warp::lane()][5] = b1;
  warp::meet();
  for (int i = 0; i < 4; ++i) {
    const int row = warp::lane() / 4 + i / 2 * 8, column = warp::lane() % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      sum += static_cast<double>(half_of(left, k % 2)) * half_of(words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  warp::meet();
}

// --- memory ---------------------------------------------------------------------------------------------------------

template <typename T>
T load_shared(uint32_t from) {
  if (from % sizeof(T) != 0 || from + sizeof(T) > sizeof(shared_memory)) std::puts("bad address"), std::abort();
  T v;
  std::memcpy(&v, shared_memory + from, sizeof(T));
  return v;
}
template <typename T>
void store_shared(uint32_t to, T v) {
  if (to % sizeof(T) != 0 || to + sizeof(T) > sizeof(shared_memory)) std::puts("bad address"), std::abort();
  std::memcpy(shared_memory + to, &v, sizeof(T));
}
inline uint4 load_shared_16(uint32_t from) { return load_shared<uint4>(from); }
inline uint32_t load_shared_4(uint32_t from) { return load_shared<uint32_t>(from); }
inline void bulk_prefetch(const void*, uint32_t bytes) {
  if (bytes % 16 != 0) std::puts("a prefetch of no multiple of 16 bytes"), std::abort();
}

template <typename T>
uint32_t packed_pair(float low, float high) {
  return pack(low, high);
}
template <int kLanes = 32>
float sum_of_lanes(float v) {
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

namespace attention {

constexpr float kLog2E = 1.4426950408889634f, kNothing = -3.402823466e38f;
constexpr int kCodeTile = 16;
using Bf16 = __nv_bfloat16;

struct CodedRows {
  uint8_t *codes, *scales, *factors;
};
struct AttendCodes {
  int tokens;
};
struct Range {
  int begin, end;
  Range(int64_t, int64_t, int) { std::abort(); }
};
struct Sight {  // of windows, which this attention has not
  int64_t from(int) const { std::abort(); }
  int64_t to(int) const { std::abort(); }
  Range seen(int64_t, int) const { std::abort(); }
};

inline float factor_of(uint32_t byte) { return bits_float(byte << 23); }
inline float exp2_of(float v) { return std::exp2(v); }
inline uint32_t transposed(uint32_t v) {  // movmatrix: 8 x 8, two columns a lane
  auto& words = warp::mine();
  words[warp::lane()][0] = v;
  warp::meet();
  const int row = warp::lane() / 4, column = warp::lane() % 4 * 2;
  const auto at = [&](int r, int c) { return words[r * 4 + c / 2][0] >> 16 * (c % 2) & 0xFFFF; };
  const uint32_t out = at(column, row) | at(column + 1, row) << 16;
  warp::meet();
  return out;
}

}  // namespace attention

namespace layers_sm90 {

constexpr int kWarps = 16, kMultiplying = kWarps * 32;

struct Layer {
  const __nv_bfloat16* head_norms[2];
  __nv_bfloat16 *keys, *values;
  attention::CodedRows coded[2];
  const __nv_bfloat16* front[2];
};
struct Step {
  const __nv_bfloat16 *cos, *sin;
  const int64_t* position;
  uint32_t *qkv, *attended;
  uint4* partials;
  float eps, scaling;
  int heads, kv_heads, length, splits, capacity, front;
  bool is_rotated;
};

inline void multiplying_barrier() { fibers::of_block.wait(); }
inline int fragment_index(int k) { return k; }
inline uint32_t word_of(__nv_bfloat16 v, uint32_t tag) { return static_cast<uint32_t>(v.bits) << 16 | tag; }
inline bool has(uint32_t word, uint32_t tag) { return (word & 0xFFFFu) == tag; }
inline float value_of(uint32_t word) { return bits_float(word & 0xFFFF0000u); }
inline void store_word(uint32_t* to, uint32_t word) { *to = word; }
inline void store_words(void* to, uint32_t a, uint32_t b) { std::memcpy(to, std::vector{a, b}.data(), 8); }
inline uint32_t load_word(const uint32_t* from) { return *from; }
inline uint2 load_two_words(const void* from) { return *static_cast<const uint2*>(from); }
inline uint4 load_words(const void* from) { return *static_cast<const uint4*>(from); }
inline float await_value(const uint32_t* from, uint32_t tag) {
  if (!has(*from, tag)) std::puts("a word that nobody writes"), std::abort();
  return value_of(*from);
}
inline float load_shared_float(uint32_t from) { return load_shared<float>(from); }
inline void store_shared_float(uint32_t to, float v) { store_shared(to, v); }
inline void store_shared_bf16(uint32_t to, __nv_bfloat16 v) { store_shared(to, v); }
inline float low_float(uint32_t pair) { return half_of(pair, 0); }
inline float high_float(uint32_t pair) { return half_of(pair, 1); }
inline float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

}  // namespace layers_sm90
}  // namespace nvfp4
