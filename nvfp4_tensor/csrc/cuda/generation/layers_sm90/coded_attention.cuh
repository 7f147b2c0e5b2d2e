// Attention of one token to a cache of codes, by the multiplying warps: dense tokens at the front, codes, and a ring of
// the latest tokens, which the token is written to. Tiles of codes take the tensor cores, as in
// cuda/attention/codes.cuh; dense tokens what a dense cache takes. The ring's oldest token becomes codes in a kernel
// before this one.
//
// The first block of a head has its dense tokens, and codes only if the others' shares take longer than these.
#pragma once

#include "cuda/generation/layers_sm90/attention.cuh"

namespace nvfp4 {
namespace layers_sm90 {

using attention::kCodeTile;

constexpr int kDenseOfTile = 2;  // dense tokens that a block attends to in the time of a tile of codes
constexpr int kFewestTiles = 2;  // of a block
constexpr int kQueryRowPad = 8;  // elements

// Bytes of shared memory: as of a dense cache, then four queries in two parts each.
constexpr int coded_attention_bytes(int dim) {
  return attention_bytes(dim) + 2 * kHeadsAtOnce * (dim + kQueryRowPad) * 2;
}

#if NVFP4_LARGE_SHARED_MEMORY

// The tiles of codes [begin, end) of one block, of a context with `count` tokens in codes.
struct CodedStretch {
  static constexpr bool kKeepsLane = true;
  int position, begin, end, count, active;  // position: of the new token
  bool has_dense;

  __device__ CodedStretch(const Step& s, int split) : position(static_cast<int>(*s.position)), has_dense(split == 0) {
    count = min(max(position - (s.length - 1), 0), s.capacity);
    const int tiles = (count + kCodeTile - 1) / kCodeTile, others = s.splits - 1;
    const int dense = (s.front + s.length) / kDenseOfTile;
    const int first = others == 0 ? tiles : max((tiles + dense) / s.splits - dense, 0);
    const int each = others == 0 ? 1 : max((tiles - first + others - 1) / others, kFewestTiles);
    active = 1 + (tiles - first + each - 1) / each;
    begin = has_dense ? 0 : first + (split - 1) * each;
    end = has_dense ? first : min(begin + each, tiles);
  }
};

// The codes of a head's keys or values, from a tile on.
template <int kDim>
struct CodedHead {
  const uint8_t *codes, *scales, *factors;

  __device__ __forceinline__ CodedHead(const Step& s, const attention::CodedRows& rows, int head, int tile) {
    const int64_t row = static_cast<int64_t>(head) * s.capacity + tile * kCodeTile;
    codes = rows.codes + row * (kDim / 2), scales = rows.scales + row * (kDim / kBlock), factors = rows.factors + row;
    __builtin_assume(__isGlobal(codes)), __builtin_assume(__isGlobal(scales)), __builtin_assume(__isGlobal(factors));
  }
  template <typename Tile>
  __device__ __forceinline__ void load(Tile& tile, int lane) const {
    tile.load(codes, scales, factors, lane);
  }
  __device__ __forceinline__ void step(int tiles) {
    codes += tiles * kCodeTile * (kDim / 2), scales += tiles * kCodeTile * (kDim / kBlock);
    factors += tiles * kCodeTile;
  }
  // To the L2 cache.
  __device__ __forceinline__ void prefetch(int tiles) const {
    bulk_prefetch(codes, tiles * kCodeTile * (kDim / 2));
    bulk_prefetch(scales, tiles * kCodeTile * (kDim / kBlock));
    bulk_prefetch(factors, tiles * kCodeTile);
  }
};

// Query `row` of a pass for codes, by a warp: rotated where keys are, a rounded part and four rows behind what is left.
template <int kDim>
__device__ __forceinline__ void split_query(const Step& s, const Scratch<kDim>& scratch, uint32_t to, int pass, int row,
                                            int lane) {
  constexpr int kPairs = kDim / 64;
  const bool is_one = pass + row < s.heads / s.kv_heads;
  float v[2 * kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t from = scratch.queries + ((pass + row) * kDim + 2 * (lane * kPairs + i)) * 2;
    const uint32_t pair = is_one ? load_shared_4(from) : 0;
    v[2 * i] = low_float(pair), v[2 * i + 1] = high_float(pair);
  }
  if (s.is_rotated) attention::rotate_query(v, lane);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t rounded = packed_pair<__nv_bfloat16>(v[2 * i], v[2 * i + 1]);
    const uint32_t rest = packed_pair<__nv_bfloat16>(v[2 * i] - low_float(rounded), v[2 * i + 1] - high_float(rounded));
    const uint32_t at = to + (row * (kDim + kQueryRowPad) + 2 * (lane * kPairs + i)) * 2;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(rounded) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + kHeadsAtOnce * (kDim + kQueryRowPad) * 2), "r"(rest) : "memory");
  }
}

