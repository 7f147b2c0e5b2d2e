// Attention of one token per row over a static cache (flash decoding), with what comes before it: norms of queries and
// keys, the rotation, the append to the cache.
//
// A block has up to 8 heads that share keys and values, and a share of the context: every splits-th tile of 16 tokens,
// a warp each. Products are mma.m16n8k16 with the context as A: scores S^T = K q^T (16 tokens x 8 heads), sums
// O^T = V^T P^T (16 elements x 8 heads). The order of k inside an mma is free, so lanes load K and V from memory as
// A fragments, 16 bytes of a token each (V's tokens are paired by byte permutations), and nothing of the cache passes
// through shared memory. q, k and v have 16 bits as in the model, the weights P two times 16 (a rounded part and the
// rest of it), sums are float32.
//
// The new token's own key and value never come from memory: the first block of a row appends them, and adds their score
// as one more partial result; sinks are another. Partial results are combined over the warps in shared memory, and over
// the blocks of a row by distributed shared memory (a cluster, each block a part of the elements, which the others send
// it) or, for long contexts of few rows, by another kernel; always in the same order.
#pragma once

#include "cuda/block/elements.cuh"
#include "cuda/generation/step.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {

constexpr int kHeads = 8;  // columns of an mma
constexpr int kAttendWarps = 8;
constexpr int kAttendThreads = kAttendWarps * 32;
constexpr int kTile = 16;  // tokens

// Of a row and some of its heads: what each block leaves.
template <int kDim>
struct Partial {
  float most[kHeads], total[kHeads];  // the largest score, and the sum of exp(score - most)
  float sum[kHeads][kDim];            // of values times that
};

template <int kDim>
struct AttendShared {
  static constexpr int kStride = kDim + 2;  // of floats: pairs of 16 lanes in all banks
  uint16_t q[kHeads + 1][kDim + 8];         // and the new key behind them
  float v[kDim];
  float most[kAttendWarps][kHeads], total[kAttendWarps][kHeads];
  float sum[kAttendWarps][kHeads][kStride];
  // of the blocks of the cluster: this block's part of the sums, one block's behind another's
  float inbox[kHeads * kDim], inbox_most[kMostBlocksInCluster][kHeads], inbox_total[kMostBlocksInCluster][kHeads];
  float new_score[kHeads];
  float squares[kAttendWarps];
};

// The tokens before the new one that a row sees: `count` from `first` on, in slots of the cache.
struct Seen {
  bool inside;     // the new token has a slot
  int slot;        // which
  int first_slot;  // of the first token seen; the others follow, from slot 0 again after the last
  int count;

  __device__ Seen(int64_t position, int length, int window) {
    const bool is_ring = window > 0 && window <= length;
    inside = position >= 0 && (is_ring || position < length);
    slot = !inside ? 0 : static_cast<int>(position < length ? position : position % length);
    const int64_t most = window > 0 ? window - 1 : length;
    count = inside ? static_cast<int>(min(position, most)) : 0;
    first_slot = slot - count + (slot < count ? length : 0);
  }
  __device__ __forceinline__ int slot_of(int i, int length) const {
    const int at = first_slot + i;
    return at >= length ? at - length : at;
  }
};

__device__ __forceinline__ uint32_t movmatrix_transposed(uint32_t v) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t packed;
  memcpy(&packed, pair, 4);
  return packed;
}

__device__ __forceinline__ float load_wide(const void* from, bool wide, Dtype narrow, int64_t i) {
  if (wide) return static_cast<const float*>(from)[i];
  return narrow == Dtype::kBf16 ? to_float(static_cast<const __nv_bfloat16*>(from)[i])
                                : to_float(static_cast<const __half*>(from)[i]);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
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
      cos[i] = d < p.rotary ? load_wide(p.cos, p.wide_angles, p.dtype, angle + d) : 0.0f;
      sin[i] = d < p.rotary ? load_wide(p.sin, p.wide_angles, p.dtype, angle + d) : 0.0f;
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
        const float other = d < half ? -to_float(row[d + half]) : to_float(row[d - half]);
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
      unit = rsqrtf(warp_sum(squares) / p.dim + p.norm.eps);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = i * 32 + lane;
      if (d < p.dim) {
        float u = v[i] * unit;
        if (p.norm.round_before_weight) u = to_float(from_float<T>(u));
        v[i] = to_float(from_float<T>(u * (load_wide(weight, p.wide_norms, p.dtype, d) + p.norm.offset)));
      }
    }
  }
};

