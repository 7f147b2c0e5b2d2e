// amax_pair: the amax of a bfloat16 matrix and of the Hadamard transform of its transpose, in one pass: over the pair's
// tiles (pair_tile.cuh), the next one on its way to shared memory while a thread has 16 rows of two columns of this one
// in registers. H200, 8192 x 4096 and 8192 x 28672: 21 and 110 us; straight to registers, 16 rows of 4 columns a
// thread, 29 and 134, for a thread then waits for its loads (with the next turn's loads ahead 22 and 114).
#include "cuda/block/finite.cuh"
#include "cuda/block/pair_tile.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace {

constexpr int kBlocksPerSm = 3;

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
  raise(out, most << 16);
  raise(out_transposed, most_transposed << 16);
}

}  // namespace

void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream) {
  launch_clear(out, out_transposed, stream);
  if (x.rows * x.columns == 0) return;
  constexpr int kBytes = 2 * kTile * kChunks * sizeof(uint4);
  allow_shared_memory<amax_pair>(kBytes);
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const Launch launch(dim3(grid_of(kBlocksPerSm, tiles)), 1, kThreads, kBytes, stream, Begins::kBesideClear);
  cudaLaunchKernelEx(&launch.config, amax_pair, x, HadamardFactors::from(static_cast<uint32_t>(hadamard_sign)), out,
                     out_transposed);
}

}  // namespace nvfp4
