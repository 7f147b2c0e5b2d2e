// Attention of one token, by the multiplying warps: rotary embedding, append to the cache, and the split context.
//
// Block c has stretch c % splits of the context of kv head c / splits. Each of its warps takes four positions at a
// time, for up to four query heads at once: lane l has dim / 32 elements of each, and the sums over lanes are folded so
// that lane l ends with the score of head l / 8. What the warps have is merged in shared memory; what the blocks of a
// head have, by all of them, a part of the outputs each.
#pragma once

#include "cuda/attention/warp.cuh"
#include "cuda/generation/layers_sm90/shared.cuh"

namespace nvfp4 {
namespace layers_sm90 {

constexpr int kHeadsAtOnce = 4, kPositions = 4, kMostGroup = 16, kMostSplits = 16;
// Of a block. H200, a layer of 8B, 512 tokens: 59.1 us; with 64 61.7, 128 62.8.
constexpr int kFewestPositions = 32;

// Bytes of shared memory: queries and the new key, then each warp's part.
constexpr int attention_bytes(int dim) { return (kMostGroup + 2) * dim * 2 + kWarps * kHeadsAtOnce * (dim + 2) * 4; }

#if NVFP4_LARGE_SHARED_MEMORY

// One head's vector from qkv, normalized where the model does, rotated: rounded as by torch's operators. Lane l has
// elements l + 32 i and those dim / 2 further.
template <int kDim>
__device__ __forceinline__ void rotate_head(const Step& s, const uint32_t* from, uint32_t tag,
                                            const __nv_bfloat16* norm, int lane, uint32_t to) {
  constexpr int kPairs = kDim / 64;
  float cos[2][kPairs], sin[2][kPairs];
  uint32_t words[2][kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * kDim / 2 + lane + 32 * i;
      cos[half][i] = __bfloat162float(s.cos[at]), sin[half][i] = __bfloat162float(s.sin[at]);
    }
  }
  for (bool done = false; !done;) {
    done = true;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) words[i % 2][i / 2] = load_word(from + i % 2 * kDim / 2 + lane + i / 2 * 32);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) done = done && has(words[i % 2][i / 2], tag);
  }
  float v[2][kPairs];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      v[half][i] = value_of(words[half][i]);
      squares += v[half][i] * v[half][i];
    }
  }
  __syncwarp();
  if (norm) {
    const float factor = rsqrtf(sum_of_lanes(squares) / kDim + s.eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float weight = __bfloat162float(norm[half * kDim / 2 + lane + 32 * i]);
        v[half][i] = round_bf16(weight * round_bf16(v[half][i] * factor));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * kDim / 2 + lane + 32 * i;
      const float other = half ? v[0][i] : -v[1][i];
      const float straight = round_bf16(v[half][i] * cos[half][i]);
      const float crossed = round_bf16(other * sin[half][i]);
      store_shared_bf16(to + 2 * at, __float2bfloat16_rn(straight + crossed));
    }
  }
}

// Four heads' values of all lanes, added: lane l has head l / 8's.
__device__ __forceinline__ float fold_heads(const float (&v)[kHeadsAtOnce], int lane) {
  const bool upper = lane & 16, odd = lane & 8;
  const float first = (upper ? v[2] : v[0]) + __shfl_xor_sync(0xFFFFFFFFu, upper ? v[0] : v[2], 16);
  const float second = (upper ? v[3] : v[1]) + __shfl_xor_sync(0xFFFFFFFFu, upper ? v[1] : v[3], 16);
  float sum = (odd ? second : first) + __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 8);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  return sum;
}

template <int kDim>
struct Row {  // a lane's part of a key or value
  static constexpr int kPairs = kDim / 64;
  uint32_t pairs[kPairs];

  __device__ __forceinline__ void load(const __nv_bfloat16* row, int lane) {
    if constexpr (kPairs == 2) {
      const uint2 v = __ldcg(reinterpret_cast<const uint2*>(row) + lane);
      pairs[0] = v.x, pairs[1] = v.y;
    } else {
      pairs[0] = __ldcg(reinterpret_cast<const unsigned*>(row) + lane);
    }
  }
  __device__ __forceinline__ void load_shared(uint32_t row, int lane) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = load_shared_4(row + (lane * kPairs + i) * 4);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = 0;
  }
  __device__ __forceinline__ float element(int i) const {
    return i % 2 ? high_float(pairs[i / 2]) : low_float(pairs[i / 2]);
  }
};

