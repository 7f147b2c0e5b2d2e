// dequantize: one thread half a block, 4 bytes of codes in and 16 (32) bytes of bfloat16 (float32) out, so that both
// sides of a warp are contiguous; several such halves a turn, to have their loads in flight together.
#include "block.cuh"
#include "decode.cuh"

namespace nvfp4 {
namespace {

constexpr int kHalves = 4;  // a thread and turn

// A half block on its way: what is loaded of it, and where it goes.
struct Half {
  uint32_t row, half, codes;
  uint8_t s_bits;
  bool inside;
};

__device__ __forceinline__ void load(Half (&halves)[kHalves], Walk& at, const Quantized& in, uint32_t column_tiles) {
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    Half& h = halves[j];
    h.row = at.row, h.half = at.column, h.inside = at.inside();
    at.step();
    if (!h.inside) continue;
    h.codes = __ldg(reinterpret_cast<const uint32_t*>(in.qdata) + (static_cast<int64_t>(h.row) * at.width + h.half));
    h.s_bits = __ldg(in.scale + scale_offset(h.row, h.half / 2, column_tiles));
  }
}

template <bool whole, typename T>
__device__ __forceinline__ void store(const Half& h, const Quantized& in, float factor, int64_t columns, T* out) {
  if (!h.inside) return;
  if (in.per_row) factor = __ldg(in.per_tensor_scale + h.row);
  const float s_b = e4m3_value(h.s_bits);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = mul(mul(mul(biased_value(h.codes, i), kCodeBias), s_b), factor);
  T* to = out + (static_cast<int64_t>(h.row) * columns + h.half * 8);
  if constexpr (whole) {
    store8(to, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (h.half * 8 + i < columns) to[i] = from_float<T>(v[i]);
    }
  }
}

// The next turn's loads are under way while this turn's values are stored.
template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads) dequantize(Quantized in, int64_t columns, T* out) {
  const uint32_t column_tiles = (static_cast<uint32_t>(in.blocks) + kTileColumns - 1) / kTileColumns;
  const float factor = in.per_tensor_scale && !in.per_row ? *in.per_tensor_scale : 1.0f;
  Walk at(in.rows, in.blocks * 2);
  Half now[kHalves], next[kHalves];
  load(next, at, in, column_tiles);
  while (next[0].inside) {
#pragma unroll
    for (int j = 0; j < kHalves; ++j) now[j] = next[j];
    load(next, at, in, column_tiles);
#pragma unroll
    for (int j = 0; j < kHalves; ++j) store<whole>(now[j], in, factor, columns, out);
  }
}

}  // namespace

void launch_dequantize(const Quantized& in, int64_t columns, Dtype dtype, void* out, cudaStream_t stream) {
  if (in.rows * in.blocks == 0) return;
  const int64_t units = ceil_div(in.rows * in.blocks * 2, kHalves);
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (columns % kBlock == 0) {
      launch_walk<dequantize<T, true>>(units, stream, in, columns, static_cast<T*>(out));
    } else {
      launch_walk<dequantize<T, false>>(units, stream, in, columns, static_cast<T*>(out));
    }
  });
}

}  // namespace nvfp4
