// One token's queries and key before attention: norms and the rotation, a warp for each head.
#pragma once

#include "cuda/block/elements.cuh"
#include "cuda/generation/step.h"
#include "cuda/ptx/lanes.cuh"

namespace nvfp4 {
namespace step {

constexpr int kAttendWarps = 8;
constexpr int kAttendThreads = kAttendWarps * 32;

// Of float32 if wide, else of T.
template <typename T>
__device__ __forceinline__ float load_wide(const void* from, bool wide, int64_t i) {
  return wide ? static_cast<const float*>(from)[i] : to_float(static_cast<const T*>(from)[i]);
}

// A head's query or key, by a warp: loaded, then to shared memory, normed and rotated.
template <typename T, int kDim>
struct HeadRow {
  static constexpr int kEach = kDim / 32;
  float v[kEach], cos[kEach], sin[kEach];

  __device__ __forceinline__ HeadRow(const Attend& p, const T* from, int64_t angle, int lane) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = i * 32 + lane;
      v[i] = d < p.dim ? to_float(from[d]) : 0.0f;
      cos[i] = sin[i] = 0.0f;
    }
    if (p.wide_angles) {
      load_angles(static_cast<const float*>(p.cos) + angle, static_cast<const float*>(p.sin) + angle, p.rotary, lane);
    } else {
      load_angles(static_cast<const T*>(p.cos) + angle, static_cast<const T*>(p.sin) + angle, p.rotary, lane);
    }
  }
  template <typename Angle>
  __device__ __forceinline__ void load_angles(const Angle* its_cos, const Angle* its_sin, int rotary, int lane) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = i * 32 + lane;
      if (d < rotary) cos[i] = to_float(its_cos[d]), sin[i] = to_float(its_sin[d]);
    }
  }
  // unit: 1 / rms over all heads, or 0: of this head.
  __device__ __forceinline__ void prepare(const Attend& p, const void* weight, float unit, uint16_t* to, int lane) {
    if (weight) norm(p, weight, unit, lane);
    T* const row = reinterpret_cast<T*>(to);
#pragma unroll
    for (int i = 0; i < kEach; ++i) row[i * 32 + lane] = from_float<T>(v[i]);
    if (p.rotary == 0) return;
    __syncwarp();
    const int half = p.rotary / 2;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = i * 32 + lane;
      if (d < p.rotary) {
        const float beside = to_float(row[d < half ? d + half : d - half]), other = d < half ? -beside : beside;
        float a = v[i] * cos[i], b = other * sin[i];
        if (!p.wide_angles) a = to_float(from_float<T>(a)), b = to_float(from_float<T>(b));
        v[i] = a + b;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) row[i * 32 + lane] = from_float<T>(v[i]);
  }
  __device__ __forceinline__ void norm(const Attend& p, const void* weight, float unit, int lane) {
    if (unit == 0.0f) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) squares += v[i] * v[i];
      unit = rsqrtf(sum_of_lanes(squares) / p.dim + p.norm.eps);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = i * 32 + lane;
      if (d < p.dim) {
        float u = v[i] * unit;
        if (p.norm.round_before_weight) u = to_float(from_float<T>(u));
        v[i] = to_float(from_float<T>(u * (load_wide<T>(weight, p.wide_norms, d) + p.norm.offset)));
      }
    }
  }
};

// The norm's weight of a head; null: no norm.
__device__ __forceinline__ const void* norm_of_head(const Attend& p, const void* weight, bool joint, int head) {
  return weight && joint ? static_cast<const uint8_t*>(weight) + head * p.dim * (p.wide_norms ? 4 : 2) : weight;
}

// The first kThreads threads wait for each other.
template <int kThreads>
__device__ __forceinline__ void sync_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// 1 / rms of so many elements, by the first kThreads threads. squares: a float for each warp, in shared memory.
template <int kThreads, typename T>
__device__ __forceinline__ float joint_unit(const T* from, int count, float eps, float* squares) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float v = to_float(from[i]);
    sum += v * v;
  }
  sum = sum_of_lanes(sum);
  sync_first<kThreads>();
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  sync_first<kThreads>();
  sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += squares[warp];
  return rsqrtf(sum / count + eps);
}

}  // namespace step
}  // namespace nvfp4