// 1 / rms of so many elements, by the block.
template <typename T>
__device__ __forceinline__ float joint_unit(const T* from, int count, float eps, float* squares) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kAttendThreads) {
    const float v = to_float(from[i]);
    sum += v * v;
  }
  sum = warp_sum(sum);
  __syncthreads();
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int warp = 0; warp < kAttendWarps; ++warp) sum += squares[warp];
  return rsqrtf(sum / count + eps);
}

// A tile of the context on its way: K as A fragments of two tokens, V of four.
template <typename T, int kDim>
struct ContextTile {
  static constexpr int kKeyChunks = kDim / 32, kValueChunks = (kDim + 63) / 64;
  uint4 k[kKeyChunks][2], v[kValueChunks][4];

  static __device__ __forceinline__ uint4 load(const T* head, const Seen& seen, const Attend& p, int token, int d,
                                               bool inside) {
    uint4 out = make_uint4(0, 0, 0, 0);
    if (inside && token < seen.count && d < p.dim) {
      const int64_t at = static_cast<int64_t>(seen.slot_of(token, p.length)) * p.dim + d;
      out = *reinterpret_cast<const uint4*>(head + at);
    }
    return out;
  }
  __device__ __forceinline__ void load_keys(const T* head, const Seen& seen, const Attend& p, int tile, int end,
                                            int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < kKeyChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        k[chunk][i] = load(head, seen, p, tile * kTile + g + 8 * i, chunk * 32 + t * 8, tile < end);
  }
  __device__ __forceinline__ void load_values(const T* head, const Seen& seen, const Attend& p, int tile, int end,
                                              int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[chunk][i] = load(head, seen, p, tile * kTile + 2 * t + i % 2 + i / 2 * 8, chunk * 64 + g * 8, tile < end);
      }
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// What a warp has of its tiles: for heads 2 (lane % 4) and the next.
template <typename T, int kDim>
struct WarpSums {
  using Context = ContextTile<T, kDim>;
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  float sum[Context::kValueChunks * 4][4] = {};

  // Scores of tokens g and g + 8 by heads 2t and 2t + 1.
  __device__ __forceinline__ void score(const Context& context, const uint4 (&q)[Context::kKeyChunks], const Attend& p,
                                        int left, int lane, float (&s)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = 0;
#pragma unroll
    for (int chunk = 0; chunk < Context::kKeyChunks; ++chunk) {
      const uint4 *a = context.k[chunk], b = q[chunk];
      const uint32_t a0[4] = {a[0].x, a[1].x, a[0].y, a[1].y}, a1[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
      mma(s, a0, b.x, b.y, T{});
      mma(s, a1, b.z, b.w, T{});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] *= p.scaling;
      if (p.softcap != 0.0f) s[i] = tanhf(s[i] / p.softcap) * p.softcap;
      if (lane / 4 + i / 2 * 8 >= left) s[i] = -INFINITY;
    }
  }

  // Scores to weights, relative to the largest so far.
  __device__ __forceinline__ void weigh(float (&s)[4]) {
    constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float now = fmaxf(s[head], s[head + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, step));
      now = fmaxf(now, most[head]);
      const float factor = most[head] == now ? 1.0f : exp2f((most[head] - now) * kLog2E);
      most[head] = now;
      s[head] = exp2f((s[head] - now) * kLog2E), s[head + 2] = exp2f((s[head + 2] - now) * kLog2E);
      total[head] = total[head] * factor + (s[head] + s[head + 2]);
#pragma unroll
      for (int i = 0; i < Context::kValueChunks * 4; ++i) sum[i][head] *= factor, sum[i][head + 2] *= factor;
    }
  }

