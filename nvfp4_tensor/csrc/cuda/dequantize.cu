// dequantize: a lane has half a block, 4 bytes of codes in and 16 (32) bytes of bfloat16 (float32) out, of each of four
// rows i, i + 32, i + 64, i + 96, whose scales are 16 contiguous bytes: one load. Its next loads are under way then.
//
// Four bytes of five that move are written, so the pattern of the writes decides. A warp writes 512 contiguous bytes of
// a row and a thread block 4 KB: 91 % of the copy bandwidth on an H200; with 128 bytes of each of four rows, 88 %.
#include "block.cuh"
#include "decode.cuh"

namespace nvfp4 {
namespace {

constexpr int kGroups = 4, kGroupRows = 32;    // a lane's rows, that far apart
constexpr int kWarpHalves = 32;                // half blocks of a row
constexpr int kTileHalves = 2 * kTileColumns;  // of a row of a tile of scales

__host__ __device__ __forceinline__ int64_t row_units(int64_t rows) {
  return ceil_div(rows, kTileRows) * kGroupRows;
}

__host__ __device__ __forceinline__ int64_t column_units(int64_t blocks) { return ceil_div(2 * blocks, kWarpHalves); }

// The four half blocks of a lane, on their way; where one does not exist, the codes are zeros.
struct Halves {
  uint32_t row, half;
  uint32_t codes[kGroups];
  uint4 scale;
};

__device__ __forceinline__ Halves load(const Quantized& in, const Walk& at, uint32_t lane) {
  Halves h{};
  const uint32_t row_tile = at.row / kGroupRows, halves = static_cast<uint32_t>(in.blocks) * 2;
  h.row = row_tile * kTileRows + at.row % kGroupRows;
  h.half = at.column * kWarpHalves + lane;
  if (!at.inside() || h.half >= halves) return h;
  const uint32_t* codes = reinterpret_cast<const uint32_t*>(in.qdata) + (static_cast<int64_t>(h.row) * halves + h.half);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (h.row + group * kGroupRows < in.rows) h.codes[group] = __ldg(codes);
    codes += static_cast<int64_t>(kGroupRows) * halves;
  }
  const int64_t tile = row_tile * ceil_div(in.blocks, kTileColumns) + h.half / kTileHalves;
  h.scale = __ldg(reinterpret_cast<const uint4*>(in.scale) + (tile * kGroupRows + at.row % kGroupRows));
  return h;
}

template <bool whole, typename T>
__device__ __forceinline__ void store(const Halves& h, const Quantized& in, float factor, uint32_t columns, T* out) {
  const uint32_t scales[kGroups] = {h.scale.x, h.scale.y, h.scale.z, h.scale.w};
  const uint32_t column = h.half * 8;
  T* to = out + (static_cast<int64_t>(h.row) * columns + column);
#pragma unroll
  for (int group = 0; group < kGroups; ++group, to += static_cast<int64_t>(kGroupRows) * columns) {
    const uint32_t row = h.row + group * kGroupRows;
    if (column >= columns || row >= in.rows) continue;
    if (in.per_row) factor = __ldg(in.per_tensor_scale + row);
    const float s_b = e4m3_value(static_cast<uint8_t>(scales[group] >> (h.half / 2 % kTileColumns * 8)));
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(mul(mul(biased_value(h.codes[group], i), kCodeBias), s_b), factor);
    if constexpr (whole) {
      store8(to, v);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i < columns) to[i] = from_float<T>(v[i]);
      }
    }
  }
}

template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads) dequantize(Quantized in, uint32_t columns, T* out) {
  const float factor = in.per_tensor_scale && !in.per_row ? *in.per_tensor_scale : 1.0f;
  const uint32_t lane = threadIdx.x % 32, warps = kThreads / 32;
  Walk at(row_units(in.rows), column_units(in.blocks), blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
  Halves next = load(in, at, lane);
  while (at.inside()) {
    const Halves now = next;
    at.step();
    next = load(in, at, lane);
    store<whole>(now, in, factor, columns, out);
  }
}

}  // namespace

void launch_dequantize(const Quantized& in, int64_t columns, Dtype dtype, void* out, cudaStream_t stream) {
  if (in.rows * in.blocks == 0) return;
  const int64_t threads = row_units(in.rows) * column_units(in.blocks) * 32;
  const uint32_t width = static_cast<uint32_t>(columns);
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (columns % kBlock == 0) {
      launch_walk<dequantize<T, true>>(threads, stream, in, width, static_cast<T*>(out));
    } else {
      launch_walk<dequantize<T, false>>(threads, stream, in, width, static_cast<T*>(out));
    }
  });
}

}  // namespace nvfp4