// Where a block's parts lie in its scratch memory.
template <int kDim>
struct Scratch {
  uint32_t queries, new_key, new_value, parts, maxima;

  __device__ explicit Scratch(uint32_t at)
      : queries(at),
        new_key(queries + kMostGroup * kDim * 2),
        new_value(new_key + kDim * 2),
        parts(new_value + kDim * 2),
        maxima(parts + kWarps * kHeadsAtOnce * kDim * 4) {}
  __device__ __forceinline__ uint32_t part(int warp, int h) const {
    return parts + (warp * kHeadsAtOnce + h) * kDim * 4;
  }
  __device__ __forceinline__ uint32_t maximum(int warp, int h) const { return maxima + (warp * kHeadsAtOnce + h) * 8; }
};

// A warp's share of the context for up to four heads: the running maximum and sum of lane l are head l / 8's.
template <int kDim>
struct Attention {
  static constexpr int kElements = kDim / 32;
  Row<kDim> q[kHeadsAtOnce];
  float sums[kHeadsAtOnce][kElements] = {};
  float most = -INFINITY, total = 0;

  __device__ __forceinline__ void load_queries(const Scratch<kDim>& scratch, int pass, int group, int lane) {
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      q[h].clear();
      if (pass + h < group) q[h].load_shared(scratch.queries + (pass + h) * kDim * 2, lane);
    }
  }

  // The new token, from scratch memory.
  __device__ __forceinline__ void add_new(const Step& s, const Scratch<kDim>& scratch, int lane) {
    Row<kDim> keys[kPositions], values[kPositions];
    keys[0].load_shared(scratch.new_key, lane);
    values[0].load_shared(scratch.new_value, lane);
#pragma unroll
    for (int i = 1; i < kPositions; ++i) keys[i].clear(), values[i].clear();
    add(s, keys, values, 1, lane);
  }

  __device__ __forceinline__ void add(const Step& s, const Row<kDim> (&keys)[kPositions],
                                      const Row<kDim> (&values)[kPositions], int count, int lane) {
    float scores[kPositions];
    float now = most;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      float products[kHeadsAtOnce] = {};
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float k = keys[i].element(e);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h) products[h] = __fmaf_rn(q[h].element(e), k, products[h]);
      }
      const float score = fold_heads(products, lane) * s.scaling * attention::kLog2E;
      scores[i] = i < count ? score : -INFINITY;
      now = fmaxf(now, scores[i]);
    }
    const float factor = exp2f(most - now);  // count > 0, so now is a number
    most = now;
    total *= factor;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) scores[i] = exp2f(scores[i] - now), total += scores[i];
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      const float its = __shfl_sync(0xFFFFFFFFu, factor, h * 8);
#pragma unroll
      for (int e = 0; e < kElements; ++e) sums[h][e] *= its;
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        const float weight = __shfl_sync(0xFFFFFFFFu, scores[i], h * 8);
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[h][e] = __fmaf_rn(weight, values[i].element(e), sums[h][e]);
      }
    }
  }
};

// The part of one block: stretch [first, end) of the cached positions, and the new one where it is its.
struct Stretch {
  static constexpr bool kKeepsLane = false;
  int position, first, end, active;  // position: of the new token; active: stretches of the context
  bool has_new;

  __device__ Stretch(const Step& s, int split) : position(min(static_cast<int>(*s.position), s.length - 1)) {
    const int count = position + 1;
    const int size = max((count + s.splits - 1) / s.splits, kFewestPositions);
    active = (count + size - 1) / size;
    first = split * size;
    end = min(first + size, position);
    has_new = split == active - 1;
  }
};

// The new key, or value, to the cache and to shared memory.
template <int kDim>
__device__ __forceinline__ void append(const Row<kDim>& row, __nv_bfloat16* cache, uint32_t to, int lane) {
  constexpr int kPairs = Row<kDim>::kPairs;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    reinterpret_cast<uint32_t*>(cache)[lane * kPairs + i] = row.pairs[i];
    if (to) asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + (lane * kPairs + i) * 4), "r"(row.pairs[i]) : "memory");
  }
}