  __device__ __forceinline__ void add(const Context& context, const float (&s)[4]) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = pack<T>(s[2 * i], s[2 * i + 1]);
      T rounded[2];
      memcpy(rounded, &high[i], 4);
      low[i] = movmatrix_transposed(pack<T>(s[2 * i] - to_float(rounded[0]), s[2 * i + 1] - to_float(rounded[1])));
      high[i] = movmatrix_transposed(high[i]);
    }
#pragma unroll
    for (int chunk = 0; chunk < Context::kValueChunks; ++chunk)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4* v = context.v[chunk];
        const uint32_t w0 = word_of(v[0], j), w1 = word_of(v[1], j), w2 = word_of(v[2], j), w3 = word_of(v[3], j);
        const uint32_t a[4] = {__byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632), __byte_perm(w2, w3, 0x5410),
                               __byte_perm(w2, w3, 0x7632)};
        mma(sum[chunk * 4 + j], a, high[0], high[1], T{});
        mma(sum[chunk * 4 + j], a, low[0], low[1], T{});
      }
  }

  __device__ __forceinline__ void leave(AttendShared<kDim>& shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total[head] += __shfl_xor_sync(0xFFFFFFFFu, total[head], step);
      if (g == 0) shared.most[warp][2 * t + head] = most[head], shared.total[warp][2 * t + head] = total[head];
#pragma unroll
      for (int i = 0; i < Context::kValueChunks * 4; ++i) {
        const int d = i / 4 * 64 + g * 8 + i % 4 * 2;
        if (d < kDim) {
          *reinterpret_cast<float2*>(&shared.sum[warp][2 * t + head][d]) = make_float2(sum[i][head], sum[i][head + 2]);
        }
      }
    }
  }
};

// exp(score - most), 0 for -inf also where nothing has been seen yet.
__device__ __forceinline__ float weight_of(float score, float most) {
  return score == -INFINITY ? 0.0f : expf(score - most);
}

// Partial results of a head and one of its elements, combined.
struct Combined {
  float most, total, sum;
};

// The block's: of its warps, and in a row's first block of the new token and the sink. fmaxf drops NaN; a score that is
// NaN makes its sums NaN by itself.
template <typename T, int kDim>
__device__ __forceinline__ Combined combine_warps(const Attend& p, const Seen& seen, bool first_block, int first_head,
                                                  int head, int d, const AttendShared<kDim>& shared) {
  const bool has_sink = first_block && p.sinks != nullptr;
  const float sink = has_sink ? load_wide(p.sinks, p.wide_sinks, p.dtype, first_head + head) : -INFINITY;
  const float own = first_block && seen.inside ? shared.new_score[head] : -INFINITY;
  float most = fmaxf(sink, own);
#pragma unroll
  for (int warp = 0; warp < kAttendWarps; ++warp) most = fmaxf(most, shared.most[warp][head]);
  Combined c = {most, weight_of(sink, most), 0};
  if (first_block) {
    const float weight = seen.inside ? weight_of(own, most) : NAN;  // a token without a slot has no result
    c.total += weight;
    c.sum += weight * shared.v[d];
  }
#pragma unroll
  for (int warp = 0; warp < kAttendWarps; ++warp) {
    const float weight = weight_of(shared.most[warp][head], most);
    c.total += weight * shared.total[warp][head];
    c.sum += weight * shared.sum[warp][head][d];
  }
  return c;
}

// sum / total of `count` partial results, at(i) the i-th: kAtOnce of them loaded before the first is used.
template <int kAtOnce, typename At>
__device__ __forceinline__ float combine_blocks(int count, At at) {
  Combined all = {-INFINITY, 0, 0};
  for (int first = 0; first < count; first += kAtOnce) {
    Combined c[kAtOnce];
    float most = all.most;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) c[i] = first + i < count ? at(first + i) : Combined{-INFINITY, 0, 0};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, c[i].most);
    const float before = weight_of(all.most, most);
    all = {most, all.total * before, all.sum * before};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = weight_of(c[i].most, most);
      all.total += weight * c[i].total;
      all.sum += weight * c[i].sum;
    }
  }
  return all.sum / all.total;
}

