// Attention of one token per row over a static cache (flash decoding), with what comes before it: norms of queries and
// keys, the rotation, the append to the cache.
//
// A block has up to 8 heads that share keys and values, and a share of the context: tiles of 16 tokens, a warp each. A
// warp copies its tiles to a ring of stages in shared memory, the first before the queries are ready. Products are
// mma.m16n8k16 with the context as A: scores S^T = K q^T (16 tokens x 8 heads), sums O^T = V^T P^T (16 elements x 8
// heads). The order of k inside an mma is free, so lanes load 16 bytes of a token as A fragments (V's tokens are paired
// by byte permutations). q, k and v have 16 bits as in the model, the weights P two times 16 (a rounded part and the
// rest of it), sums are float32.
//
// The new token's own key and value never come from memory: the first block of a row appends them, and adds their score
// as one more partial result; sinks are another. Partial results are combined over the warps in shared memory, and over
// the blocks of a row by distributed shared memory (a cluster, each block a part of the elements, which the others send
// it) or, for long contexts of few rows, by another kernel; always in the same order.
//
// What is loaded behind many copies comes late: queries, keys and angles are loaded first.
#pragma once

#include "cuda/attention/warp.cuh"
#include "cuda/generation/context.cuh"
#include "cuda/generation/head_row.cuh"
#include "cuda/host/launch.h"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace step {

constexpr int kParts = 16;  // places of a block's partial results: its warps', the new token, a sink
constexpr int kMostStages = 2;

constexpr int attend_warps(int dim) { return dim > 128 ? kAttendWarps / 2 : kAttendWarps; }

template <int kDim>
struct AttendShared {
  static constexpr int kWarps = attend_warps(kDim);
  uint16_t q[kHeads + 1][kDim + 8];  // and the new key behind them
  float v[kDim];
  float most[kHeads][kParts], total[kHeads][kParts], weight[kHeads][kParts];
  // of the blocks of the cluster: this block's part of the sums, one block's behind another's
  float inbox[kHeads * kDim], inbox_most[kMostBlocksInCluster][kHeads], inbox_total[kMostBlocksInCluster][kHeads];
  float block_most[kHeads], block_total[kHeads];
  float squares[kWarps];
  // [warp][stage], as many stages as there is memory; a warp leaves its sums, [kHeads][kSumsStride], in its first tile
  __align__(16) Tile<kDim> tiles[1];

  __device__ __forceinline__ float* sums(int warp, int stages) {
    return reinterpret_cast<float*>(&tiles[warp * stages]);
  }
};

template <int kDim>
constexpr int attend_shared_bytes(int stages) {
  using Shared = AttendShared<kDim>;
  static_assert(sizeof(float) * kHeads * kSumsStride<kDim> <= sizeof(Tile<kDim>), "sums fit a tile");
  static_assert(Shared::kWarps + 2 <= kParts, "a new token and a sink beside warps");
  return static_cast<int>(sizeof(Shared) + (Shared::kWarps * stages - 1) * sizeof(Tile<kDim>));
}

// What blocks leave where another kernel combines it.
template <int kDim>
__host__ __device__ inline attention::Partials partials_of(const Attend& p) {
  return {p.partial, kHeads, kDim, p.passes, p.splits};
}

// Weights of a block's partial results, 16 lanes for a head: its warps' and, in a row's first block, the new token's
// and the sink's. fmaxf drops NaN; a score that is NaN makes its sums NaN by itself.
template <typename T, int kDim>
__device__ __forceinline__ void weigh_parts(const Attend& p, bool first_block, bool inside, int first_head,
                                            AttendShared<kDim>& shared) {
  constexpr int kWarps = AttendShared<kDim>::kWarps;
  const int head = threadIdx.x / kParts, part = threadIdx.x % kParts;
  const bool is_token = part == kWarps && first_block, is_sink = part == kWarps + 1 && first_block && p.sinks;
  float score = part < kWarps || (is_token && inside) ? shared.most[head][part] : -INFINITY;
  if (is_sink && first_head + head < p.heads)
    score = load_wide<T>(p.sinks, p.wide_sinks, first_head + head) * attention::kLog2E;
  const float most = most_of_lanes<kParts>(score);
  float weight = attention::weight_of(score, most);
  if (is_token && !inside) weight = NAN;  // a token without a slot has no result
  const float total = sum_of_lanes<kParts>(part < kWarps ? weight * shared.total[head][part] : weight);
  shared.weight[head][part] = weight;
  if (part == 0) shared.block_most[head] = most, shared.block_total[head] = total;
}