// Where a block leaves what it has of a head for the others.
template <int kDim>
__device__ __forceinline__ uint4* partial_of(const Step& s, int head, int split, int h) {
  const int group = s.heads / s.kv_heads;
  return s.partials + ((static_cast<int64_t>(head) * s.splits + split) * group + h) * (kDim / 2 + 1);
}

// Queries of a head of keys to scratch memory, and the new key and value there and to the cache, at a row of it: each
// by a warp.
template <int kDim>
__device__ __forceinline__ void prepare_heads(const Step& s, const Layer& layer, const Scratch<kDim>& scratch, int head,
                                              bool has_new, int64_t cache_row, uint32_t tag, int warp, int lane) {
  const int group = s.heads / s.kv_heads, tasks = group + (has_new ? 2 : 0);
  for (int task = warp; task < tasks; task += kWarps) {
    if (task < group) {
      rotate_head<kDim>(s, s.qkv + (head * group + task) * kDim, tag, layer.head_norms[0], lane,
                        scratch.queries + task * kDim * 2);
    } else if (task == group) {
      rotate_head<kDim>(s, s.qkv + (s.heads + head) * kDim, tag, layer.head_norms[1], lane, scratch.new_key);
      __syncwarp();
      Row<kDim> key;
      key.load_shared(scratch.new_key, lane);
      append(key, layer.keys + cache_row, 0, lane);
    } else {
      Row<kDim> value;
      const uint32_t* from = s.qkv + (s.heads + s.kv_heads + head) * kDim + lane * (kDim / 32);
#pragma unroll
      for (int i = 0; i < Row<kDim>::kPairs; ++i) {
        value.pairs[i] = packed_pair<__nv_bfloat16>(await_value(from + 2 * i, tag), await_value(from + 2 * i + 1, tag));
      }
      append(value, layer.values + cache_row, scratch.new_value, lane);
    }
  }
}

// What a warp has of four heads, to scratch memory.
template <int kDim>
__device__ __forceinline__ void leave_warp(const Attention<kDim>& attention, const Scratch<kDim>& scratch, int warp,
                                           int lane) {
  constexpr int kElements = Attention<kDim>::kElements;
#pragma unroll
  for (int h = 0; h < kHeadsAtOnce; ++h) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      store_shared_float(scratch.part(warp, h) + (lane * kElements + e) * 4, attention.sums[h][e]);
    }
  }
  if (lane % 8 == 0) {
    store_shared_float(scratch.maximum(warp, lane / 8), attention.most);
    store_shared_float(scratch.maximum(warp, lane / 8) + 4, attention.total);
  }
}

// What the first `warps` warps have, together: the result if no other block has a stretch, else for the others.
template <int kDim>
__device__ __forceinline__ void merge_warps(const Step& s, const Scratch<kDim>& scratch, int head, int split, int pass,
                                            int active, int warps, uint32_t tag, int thread) {
  const int group = s.heads / s.kv_heads;
  for (int i = thread; i < kHeadsAtOnce * kDim; i += kMultiplying) {
    const int h = i / kDim, d = i % kDim;
    if (pass + h >= group) break;
    float most = -INFINITY, total = 0, sum = 0;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) most = fmaxf(most, load_shared_float(scratch.maximum(w, h)));
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const float its = attention::weight_of(load_shared_float(scratch.maximum(w, h)), most);
      total += its * load_shared_float(scratch.maximum(w, h) + 4);
      sum += its * load_shared_float(scratch.part(w, h) + d * 4);
    }
    if (active == 1) {
      store_word(s.attended + fragment_index((head * group + pass + h) * kDim + d),
                 word_of(__float2bfloat16_rn(sum / total), tag));
    } else {
      uint4* to = partial_of<kDim>(s, head, split, pass + h);
      store_words(reinterpret_cast<uint2*>(to + 1) + d, __float_as_uint(sum), tag);
      if (d == 0) {
        store_words(to, __float_as_uint(most), tag);
        store_words(reinterpret_cast<uint2*>(to) + 1, __float_as_uint(total), tag);
      }
    }
  }
}

