// hadamard: the random Hadamard transform of each 16 elements of a row, to bfloat16; one thread a block.
#include "cuda/block/block.cuh"

namespace nvfp4 {
namespace {

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

}  // namespace

void launch_hadamard(const Matrix& x, uint32_t sign, void* out, cudaStream_t stream) {
  if (x.rows * x.blocks() == 0) return;
  for_matrix(x, [&](auto type, auto whole) {
    launch_walk<hadamard_rows<decltype(type), whole.value>>(x.rows * x.blocks(), stream, x, sign,
                                                            static_cast<uint4*>(out));
  });
}

}  // namespace nvfp4
