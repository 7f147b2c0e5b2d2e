// quantize, 1x16 blocks: the fast kernel. One thread has the blocks of two neighbouring rows: 64 bytes of bfloat16 in
// flight, and the addresses and Philox's round keys serve both.
//
// 16384^2 bfloat16 on an H200 allows about 20 issued instructions an element at 90 % of the memory bandwidth.
#include "block.cuh"

namespace nvfp4 {
namespace {

constexpr int kRowsAThread = 2;

// The block of the i-th of a thread's rows; past the last row, the last row's.
template <typename T>
__device__ __forceinline__ Elements<T, kBlock> load_row(const Matrix& x, const Walk& at, int i) {
  const uint32_t row = min(at.row * kRowsAThread + i, static_cast<uint32_t>(x.rows) - 1);
  return Elements<T, kBlock>::load(element_at<T>(x, row, at.column * kBlock));
}

template <typename T, Fast mode>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4) quantize_rows(Matrix x, Quantization how,
                                                                                 Codes out) {
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  const float* enc = encode_table(tensor);
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const uint32_t column_tiles = static_cast<uint32_t>(x.column_tiles()), rows = static_cast<uint32_t>(x.rows);
  Walk at(ceil_div(x.rows, kRowsAThread), x.blocks());
  if (!at.inside()) return;
  Elements<T, kBlock> block[kRowsAThread];
  for (int i = 0; i < kRowsAThread; ++i) block[i] = load_row<T>(x, at, i);
  for (bool more = true; more;) {
    const uint32_t row = at.row * kRowsAThread, column = at.column;
    uint2* codes = reinterpret_cast<uint2*>(out.qdata) + (static_cast<int64_t>(row) * at.width + column);
    uint8_t* scale = out.scale + scale_offset(row, column, column_tiles);  // row is even: its neighbour is 16 bytes on
    const uint64_t number = block_number(how.random, row, column);
    at.step();
    more = at.inside();
#pragma unroll
    for (int i = 0; i < kRowsAThread; ++i) {
      const uint8_t s_bits = scale_from_bits<T>(block[i].amax_bits(), tensor.sixth, how.spec.scale_rounding);
      const uint2 coded = encode16<mode>(block[i], s_bits, enc[s_bits], source, number + i * how.random.width);
      if (more) block[i] = load_row<T>(x, at, i);  // in flight while the other row is encoded
      if (row + i < rows) {
        codes[i * at.width] = coded;
        scale[i * 16] = s_bits;
      }
    }
  }
}

}  // namespace

void launch_quantize_rows(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  const int64_t units = ceil_div(x.rows, kRowsAThread) * x.blocks();
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      launch_walk<quantize_rows<decltype(type), mode.value>>(units, stream, x, how, out);
    });
  });
}

}  // namespace nvfp4
