// What the kernels share: walking the blocks of a matrix, loading any block, and quantizing one.
#pragma once

#include "cuda/block/round.cuh"
#include "cuda/host/kernels.h"
#include "cuda/host/launch.h"
#include "numerics/block.h"
#include "numerics/hadamard.h"

namespace nvfp4 {

constexpr int kThreads = 256;
constexpr unsigned kFewBlocks = 128;  // that find room beside the kernels before and behind theirs

// The units (blocks, say) of a matrix, row by row, in steps of the whole grid, without a division in the loop.
struct Walk {
  uint32_t rows, width, row, column, step_rows, step_columns;

  __device__ __forceinline__ Walk(int64_t row_count, int64_t units_in_a_row)
      : Walk(row_count, units_in_a_row, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x) {}

  __device__ __forceinline__ Walk(int64_t row_count, int64_t units_in_a_row, uint32_t first, uint32_t step)
      : rows(static_cast<uint32_t>(row_count)), width(static_cast<uint32_t>(units_in_a_row)) {
    if (width == 0) rows = 0;
    const uint32_t divisor = max(width, 1u);
    row = first / divisor, column = first % divisor;
    step_rows = step / divisor, step_columns = step % divisor;
  }

  __device__ __forceinline__ bool inside() const { return row < rows; }

  __device__ __forceinline__ void step() {
    row += step_rows, column += step_columns;
    if (column >= width) column -= width, ++row;
  }
};

template <typename T>
__device__ __forceinline__ const T* element_at(const Matrix& x, uint32_t row, uint32_t column) {
  return static_cast<const T*>(x.data) + (static_cast<int64_t>(row) * x.row_stride + column);
}

// The full block at a walk, in memory order; zero past the end of the walk. For kernels that begin before the previous
// kernel ends.
template <typename T>
__device__ __forceinline__ Elements<T, kBlock> block_at(const Matrix& x, const Walk& at) {
  if (!at.inside()) return Elements<T, kBlock>::zero();
  return Elements<T, kBlock>::template load<Read::kAfterWait>(element_at<T>(x, at.row, at.column * kBlock));
}

// A block of any matrix as float32, zero past its end.
template <typename T>
__device__ __forceinline__ void load_block(const Matrix& x, uint32_t row, uint32_t block, float (&v)[kBlock]) {
  const uint32_t first = block * kBlock;
  const T* from = element_at<T>(x, row, first);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = first + i < x.columns ? to_float(__ldg(from + i)) : 0.0f;
}

// The Hadamard transform of a block, rounded to bfloat16 as the contract has it.
__device__ __forceinline__ void hadamard_block(float (&v)[kBlock], uint32_t sign) {
  hadamard16(v, sign);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = from_bfloat16(to_bfloat16(v[i]));
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xFFFFFFFFu, v); }

// The largest v of the thread block, of whole warps, for its first one; 0 for the others.
__device__ __forceinline__ uint32_t block_max(uint32_t v) {
  __shared__ uint32_t of_warp[32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  v = warp_max(v);
  __syncthreads();
  if (lane == 0) of_warp[warp] = v;
  __syncthreads();
  return warp == 0 ? warp_max(lane < blockDim.x / 32 ? of_warp[lane] : 0) : 0;
}

// The same, raised into *out; magnitudes order like their bits. *out must hold zero before.
__device__ __forceinline__ void raise(float* out, uint32_t bits) {
  bits = block_max(bits);
  if (threadIdx.x == 0 && bits) atomicMax(reinterpret_cast<unsigned int*>(out), bits);
}

// Its sign is left out: the host cannot look at it, and block scales below zero would lie beyond the tables of 128.
__device__ __forceinline__ float load_amax(const Quantization& how) { return fabsf(*how.amax); }

__device__ __forceinline__ TensorScale tensor_scale(const Quantization& how) {
  return TensorScale::of(load_amax(how), how.spec.scale_ceiling);
}

__device__ __forceinline__ void write_per_tensor_scale(const Quantization& how, float amax) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *how.per_tensor_scale = per_tensor_scale(amax, how.spec.scale_ceiling);
}
__device__ __forceinline__ void write_per_tensor_scale(const Quantization& how) {
  write_per_tensor_scale(how, load_amax(how));
}

// The scale of a tensor, perhaps from maxima of its parts; its factor is written. All threads of the thread block, of
// whole warps, come here together.
__device__ __forceinline__ TensorScale tensor_scale_by_maxima(const Quantization& how) {
  float most = 0.0f;
  if (how.maxima == 1) {
    most = load_amax(how);
  } else {
    __shared__ float of_warp[32];
    for (int i = threadIdx.x; i < how.maxima; i += blockDim.x) most = fmaxf(most, how.amax[i]);
    most = __uint_as_float(warp_max(__float_as_uint(most)));
    __syncthreads();  // what an earlier call left has been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; ++i) most = fmaxf(most, of_warp[i]);
  }
  write_per_tensor_scale(how, most);
  return TensorScale::of(most, how.spec.scale_ceiling);
}

