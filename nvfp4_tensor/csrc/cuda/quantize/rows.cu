// Quantization kernel for 1x16 blocks.
//
// A scale tile covers 128 rows x 4 blocks. Its i-th 16-byte group holds rows i, i + 32, i + 64, i + 96. Each warp
// handles 8 values of i x 4 blocks; each lane handles one block column of the four rows. Lanes sharing i transpose
// their scales, so that the warp stores 128 contiguous bytes, padding included. Byte-wise scale stores were 1/6 of L2
// operations: L2 ran at 95 % of peak, memory at 81 %.
//
// Budget: about 20 issued instructions per element at 90 % of the bandwidth (16384^2 bfloat16, H200).
#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarpRows = 8;

__host__ __device__ __forceinline__ int64_t row_units(int64_t rows) {
  return ceil_div(rows, kTileRows) * (kGroupRows / kWarpRows);
}

// A lane's first row and its block column. A warp's unit is 8 of a row tile's 32 groups of rows.
struct LaneCoord {
  uint32_t row, column;
};

__device__ __forceinline__ LaneCoord lane_coord(const Walk& at, uint32_t lane) {
  const uint32_t row_tile = at.row / (kGroupRows / kWarpRows), part = at.row % (kGroupRows / kWarpRows);
  const uint32_t row = row_tile * kTileRows + part * kWarpRows + lane / kTileColumns;
  return {row, at.column * kTileColumns + lane % kTileColumns};
}

template <typename T, Fast mode, typename Transform>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    quantize_rows(Matrix x, Quantization how, Transform transform, Codes out) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), blocks = static_cast<uint32_t>(x.blocks());
  const uint32_t lane = threadIdx.x % 32, warps = kThreads / 32;
  const auto inside = [=](const LaneCoord& p, int group) {
    return p.column < blocks && p.row + group * kGroupRows < rows;
  };
  Walk at(row_units(x.rows), x.column_tiles(), blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
  const int64_t group_stride = kGroupRows * x.row_stride;
  LaneCoord here = lane_coord(at, lane);
  const T* from = element_at<T>(x, here.row, here.column * kBlock);
  Elements<T, kBlock> block[2];  // in flight while the table is filled
#pragma unroll
  for (int group = 0; group < 2; ++group, from += group_stride) {
    block[group] = Elements<T, kBlock>::zero();
    if (inside(here, group)) block[group] = Elements<T, kBlock>::load(from);
  }
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const TensorScale tensor = tensor_scale_by_maxima(how);
  const float* enc = encode_table(tensor);
  while (at.inside()) {
    uint2* codes = reinterpret_cast<uint2*>(out.qdata) + (static_cast<int64_t>(here.row) * blocks + here.column);
    uint64_t number = block_number(how.random, here.row, here.column);
    uint32_t* scale = reinterpret_cast<uint32_t*>(out.scale) +
                      ((static_cast<uint64_t>(here.row / kTileRows) * at.width + at.column) * (kTileBytes / 4) +
                       here.row % kGroupRows * kGroups + lane % kTileColumns);
    at.step();
    const LaneCoord next = lane_coord(at, lane);
    uint32_t s_bytes = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const auto& x_block = transform(block[group % 2]);
      const uint8_t s_bits = scale_from_bits<Given<T, Transform>>(x_block.amax_bits(), tensor.sixth,
                                                                  how.spec.scale_rounding);
      const uint2 coded = encode16<mode>(x_block, s_bits, enc[s_bits], source, number);
      // Two rows on, perhaps of the next unit: in flight while the row in between is encoded.
      if (group == 2) from = element_at<T>(x, next.row, next.column * kBlock);
      if (inside(group < 2 ? here : next, (group + 2) % kGroups)) block[group % 2] = Elements<T, kBlock>::load(from);
      from += group_stride;
      if (inside(here, group)) {
        *codes = coded;
        s_bytes |= static_cast<uint32_t>(s_bits) << (8 * group);
      }
      codes += static_cast<int64_t>(kGroupRows) * blocks, number += kGroupRows * how.random.width;
    }
    *scale = transpose_bytes(s_bytes, lane);
    here = next;
  }
}

}  // namespace

void launch_quantize_rows(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  const int64_t threads = row_units(x.rows) * x.column_tiles() * 32;
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      using T = decltype(type);
      if (how.spec.hadamard_sign < 0) {
        launch_walk<quantize_rows<T, mode.value, Plain>, 6>(threads, stream, x, how, Plain{}, out);
      } else {
        const Transformed transform{HadamardFactors::from(static_cast<uint32_t>(how.spec.hadamard_sign))};
        launch_walk<quantize_rows<T, mode.value, Transformed>, 6>(threads, stream, x, how, transform, out);
      }
    });
  });
}

}  // namespace nvfp4
