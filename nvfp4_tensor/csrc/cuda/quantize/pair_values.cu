// quantize_pair_values: quantize_pair that stores decoded bfloat16 values, which products read on hardware without FP4
// tensor cores. The rows are always stored as values, the transpose as values or as codes and scales.
//
// The values of the rows overwrite x in shared memory, those of the transpose have a buffer of their own, so that both
// are stored with 16 bytes per thread and 256 contiguous bytes. Three barriers per tile: columns have read x before the
// rows overwrite it.
#include "cuda/block/tile_values.cuh"
#include "cuda/quantize/maxima.h"

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

template <bool values_t, bool searched = true>  // the larger one
struct Shared {
  uint4 x[2][kTile][kChunks];  // the tile at work and the next
  std::conditional_t<values_t, ForValues, ForCodes> transposed;
  RowTable<searched> rows;
  RowTable<false> transposed_rows;
};

// The scale of a tensor, written, and the table of a side filled. All threads of the block come here together.
template <Fast mode, bool searched>
__device__ __forceinline__ auto side_encoder(const Quantization& how, int maxima, RowTable<searched>& table) {
  const float amax = largest_amax(how, maxima);
  const TensorScale tensor = TensorScale::of(amax, how.spec.scale_ceiling);
  if (blockIdx.x == 0 && threadIdx.x == 0) *how.per_tensor_scale = per_tensor_scale(amax, how.spec.scale_ceiling);
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  if constexpr (searched) {
    table.search.fill(tensor);
    return SearchEncoder{&table.search, tensor.sixth, source};
  } else {
    if (threadIdx.x < 128) table.enc[threadIdx.x] = tensor.block_encode(e4m3_value(static_cast<uint8_t>(threadIdx.x)));
    return Encoder{table.enc, tensor.sixth, source};
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

// Transposed: ValueSide, or Side for codes. searched: the scales of the rows are.
template <Fast mode, bool transform, bool searched, typename Transposed>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<std::is_same_v<Transposed, ValueSide>>)
    quantize_pair_values(Matrix x, ValueSide side, Transposed transposed, HadamardFactors factors, int maxima) {
  constexpr bool values_t = std::is_same_v<Transposed, ValueSide>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<values_t, searched>*>(memory);
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  load_tile(x, tile.row * kTile, tile.column * kTile, shared.x[0]);
  asm volatile("cp.async.commit_group;");
  const auto encoder = side_encoder<mode>(side.how, maxima, shared.rows);
  const Encoder encoder_transposed = side_encoder<mode>(transposed.how, maxima, shared.transposed_rows);
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
    values_by_rows<mode, PairRows>(side.how, encoder, row0, column0 / kBlock, elements);
    __syncthreads();
    store_tile(elements, side, row0, column0, [](uint32_t row, uint32_t chunk) { return chunk ^ row / kBlock; });
    if constexpr (values_t) {
      store_tile(shared.transposed.x, transposed, column0, row0,
                 [](uint32_t row, uint32_t chunk) { return chunk ^ column_swizzle(row); });
    } else {
      store_scales(shared.transposed.scale, transposed, column0, row0 / kBlock);
    }
  }
}

template <Fast mode, bool transform, bool searched, typename Transposed>
void launch(const Matrix& x, const ValueSide& side, const Transposed& transposed, int maxima, cudaStream_t stream) {
  constexpr auto kernel = quantize_pair_values<mode, transform, searched, Transposed>;
  constexpr bool values_t = std::is_same_v<Transposed, ValueSide>;
  constexpr int kBytes = sizeof(Shared<values_t, searched>);
  allow_shared_memory<kernel>(kBytes);
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const int sign = transposed.how.spec.hadamard_sign;
  kernel<<<grid_of(kPairWaves * kBlocksPerSm<values_t>, tiles), kThreads, kBytes, stream>>>(
      x, side, transposed, HadamardFactors::from(static_cast<uint32_t>(sign)), maxima);
}

template <typename Transposed>
void launch_any(const Matrix& x, const ValueSide& side, const Transposed& transposed, int maxima, cudaStream_t stream) {
  const auto launch_by = [&](auto mode, auto searched) {
    if (transposed.how.spec.hadamard_sign >= 0) {
      launch<mode.value, true, searched.value>(x, side, transposed, maxima, stream);
    } else {
      launch<mode.value, false, searched.value>(x, side, transposed, maxima, stream);
    }
  };
  if (side.how.spec.scale_search != ScaleSearch::kNone) {
    return launch_by(std::integral_constant<Fast, Fast::kNearestEven>{}, std::true_type{});
  }
  for_mode(side.how.spec, [&](auto mode) { launch_by(mode, std::false_type{}); });
}

}  // namespace

bool fits_quantize_pair_values(bool codes_t) {
  constexpr int kOfWarps = 32 * sizeof(float);  // largest_amax's
  return this_machine().shared_bytes >=
         static_cast<int>(codes_t ? sizeof(Shared<false>) : sizeof(Shared<true>)) + kOfWarps;
}

void launch_quantize_pair_values(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                                 int maxima, void* values, void* values_transposed, const Codes& codes_transposed,
                                 cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t blocks_t = static_cast<uint32_t>(ceil_div(x.rows, kBlock));
  const ValueSide side{how, static_cast<Bf16*>(values), rows, columns};
  if (values_transposed) {
    launch_any(x, side, ValueSide{how_transposed, static_cast<Bf16*>(values_transposed), columns, blocks_t * kBlock},
               maxima, stream);
  } else {
    launch_any(x, side, Side{how_transposed, codes_transposed, columns, blocks_t}, maxima, stream);
  }
}

void launch_quantize_pair_values(const Matrix& x, const Quantization& how, const Quantization& how_transposed,
                                 void* values, void* values_transposed, const Codes& codes_transposed,
                                 cudaStream_t stream) {
  launch_quantize_pair_values(x, how, how_transposed, 1, values, values_transposed, codes_transposed, stream);
}

}  // namespace nvfp4
