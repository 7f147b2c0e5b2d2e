// amax: the largest finite magnitude of a matrix, or of its Hadamard transform along the rows.
//
// Magnitudes order like their bits as integers, NaN and Inf on top, so the maximum runs on integers (two 16-bit ones an
// instruction), and a group that shows a NaN or Inf is looked through again element by element.
#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace {

// A thread block's maximum, as the bits of a float32: parts, left at its place in out; else out is raised to it.
template <bool parts>
__device__ __forceinline__ void leave(float* out, uint32_t bits) {
  if constexpr (parts) {
    bits = block_max(bits);
    if (threadIdx.x == 0) out[blockIdx.x] = __uint_as_float(bits);
  } else {
    raise(out, bits);
  }
}

// 64 bytes per thread and iteration, so that four independent 16-byte loads are in flight; they are 16 * kThreads bytes
// apart. One wave: a thread block does little beside its loads, so that its start and its maximum weigh. 8192 x 14336
// on an H200 in 54 us, with twelve waves in 58.
constexpr int kWaves = 1;

template <typename T, bool parts>
__global__ void __launch_bounds__(kThreads) amax_contiguous(const T* x, int64_t count, float* out) {
  griddepcontrol_wait();
  constexpr int kVector = 16 / sizeof(T), kLoads = 4;
  const int64_t vectors = count / kVector, step = static_cast<int64_t>(gridDim.x) * kThreads * kLoads;
  uint32_t most = 0;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  for (; i + (kLoads - 1) * kThreads < vectors; i += step) {
    Elements<T, kVector * kLoads> group;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const auto part = Elements<T, kVector>::load(x + (i + j * kThreads) * kVector);
#pragma unroll
      for (int w = 0; w < 4; ++w) group.word[4 * j + w] = part.word[w];
    }
    most = max(most, finite_amax_bits(group));
  }
  for (; i < vectors; i += kThreads) most = max(most, finite_amax_bits(Elements<T, kVector>::load(x + i * kVector)));
  float tail = 0.0f;
  const int64_t last = vectors * kVector + threadIdx.x;
  if (blockIdx.x == 0 && last < count) tail = magnitude(to_float(x[last]));
  const float here = Elements<T, kVector>::magnitude_of(most);
  const uint32_t bits = float_bits(is_finite(tail) ? fmaxf(here, tail) : here);
  leave<parts>(out, bits);
}

// Of whole blocks, or of their transform. Parts are those that the next kernel, which may begin already, takes.
template <typename T, bool parts, typename Transform>
__global__ void __launch_bounds__(kThreads) amax_blocks(Matrix x, Transform transform, float* out) {
  griddepcontrol_wait();
  if constexpr (parts) griddepcontrol_launch_dependents();
  constexpr int kLoads = parts || sizeof(T) == 2 ? 4 : 2;  // under way at once
  uint32_t most = 0;
  for (Walk at(x.rows, x.blocks()); at.inside();) {
    Elements<T, kBlock> block[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i, at.step()) block[i] = block_at<T>(x, at);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) most = max(most, finite_amax_bits(transform(block[i])));
  }
  leave<parts>(out, float_bits(Elements<Given<T, Transform>, kBlock>::magnitude_of(most)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) amax_any(Matrix x, int hadamard_sign, float* out) {
  griddepcontrol_wait();
  float most = 0.0f;
  for (Walk at(x.rows, x.blocks()); at.inside(); at.step()) {
    float v[kBlock];
    load_block<T>(x, at.row, at.column, v);
    if (hadamard_sign >= 0) hadamard_block(v, hadamard_sign);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) most = is_finite(v[i]) ? fmaxf(most, magnitude(v[i])) : most;
  }
  raise(out, float_bits(most));
}

template <typename T>
int64_t threads_of(int64_t count) {
  return ceil_div(count * static_cast<int64_t>(sizeof(T)), 64);
}

__global__ void clear(float* a, float* b) {
  griddepcontrol_launch_dependents();
  *a = 0.0f;
  if (b) *b = 0.0f;
}

}  // namespace

void launch_clear(float* a, float* b, cudaStream_t stream) { clear<<<1, 1, 0, stream>>>(a, b); }

bool fits_maxima(const Matrix& x) {
  const bool contiguous = x.rows == 1 || x.row_stride == x.columns;
  return contiguous && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

Amax launch_maxima(const Matrix& x, const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  Amax maxima{};
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    const unsigned grid = grid_of_walk<amax_contiguous<T, true>>(kWaves, threads_of<T>(count));
    float* const out = static_cast<float*>(scratch(grid * int64_t{sizeof(float)}));
    const Launch launch(dim3(grid), 1, kThreads, 0, stream, Begins::kAfterPrevious);
    cudaLaunchKernelEx(&launch.config, amax_contiguous<T, true>, static_cast<const T*>(x.data), count, out);
    maxima = {out, static_cast<int>(grid)};
  });
  return maxima;
}

Amax launch_few_maxima(const Matrix& x, const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(ceil_div(x.rows * x.blocks(), kThreads), kFewBlocks));
  float* const out = static_cast<float*>(scratch(grid * sizeof(float)));
  for_dtype(x.dtype, [&](auto type) {
    const Launch launch(dim3(grid), 1, kThreads, 0, stream, Begins::kBeforePreviousEnds);
    cudaLaunchKernelEx(&launch.config, amax_blocks<decltype(type), true, Plain>, x, Plain{}, out);
  });
  return {out, static_cast<int>(grid)};
}

void launch_amax(const Matrix& x, int hadamard_sign, float* out, cudaStream_t stream) {
  const int64_t count = x.rows * x.columns;
  launch_clear(out, nullptr, stream);
  if (count == 0) return;
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto by_blocks = [&](const auto& transform) {
      using Transform = std::decay_t<decltype(transform)>;
      launch_walk<amax_blocks<T, false, Transform>, kWaves, Begins::kBesideClear>(x.rows * x.blocks(), stream, x,
                                                                                  transform, out);
    };
    if (hadamard_sign < 0 && fits_maxima(x)) {
      launch_walk<amax_contiguous<T, false>, kWaves, Begins::kBesideClear>(threads_of<T>(count), stream,
                                                                           static_cast<const T*>(x.data), count, out);
    } else if (!x.whole_blocks()) {
      launch_walk<amax_any<T>, 12, Begins::kBesideClear>(x.rows * x.blocks(), stream, x, hadamard_sign, out);
    } else if (hadamard_sign >= 0) {
      by_blocks(Transformed{HadamardFactors::from(static_cast<uint32_t>(hadamard_sign))});
    } else {
      by_blocks(Plain{});
    }
  });
}

}  // namespace nvfp4
