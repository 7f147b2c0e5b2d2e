// quantize_pair_values: quantize_pair that stores decoded bfloat16 values, which products read on hardware without FP4
// tensor cores. The rows are always stored as values, the transpose as values or as codes and scales.
//
// The values of the rows overwrite x in shared memory, those of the transpose have a buffer of their own, so that both
// are stored with 16 bytes per thread and 256 contiguous bytes. Three barriers per tile: columns have read x before the
// rows overwrite it.
#include "cuda/block/pair_tile.cuh"
#include "cuda/block/values.cuh"

namespace nvfp4 {
namespace {

struct ForCodes {
  uint8_t scale[kScaleBytes];
};
struct ForValues {
  uint4 x[kTile][kChunks];
};

// Thread blocks a multiprocessor. With codes three, of 80 registers a thread, find room, and take 3 to 5 % less time on
// an H200 than two: 8192 x 4096 51 to 52 us, not 55, 8192 x 14336 165, not 172.
template <bool values_t>
constexpr int kBlocksPerSm = values_t ? kPairBlocksPerSm : 3;

template <bool values_t>
struct Shared {
  uint4 x[2][kTile][kChunks];  // the tile at work and the next
  std::conditional_t<values_t, ForValues, ForCodes> transposed;
  float enc[128], enc_transposed[128];
};

// A side that leaves as values, so many rows of so many columns.
struct ValueSide {
  Quantization how;
  Bf16* out;
  uint32_t rows, columns;
};

template <Fast mode>
__device__ __forceinline__ Elements<Bf16, kBlock> values_of(const Elements<Bf16, kBlock>& x, const Encoder& encoder,
                                                            ScaleRounding rounding, uint64_t number) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  return block_values<mode>(x, e4m3_value(s_bits), encoder.enc[s_bits], encoder.source, number);
}

__device__ __forceinline__ void store_chunks(const Elements<Bf16, kBlock>& v, uint4* low, uint4* high) {
  *low = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
  *high = make_uint4(v.word[4], v.word[5], v.word[6], v.word[7]);
}

// In place. The lanes as in quantize_pair.
template <Fast mode>
__device__ __forceinline__ void values_by_rows(const Quantization& how, const Encoder& encoder, uint32_t row0,
                                               uint32_t block0, uint4 (*x)[kChunks]) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kRowsATurn = 4;
  const uint32_t block = lane % 4 + 4 * (warp % 2), group = lane / 4 % 2 + 2 * (warp / 2);
  const uint32_t first = group * kBlock + lane / 8;
  uint4* low = &x[first][(2 * block) ^ group];
  uint4* high = &x[first][(2 * block + 1) ^ group];
  uint64_t number = block_number(how.random, row0 + first, block0 + block);
#pragma unroll
  for (int row = 0; row < kBlock; row += kRowsATurn) {
    const uint4 a = low[row * kChunks], b = high[row * kChunks];
    const Elements<Bf16, kBlock> elements = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    store_chunks(values_of<mode>(elements, encoder, how.spec.scale_rounding, number), low + row * kChunks,
                 high + row * kChunks);
    number += kRowsATurn * how.random.width;
  }
}

// Chunk c of column r lies at chunk c ^ this: eight lanes, four even or odd columns by two neighbouring groups of rows,
// then write different banks.
__device__ __forceinline__ uint32_t column_swizzle(uint32_t column) { return column / 2 % 2 + column / 4 % 2 * 4; }

template <Fast mode, bool transform>
__device__ __forceinline__ void values_by_columns(const Quantization& how, const Encoder& encoder,
                                                  const HadamardFactors& factors, uint32_t row0, uint32_t block0,
                                                  const uint4 (*x)[kChunks], uint4 (*out)[kChunks]) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t group = lane / 4, first = warp * 8 + lane % 4 * 2;
  constexpr int kColumnsATurn = kThreads / 32 * 8;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&x[group * kBlock][warp ^ group]) + lane % 4;
  uint4* low = &out[first][(2 * group) ^ column_swizzle(first)];
  uint4* high = &out[first][(2 * group + 1) ^ column_swizzle(first)];
  uint64_t number = block_number(how.random, row0 + first, block0 + group);
#pragma unroll
  for (int column = 0; column < kTile; column += kColumnsATurn) {
    uint32_t word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) word[i] = words[(i * kChunks + column / 8) * 4];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const auto elements = column_block<transform>(word, which, factors);
      store_chunks(values_of<mode>(elements, encoder, how.spec.scale_rounding, number + which * how.random.width),
                   low + (column + which) * kChunks, high + (column + which) * kChunks);
    }
    number += kColumnsATurn * how.random.width;
  }
}