// A warp's first head, a query or, behind them, the new key, with its value. Loaded before any tile.
template <typename T, int kDim>
struct FirstHead {
  HeadRow<T, kDim> row;
  T value[kDim / 32];

  __device__ __forceinline__ FirstHead(const Attend& p, const T* q_row, int kv_head, int first_head, int heads)
      : row(p, q_row + (warp() >= heads ? p.heads + kv_head : first_head + warp()) * p.dim,
            static_cast<int64_t>(blockIdx.z) * p.angle_step, threadIdx.x % 32) {
    load_value(p, q_row, kv_head, warp() >= heads);
  }
  __device__ __forceinline__ void load_value(const Attend& p, const T* q_row, int kv_head, bool is_key) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const int d = i * 32 + threadIdx.x % 32;
      value[i] = is_key && d < p.dim ? q_row[(p.heads + p.kv_heads + kv_head) * p.dim + d] : from_float<T>(0.0f);
    }
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
};

// Queries to shared memory, and in the first block of a row the new key and value, there and into the cache.
template <typename T, int kDim>
__device__ __forceinline__ void prepare_heads(const Attend& p, const Seen& seen, FirstHead<T, kDim>& its,
                                              const T* q_row, T* keys, T* values, bool first_block,
                                              AttendShared<kDim>& shared) {
  constexpr int kThreads = attend_warps(kDim) * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.y / p.passes, pass = blockIdx.y % p.passes;
  const int first_head = kv_head * p.group + pass * kHeads, heads = min(p.group - pass * kHeads, kHeads);
  const T* const k_row = q_row + p.heads * p.dim;
  float q_unit = 0, k_unit = 0;
  if (p.q_joint) q_unit = joint_unit<kThreads>(q_row, p.heads * p.dim, p.norm.eps, shared.squares);
  if (p.k_joint && first_block) k_unit = joint_unit<kThreads>(k_row, p.kv_heads * p.dim, p.norm.eps, shared.squares);
  for (int i = threadIdx.x; i < (kHeads - heads) * kDim; i += kThreads) shared.q[heads + i / kDim][i % kDim] = 0;
#pragma unroll 1
  for (int head = warp; head < heads + first_block; head += AttendShared<kDim>::kWarps) {  // the last is the key
    const bool is_key = head == heads;
    if (head != warp) {
      its.row = HeadRow<T, kDim>(p, is_key ? k_row + kv_head * p.dim : q_row + (first_head + head) * p.dim,
                                 static_cast<int64_t>(blockIdx.z) * p.angle_step, lane);
      its.load_value(p, q_row, kv_head, is_key);
    }
    uint16_t* const row = shared.q[is_key ? kHeads : head];
    const void* const weight = is_key ? norm_of_head(p, p.k_norm, p.k_joint, kv_head)
                                      : norm_of_head(p, p.q_norm, p.q_joint, first_head + head);
    its.row.prepare(p, weight, is_key ? k_unit : q_unit, row, lane);
    if (!is_key) continue;
    const bool appends = pass == 0 && seen.inside;
    const int64_t to = static_cast<int64_t>(seen.slot) * p.dim;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const int d = i * 32 + lane;
      shared.v[d] = to_float(its.value[i]);
      if (appends && d < p.dim) keys[to + d] = reinterpret_cast<const T*>(row)[d], values[to + d] = its.value[i];
    }
  }
}

