// hadamard, and transpose: of a matrix as it is, or with its rows' Hadamard transform taken, rounded to bfloat16; the
// rows of the result padded to 16 with zeros. What a pair is made from where quantize_pair does not serve.
//
// A lane has 16 rows of two columns in registers. Neighbouring warps have neighbouring rows of the same columns, so
// that the 32 bytes that a lane writes of a row meet the rest of their line in the L2.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"

namespace nvfp4 {
namespace {

// The Hadamard transform of each 16 elements of a row, to bfloat16; one thread a block.
template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads) hadamard_rows(Matrix x, uint32_t sign, uint4* out) {
  for (Walk at(x.rows, x.blocks()); at.inside(); at.step()) {
    float v[kBlock];
    if constexpr (whole) {
      const auto elements = Elements<T, kBlock>::load(element_at<T>(x, at.row, at.column * kBlock));
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] = elements.value(i);
    } else {
      load_block<T>(x, at.row, at.column, v);
    }
    hadamard16(v, sign);
    uint32_t word[kBlock / 2];
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) word[i] = to_bfloat16(v[2 * i]) | to_bfloat16(v[2 * i + 1]) << 16;
    uint4* to = out + (static_cast<int64_t>(at.row) * x.blocks() + at.column) * 2;
    to[0] = make_uint4(word[0], word[1], word[2], word[3]);
    to[1] = make_uint4(word[4], word[5], word[6], word[7]);
  }
}

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

void launch_hadamard(const Matrix& x, uint32_t sign, void* out, cudaStream_t stream) {
  if (x.rows * x.blocks() == 0) return;
  for_matrix(x, [&](auto type, auto whole) {
    launch_walk<hadamard_rows<decltype(type), whole.value>>(x.rows * x.blocks(), stream, x, sign,
                                                            static_cast<uint4*>(out));
  });
}

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
