// x in the order in which PermutedStage decodes w: by a kernel before, or by the producer's warps.
//
// The order of K inside a product is free. Lane t of a quad holds elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each
// 16; for its 16 bytes of codes to be that in memory order, element k = 32 t + 8 w + e of each 128 of x goes to
// 16 (2 w + e % 4 / 2) + 2 t + 8 (e % 2) + e / 4.
//
// The kernel before costs a launch and less than 1 us, the warps that copy some 4 cycles a row of x and stage, which
// the loop does not hide (they take the products' path to shared memory). So it is for tiles of 16 and 32 rows (H200,
// us single and in a chain, before -> so: 4096 x 4096 15.1, 10.3 -> 13.7, 8.8; 3584 x 3584 14.7, 9.7 -> 13.3, 8.4; but
// 64 of 4096 x 4096 16.4, 10.6 -> 16.6, 11.0, of 4096 x 14336 26.8, 21.1 -> 29.8, 24.2).
#pragma once

#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/many_rows_sm90/shapes.h"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kPermuteThreads = 128;  // each with 32 elements
constexpr int kPermuteK = kPermuteThreads * 32;
// Shared memory that keeps all but a few of its blocks off a multiprocessor. It begins before the kernel before it
// ends, on the multiprocessors which that one leaves free; those are few, and took half of its blocks. H200, us in a
// chain, beginning after that kernel -> before its end -> so kept, to three: 4096 x 4096, M = 128 14.9 -> 16.4 -> 14.1
// (it leaves 4), 7168 x 2048, M = 96 13.6 -> 12.5 -> 12.3 (20). Here it is four, for which a kernel need not ask.
constexpr int kPermuteSpare = 40 << 10;
constexpr int kWarpWords = 512;
static_assert(kPermuteThreads / 32 * kWarpWords * 4 + kPermuteSpare <= 48 << 10,
              "a kernel has 48 KB of shared memory without asking for more");

// One block for kPermuteK elements of a row. Both memory accesses are contiguous: a warp's 2 KB turn around in shared
// memory, whose 16-byte units are swizzled against bank conflicts. (Without: 61 us instead of 33 for 4096 x 8192.)
__global__ void __launch_bounds__(kPermuteThreads) permute_x(const __grid_constant__ Problem p, uint4* out) {
  __shared__ uint32_t words[kPermuteThreads / 32][kWarpWords];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, units = (p.K + kStageK - 1) / kStageK * 16;
  const int first = (blockIdx.y * (kPermuteThreads / 32) + warp) * 128;  // units of 16 bytes
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) | (p.x_row * 2)) % 16 == 0;
  const uint16_t* from = static_cast<const uint16_t*>(p.x) + row * p.x_row;
  const auto swizzled = [](int unit) { return unit ^ (unit >> 3 & 3); };
  uint4 v[4];
  if (aligned && (first + 128) * 8 <= p.K) {  // all loads under way at once
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(from + (first + i * 32 + lane) * 8);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = load_x(p, from, (first + i * 32 + lane) * 8, aligned);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 pairs = to_fragment(v[i]);
    const uint32_t word[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    const int t = lane % 16 / 4, w = lane % 4, to = (i * 2 + lane / 16) * 16 + w * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[warp][swizzled(to + j) * 4 + t] = word[j];
  }
  __syncwarp();
  out += row * units + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int unit = i * 32 + lane;
    if (first + unit < units) out[unit] = *reinterpret_cast<const uint4*>(words[warp] + swizzled(unit) * 4);
  }
}

// 16 bytes, or zeros. No constant load: those may come before the wait for the kernel that writes x.
__device__ __forceinline__ uint4 load_if(bool there, const uint16_t* from) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"(static_cast<int>(there))
               : "memory");
  return v;
}

// A stage of x from row `row` on, permuted by a warp on its way through registers, into the 128-byte swizzle in which
// TMA would have brought it. A lane has elements 8 w..8 w + 7 of each 32 of a token, four chunks of 16
// bytes that become four others. All loads are under way at once.
template <int kTokens>
__device__ __forceinline__ void permute_stage(const Problem& p, int row, int step, uint32_t at) {
  constexpr int kTimes = kTokens / 8;
  // Eight lanes read whole sectors of four rows, and write to all banks.
  const int lane = threadIdx.x % 32, token = lane / 16 * 4 + lane / 2 % 4, w = lane % 2 + lane / 8 % 2 * 2;
  const int k = step * kStageK + w * 8;
  uint4 v[kTimes][4];
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    // beyond the last row: its sum is not written
    const int64_t of = min(row + i * 8 + token, p.rows - 1);
    const uint16_t* from = static_cast<const uint16_t*>(p.x) + of * p.x_row + k;
#pragma unroll
    for (int t = 0; t < 4; ++t) v[i][t] = load_if(k + 32 * t < p.K, from + 32 * t);
  }
  const uint32_t to = at + w / 2 * (kTokens * kStageK) + token * 128, piece = (w % 2 * 4 ^ token) * 16;
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    uint4 pairs[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) pairs[t] = to_fragment(v[i][t]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto word = [&](int t) { return (&pairs[t].x)[j]; };
      store_shared_16(to + i * 1024 + (piece ^ j * 16), make_uint4(word(0), word(1), word(2), word(3)));
    }
  }
}

// x with rows of a multiple of 16 bytes, which copies need, and zeros up to the next stage; a thread moves 8 elements.
__global__ void __launch_bounds__(128) align_x(const __grid_constant__ Problem p, uint4* out) {
  const int units = (p.K + kStageK - 1) / kStageK * (kStageK / 8), unit = blockIdx.y * 128 + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = blockIdx.x;
  out[row * units + unit] = load_x(p, static_cast<const uint16_t*>(p.x) + row * p.x_row, unit * 8, false);
}

}  // namespace many_rows
}  // namespace nvfp4