// Scores of the new token's key, a warp for each head.
template <typename T, int kDim>
__device__ __forceinline__ void score_new_token(const Attend& p, int heads, AttendShared<kDim>& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < heads; head += AttendShared<kDim>::kWarps) {
    const T *const a = reinterpret_cast<const T*>(shared.q[head]), *const b = reinterpret_cast<const T*>(
                                                                       shared.q[kHeads]);
    float score = 0;
#pragma unroll
    for (int d = lane; d < kDim; d += 32) score += to_float(a[d]) * to_float(b[d]);
    score = sum_of_lanes(score) * attention::log2_scale(p.scaling, p.softcap);
    if (p.softcap != 0.0f) score = attention::log2_capped(score, p.softcap);
    if (lane == 0) shared.most[head][AttendShared<kDim>::kWarps] = score;
  }
}

// A block's tiles; a warp has every kWarps-th of them.
struct Tiles {
  int begin, end;

  __device__ Tiles(const Attend& p, const Seen& seen) {
    const int all = (seen.count + kTile - 1) / kTile, blocks = p.is_long(seen.count) ? p.splits : p.few_splits;
    const int share = (all + blocks - 1) / blocks;
    begin = blockIdx.x * share, end = min(begin + share, all);
  }
};

// A warp's ring. A request is made each turn, of a tile or of none, so that the oldest one is known.
template <typename T, int kDim>
struct Ring {
  Tile<kDim>* stages;
  const T *keys, *values;
  int next, end;  // tiles
  int to = 0;     // a stage

  __device__ __forceinline__ void request(const Attend& p, const Seen& seen) {
    if (next < end) copy_tile(stages[to], keys, values, seen, p, next, threadIdx.x % 32);
    cp_async_commit();
    next += AttendShared<kDim>::kWarps;
    to = to + 1 == p.stages ? 0 : to + 1;
  }
  __device__ __forceinline__ void wait(const Attend& p) const {
    p.stages == 1 ? cp_async_wait<0>() : cp_async_wait<kMostStages - 1>();
    __syncwarp();
  }
};

