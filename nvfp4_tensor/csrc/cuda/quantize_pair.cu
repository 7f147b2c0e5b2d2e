// quantize_pair: a bfloat16 matrix and its (Hadamard-transformed) transpose, quantized in one pass over it.
//
// A thread block copies a tile of 128 x 128 elements to shared memory, 16 bytes a copy, and reads it twice: by rows, a
// thread 16 elements of one, and by columns, a thread 16 rows of two of them. 16-byte chunk c of row r lies at chunk
// c ^ (r / 16): eight groups of 16 rows by four words then fall into 32 different banks, and so do four even chunks of
// a row and of the row 16 below it. The tile makes two whole tiles of block scales on either side; they are gathered in
// shared memory and written, padding included, as 1024 contiguous bytes each.
#include "block.cuh"
#include "columns.cuh"

namespace nvfp4 {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kTile = 128;
constexpr int kChunks = kTile * 2 / 16;       // 16-byte chunks of a row
constexpr int kTileBlocks = kTile / kBlock;   // of a row
constexpr int kScaleBytes = kTile * kTileBlocks;

struct Shared {
  uint4 x[kTile][kChunks];
  uint8_t scale[kScaleBytes], scale_transposed[kScaleBytes];
  float enc[128], enc_transposed[128];
};

// One side of the pair: what it writes, in units of a tile's place.
struct Side {
  Quantization how;
  Codes out;
  uint32_t rows, blocks;  // blocks in a row of codes
};

__device__ __forceinline__ void copy_chunk(uint4* to, const void* from, bool inside) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void load_tile(const Matrix& x, uint32_t row0, uint32_t column0, Shared& shared) {
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kThreads; ++i) {
    const uint32_t index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
    const bool inside = row0 + row < x.rows && column0 + chunk * 8 < x.columns;
    const Bf16* from = inside ? element_at<Bf16>(x, row0 + row, column0 + chunk * 8) : static_cast<const Bf16*>(x.data);
    copy_chunk(&shared.x[row][chunk ^ row / kBlock], from, inside);
  }
  asm volatile("cp.async.commit_group;");
}

// Block (row, block) of a side, where the tile begins at (row0, block0): codes to memory, scale to shared memory.
template <Fast mode>
__device__ __forceinline__ void quantize_one(const Elements<Bf16, kBlock>& x, const Side& side,
                                             float sixth, const float* enc, const DrawSource& source,
                                             uint32_t row0, uint32_t row, uint32_t block0, uint32_t block,
                                             uint8_t* scale) {
  const bool inside = row0 + row < side.rows && block0 + block < side.blocks;
  uint8_t s_bits = 0;
  if (inside) {
    s_bits = scale_from_bits<Bf16>(x.amax_bits(), sixth, side.how.spec.scale_rounding);
    const uint64_t number = block_number(side.how.random, row0 + row, block0 + block);
    const uint2 codes = encode16<mode>(x, s_bits, enc[s_bits], source, number);
    reinterpret_cast<uint2*>(side.out.qdata)[static_cast<int64_t>(row0 + row) * side.blocks + block0 + block] = codes;
  }
  scale[scale_offset(row, block, kTileBlocks / kTileColumns)] = s_bits;
}

template <Fast mode>
__device__ __forceinline__ void quantize_by_rows(const Side& side, float sixth, uint32_t row0, uint32_t block0,
                                                 Shared& shared) {
  const DrawSource source = draw_source(side.how, mode == Fast::kStochastic);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (uint32_t i = 0; i < kTile * kTileBlocks / kThreads; ++i) {
    // Lanes: 4 blocks, 2 rows 16 apart, 4 rows; warps and turns: the other half of the row, 4 x 4 rows.
    const uint32_t block = lane % 4 + 4 * (warp % 2);
    const uint32_t row = lane / 8 + 4 * (warp / 2) + 16 * (lane / 4 % 2) + 32 * i;
    const uint4 low = shared.x[row][(2 * block) ^ row / kBlock], high = shared.x[row][(2 * block + 1) ^ row / kBlock];
    const Elements<Bf16, kBlock> x = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    quantize_one<mode>(x, side, sixth, shared.enc, source, row0, row, block0, block, shared.scale);
  }
}

template <Fast mode, bool transform>
__device__ __forceinline__ void quantize_by_columns(const Side& side, const HadamardFactors& factors, float sixth,
                                                    uint32_t row0, uint32_t block0, Shared& shared) {
  const DrawSource source = draw_source(side.how, mode == Fast::kStochastic);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t group = lane / 4;  // of 16 rows: a block of the transpose
#pragma unroll 1
  for (uint32_t chunk = warp; chunk < kChunks; chunk += kThreads / 32) {
    uint32_t word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      word[i] = reinterpret_cast<const uint32_t*>(&shared.x[group * kBlock + i][chunk ^ group])[lane % 4];
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t column = chunk * 8 + lane % 4 * 2 + which;
      quantize_one<mode>(column_block<transform>(word, which, factors), side, sixth, shared.enc_transposed, source,
                         row0, column, block0, group, shared.scale_transposed);
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

template <Fast mode, bool transform>
__global__ void __launch_bounds__(kThreads, 4) quantize_pair(Matrix x, Side side, Side transposed,
                                                             HadamardFactors factors) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  write_per_tensor_scale(side.how);
  write_per_tensor_scale(transposed.how);
  const uint32_t tiles_across = static_cast<uint32_t>(ceil_div(x.columns, kTile));
  const uint32_t row0 = blockIdx.x / tiles_across * kTile, column0 = blockIdx.x % tiles_across * kTile;
  load_tile(x, row0, column0, shared);
  const TensorScale tensor = tensor_scale(side.how), tensor_transposed = tensor_scale(transposed.how);
  const float s_b = e4m3_value(static_cast<uint8_t>(threadIdx.x % 128));
  if (threadIdx.x < 128) {
    shared.enc[threadIdx.x] = tensor.block_encode(s_b);
  } else {
    shared.enc_transposed[threadIdx.x - 128] = tensor_transposed.block_encode(s_b);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  quantize_by_rows<mode>(side, tensor.sixth, row0, column0 / kBlock, shared);
  quantize_by_columns<mode, transform>(transposed, factors, tensor_transposed.sixth, column0, row0 / kBlock, shared);
  __syncthreads();
  store_scales(shared.scale, side, row0, column0 / kBlock);
  store_scales(shared.scale_transposed, transposed, column0, row0 / kBlock);
}

template <Fast mode, bool transform>
void launch(const Matrix& x, const Side& side, const Side& transposed, cudaStream_t stream) {
  const auto kernel = quantize_pair<mode, transform>;
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const int sign = transposed.how.spec.hadamard_sign;
  kernel<<<static_cast<unsigned>(tiles), kThreads, sizeof(Shared), stream>>>(
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
