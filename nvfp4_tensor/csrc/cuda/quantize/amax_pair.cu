// amax_pair: the amax of a bfloat16 matrix and of the Hadamard transform of its transpose, in one pass: over the pair's
// tiles (pair_tile.cuh), the next one on its way to shared memory while a thread has 16 rows of two columns of this one
// in registers. H200, 8192 x 4096 and 8192 x 28672: 21 and 110 us; straight to registers, 16 rows of 4 columns a
// thread, 29 and 134, for a thread then waits for its loads (with the next turn's loads ahead 22 and 114).
#include "cuda/block/finite.cuh"
#include "cuda/block/pair_tile.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/quantize/maxima.h"

namespace nvfp4 {
namespace {

constexpr int kBlocksPerSm = 3;
constexpr int kSharedBytes = 2 * kTile * kChunks * sizeof(uint4);

// parts: each thread block leaves its maxima, those of the transpose after all of the rows; else it raises out.
template <bool parts>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    amax_pair(Matrix x, HadamardFactors factors, float* out, float* out_transposed) {
  extern __shared__ __align__(16) unsigned char memory[];
  const auto tiles = reinterpret_cast<uint4(*)[kTile][kChunks]>(memory);
  griddepcontrol_wait();
  uint32_t most = 0, most_transposed = 0;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t group = lane / 4;  // of 16 rows
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  load_tile(x, tile.row * kTile, tile.column * kTile, tiles[0]);
  asm volatile("cp.async.commit_group;");
  for (uint32_t stage = 0; tile.inside(); stage ^= 1) {
    tile.step();
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // this tile has arrived, and no thread reads the last one any more
    if (tile.inside()) load_tile(x, tile.row * kTile, tile.column * kTile, tiles[stage ^ 1]);
    asm volatile("cp.async.commit_group;");
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&tiles[stage][group * kBlock][warp ^ group]) + lane % 4;
#pragma unroll
    for (int column = 0; column < kTile; column += kThreads / 32 * 8) {
      Elements<Bf16, 2 * kBlock> both;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) both.word[i] = words[(i * kChunks + column / 8) * 4];
      most = max(most, finite_amax_bits(both));
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        most_transposed = max(most_transposed, finite_amax_bits(column_block<true>(both.word, which, factors)));
      }
    }
  }
  if constexpr (parts) {
    most = block_max(most), most_transposed = block_max(most_transposed);
    if (threadIdx.x == 0) {
      out[blockIdx.x] = __uint_as_float(most << 16);
      out_transposed[blockIdx.x] = __uint_as_float(most_transposed << 16);
    }
  } else {
    raise(out, most << 16);
    raise(out_transposed, most_transposed << 16);
  }
}

template <bool parts>
void launch(const Matrix& x, unsigned grid, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream) {
  allow_shared_memory<amax_pair<parts>>(kSharedBytes);
  const Begins begins = parts ? Begins::kAfterPrevious : Begins::kBesideClear;
  const Launch launch(dim3(grid), 1, kThreads, kSharedBytes, stream, begins);
  cudaLaunchKernelEx(&launch.config, amax_pair<parts>, x, HadamardFactors::from(static_cast<uint32_t>(hadamard_sign)),
                     out, out_transposed);
}

unsigned grid_for(const Matrix& x) {
  return grid_of(kBlocksPerSm, ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile));
}

}  // namespace

void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream) {
  launch_clear(out, out_transposed, stream);
  if (x.rows * x.columns == 0) return;
  launch<false>(x, grid_for(x), hadamard_sign, out, out_transposed, stream);
}

Maxima launch_maxima_of_pair(const Matrix& x, int hadamard_sign, const std::function<void*(int64_t)>& scratch,
                             cudaStream_t stream) {
  const unsigned grid = grid_for(x);
  float* const out = static_cast<float*>(scratch(grid * int64_t{2 * sizeof(float)}));
  launch<true>(x, grid, hadamard_sign, out, out + grid, stream);
  return {out, static_cast<int>(grid)};
}

}  // namespace nvfp4