// Grid (splits, kv_heads * passes, batch); without scratch the splits of a row are a cluster.
template <typename T, int kDim, bool kScratch>
__global__ void __launch_bounds__(kAttendThreads, 1) attend_kernel(const __grid_constant__ Attend p) {
  using Context = ContextTile<T, kDim>;
  extern __shared__ __align__(16) uint8_t memory[];
  AttendShared<kDim>& shared = *reinterpret_cast<AttendShared<kDim>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.x, kv_head = blockIdx.y / p.passes, pass = blockIdx.y % p.passes, row = blockIdx.z;
  const int first_head = kv_head * p.group + pass * kHeads, heads = min(p.group - pass * kHeads, kHeads);
  const bool first_block = split == 0;
  const T* const q_row = static_cast<const T*>(p.qkv) + static_cast<int64_t>(row) * (p.heads + 2 * p.kv_heads) * p.dim;
  const T *const k_row = q_row + p.heads * p.dim, *const v_row = k_row + p.kv_heads * p.dim;
  const int64_t cache_at = (static_cast<int64_t>(row) * p.kv_heads + kv_head) * p.length * p.dim;
  T *const keys = static_cast<T*>(p.keys) + cache_at, *const values = static_cast<T*>(p.values) + cache_at;

  if (!kScratch && gridDim.x > 1) cluster_arrive();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t angle = static_cast<int64_t>(row) * p.angle_step;
  HeadRow<T, kDim> its(p, q_row + (first_head + min(warp, heads - 1)) * p.dim, angle, lane);
  const Seen seen(p.position[static_cast<int64_t>(row) * p.position_step], p.length, p.window);
  const int all_tiles = (seen.count + kTile - 1) / kTile, share = (all_tiles + gridDim.x - 1) / gridDim.x;
  const int end = min((split + 1) * share, all_tiles);  // of this block's tiles
  int tile = split * share + warp;
  Context context;
  context.load_keys(keys, seen, p, tile, end, lane);
  context.load_values(values, seen, p, tile, end, lane);

  float q_unit = 0, k_unit = 0;
  if (p.q_joint) q_unit = joint_unit(q_row, p.heads * p.dim, p.norm.eps, shared.squares);
  if (p.k_joint && first_block) k_unit = joint_unit(k_row, p.kv_heads * p.dim, p.norm.eps, shared.squares);
  const auto part = [&](const void* weight, bool joint, int head) -> const void* {
    return weight && joint ? static_cast<const uint8_t*>(weight) + head * p.dim * (p.wide_norms ? 4 : 2) : weight;
  };
  if (warp < heads) {
    its.prepare(p, part(p.q_norm, p.q_joint, first_head + warp), q_unit, shared.q[warp], lane);
  } else {
    for (int d = lane; d < kDim; d += 32) shared.q[warp][d] = 0;
  }
  if (first_block && warp == kAttendWarps - 1) {
    HeadRow<T, kDim> key_row(p, k_row + kv_head * p.dim, angle, lane);
    key_row.prepare(p, part(p.k_norm, p.k_joint, kv_head), k_unit, shared.q[kHeads], lane);
    __syncwarp();
    const T *const key = reinterpret_cast<const T*>(shared.q[kHeads]), *const value = v_row + kv_head * p.dim;
    const bool appends = pass == 0 && seen.inside;
    for (int d = lane; d < kDim; d += 32) {
      shared.v[d] = d < p.dim ? to_float(value[d]) : 0.0f;
      if (appends && d < p.dim) {
        keys[static_cast<int64_t>(seen.slot) * p.dim + d] = key[d];
        values[static_cast<int64_t>(seen.slot) * p.dim + d] = value[d];
      }
    }
  }
  __syncthreads();
  if (first_block && warp < heads) {
    const T *const a = reinterpret_cast<const T*>(shared.q[warp]), *const b = reinterpret_cast<const T*>(
                                                                       shared.q[kHeads]);
    float score = 0;
    for (int d = lane; d < kDim; d += 32) score += to_float(a[d]) * to_float(b[d]);
    score = warp_sum(score) * p.scaling;
    if (p.softcap != 0.0f) score = tanhf(score / p.softcap) * p.softcap;
    if (lane == 0) shared.new_score[warp] = score;
  }

  uint4 q[Context::kKeyChunks];
#pragma unroll
  for (int chunk = 0; chunk < Context::kKeyChunks; ++chunk) {
    q[chunk] = *reinterpret_cast<const uint4*>(&shared.q[lane / 4][chunk * 32 + lane % 4 * 8]);
  }
  WarpSums<T, kDim> sums;
#pragma unroll 1
  for (; tile < end; tile += kAttendWarps) {
    float s[4];
    sums.score(context, q, p, seen.count - tile * kTile, lane, s);
    context.load_keys(keys, seen, p, tile + kAttendWarps, end, lane);
    sums.weigh(s);
    sums.add(context, s);
    context.load_values(values, seen, p, tile + kAttendWarps, end, lane);
  }
  sums.leave(shared, warp, lane);
  __syncthreads();

  const int part_size = heads * kDim / gridDim.x;  // of a block: kDim is a multiple of its cluster
  if (!kScratch && gridDim.x > 1) cluster_wait();  // all blocks of it have begun
  for (int i = threadIdx.x; i < heads * kDim; i += kAttendThreads) {
    const int head = i / kDim, d = i % kDim;
    const Combined c = combine_warps<T, kDim>(p, seen, first_block, first_head, head, d, shared);
    if constexpr (kScratch) {
      const int64_t at = (static_cast<int64_t>(row) * gridDim.y + blockIdx.y) * gridDim.x + split;
      Partial<kDim>& to = reinterpret_cast<Partial<kDim>*>(p.partial)[at];
      to.sum[head][d] = c.sum;
      if (d == 0) to.most[head] = c.most, to.total[head] = c.total;
    } else {
      const int rank = i / part_size;
      store_to_rank(&shared.inbox[split * part_size + i - rank * part_size], rank, c.sum);
      if (d < gridDim.x) {
        store_to_rank(&shared.inbox_most[split][head], d, c.most);
        store_to_rank(&shared.inbox_total[split][head], d, c.total);
      }
    }
  }
  if constexpr (!kScratch) {
    if (gridDim.x > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    T* const out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + first_head) * p.dim;
    for (int i = threadIdx.x; i < part_size; i += kAttendThreads) {
      const int head = (split * part_size + i) / kDim, d = (split * part_size + i) % kDim;
      const float y = combine_blocks<kMostBlocksInCluster>(gridDim.x, [&](int block) {
        return Combined{shared.inbox_most[block][head], shared.inbox_total[block][head],
                        shared.inbox[block * part_size + i]};
      });
      if (d < p.dim) out[head * p.dim + d] = from_float<T>(y);
    }
  }
}

// Grid (heads, batch): the splits of a head, whose partial results are in memory.
template <typename T, int kDim>
__global__ void __launch_bounds__(kDim) combine_kernel(const __grid_constant__ Attend p) {
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x;
  const int kv_head = head / p.group, pass = head % p.group / kHeads, its = head % p.group % kHeads;
  const int64_t first = (static_cast<int64_t>(row) * p.kv_heads * p.passes + kv_head * p.passes + pass) * p.splits;
  const Partial<kDim>* const partial = reinterpret_cast<const Partial<kDim>*>(p.partial) + first;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const float y = combine_blocks<16>(
      p.splits, [&](int i) { return Combined{partial[i].most[its], partial[i].total[its], partial[i].sum[its][d]}; });
  if (d < p.dim) {
    static_cast<T*>(p.out)[(static_cast<int64_t>(row) * p.heads + head) * p.dim + d] = from_float<T>(y);
  }
}

}  // namespace step
}  // namespace nvfp4
