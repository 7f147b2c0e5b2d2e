// quantize_pair: a bfloat16 matrix and its (Hadamard-transformed) transpose, quantized in one pass over it.
//
// A thread block copies a tile of 128 x 128 elements to shared memory, 16 bytes a copy, and reads it twice: by rows, a
// thread 16 elements of one, and by columns, a thread 16 rows of two of them. 16-byte chunk c of row r lies at chunk
// c ^ (r / 16): eight groups of 16 rows by four words then fall into 32 different banks, and so do four even chunks of
// a row and of the row 16 below it. The tile makes two whole tiles of block scales on either side; they are gathered in
// shared memory and written, padding included, as 1024 contiguous bytes each. The next tile is copied meanwhile.
#include "block.cuh"
#include "columns.cuh"

namespace nvfp4 {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kTile = 128;
constexpr int kChunks = kTile * 2 / 16;       // 16-byte chunks of a row
constexpr int kTileBlocks = kTile / kBlock;   // of a row
constexpr int kScaleBytes = kTile * kTileBlocks;
constexpr int kBlocksPerSm = 3;               // 68 KB of shared memory and 80 registers a thread each
constexpr int kWaves = 4;                     // a static share each leaves some warps to end alone

struct Shared {
  uint4 x[2][kTile][kChunks];  // the tile at work and the next
  uint8_t scale[kScaleBytes], scale_transposed[kScaleBytes];
  float enc[128], enc_transposed[128];
};

// One side of the pair.
struct Side {
  Quantization how;
  Codes out;
  uint32_t rows, blocks;  // blocks in a row of codes
};

// What a side's blocks need that is the same for all of them.
struct Encoder {
  const float* enc;
  float sixth;
  DrawSource source;
};

__device__ __forceinline__ void copy_chunk(uint4* to, const void* from, bool inside) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(inside ? 16 : 0));
}

// Starts the copy of the tile at (row0, column0); one commit group, empty past the last tile.
__device__ __forceinline__ void load_tile(const Matrix& x, uint32_t row0, uint32_t column0, uint4 (*to)[kChunks]) {
  constexpr uint32_t kRowsATurn = kThreads / kChunks;  // = kBlock: turn i loads group i of 16 rows
  const uint32_t chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks, column = column0 + chunk * 8;
  const uint32_t rows = column < x.columns ? static_cast<uint32_t>(x.rows) : 0;
  const Bf16* from = element_at<Bf16>(x, row0 + row, column);
#pragma unroll
  for (int i = 0; i < kTile / kRowsATurn; ++i) {
    const bool inside = row0 + row + i * kRowsATurn < rows;
    copy_chunk(&to[row + i * kRowsATurn][chunk ^ i], from, inside);
    from += x.row_stride * kRowsATurn;
  }
}

template <Fast mode>
__device__ __forceinline__ void quantize_one(const Elements<Bf16, kBlock>& x, const Encoder& encoder,
                                             ScaleRounding rounding, uint64_t number, bool inside, uint2* codes,
                                             uint8_t* scale) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  const uint2 coded = encode16<mode>(x, s_bits, encoder.enc[s_bits], encoder.source, number);
  if (inside) *codes = coded;
  *scale = inside ? s_bits : 0;
}

// Where block (row, block) of a side has its codes.
__device__ __forceinline__ uint2* codes_at(const Side& side, uint32_t row, uint32_t block) {
  return reinterpret_cast<uint2*>(side.out.qdata) + (static_cast<int64_t>(row) * side.blocks + block);
}

template <Fast mode>
__device__ __forceinline__ void quantize_by_rows(const Side& side, const Encoder& encoder, uint32_t row0,
                                                 uint32_t block0, const uint4 (*x)[kChunks], uint8_t* scale) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Lanes: 4 blocks, 2 rows 16 apart, 4 rows; warps and turns: the other half of the row, 4 x 4 rows.
  const uint32_t block = lane % 4 + 4 * (warp % 2);
  const uint32_t first = lane / 8 + 4 * (warp / 2) + 16 * (lane / 4 % 2);
  const bool block_inside = block0 + block < side.blocks;
  uint2* codes = codes_at(side, row0 + first, block0 + block);
  uint64_t number = block_number(side.how.random, row0 + first, block0 + block);
  scale += scale_offset(first, block, kTileBlocks / kTileColumns);
