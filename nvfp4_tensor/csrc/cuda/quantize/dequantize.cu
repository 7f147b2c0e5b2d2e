// dequantize: a thread has half a block of two neighbouring rows, 4 bytes of codes in and 16 (32) bytes of bfloat16
// (float32) out of each, and nothing after that.
//
// Four bytes of five that move are written, so the pattern of the writes decides. H200, 16384^2 to bfloat16, of the
// copy bandwidth, programs of one pattern each in one run: two rows per thread 94 %, one 84, four 93; threads that go
// on to further blocks, their loads ahead of them, 74 to 89. The same bytes moved without decoding: 91 to 93, so
// nothing is left. (This kernel, in other runs: 93, where moving the bytes took 90 to 91.)
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "numerics/layout.h"

namespace nvfp4 {
namespace {

constexpr int kRows = 2;  // of a thread; an even row and the next are in one tile of scales, 16 bytes apart

// A block of threads covers 2^log2_width half blocks, the least such width that holds a row or all of its threads, of
// as many pairs of rows as it has threads for: fewer than half of them are beside the matrix's columns.
template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads) dequantize(const Quantized in, uint32_t columns, int log2_width,
                                                       uint32_t blocks_in_a_row, T* out, const Alpha alpha) {
  if (alpha.out && blockIdx.x == 0 && threadIdx.x == 0) *alpha.out = mul(*alpha.a, *alpha.b);
  const uint32_t halves = static_cast<uint32_t>(in.blocks) * 2, width = 1u << log2_width;
  const uint32_t half = (blockIdx.x % blocks_in_a_row << log2_width) + threadIdx.x % width;
  const uint32_t pair = blockIdx.x / blocks_in_a_row * (kThreads >> log2_width) + (threadIdx.x >> log2_width);
  const uint32_t row = pair * kRows, column = half * 8;
  if (half >= halves || row >= in.rows) return;
  const uint8_t* scale = in.scale +
                         scale_offset(row, half / 2, static_cast<uint32_t>(ceil_div(in.blocks, kTileColumns)));
  uint32_t rows[kRows], codes[kRows];
  uint32_t scales[kRows];
  float factors[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // The last row again where there is no second: under a condition its loads would wait for the first row's store.
    rows[i] = min(row + i, static_cast<uint32_t>(in.rows) - 1);
    codes[i] = __ldg(reinterpret_cast<const uint32_t*>(in.qdata) + (static_cast<int64_t>(rows[i]) * halves + half));
    scales[i] = __ldg(scale + (rows[i] - row) * kTileBytes / 32);
    factors[i] = in.per_tensor_scale ? __ldg(in.per_tensor_scale + (in.per_row ? rows[i] : 0)) : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // From 0x80 on, which no kernel of ours writes, a byte means NaN, where the conversion would see a sign.
    const float s_b = e4m3_value(static_cast<uint8_t>(min(scales[i], uint32_t{kE4M3Nan})));
    float v[8];
    decode8(codes[i], s_b, v, factors[i]);
    T* to = out + (static_cast<int64_t>(rows[i]) * columns + column);
    if constexpr (whole) {
      store8(to, v);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < columns) to[j] = from_float<T>(v[j]);
      }
    }
  }
}

}  // namespace

void launch_dequantize(const Quantized& in, int64_t columns, Dtype dtype, void* out, cudaStream_t stream,
                       const Alpha& alpha) {
  if (in.rows * in.blocks == 0) return;
  int log2_width = 0;
  while (1 << log2_width < std::min<int64_t>(in.blocks * 2, kThreads)) ++log2_width;
  const int64_t in_a_row = ceil_div(in.blocks * 2, 1 << log2_width);
  const int64_t of_rows = ceil_div(ceil_div(in.rows, kRows), kThreads >> log2_width);
  const dim3 grid(static_cast<uint32_t>(in_a_row * of_rows));
  const uint32_t width = static_cast<uint32_t>(columns), blocks = static_cast<uint32_t>(in_a_row);
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(out);
    for_flag(columns % kBlock == 0, [&](auto whole) {
      dequantize<T, whole.value><<<grid, kThreads, 0, stream>>>(in, width, log2_width, blocks, to, alpha);
    });
  });
}

}  // namespace nvfp4