// A warp's tiles, added up to its sums in shared memory.
template <typename T, int kDim>
__device__ __forceinline__ void add_tiles(const Attend& p, const Seen& seen, const Tiles& tiles, Ring<T, kDim>& ring,
                                          AttendShared<kDim>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 q[kDim / 32];
#pragma unroll
  for (int chunk = 0; chunk < kDim / 32; ++chunk) {
    q[chunk] = *reinterpret_cast<const uint4*>(&shared.q[lane / 4][chunk * 32 + lane % 4 * 8]);
  }
  const float scale = attention::log2_scale(p.scaling, p.softcap);
  attention::WarpSums<TileElements<kDim>, 1, false> sums;
  int stage = 0;
#pragma unroll 1
  for (int tile = tiles.begin + warp; tile < tiles.end; tile += AttendShared<kDim>::kWarps) {
    const TileReader<kDim> at(ring.stages[stage], lane);
    float s[1][4];
    ring.request(p, seen);
    ring.wait(p);
    attention::score_dense<T, kDim, 2>(at, [&](int, int d) { return q[d / 32]; }, lane, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[0][i] *= scale;
      if (p.softcap != 0.0f) s[0][i] = attention::log2_capped(s[0][i], p.softcap);
      if (tile * kTile + lane / 4 + i / 2 * 8 >= seen.count) s[0][i] = -INFINITY;
    }
    sums.weigh(s);
    sums.template add_dense<T>(at, s, lane);
    __syncwarp();  // all lanes have read it
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  float* const to = shared.sums(warp, p.stages);
  sums.leave(
      lane,
      [&](int head, float most, float total) { shared.most[head][warp] = most, shared.total[head][warp] = total; },
      [&](int head, int d, float2 both) { *reinterpret_cast<float2*>(&to[head * kSumsStride<kDim> + d]) = both; });
}

// Grid (splits, kv_heads * passes, batch); without scratch the splits of a row are a cluster.
template <typename T, int kDim>
__global__ void __launch_bounds__(attend_warps(kDim) * 32) attend_kernel(const __grid_constant__ Attend p) {
  using Shared = AttendShared<kDim>;
  constexpr int kWarps = Shared::kWarps;
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, split = blockIdx.x, row = blockIdx.z;
  const int kv_head = blockIdx.y / p.passes, pass = blockIdx.y % p.passes;
  const int first_head = kv_head * p.group + pass * kHeads, heads = min(p.group - pass * kHeads, kHeads);
  const bool first_block = split == 0, in_cluster = !p.partial && gridDim.x > 1;
  const T* const q_row = static_cast<const T*>(p.qkv) + static_cast<int64_t>(row) * (p.heads + 2 * p.kv_heads) * p.dim;
  const int64_t cache_at = (static_cast<int64_t>(row) * p.kv_heads + kv_head) * p.length * p.dim;
  T *const keys = static_cast<T*>(p.keys) + cache_at, *const values = static_cast<T*>(p.values) + cache_at;

  if (in_cluster) cluster_arrive();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t position = p.position[static_cast<int64_t>(row) * p.position_step];
  FirstHead<T, kDim> its(p, q_row, kv_head, first_head, heads);
  const Seen seen(position, p.starts ? p.starts[row] : 0, p.length, p.window);
  const Tiles tiles(p, seen);
  Ring<T, kDim> ring = {&shared.tiles[warp * p.stages], keys, values, tiles.begin + warp, tiles.end};
  for (int i = 1; i < p.stages; ++i) ring.request(p, seen);
  prepare_heads(p, seen, its, q_row, keys, values, first_block, shared);
  __syncthreads();
  if (first_block) score_new_token<T>(p, heads, shared);
  add_tiles(p, seen, tiles, ring, shared);
  __syncthreads();
  if (threadIdx.x < kHeads * kParts) weigh_parts<T>(p, first_block, seen.inside, first_head, shared);
  __syncthreads();

  const int part_size = heads * kDim / gridDim.x;  // of a block: kDim is a multiple of its cluster
  T* const out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + first_head) * p.dim;
  if (in_cluster) cluster_wait();  // all blocks of it have begun
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * kDim; i += kWarps * 32) {
    const int head = i / kDim, d = i % kDim;
    float sum = first_block ? shared.weight[head][kWarps] * shared.v[d] : 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      sum += shared.weight[head][from] * shared.sums(from, p.stages)[head * kSumsStride<kDim> + d];
    }
    if (in_cluster) {
      const int rank = i / part_size;
      store_to_rank(&shared.inbox[split * part_size + i - rank * part_size], rank, sum);
      if (d < gridDim.x) {
        store_to_rank(&shared.inbox_most[split][head], d, shared.block_most[head]);
        store_to_rank(&shared.inbox_total[split][head], d, shared.block_total[head]);
      }
    } else if (p.partial) {
      const int64_t at = (static_cast<int64_t>(row) * gridDim.y + blockIdx.y) * gridDim.x + split;
      float* const to = p.partial + at * partials_of<kDim>(p).floats();
      to[i] = sum;
      if (d == 0) {
        to[kHeads * kDim + head] = shared.block_most[head];
        to[kHeads * (kDim + 1) + head] = shared.block_total[head];
      }
    } else if (d < p.dim) {
      out[head * p.dim + d] = from_float<T>(sum / shared.block_total[head]);
    }
  }
  if (!in_cluster) return;
  cluster_sync();
  for (int i = threadIdx.x; i < part_size; i += kWarps * 32) {
    const int head = (split * part_size + i) / kDim, d = (split * part_size + i) % kDim;
    float most = -INFINITY, total = 0, sum = 0;
#pragma unroll 2
    for (int block = 0; block < gridDim.x; ++block) most = fmaxf(most, shared.inbox_most[block][head]);
#pragma unroll 2
    for (int block = 0; block < gridDim.x; ++block) {
      const float weight = attention::weight_of(shared.inbox_most[block][head], most);
      total = __fmaf_rn(weight, shared.inbox_total[block][head], total);
      sum = __fmaf_rn(weight, shared.inbox[block * part_size + i], sum);
    }
    if (d < p.dim) out[head * p.dim + d] = from_float<T>(sum / total);
  }
}

}  // namespace step
}  // namespace nvfp4
