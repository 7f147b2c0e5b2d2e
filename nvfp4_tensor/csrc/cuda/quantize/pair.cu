// quantize_pair: a bfloat16 matrix and its (Hadamard-transformed) transpose, quantized in one pass over it.
//
// A thread block copies a tile of 128 x 128 elements to shared memory, 16 bytes a copy, and reads it twice: by rows, a
// thread 16 elements of one, and by columns, a thread 16 rows of two of them. The tile makes two whole tiles of block
// scales on either side; they are gathered in shared memory and written, padding included, as 1024 contiguous bytes
// each. The next tile is copied meanwhile.
#include "cuda/block/pair_tile.cuh"

namespace nvfp4 {
namespace {

struct Shared {
  uint4 x[2][kTile][kChunks];  // the tile at work and the next
  uint8_t scale[kScaleBytes], scale_transposed[kScaleBytes];
  float enc[128], enc_transposed[128];
};

template <Fast mode>
__device__ __forceinline__ void quantize_by_rows(const Side& side, const Encoder& encoder, uint32_t row0,
                                                 uint32_t block0, const uint4 (*x)[kChunks], uint8_t* scale) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Lanes: 4 blocks, 2 groups, 4 rows; warps: the halves of a row, 4 x 2 groups; turns: 4 x 4 rows of a group.
  constexpr int kRowsATurn = 4;
  const uint32_t block = lane % 4 + 4 * (warp % 2), group = lane / 4 % 2 + 2 * (warp / 2);
  const uint32_t first = group * kBlock + lane / 8;
  const uint32_t rows = block0 + block < side.blocks ? rows_left(side.rows, row0 + first) : 0;
  const uint4* low = &x[first][(2 * block) ^ group];
  const uint4* high = &x[first][(2 * block + 1) ^ group];
  uint2* codes = codes_at(side, row0 + first, block0 + block);
  uint64_t number = block_number(side.how.random, row0 + first, block0 + block);
  scale += scale_offset(first, block, kTileBlocks / kTileColumns);
#pragma unroll
  for (int row = 0; row < kBlock; row += kRowsATurn) {
    const uint4 a = low[row * kChunks], b = high[row * kChunks];
    const Elements<Bf16, kBlock> elements = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    quantize_one<mode>(elements, encoder, side.how.spec.scale_rounding, number, row < rows, codes, scale + row * 16);
    codes += kRowsATurn * static_cast<int64_t>(side.blocks), number += kRowsATurn * side.how.random.width;
  }
}

template <Fast mode, bool transform>
__global__ void __launch_bounds__(kThreads, kPairBlocksPerSm)
    quantize_pair(Matrix x, Side side, Side transposed, HadamardFactors factors) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  write_per_tensor_scale(side.how);
  write_per_tensor_scale(transposed.how);
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  load_tile(x, tile.row * kTile, tile.column * kTile, shared.x[0]);
  asm volatile("cp.async.commit_group;");
  const Encoder encoder = make_encoder<mode>(side.how, shared.enc);
  const Encoder encoder_transposed = make_encoder<mode>(transposed.how, shared.enc_transposed);
  for (uint32_t stage = 0; tile.inside(); stage ^= 1) {
    const uint32_t row0 = tile.row * kTile, column0 = tile.column * kTile;
    tile.step();
    if (tile.inside()) load_tile(x, tile.row * kTile, tile.column * kTile, shared.x[stage ^ 1]);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    const uint4(*elements)[kChunks] = shared.x[stage];
    quantize_by_rows<mode>(side, encoder, row0, column0 / kBlock, elements, shared.scale);
    quantize_by_columns<mode, transform>(transposed, encoder_transposed, factors, column0, row0 / kBlock, elements,
                                         shared.scale_transposed);
    __syncthreads();
    store_scales(shared.scale, side, row0, column0 / kBlock);
    store_scales(shared.scale_transposed, transposed, column0, row0 / kBlock);
  }
}

template <Fast mode, bool transform>
void launch(const Matrix& x, const Side& side, const Side& transposed, cudaStream_t stream) {
  constexpr auto kernel = quantize_pair<mode, transform>;
  allow_shared_memory<kernel>(sizeof(Shared));
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const int sign = transposed.how.spec.hadamard_sign;
  kernel<<<grid_of(kPairWaves * kPairBlocksPerSm, tiles), kThreads, sizeof(Shared), stream>>>(
      x, side, transposed, HadamardFactors::from(static_cast<uint32_t>(sign)));
}

}  // namespace

void launch_quantize_pair(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                          const Codes& out, const Codes& out_transposed, cudaStream_t stream) {
  const Side side{how, out, static_cast<uint32_t>(x.rows), static_cast<uint32_t>(x.blocks())};
  const Side transposed{how_transposed, out_transposed, static_cast<uint32_t>(x.columns),
                        static_cast<uint32_t>(ceil_div(x.rows, kBlock))};
  for_mode(how.spec, [&](auto mode) {
    if (how_transposed.spec.hadamard_sign >= 0) {
      launch<mode.value, true>(x, side, transposed, stream);
    } else {
      launch<mode.value, false>(x, side, transposed, stream);
    }
  });
}

}  // namespace nvfp4
