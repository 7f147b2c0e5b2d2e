// dequantize: one thread half a block, 4 bytes of codes in and 16 (32) bytes of bfloat16 (float32) out, so that both
// sides of a warp are contiguous; several such halves a turn, to have their loads in flight together.
#include "block.cuh"
#include "decode.cuh"

namespace nvfp4 {
namespace {

constexpr int kHalves = 4;  // a thread and turn

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize(Quantized in, int64_t columns, bool whole, T* out) {
  const uint32_t halves = static_cast<uint32_t>(in.blocks) * 2;
  const uint32_t column_tiles = (static_cast<uint32_t>(in.blocks) + kTileColumns - 1) / kTileColumns;
  const float one_factor = in.per_tensor_scale && !in.per_row ? *in.per_tensor_scale : 1.0f;
  Walk at(in.rows, halves);
  while (at.inside()) {
    uint32_t row[kHalves], half[kHalves], codes[kHalves];
    float s_b[kHalves], factor[kHalves];
    bool inside[kHalves];
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      row[j] = at.row, half[j] = at.column, inside[j] = at.inside();
      at.step();
      if (!inside[j]) continue;
      codes[j] = __ldg(reinterpret_cast<const uint32_t*>(in.qdata) + (static_cast<int64_t>(row[j]) * halves + half[j]));
      s_b[j] = e4m3_value(__ldg(in.scale + scale_offset(row[j], half[j] / 2, column_tiles)));
      factor[j] = in.per_row ? __ldg(in.per_tensor_scale + row[j]) : one_factor;
    }
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      if (!inside[j]) continue;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = mul(mul(mul(biased_value(codes[j], i), kCodeBias), s_b[j]), factor[j]);
      T* to = out + (static_cast<int64_t>(row[j]) * columns + half[j] * 8);
      if (whole) {
        store8(to, v);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (half[j] * 8 + i < columns) to[i] = from_float<T>(v[i]);
        }
      }
    }
  }
}

}  // namespace

void launch_dequantize(const Quantized& in, int64_t columns, Dtype dtype, void* out, cudaStream_t stream) {
  if (in.rows * in.blocks == 0) return;
  const bool whole = columns % kBlock == 0;
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    launch_persistent(dequantize<T>, ceil_div(in.rows * in.blocks * 2, kHalves), stream, in, columns, whole,
                      static_cast<T*>(out));
  });
}

}  // namespace nvfp4