__device__ __forceinline__ DrawSource draw_source(const Quantization& how, bool stochastic) {
  DrawSource source{};
  if (stochastic) {
    source.key = RandomKey::of(how.random.rng_state[0], how.random.rng_state[1], how.random.stream);
    source.hardware = how.spec.hardware_rounding;
  }
  return source;
}

__device__ __forceinline__ uint64_t block_number(const RandomOffset& offset, uint32_t row, uint32_t column) {
  return static_cast<uint64_t>(offset.first + static_cast<int64_t>(row) * offset.width + column);
}

// enc of every block scale, in shared memory: 127 exact divisions per thread block instead of one per 16 elements.
// All threads of the thread block come here, and meet before they read it.
__device__ __forceinline__ void fill_encode_table(const TensorScale& tensor, float* table) {
  if (threadIdx.x < 128) table[threadIdx.x] = tensor.block_encode(e4m3_value(static_cast<uint8_t>(threadIdx.x)));
}
__device__ __forceinline__ const float* encode_table(const TensorScale& tensor) {
  __shared__ float table[128];
  fill_encode_table(tensor, table);
  __syncthreads();
  return table;
}

// The 16 bytes i of a tile of scales are those of rows i, i + 32, i + 64 and i + 96, four blocks of each: a lane that
// has one block column of these rows makes whole words with its three neighbours.
constexpr int kGroups = 4, kGroupRows = 32;  // rows per lane, and their distance

// Transposes 4 x 4 bytes among four neighbouring lanes: lane g gets byte g of each, the lowest lane's in the low byte.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t mine, uint32_t lane) {
  const uint32_t next = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  const uint32_t pairs = lane & 1 ? __byte_perm(next, mine, 0x7351) : __byte_perm(mine, next, 0x6240);
  const uint32_t far = __shfl_xor_sync(0xFFFFFFFFu, pairs, 2);
  return lane & 2 ? __byte_perm(far, pairs, 0x7632) : __byte_perm(pairs, far, 0x5410);
}

// s_b from the bits of a block's amax.
template <typename T>
__device__ __forceinline__ uint8_t scale_from_bits(uint32_t amax_bits, float sixth, ScaleRounding rounding) {
  const float amax = Elements<T, 8>::magnitude_of(amax_bits);
  const uint8_t s_bits = to_e4m3(mul(amax, sixth), rounding, amax);
  return amax_bits >= kInfinity<T> ? kE4M3Nan : s_bits;
}

// Calls f(type tag, mode tag) with the compile-time types that dtype and mode stand for.
template <typename Function>
void for_dtype(Dtype dtype, Function f) {
  switch (dtype) {
    case Dtype::kBf16: return f(__nv_bfloat16{});
    case Dtype::kFp16: return f(__half{});
    case Dtype::kFloat: return f(float{});
  }
}

// Calls f(flag) with the compile-time flag of a value.
template <typename Function>
void for_flag(bool value, Function f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f(type tag, flag): whether 16-byte loads take the blocks of x.
template <typename Function>
void for_matrix(const Matrix& x, Function f) {
  for_dtype(x.dtype, [&](auto type) { for_flag(x.whole_blocks(), [&](auto whole) { f(type, whole); }); });
}

template <typename Function>
void for_mode(const QuantizeSpec& spec, Function f) {
  if (!spec.is_stochastic()) return f(std::integral_constant<Fast, Fast::kNearestEven>{});
  if (spec.random_bits == 8) return f(std::integral_constant<Fast, Fast::kStochastic8>{});
  return f(std::integral_constant<Fast, Fast::kStochastic16>{});
}

// The grid of a kernel that walks so many units of work, one per thread and iteration: a few waves of what fits at
// once. With one, a static share each, warps end up to a third apart and the last run alone; with many, thread blocks
// do not live long enough to pay for their table of enc. Measured on an H200, quantize_rows, stochastic, with 6 and 12:
// 81 and 80 % of the copy bandwidth, and with 64 a fifth less.
template <auto kernel>
unsigned grid_of_walk(int waves, int64_t units) {
  static const int blocks_per_sm = [] {
    int count = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kThreads, 0);
    return count < 1 ? 1 : count;
  }();
  return grid_of(waves * blocks_per_sm, ceil_div(units, kThreads));
}

// Launches it. With few blocks it begins before the kernel before it ends, where it may; many would crowd the
// multiprocessors that are free until then.
template <auto kernel, int waves = 12, Begins begins = Begins::kAfterPrevious, typename... Arguments>
void launch_walk(int64_t units, cudaStream_t stream, Arguments... arguments) {
  const dim3 grid(grid_of_walk<kernel>(waves, units));
  const bool crowds = begins == Begins::kBeforePreviousEnds && grid.x > kFewBlocks;
  const Launch launch(grid, 1, kThreads, 0, stream, crowds ? Begins::kAfterPrevious : begins);
  cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

}  // namespace nvfp4
