// The kernels of one token's step, except its products: plain structs, one launcher each. Like those of
// cuda/host/kernels.h, launchers only enqueue work.
//
// All are launched with PDL: a kernel waits for the one before it (griddepcontrol.wait) before it reads anything, and
// only then lets the next one begin, so that whatever begins may rely on all kernels but the previous one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention/attend.h"
#include "cuda/generation/activation.h"
#include "numerics/matrix.h"

namespace nvfp4 {
namespace step {

// Calls f(tag) with the type that one of the dtypes of 16 bits stands for.
template <typename Function>
auto for_16_bits(Dtype dtype, Function f) {
  return dtype == Dtype::kBf16 ? f(__nv_bfloat16{}) : f(__half{});
}

// x / sqrt(mean(x^2) + eps) * (weight + offset).
struct Norm {
  float eps, offset;
  bool round_before_weight;
};

struct NormRows {
  const void *x, *residual, *weight, *first_weight;  // all but x may be null
  bool wide_weight, wide_first;                      // float32 in place of x's dtype
  void *y, *sum;                                     // null: not wanted
  int64_t rows;
  int columns;
  Norm norm;
  float multiplier;
  Dtype dtype;
};
constexpr int kMostNormColumns = 16384;
void launch_rms_norm(const NormRows& p, cudaStream_t stream);

struct Gated {
  const void* gate_up;
  void* out;
  int64_t rows;
  int columns;  // of out
  Activation activation;
  float limit, alpha;
  bool interleaved;
  Dtype dtype;
};
void launch_gated(const Gated& p, cudaStream_t stream);

constexpr int kMostHeadDim = 256;  // and a multiple of 8
// Tokens of a block from which on more blocks pay, where they fill the machine and clusters do not.
constexpr int kLongShare = 1024;

struct Attend {
  const void* qkv;  // (batch, (heads + 2 * kv_heads) * dim)
  const void *q_norm, *k_norm;
  bool wide_norms;        // float32
  bool q_joint, k_joint;  // a norm over all heads
  Norm norm;
  const void *cos, *sin;
  bool wide_angles;
  int rotary, angle_step;  // elements of cos and sin; from a row's to the next's
  void *keys, *values;     // (batch, kv_heads, length, dim)
  const int64_t* position;
  int position_step;
  const int64_t* starts;  // (batch,), the first position that a row sees; null: 0
  const void* sinks;
  bool wide_sinks;
  void* out;  // (batch, heads * dim)
  int batch, heads, kv_heads, length, dim;
  int window;  // 0: none
  float scaling, softcap;
  Dtype dtype;
  // set by the launcher
  int group, passes, splits;  // heads of a kv head; in how many passes of kHeads; shares of the context
  int few_splits;             // as many as a cluster has: of a context that is short, whatever the cache could hold
  int stages;                 // of the ring of each warp
  float* partial;

  __host__ __device__ bool is_long(int tokens) const { return tokens > kLongShare * few_splits; }
};

// How many floats of scratch the launcher wants; sets p.splits.
int64_t plan_attend(Attend& p);
void launch_attend(const Attend& p, cudaStream_t stream);

// What comes before attention to codes: queries to `of.out`, the key and the value into a ring, in slot
// position % length, and what the slot behind it holds to codes.
struct PlaceOne {
  Attend of;
  attention::AppendCodes append;
};
void launch_place_one(const PlaceOne& p, cudaStream_t stream);

}  // namespace step
}  // namespace nvfp4
