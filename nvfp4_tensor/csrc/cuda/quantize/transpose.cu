// transpose: of a matrix as it is, or with its rows' Hadamard transform taken, rounded to bfloat16; the rows of the
// result padded to 16 with zeros. What a pair is made from where quantize_pair does not serve.
//
// A lane has 16 rows of two columns in registers. Neighbouring warps have neighbouring rows of the same columns, so
// that the 32 bytes that a lane writes of a row meet the rest of their line in the L2.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"

namespace nvfp4 {
namespace {

constexpr int kColumnsALane = 2, kColumnsAWarp = 32 * kColumnsALane;

template <typename T, typename Out, bool transform>
__global__ void __launch_bounds__(kThreads) transpose_blocks(Matrix x, uint32_t sign, Out* out) {
  const uint32_t lane = threadIdx.x % 32, warps = kThreads / 32, rows = static_cast<uint32_t>(x.rows);
  const int64_t row_blocks = ceil_div(x.rows, kBlock);
  for (Walk at(ceil_div(x.columns, kColumnsAWarp), row_blocks, blockIdx.x * warps + threadIdx.x / 32,
               gridDim.x * warps);
       at.inside(); at.step()) {
    const uint32_t column = at.row * kColumnsAWarp + lane * kColumnsALane, row0 = at.column * kBlock;
    if (column >= x.columns) continue;
    const T* from = element_at<T>(x, row0, column);
    float v[kColumnsALane][kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i, from += x.row_stride) {
      struct alignas(kColumnsALane * sizeof(T)) Pair {
        T of[kColumnsALane];
      } pair{};
      if (row0 + i < rows) pair = *reinterpret_cast<const Pair*>(from);
#pragma unroll
      for (int c = 0; c < kColumnsALane; ++c) v[c][i] = to_float(pair.of[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumnsALane; ++c) {
      if constexpr (transform) hadamard16(v[c], sign);
      Out* to = out + ((column + c) * row_blocks + at.column) * kBlock;
#pragma unroll
      for (int half = 0; half < kBlock; half += 8) {
        store8(to + half, reinterpret_cast<const float (&)[8]>(v[c][half]));
      }
    }
  }
}

}  // namespace

void launch_transpose(const Matrix& x, int hadamard_sign, void* out, cudaStream_t stream) {
  const int64_t threads = ceil_div(x.columns, kColumnsAWarp) * ceil_div(x.rows, kBlock) * 32;
  if (threads == 0) return;
  const uint32_t sign = static_cast<uint32_t>(hadamard_sign);
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_flag(hadamard_sign >= 0, [&](auto transform) {
      using Out = std::conditional_t<transform.value, __nv_bfloat16, T>;
      launch_walk<transpose_blocks<T, Out, transform.value>>(threads, stream, x, sign, static_cast<Out*>(out));
    });
  });
}

}  // namespace nvfp4
