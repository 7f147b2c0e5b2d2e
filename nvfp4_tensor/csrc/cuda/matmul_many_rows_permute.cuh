// x in the order in which PermutedHalf decodes w.
//
// The order of K inside a product is free. Lane t of a quad holds elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each
// 16; for its 16 bytes of codes to be that as they lie, element k = 32 t + 8 w + e of each 128 of x goes to
// 16 (2 w + e % 4 / 2) + 2 t + 8 (e % 2) + e / 4.
#pragma once

#include "matmul_decode.cuh"

namespace nvfp4 {
namespace many_rows {

constexpr int kStageK = 128;          // what is permuted, and a stage of the pipeline: two column tiles of scales
constexpr int kPermuteThreads = 128;  // each with 32 elements
constexpr int kPermuteK = kPermuteThreads * 32;

// One block for kPermuteK elements of a row. Both memory accesses are contiguous: a warp's 2 KB turn around in shared
// memory, whose 16-byte units are swizzled against bank conflicts. (Without: 61 us instead of 33 for 4096 x 8192.)
__global__ void __launch_bounds__(kPermuteThreads)
    permute_x(const __grid_constant__ Problem p, uint4* out) {
  __shared__ uint32_t words[kPermuteThreads / 32][512];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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

// x with rows of a multiple of 16 bytes, which copies need, and zeros up to the next stage; a thread moves 8 elements.
__global__ void __launch_bounds__(128) align_x(const __grid_constant__ Problem p, uint4* out) {
  const int units = (p.K + kStageK - 1) / kStageK * (kStageK / 8), unit = blockIdx.y * 128 + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = blockIdx.x;
  out[row * units + unit] = load_x(p, static_cast<const uint16_t*>(p.x) + row * p.x_row, unit * 8, false);
}

}  // namespace many_rows
}  // namespace nvfp4