template <int kDim>
__device__ void attend_stretch(const Step& s, const Layer& layer, const Stretch& part, int head, int split,
                               uint32_t tag, uint32_t scratch_at, int warp, int lane) {
  const int group = s.heads / s.kv_heads;
  const Scratch<kDim> scratch(scratch_at);
  const int64_t cache_row = (static_cast<int64_t>(head) * s.length) * kDim;
  Row<kDim> keys[kPositions], values[kPositions];
  const auto load = [&](int at) {
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int64_t row = cache_row + static_cast<int64_t>(min(at + i, part.end - 1)) * kDim;
      keys[i].load(layer.keys + row, lane);
      values[i].load(layer.values + row, lane);
    }
  };
  const int begin = part.first + warp * kPositions;
  // Warps that have some of the context, and the one that has the new token: one of its own if there is one.
  const int with_context = min((part.end - part.first + kPositions - 1) / kPositions, kWarps);
  const int new_warp = min(with_context, kWarps - 1), with_any = part.has_new ? new_warp + 1 : with_context;
  if (begin < part.end) load(begin);  // before q is there
  prepare_heads(s, layer, scratch, head, part.has_new, cache_row + static_cast<int64_t>(part.position) * kDim, tag,
                warp, lane);
  multiplying_barrier();
#pragma unroll 1
  for (int pass = 0; pass < group; pass += kHeadsAtOnce) {
    Attention<kDim> attention;
    attention.load_queries(scratch, pass, group, lane);
#pragma unroll 1
    for (int at = begin; at < part.end; at += kWarps * kPositions) {
      if (pass > 0 || at != begin) load(at);
      attention.add(s, keys, values, part.end - at, lane);
    }
    if (part.has_new && warp == new_warp) attention.add_new(s, scratch, lane);
    if (warp < with_any) leave_warp(attention, scratch, warp, lane);
    multiplying_barrier();
    merge_warps(s, scratch, head, split, pass, part.active, with_any, tag, warp * 32 + lane);
    multiplying_barrier();
  }
}

// What the blocks of a head have, together: `width` lanes add an output's, and each block has a part of the outputs.
template <int kDim>
__device__ void merge_stretches(const Step& s, int head, int split, int active, uint32_t tag, int thread) {
  const int group = s.heads / s.kv_heads, outputs = group * kDim;
  const int width = active > 8 ? 16 : active > 4 ? 8 : active > 2 ? 4 : 2;
  const int each = (outputs + active - 1) / active, end = min((split + 1) * each, outputs);
  for (int first = split * each; first < end; first += kMultiplying / width) {
    const int i = first + thread / width, lane = thread % width;
    const bool mine = i < end;
    const int h = i / kDim, d = i % kDim;
    float most = -INFINITY, total = 0, sum = 0;
    if (mine && lane < active) {
      const uint4* from = partial_of<kDim>(s, head, lane, h);
      uint4 both;
      uint2 value;
      do {
        both = load_words(from);
        value = load_two_words(reinterpret_cast<const uint2*>(from + 1) + d);
      } while (both.y != tag || both.w != tag || value.y != tag);
      most = __uint_as_float(both.x), total = __uint_as_float(both.z), sum = __uint_as_float(value.x);
    }
    float all = most;
    for (int step = width / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
    const float its = attention::weight_of(most, all);
    total *= its, sum *= its;
    for (int step = width / 2; step > 0; step /= 2) {
      total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    }
    if (mine && lane == 0) {
      store_word(s.attended + fragment_index((head * group + h) * kDim + d),
                 word_of(__float2bfloat16_rn(sum / total), tag));
    }
  }
}

// The block's first keys and values of the next layer, to the L2 cache.
template <int kDim>
__device__ __forceinline__ void prefetch_stretch(const Step& s, const Layer& next, const Stretch& part, int head) {
  constexpr int kMostPositions = 128;
  const int positions = min(part.end - part.first, kMostPositions);
  if (positions <= 0) return;
  const int64_t first = (static_cast<int64_t>(head) * s.length + part.first) * kDim;
  bulk_prefetch(next.keys + first, positions * kDim * 2);
  bulk_prefetch(next.values + first, positions * kDim * 2);
}

#endif

}  // namespace layers_sm90
}  // namespace nvfp4