// A warp's tiles of codes for four queries; where `adds`, to what the warp has left in scratch memory.
template <int kDim>
__device__ __forceinline__ void attend_tiles(const Step& s, const Layer& layer, const Scratch<kDim>& scratch,
                                             uint32_t queries, const CodedStretch& part, int head, bool adds, int warp,
                                             int lane) {
  using Warp = attention::CodesWarp<kDim, 1>;
  using Bf16 = __nv_bfloat16;
  Warp mine;
  const int g = lane / 4, t = lane % 4;
  if (adds) {  // the second part of a query begins with nothing, lanes of a column share its total
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = t % 2 * 2 + i;
      mine.most[0][i] = fmaxf(load_shared_float(scratch.maximum(warp, row)), attention::kNothing);
      if (g == 0) mine.total[0][i] = load_shared_float(scratch.maximum(warp, row) + 4);
#pragma unroll
      for (int m = 0; m < Warp::kParts; ++m) {
        const uint32_t at = scratch.part(warp, row) + (Warp::Lane::value(g, m / 2) + m % 2 * 2) * 4;
        if (t < 2) mine.sum[0][m][i] = load_shared_float(at), mine.sum[0][m][i + 2] = load_shared_float(at + 4);
      }
    }
    __syncwarp();
  }
  int tile = part.begin + warp;
  CodedHead<kDim> key_head(s, layer.coded[0], head, tile), value_head(s, layer.coded[1], head, tile);
  const uint32_t query = queries + (g * (kDim + kQueryRowPad) + Warp::Lane::key(t, 0)) * 2;
  const float unit = s.scaling * (1.0f / Decoder<Bf16>::kUnit);
#pragma unroll 1
  for (; tile < part.end; tile += kWarps) {
    float scores[1][4];
    {
      attention::CodedKeys<kDim> keys;
      key_head.load(keys, lane);
      key_head.step(kWarps);
      Warp::score(keys, [&](int, int j) { return to_fragment(load_shared_16(query + j * 16)); }, scores);
      const float factor[2] = {keys.factor(0), keys.factor(1)};
      Warp::template scale<true>(0.0f, unit, factor, lane, scores);
    }
    attention::CodedValues<kDim> values;
    value_head.load(values, lane);
    value_head.step(kWarps);
    const int rest = part.count - tile * kCodeTile;
    if (rest < kCodeTile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (g + i / 2 * 8 >= rest) scores[0][i] = -INFINITY;
      }
      values.clear_outside(0, rest, lane);
    }
    mine.weigh(scores);
    mine.add(values, scores, lane);
  }
  mine.leave(
      lane,
      [&](int row, float most, float total) {
        store_shared_float(scratch.maximum(warp, row), most);
        store_shared_float(scratch.maximum(warp, row) + 4, total);
      },
      [&](int row, int d, float2 both) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(scratch.part(warp, row) + d * 4), "f"(both.x), "f"(both.y)
                     : "memory");
      });
}

// The dense tokens but the new one: those at the front, and the ring behind the new one's slot.
template <int kDim>
__device__ __forceinline__ void attend_dense(const Step& s, const Layer& layer, const Scratch<kDim>& scratch, int head,
                                             int slot, int pass, int warp, int lane) {
  const int group = s.heads / s.kv_heads, count = s.front + s.length - 1;
  Attention<kDim> attention;
  attention.load_queries(scratch, pass, group, lane);
#pragma unroll 1
  for (int at = warp * kPositions; at < count; at += kWarps * kPositions) {
    Row<kDim> keys[kPositions], values[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int token = min(at + i, count - 1);
      const bool is_front = token < s.front;
      int row = slot + 1 + token - s.front;
      if (row >= s.length) row -= s.length;
      const int64_t from = is_front ? static_cast<int64_t>(head) * s.front + token
                                    : static_cast<int64_t>(head) * s.length + row;
      keys[i].load((is_front ? layer.front[0] : layer.keys) + from * kDim, lane);
      values[i].load((is_front ? layer.front[1] : layer.values) + from * kDim, lane);
    }
    attention.add(s, keys, values, count - at, lane);
  }
  if (warp == kWarps - 1) attention.add_new(s, scratch, lane);
  leave_warp(attention, scratch, warp, lane);
  __syncwarp();
}

// What one block has of a head.
template <int kDim>
__device__ __forceinline__ void attend_stretch(const Step& s, const Layer& layer, const CodedStretch& part, int head,
                                               int split, uint32_t tag, uint32_t scratch_at, int warp, int lane) {
  const int group = s.heads / s.kv_heads, slot = part.position % s.length;
  const Scratch<kDim> scratch(scratch_at);
  const uint32_t queries = scratch_at + attention_bytes(kDim);
  prepare_heads(s, layer, scratch, head, part.has_dense, (static_cast<int64_t>(head) * s.length + slot) * kDim, tag,
                warp, lane);
  const int warps = part.has_dense ? kWarps : min(part.end - part.begin, kWarps);
#pragma unroll 1
  for (int pass = 0; pass < group; pass += kHeadsAtOnce) {
    if (warp < kHeadsAtOnce) {
      __syncwarp();
      split_query(s, scratch, queries, pass, warp, lane);
    }
    multiplying_barrier();
    if (part.has_dense) attend_dense(s, layer, scratch, head, slot, pass, warp, lane);
    if (warp < warps && part.begin < part.end) {
      attend_tiles(s, layer, scratch, queries, part, head, part.has_dense, warp, lane);
    }
    multiplying_barrier();
    merge_warps(s, scratch, head, split, pass, part.active, warps, tag, threadIdx.x);
    multiplying_barrier();
  }
}

// What a block reads of the next layer's codes, to the L2 cache.
template <int kDim>
__device__ __forceinline__ void prefetch_stretch(const Step& s, const Layer& next, const CodedStretch& part, int head) {
  constexpr int kMostTiles = 64;
  if (part.has_dense) {
    const int64_t ring = static_cast<int64_t>(head) * s.length * kDim;
    bulk_prefetch(next.keys + ring, s.length * kDim * 2);
    bulk_prefetch(next.values + ring, s.length * kDim * 2);
  }
  const int tiles = min(part.end - part.begin, kMostTiles);
  if (tiles <= 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) CodedHead<kDim>(s, next.coded[i], head, part.begin).prefetch(tiles);
}

#endif

}  // namespace layers_sm90
}  // namespace nvfp4
