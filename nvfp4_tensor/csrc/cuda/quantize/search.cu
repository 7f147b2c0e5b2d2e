// quantize with a search over scales: of seven neighbours, the one of least squared error. A lane has a row of a block,
// the magnitudes of its elements in registers.
//
// What an element is rounded to comes from two fused multiply-adds, without a code: six instructions an element and
// scale (seven where values beyond 6 saturate, as under the smallest scale), 43 for seven scales. Four-over-six, whose
// error is that of decoded values, takes 12 a scale.
#include "cuda/block/row_lanes.cuh"
#include "cuda/block/search.cuh"

namespace nvfp4 {
namespace {

template <typename T>
__device__ __forceinline__ Elements<T, kBlock> load(const Matrix& x, const RowCoord& coord) {
  if (!coord.inside) return Elements<T, kBlock>::zero();
  return Elements<T, kBlock>::load(element_at<T>(x, coord.row, coord.column * kBlock));
}

template <typename T, Fast mode, bool tile>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    quantize_search(Matrix x, Quantization how, Codes out) {
  RowLanes lanes(x, tile);
  RowCoord coord = lanes.coord(x);
  auto block = load<T>(x, coord);  // on its way while the table is made
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  __shared__ SearchTable table;
  table.fill(tensor);
  __syncthreads();
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const uint32_t blocks = static_cast<uint32_t>(x.blocks()), column_tiles = static_cast<uint32_t>(x.column_tiles());
  while (lanes.any()) {
    const RowCoord here = coord;
    const Elements<T, kBlock> now = block;
    lanes.at.step();
    coord = lanes.coord(x);
    block = load<T>(x, coord);  // in flight during the rest
    uint32_t most = now.amax_bits();
    if constexpr (tile) {
#pragma unroll
      for (int half = 8; half; half /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, half));
    }
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      v[i] = now.value(i);
      asm volatile("" : "+f"(v[i]));  // else each scale tried would unpack it again
    }
    const float amax = Elements<T, kBlock>::magnitude_of(most);
    const uint8_t s_bits = search_scale(v, amax, tensor.block_scale(amax, how.spec.scale_rounding),
                                        how.spec.scale_rounding, table, [](float sum) { return tile_sum(sum, tile); });
    if (!here.inside) continue;
    const uint64_t number = block_number(how.random, here.row, here.column);
    reinterpret_cast<uint2*>(out.qdata)[static_cast<int64_t>(here.row) * blocks + here.column] = encode16<mode>(
        now, s_bits, table.enc(s_bits), source, number);
    out.scale[scale_offset(here.row, here.column, column_tiles)] = s_bits;
  }
}

}  // namespace

void launch_quantize_search(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  const int64_t threads = RowLanes::threads(x, how.spec);
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      if (how.spec.block_rows == 1) {
        launch_walk<quantize_search<decltype(type), mode.value, false>, 4>(threads, stream, x, how, out);
      } else {
        launch_walk<quantize_search<decltype(type), mode.value, true>, 4>(threads, stream, x, how, out);
      }
    });
  });
}

}  // namespace nvfp4
