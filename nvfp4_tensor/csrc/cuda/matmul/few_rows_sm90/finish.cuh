// What becomes of a tile's sums: scaled, biased and rounded, or also gated, and written.
#pragma once

#include "cuda/block/elements.cuh"
#include "cuda/generation/gate.cuh"
#include "cuda/matmul/decode.cuh"
#include "cuda/matmul/few_rows_sm90/shape.cuh"
#include "cuda/ptx/shared_sm90.cuh"

#if NVFP4_LARGE_SHARED_MEMORY

namespace nvfp4 {
namespace few_rows_sm90 {

// The lane's first row of a tile, counted in its band; the other one is at this ^ 32. Neighbouring lane groups differ
// in bit 5, so that what eight lanes read at once of a copy in the engine's 128-byte swizzle lies in different banks.
__device__ __forceinline__ int row_in_band(uint32_t tile, int lane) {
  const int g = lane / 4;
  return tile % kTilesPerBand * 4 + g % 4 + g / 4 * 64 + g % 2 * 32;
}

// Writes a tile of y: sum[column] has its columns n and n ^ 32, rows 8 column + 2 (lane % 4) and the next.
template <typename T, typename S, typename Value>
__device__ __forceinline__ void write_tile(const Problem& p, int expert, int n, int lane,
                                           const float4 (&sum)[S::kColumns], Value value) {
  const int64_t row = static_cast<int64_t>(expert) * p.M + p.first_m;
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = column * 8 + lane % 4 * 2 + i;
      if (m < p.some_m) {
        T* to = static_cast<T*>(p.y) + (row + m) * p.y_row + n;
        to[0] = from_float<T>(value(m, n, i ? sum[column].y : sum[column].x));
        to[(n ^ 32) - n] = from_float<T>(value(m, n ^ 32, i ? sum[column].w : sum[column].z));
      }
    }
  }
}

template <typename T, typename S>
__device__ __forceinline__ void to_one(float4 (&sum)[S::kColumns]) {
  constexpr float kToOne = 1.0f / Decoder<T>::kUnit;
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) {
    sum[column].x *= kToOne, sum[column].y *= kToOne, sum[column].z *= kToOne, sum[column].w *= kToOne;
  }
}

template <typename T, typename S>
__device__ __forceinline__ void finish_tile(const Problem& p, int expert, uint32_t tile, int lane, bool uniform,
                                            float alpha, float4 (&sum)[S::kColumns]) {
  to_one<T, S>(sum);
  const int n = tile / kTilesPerBand * 128 + row_in_band(tile, lane) - expert * p.N;
  if (uniform && p.y_dtype == p.x_dtype) {
    write_tile<T, S>(p, expert, n, lane, sum, [&](int, int, float v) { return __fmul_rn(v, alpha); });
  } else {
    const auto finished = [&](int m, int n, float v) { return finish(p, expert, p.first_m + m, n, v); };
    switch (p.y_dtype) {
      case Dtype::kBf16: write_tile<__nv_bfloat16, S>(p, expert, n, lane, sum, finished); break;
      case Dtype::kFp16: write_tile<__half, S>(p, expert, n, lane, sum, finished); break;
      case Dtype::kFloat: write_tile<float, S>(p, expert, n, lane, sum, finished); break;
    }
  }
}

// A tile's sums as the product has them: scaled, biased and rounded.
template <typename T, typename S>
__device__ __forceinline__ void round_tile(const Problem& p, uint32_t tile, int lane, bool uniform, float alpha,
                                           float4 (&sum)[S::kColumns]) {
  to_one<T, S>(sum);
  const int n = tile / kTilesPerBand * 128 + row_in_band(tile, lane);
  const auto value = [&](int m, int n, float v) {
    return to_float(from_float<T>(uniform ? __fmul_rn(v, alpha) : finish(p, 0, p.first_m + m, n, v)));
  };
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) {
    const int m = column * 8 + lane % 4 * 2;
    float4& v = sum[column];
    v = make_float4(value(m, n, v.x), value(m + 1, n, v.y), value(m, n ^ 32, v.z), value(m + 1, n ^ 32, v.w));
  }
}

// activation(gate) * up.
template <typename T, typename S>
__device__ __forceinline__ void write_gated(const Problem& p, const Fused& fused, uint32_t tile, int lane,
                                            const float4 (&gate)[S::kColumns], const float4 (&up)[S::kColumns]) {
  const auto y = [&](float gate, float up) {
    return step::gate_of<T>(gate, up, fused.activation, fused.limit, fused.alpha);
  };
  float4 out[S::kColumns];
#pragma unroll
  for (int column = 0; column < S::kColumns; ++column) {
    const float4 &g = gate[column], &u = up[column];
    out[column] = make_float4(y(g.x, u.x), y(g.y, u.y), y(g.z, u.z), y(g.w, u.w));
  }
  const int n = tile / kTilesPerBand * 128 + row_in_band(tile, lane);
  write_tile<T, S>(p, 0, n, lane, out, [](int, int, float v) { return v; });
}

}  // namespace few_rows_sm90
}  // namespace nvfp4

#endif
