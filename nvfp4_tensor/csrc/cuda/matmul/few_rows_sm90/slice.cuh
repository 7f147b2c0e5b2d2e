// A warp's slice of x, plain or normed, to the fragments that it is multiplied as.
#pragma once

#include "cuda/block/elements.cuh"
#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/few_rows_sm90/shape.cuh"
#include "cuda/ptx/lanes.cuh"
#include "cuda/ptx/shared_sm90.cuh"

#if NVFP4_LARGE_SHARED_MEMORY

namespace nvfp4 {
namespace few_rows_sm90 {

// A warp's slice of x: b[unit][chunk][i][column] has 16 bytes of row 2 i + lane / 16 of a column's eight.
template <typename S>
__device__ __forceinline__ void fetch_slice(const Problem& p, int expert, int k0, int lane,
                                            uint4 (&b)[S::kUnits][2][4][S::kColumns]) {
  const int64_t row = static_cast<int64_t>(expert) * p.M + p.first_m + lane / 16;
  k0 += lane % 16 * 8;
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.x_row + k0;
#pragma unroll
  for (int unit = 0; unit < S::kUnits; ++unit)
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk)
#pragma unroll
      for (int column = 0; column < S::kColumns; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = column * 8 + 2 * i, k = (unit * 2 + chunk) * 128;
          b[unit][chunk][i][column] = make_uint4(0, 0, 0, 0);
          if (m + lane / 16 < p.some_m && k0 + k < p.K) {
            b[unit][chunk][i][column] = *reinterpret_cast<const uint4*>(x + m * p.x_row + k);
          }
        }
}

// Eight elements of 16 bits in a register quadruple.
template <typename T>
__device__ __forceinline__ void unpack(const uint4& from, float (&v)[8]) {
  T e[8];
  memcpy(e, &from, 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = to_float(e[i]);
}

template <typename T>
__device__ __forceinline__ uint4 packed(const float (&v)[8]) {
  T e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) e[i] = from_float<T>(v[i]);
  uint4 to;
  memcpy(&to, e, 16);
  return to;
}

// fetch_slice of the RMS norm of x. The warps of a row add its squares by way of `squares`, 16 floats each; one block
// writes the sum with the residual. Rows in no more slices than a block has warps.
template <typename T, typename S>
__device__ __forceinline__ void fetch_normed(const Problem& p, const Fused& fused, const Work& work, int group, int k0,
                                             uint32_t squares, int warp, int lane,
                                             uint4 (&b)[S::kUnits][2][4][S::kColumns]) {
  const int half = lane / 16, piece = lane % 16;
  k0 += piece * 8;
  const int64_t begin = static_cast<int64_t>(p.first_m + half) * p.K + k0;
  const uint16_t* const x = static_cast<const uint16_t*>(p.x) + (p.first_m + half) * p.x_row + k0;
  const uint16_t* const residual = fused.residual ? static_cast<const uint16_t*>(fused.residual) + begin : nullptr;
  uint16_t* const sum = fused.sum && blockIdx.y == 0 && group == 0 ? static_cast<uint16_t*>(fused.sum) + begin
                                                                   : nullptr;
  const auto each = [&](auto does) {
#pragma unroll
    for (int column = 0; column < S::kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) does(column, i, column * 8 + 2 * i);
  };
  const auto each_chunk = [&](auto does) {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) does(unit, chunk, (unit * 2 + chunk) * 128);
  };
  const auto load = [&](const uint16_t* from, int m, int k) {
    const bool inside = m + half < p.some_m && k0 + k < p.K;
    return inside ? *reinterpret_cast<const uint4*>(from + k) : make_uint4(0, 0, 0, 0);
  };
  each([&](int column, int i, int m) {
    float square = 0;
    if (m < p.some_m) {
      uint4 more[S::kUnits][2];
      each_chunk([&](int unit, int chunk, int k) {
        b[unit][chunk][i][column] = load(x + m * p.x_row, m, k);
        if (residual) more[unit][chunk] = load(residual + static_cast<int64_t>(m) * p.K, m, k);
      });
      each_chunk([&](int unit, int chunk, int k) {
        uint4& to = b[unit][chunk][i][column];
        float v[8], r[8];
        unpack<T>(to, v);
        if (fused.multiplier != 1.0f) {
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = to_float(from_float<T>(v[e] * fused.multiplier));
        }
        if (residual) {
          unpack<T>(more[unit][chunk], r);
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = to_float(from_float<T>(r[e] + v[e]));
        }
        to = packed<T>(v);
#pragma unroll
        for (int e = 0; e < 8; ++e) square += v[e] * v[e];
        if (sum && m + half < p.some_m && k0 + k < p.K) {
          *reinterpret_cast<uint4*>(sum + static_cast<int64_t>(m) * p.K + k) = to;
        }
      });
    } else {
      each_chunk([&](int unit, int chunk, int) { b[unit][chunk][i][column] = make_uint4(0, 0, 0, 0); });
    }
    if (m < p.some_m) {
      square = sum_of_lanes<16>(square);
      if (piece == 0) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + (warp * 16 + m + half) * 4), "f"(square) : "memory");
      }
    }
  });
  uint4 weight[S::kUnits][2];
  each_chunk([&](int unit, int chunk, int k) {
    weight[unit][chunk] = make_uint4(0, 0, 0, 0);
    if (k0 + k < p.K)
      weight[unit][chunk] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(fused.norm) + k0 + k);
  });
  asm volatile("bar.sync 1, %0;" ::"r"(work.warps_in_k * work.row_groups * 32) : "memory");
  each([&](int column, int i, int m) {
    if (m >= p.some_m) return;
    float square = 0;
    if (piece < work.warps_in_k) {
      const uint32_t from = squares + ((group * work.warps_in_k + piece) * 16 + m + half) * 4;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(square) : "r"(from) : "memory");
    }
    const float factor = rsqrtf(sum_of_lanes<16>(square) / p.K + fused.eps);
    each_chunk([&](int unit, int chunk, int) {
      uint4& to = b[unit][chunk][i][column];
      float v[8], w[8];
      unpack<T>(to, v);
      unpack<T>(weight[unit][chunk], w);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float one = v[e] * factor;
        if (fused.round_before_weight) one = to_float(from_float<T>(one));
        v[e] = one * (w[e] + fused.offset);
      }
      to = packed<T>(v);
    });
  });
}

// It as B fragments, turned by way of 2 KB of shared memory.
template <typename S>
__device__ __forceinline__ void turn_slice(int rows, int lane, uint32_t by, uint4 (&b)[S::kUnits][2][4][S::kColumns]) {
  // 16-byte chunk 4 t + w of row m goes to 4 t + (w + t + m % 2) % 4: no bank conflicts either way
  const int half = lane / 16, piece = lane % 16, g = lane / 4, t = lane % 4;
  const uint32_t to = by + half * 256 + (piece & 12) * 16 + (piece + piece / 4 + half) % 4 * 16;
#pragma unroll
  for (int unit = 0; unit < S::kUnits; ++unit)
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk)
#pragma unroll
      for (int column = 0; column < S::kColumns; ++column) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column * 8 + 2 * i < rows) store_shared_16(to + i * 512, b[unit][chunk][i][column]);
        }
        __syncwarp();
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (column * 8 + g < rows) v = load_shared_16(by + g * 256 + t * 64 + (w + t + g % 2) % 4 * 16);
          b[unit][chunk][w][column] = to_fragment(v);
        }
      }
}

}  // namespace few_rows_sm90
}  // namespace nvfp4

#endif
