// RMS norms of rows, with what is added before: a block has a row, in registers.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "cuda/generation/step.h"
#include "cuda/ptx/lanes.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {
namespace {

constexpr int kMostWarps = 32;

// Of all threads of the block, to each of them. `warps`: kMostWarps floats of shared memory, one array for each call.
__device__ __forceinline__ float block_sum(float v, float* warps) {
  v = sum_of_lanes(v);
  const int count = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  return sum_of_lanes(lane < count ? warps[lane] : 0.0f);
}

template <typename T>
__device__ __forceinline__ float round_to(float v) {
  return to_float(from_float<T>(v));
}

// kVectors groups of 8 consecutive elements per thread, or, unaligned, 8 * kVectors single ones.
template <typename T, bool kAligned, int kVectors>
struct Row {
  static constexpr int kValues = 8 * kVectors;
  float v[kValues];

  static __device__ __forceinline__ int column(int i) {
    return kAligned ? (i / 8 * blockDim.x + threadIdx.x) * 8 + i % 8 : i * blockDim.x + threadIdx.x;
  }
  template <Read read>
  __device__ __forceinline__ void load(const T* from, int columns) {
    if constexpr (kAligned) {
#pragma unroll
      for (int group = 0; group < kVectors; ++group) {
        const int at = column(8 * group);
        if (at < columns) {
          const auto e = Elements<T, 8>::template load<read>(from + at);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[8 * group + i] = e.value(i);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) v[8 * group + i] = 0;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] = column(i) < columns ? to_float(from[column(i)]) : 0.0f;
    }
  }
  __device__ __forceinline__ void store(T* to, int columns) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int group = 0; group < kVectors; ++group) {
        const int at = column(8 * group);
        if (at < columns) store8(to + at, reinterpret_cast<const float (&)[8]>(v[8 * group]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (column(i) < columns) to[column(i)] = from_float<T>(v[i]);
      }
    }
  }
};

// v to its norm, rounded.
template <typename T, typename R>
__device__ __forceinline__ void normalize(R& row, const R& weight, const NormRows& p, float* warps) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < R::kValues; ++i) sum += row.v[i] * row.v[i];
  const float factor = rsqrtf(block_sum(sum, warps) / p.columns + p.norm.eps);
#pragma unroll
  for (int i = 0; i < R::kValues; ++i) {
    float unit = row.v[i] * factor;
    if (p.norm.round_before_weight) unit = round_to<T>(unit);
    row.v[i] = round_to<T>(unit * (weight.v[i] + p.norm.offset));
  }
}

template <typename T, bool kAligned, int kVectors>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const __grid_constant__ NormRows p) {
  using R = Row<T, kAligned, kVectors>;
  __shared__ float warps[2][kMostWarps];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.columns;
  const auto load_weight = [&](R& to, const void* from, bool wide) {
    if (wide) {
#pragma unroll
      for (int i = 0; i < R::kValues; ++i) {
        const int at = R::column(i);
        to.v[i] = at < p.columns ? static_cast<const float*>(from)[at] : 0.0f;
      }
    } else {
      to.template load<Read::kAfterWait>(static_cast<const T*>(from), p.columns);
    }
  };
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  R row, other, weight;
  row.template load<Read::kAfterWait>(static_cast<const T*>(p.x) + begin, p.columns);
  if (p.residual) other.template load<Read::kAfterWait>(static_cast<const T*>(p.residual) + begin, p.columns);
  if (p.weight) load_weight(weight, p.weight, p.wide_weight);
  if (p.first_weight) {
    R first;
    load_weight(first, p.first_weight, p.wide_first);
    normalize<T>(row, first, p, warps[0]);
  }
  if (p.multiplier != 1.0f) {
#pragma unroll
    for (int i = 0; i < R::kValues; ++i) row.v[i] = round_to<T>(row.v[i] * p.multiplier);
  }
  if (p.residual) {
#pragma unroll
    for (int i = 0; i < R::kValues; ++i) row.v[i] = round_to<T>(other.v[i] + row.v[i]);
  }
  if (p.sum) row.store(static_cast<T*>(p.sum) + begin, p.columns);
  if (p.weight) {
    normalize<T>(row, weight, p, warps[1]);
    row.store(static_cast<T*>(p.y) + begin, p.columns);
  }
}

}  // namespace

void launch_rms_norm(const NormRows& p, cudaStream_t stream) {
  const auto at = [](const void* t) { return reinterpret_cast<uintptr_t>(t); };
  const bool aligned = p.columns % 8 == 0 && (at(p.x) | at(p.residual) | at(p.weight) | at(p.first_weight)) % 16 == 0;
  const int vectors = p.columns <= 8192 ? 1 : 2;
  const int threads = std::min((p.columns + 8 * vectors - 1) / (8 * vectors) + 31, 1024) / 32 * 32;
  const Launch launch(dim3(static_cast<unsigned>(p.rows)), 1, threads, 0, stream, Begins::kBeforePreviousEnds);
  for_16_bits(p.dtype, [&](auto type) {
    for_flag(aligned, [&](auto wide) {
      constexpr auto one = rms_norm_kernel<decltype(type), wide.value, 1>;
      constexpr auto two = rms_norm_kernel<decltype(type), wide.value, 2>;
      cudaLaunchKernelEx(&launch.config, vectors == 1 ? one : two, p);
    });
  });
}

}  // namespace step
}  // namespace nvfp4