// A tile of values to its place. Each thread reads the chunks that load_tile will have it overwrite.
template <typename Swizzle>
__device__ __forceinline__ void store_tile(const uint4 (*from)[kChunks], const ValueSide& side, uint32_t row0,
                                           uint32_t column0, Swizzle swizzle) {
  constexpr int kRowsAThread = kTile * kChunks / kThreads;
  const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks * kRowsAThread;
  const uint32_t column = column0 + chunk * 8;
  const uint32_t rows = column < side.columns ? rows_left(side.rows, row0 + first) : 0;
  Bf16* to = side.out + (static_cast<int64_t>(row0 + first) * side.columns + column);
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i, to += side.columns) {
    const uint4 v = from[first + i][chunk ^ swizzle(first + i)];
    if (i < rows) *reinterpret_cast<uint4*>(to) = v;
  }
  asm volatile("" ::: "memory");
}

// Transposed: ValueSide, or Side for codes.
template <Fast mode, bool transform, typename Transposed>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<std::is_same_v<Transposed, ValueSide>>)
    quantize_pair_values(Matrix x, ValueSide side, Transposed transposed, HadamardFactors factors) {
  constexpr bool values_t = std::is_same_v<Transposed, ValueSide>;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared<values_t>& shared = *reinterpret_cast<Shared<values_t>*>(memory);
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
    uint4(*elements)[kChunks] = shared.x[stage];
    if constexpr (values_t) {
      values_by_columns<mode, transform>(transposed.how, encoder_transposed, factors, column0, row0 / kBlock, elements,
                                         shared.transposed.x);
    } else {
      quantize_by_columns<mode, transform>(transposed, encoder_transposed, factors, column0, row0 / kBlock, elements,
                                           shared.transposed.scale);
    }
    __syncthreads();
    values_by_rows<mode>(side.how, encoder, row0, column0 / kBlock, elements);
    __syncthreads();
    store_tile(elements, side, row0, column0, [](uint32_t row) { return row / kBlock; });
    if constexpr (values_t) {
      store_tile(shared.transposed.x, transposed, column0, row0, [](uint32_t row) { return column_swizzle(row); });
    } else {
      store_scales(shared.transposed.scale, transposed, column0, row0 / kBlock);
    }
  }
}

template <Fast mode, bool transform, typename Transposed>
void launch(const Matrix& x, const ValueSide& side, const Transposed& transposed, cudaStream_t stream) {
  constexpr auto kernel = quantize_pair_values<mode, transform, Transposed>;
  constexpr bool values_t = std::is_same_v<Transposed, ValueSide>;
  constexpr int kBytes = sizeof(Shared<values_t>);
  allow_shared_memory<kernel>(kBytes);
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const int sign = transposed.how.spec.hadamard_sign;
  kernel<<<grid_of(kPairWaves * kBlocksPerSm<values_t>, tiles), kThreads, kBytes, stream>>>(
      x, side, transposed, HadamardFactors::from(static_cast<uint32_t>(sign)));
}

template <typename Transposed>
void launch_any(const Matrix& x, const ValueSide& side, const Transposed& transposed, cudaStream_t stream) {
  for_mode(side.how.spec, [&](auto mode) {
    if (transposed.how.spec.hadamard_sign >= 0) {
      launch<mode.value, true>(x, side, transposed, stream);
    } else {
      launch<mode.value, false>(x, side, transposed, stream);
    }
  });
}

}  // namespace

bool fits_quantize_pair_values(bool codes_t) {
  return this_machine().shared_bytes >= static_cast<int>(codes_t ? sizeof(Shared<false>) : sizeof(Shared<true>));
}

void launch_quantize_pair_values(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                                 void* values, void* values_transposed, const Codes& codes_transposed,
                                 cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t blocks_t = static_cast<uint32_t>(ceil_div(x.rows, kBlock));
  const ValueSide side{how, static_cast<Bf16*>(values), rows, columns};
  if (values_transposed) {
    launch_any(x, side, ValueSide{how_transposed, static_cast<Bf16*>(values_transposed), columns, blocks_t * kBlock},
               stream);
  } else {
    launch_any(x, side, Side{how_transposed, codes_transposed, columns, blocks_t}, stream);
  }
}

}  // namespace nvfp4
