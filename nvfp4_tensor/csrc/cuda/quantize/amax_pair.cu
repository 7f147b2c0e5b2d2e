// amax_pair: the amax of a bfloat16 matrix and of the Hadamard transform of its transpose, in one pass. One thread has
// 16 rows of 4 columns in registers (16 independent loads of 8 bytes), so nothing goes through shared memory.
#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"
#include "cuda/block/finite.cuh"

namespace nvfp4 {
namespace {

constexpr int kColumns = 4;  // a thread

__global__ void __launch_bounds__(kThreads, 2)
    amax_pair(Matrix x, HadamardFactors factors, float* out, float* out_transposed) {
  using Bf16 = __nv_bfloat16;
  uint32_t most = 0, most_transposed = 0;
  for (Walk at(ceil_div(x.rows, kBlock), x.columns / kColumns); at.inside(); at.step()) {
    uint32_t word[kColumns / 2][kBlock];
    Elements<Bf16, kBlock * kColumns> all;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t row = at.row * kBlock + i;
      uint2 v = make_uint2(0u, 0u);
      if (row < x.rows) v = __ldg(reinterpret_cast<const uint2*>(element_at<Bf16>(x, row, at.column * kColumns)));
      all.word[2 * i] = word[0][i] = v.x, all.word[2 * i + 1] = word[1][i] = v.y;
    }
    most = max(most, finite_amax_bits(all));
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        most_transposed = max(most_transposed, finite_amax_bits(column_block<true>(word[pair], which, factors)));
      }
    }
  }
  raise(out, most << 16);
  raise(out_transposed, most_transposed << 16);
}

}  // namespace

void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream) {
  if (x.rows * x.columns == 0) return;
  launch_walk<amax_pair>(ceil_div(x.rows, kBlock) * (x.columns / kColumns), stream, x,
                         HadamardFactors::from(static_cast<uint32_t>(hadamard_sign)), out, out_transposed);
}

}  // namespace nvfp4