#pragma unroll 1
  for (uint32_t row = first; row < kTile; row += 32) {
    const uint4 low = x[row][(2 * block) ^ row / kBlock], high = x[row][(2 * block + 1) ^ row / kBlock];
    const Elements<Bf16, kBlock> elements = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    quantize_one<mode>(elements, encoder, side.how.spec.scale_rounding, number,
                       block_inside && row0 + row < side.rows, codes, scale);
    codes += 32 * static_cast<int64_t>(side.blocks), number += 32 * side.how.random.width, scale += 4;
  }
}

template <Fast mode, bool transform>
__device__ __forceinline__ void quantize_by_columns(const Side& side, const Encoder& encoder,
                                                    const HadamardFactors& factors, uint32_t row0, uint32_t block0,
                                                    const uint4 (*x)[kChunks], uint8_t* scale) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t group = lane / 4;  // of 16 rows: a block of the transpose
  const bool group_inside = block0 + group < side.blocks;
#pragma unroll 1
  for (uint32_t chunk = warp; chunk < kChunks; chunk += kThreads / 32) {
    uint32_t word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      word[i] = reinterpret_cast<const uint32_t*>(&x[group * kBlock + i][chunk ^ group])[lane % 4];
    }
    const uint32_t column = chunk * 8 + lane % 4 * 2;
    uint2* codes = codes_at(side, row0 + column, block0 + group);
    const uint64_t number = block_number(side.how.random, row0 + column, block0 + group);
    uint8_t* to = scale + scale_offset(column, group, kTileBlocks / kTileColumns);
#pragma unroll
    for (int which = 0; which < 2; ++which) {  // the columns are whole blocks of x: both inside or neither
      quantize_one<mode>(column_block<transform>(word, which, factors), encoder, side.how.spec.scale_rounding,
                         number + which * side.how.random.width, group_inside && row0 + column < side.rows,
                         codes + which * static_cast<int64_t>(side.blocks), to + which * 16);
    }
  }
}

// The tile's scales, 1024 bytes in place order, to where the two tiles of scales lie; the second may not exist.
__device__ __forceinline__ void store_scales(const uint8_t* scale, const Side& side, uint32_t row0, uint32_t block0) {
  const uint32_t column_tiles = (side.blocks + kTileColumns - 1) / kTileColumns;
  const uint32_t bytes = min(2u, column_tiles - block0 / kTileColumns) * kTileBytes;
  const uint32_t at = threadIdx.x * 16;
  if (at >= bytes) return;
  uint8_t* to = side.out.scale + scale_offset(row0, block0, column_tiles);
  *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(scale + at);
}

template <Fast mode>
__device__ __forceinline__ Encoder make_encoder(const Side& side, float* enc) {
  const TensorScale tensor = tensor_scale(side.how);
  if (threadIdx.x < 128) enc[threadIdx.x] = tensor.block_encode(e4m3_value(static_cast<uint8_t>(threadIdx.x)));
  return {enc, tensor.sixth, draw_source(side.how, mode != Fast::kNearestEven)};
}

template <Fast mode, bool transform>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) quantize_pair(Matrix x, Side side, Side transposed,
                                                                        HadamardFactors factors) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  write_per_tensor_scale(side.how);
  write_per_tensor_scale(transposed.how);
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  load_tile(x, tile.row * kTile, tile.column * kTile, shared.x[0]);
  asm volatile("cp.async.commit_group;");
  const Encoder encoder = make_encoder<mode>(side, shared.enc);
  const Encoder encoder_transposed = make_encoder<mode>(transposed, shared.enc_transposed);
  for (uint32_t stage = 0; tile.inside(); stage ^= 1) {
    const uint32_t row0 = tile.row * kTile, column0 = tile.column * kTile;
    tile.step();
    if (tile.inside()) load_tile(x, tile.row * kTile, tile.column * kTile, shared.x[stage ^ 1]);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    const uint4 (*elements)[kChunks] = shared.x[stage];
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
  const auto kernel = quantize_pair<mode, transform>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const int sign = transposed.how.spec.hadamard_sign;
  kernel<<<grid_of(kWaves * kBlocksPerSm, tiles), kThreads, sizeof(Shared), stream>>>(
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
