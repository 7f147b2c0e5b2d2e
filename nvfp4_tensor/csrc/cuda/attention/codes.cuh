// Attention on the tensor cores (flash decoding): a warp has every kWarps-th tile of 16 tokens of its block's share,
// and up to 4 kTiles queries of one head of keys, which share what it decodes.
//
// Products are mma.m16n8k16 with the context as A: scores S^T = K q^T (16 tokens x 8 columns), sums O^T = V^T P^T
// (16 elements x 8 columns). The order of k inside an mma is free, and so is which element a row of O^T is. So lanes
// take codes as they lie, of K 1/4 of two tokens, of V 1/8 of four tokens, and decode them in registers to A fragments.
// Of V, the codes of two tokens are put into the halves of a word first, so that what decodes together is a pair of
// tokens.
//
// Codes come through shared memory, a ring of kStages tiles of a warp's own, so that enough of them is under way; dense
// tokens come from memory as fragments.
//
// Codes times block scales are exact in bfloat16. Queries and weights are two bfloat16 each, a rounded part and the
// rest of it, in columns 0 to 3 and 4 to 7: four queries fill one mma, and its sums are as if it had been float32. A
// row's factor (e8m0) multiplies a score, or a weight.
#pragma once

#include "cuda/attention/warp.cuh"

namespace nvfp4 {
namespace attention {

// Queries to shared memory, rotated where keys are, a row at a time by each warp: two bfloat16 in rows four apart, and
// as they are. The first row is loaded early.
template <int kDim, int kTiles>
struct Queries {
  using Of = Shape<kDim, kTiles>;
  static constexpr int kEach = kDim / 32;           // elements of a lane
  static constexpr bool kInPairs = kEach % 2 == 0;  // side by side; else 32 apart
  static constexpr int kWords = (kEach + 1) / 2;
  uint32_t first[kWords];
  int warp, lane;

  __device__ __forceinline__ Queries() : first{}, warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}
  __device__ __forceinline__ void load_first(const AttendCodes& p, const Place& at) { load(p, at, warp, first); }
  __device__ __forceinline__ int element(int i) const { return kInPairs ? lane * kEach + i : 32 * i + lane; }
  __device__ __forceinline__ void load(const AttendCodes& p, const Place& at, int row,
                                       uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (row >= at.rows) return;
    const auto* const from = static_cast<const uint16_t*>(p.q) + at.q_row(p, row) * kDim;
    if constexpr (kInPairs) {
      load_bytes<4 * kWords>(reinterpret_cast<const uint8_t*>(from + lane * kEach), words);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) words[i / 2] |= static_cast<uint32_t>(from[element(i)]) << (16 * (i % 2));
    }
  }
  __device__ __forceinline__ void place(const AttendCodes& p, const Place& at,
                                        CodesShared<kDim, kTiles>& shared) const {
#pragma unroll 1
    for (int row = warp; row < Of::kRows; row += Of::kWarps) {
      uint32_t words[kWords];
      if (row == warp) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = first[i];
      } else {
        load(p, at, row, words);
      }
      place_row(p, row / 4 * 8 + row % 4, words, shared);
    }
  }
  __device__ __forceinline__ void place_row(const AttendCodes& p, int to, const uint32_t (&words)[kWords],
                                            CodesShared<kDim, kTiles>& shared) const {
    float v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Pair<Bf16> bf16(words[i / 2]);
      const Pair<__half> half(words[i / 2]);
      if (p.dtype == Dtype::kBf16) v[i] = i % 2 ? bf16.high() : bf16.low();
      else v[i] = i % 2 ? half.high() : half.low();
    }
    store(shared.q[1][to], words);
    const uint32_t none[kWords] = {};
    store(shared.q[1][to + 4], none);
    if (p.is_rotated) rotate_query(v, lane);
    uint32_t rounded[kWords], rest[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float low = v[2 * i], high = 2 * i + 1 < kEach ? v[2 * i + 1] : 0.0f;
      rounded[i] = packed_pair<Bf16>(low, high);
      const Pair<Bf16> taken(rounded[i]);
      rest[i] = packed_pair<Bf16>(low - taken.low(), high - taken.high());
    }
    store(shared.q[0][to], rounded);
    store(shared.q[0][to + 4], rest);
  }
  __device__ __forceinline__ void store(uint16_t* to, const uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (kInPairs) {
        if (i % 2 == 0) *reinterpret_cast<uint32_t*>(to + lane * kEach + i) = words[i / 2];
      } else {
        to[element(i)] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
      }
    }
  }
};

// The sums of a block's warps, in their order.
template <int kDim, int kTiles>
__device__ __forceinline__ void leave_block(const AttendCodes& p, const Place& at,
                                            const CodesShared<kDim, kTiles>& shared) {
  using Of = Shape<kDim, kTiles>;
  float *const to = at.partial(p), *const most_to = to + p.partials().most();
  for (int i = threadIdx.x; i < at.rows * kDim; i += Of::kThreads) {
    const int row = i / kDim, d = i % kDim;
    float most = kNothing, total = 0, sum = 0;
#pragma unroll
    for (int warp = 0; warp < Of::kWarps; ++warp) most = fmaxf(most, shared.left.most[warp][row]);
#pragma unroll
    for (int warp = 0; warp < Of::kWarps; ++warp) {
      const float weight = exp2_of(shared.left.most[warp][row] - most);
      total = __fmaf_rn(weight, shared.left.total[warp][row], total);
      sum = __fmaf_rn(weight, shared.left.sum[warp][row][d], sum);
    }
    to[i] = sum;
    if (d == 0) most_to[row] = most, most_to[p.block_rows + row] = total;
  }
}

// Dense tokens straight from memory: rows of keys g and g + 8 and of values 2t, 2t + 1, 2t + 8 and 2t + 9, null for
// what no query sees, which may be anything.
template <typename T>
struct DenseRowsReader {
  const T *keys[2], *values[4];

  __device__ __forceinline__ uint4 key(int which, int d) const { return load<2>(keys[which], d); }
  template <int kFours>
  __device__ __forceinline__ uint4 value(int i, int d) const {
    return load<kFours>(values[i], d);
  }
  template <int kFours>
  __device__ __forceinline__ static uint4 load(const T* row, int d) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row == nullptr) return v;
    if constexpr (kFours == 2) return *reinterpret_cast<const uint4*>(row + d);
    const uint2 four = *reinterpret_cast<const uint2*>(row + d);
    v.x = four.x, v.y = four.y;
    return v;
  }
};

// A tile of dense tokens of a stretch, by a warp.
template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void attend_dense_tile(const AttendCodes& p, const Place& at, const Sight& sight,
                                                  const Mask& mask, const DenseRows& key_rows,
                                                  const DenseRows& value_rows, int first,
                                                  const CodesShared<kDim, kTiles>& shared,
                                                  CodesWarp<kDim, kTiles>& mine, int lane) {
  using Warp = CodesWarp<kDim, kTiles>;
  const int g = lane / 4, t = lane % 4;
  const auto row = [&](const DenseRows& rows, int token) {
    if (token < mask.seen.begin || token >= mask.seen.end) return static_cast<const T*>(nullptr);
    return static_cast<const T*>(rows.data) + at.b * rows.batch_step + at.kv_head * rows.head_step +
           token * rows.token_step;
  };
  DenseRowsReader<T> reader;
#pragma unroll
  for (int i = 0; i < 2; ++i) reader.keys[i] = row(key_rows, first + g + 8 * i);
  const auto query = [&](int n, int d) { return *reinterpret_cast<const uint4*>(&shared.q[1][8 * n + g][d]); };
  float s[kTiles][4];
  score_dense<T, kDim, 1>(reader, query, lane, s);
  const float ones[2] = {1.0f, 1.0f};
  Warp::template scale<false>(p.softcap, p.scale, ones, lane, s);
  if (mask.cuts(first)) Warp::hide(p, sight, mask, at.first_row, first, lane, s);
  mine.weigh(s);
#pragma unroll
  for (int i = 0; i < 4; ++i) reader.values[i] = row(value_rows, first + 2 * t + i % 2 + i / 2 * 8);
  mine.template add_dense<T>(reader, s, lane);
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void attend_dense_tiles(const AttendCodes& p, const Place& at, const Sight& sight,
                                                   const TileShare& share, const CodesShared<kDim, kTiles>& shared,
                                                   CodesWarp<kDim, kTiles>& mine, int warp, int lane) {
  const int fronts = TileShare::dense_tiles(p.front);
  for (int tile = share.dense_begin + warp; tile < share.dense_end; tile += Shape<kDim, kTiles>::kWarps) {
    const bool is_front = tile < fronts;
    const Mask mask(p, sight, is_front ? 0 : static_cast<int64_t>(p.front) + sight.length,
                    is_front ? p.front : p.latest);
    attend_dense_tile<T>(p, at, sight, mask, is_front ? p.front_keys : p.latest_keys,
                         is_front ? p.front_values : p.latest_values, (is_front ? tile : tile - fronts) * kCodeTile,
                         shared, mine, lane);
  }
}

// To the L2 cache what is read when copies of codes are under way, which loads would wait behind: queries, lengths, and
// dense tokens, which are the first block's. Before the kernel before this one ends: what it writes goes through that
// cache.
template <int kDim>
__device__ __forceinline__ void prefetch_dense(const AttendCodes& p, const Place& at) {
  constexpr int kLine = 64, kLines = (kDim + kLine - 1) / kLine, kMostRows = 256;
  if (threadIdx.x == 0) prefetch(p.lengths + at.b);
  if (threadIdx.x < at.rows * kLines) {
    const int row = threadIdx.x / kLines, d = threadIdx.x % kLines * kLine;
    prefetch(static_cast<const uint16_t*>(p.q) + at.q_row(p, row) * kDim + d);
  }
  if (blockIdx.x != 0 || blockIdx.y % p.passes != 0) return;
  const int front = min(p.front, kMostRows), rows = front + min(p.latest, kMostRows);
  for (int i = threadIdx.x; i < 2 * rows * kLines; i += blockDim.x) {
    const int row = i / (2 * kLines), d = i / 2 % kLines * kLine;
    const bool is_front = row < front;
    const DenseRows& of = i % 2 ? is_front ? p.front_values : p.latest_values : is_front ? p.front_keys : p.latest_keys;
    prefetch(static_cast<const uint16_t*>(of.data) + at.b * of.batch_step + at.kv_head * of.head_step +
             (is_front ? row : row - front) * of.token_step + d);
  }
}

// Grid (splits, heads of keys x passes, batch).
template <int kDim, int kTiles>
__global__ void __launch_bounds__(Shape<kDim, kTiles>::kThreads, Shape<kDim, kTiles>::kBlocksPerSm)
    attend_codes_kernel(const __grid_constant__ AttendCodes p) {
  using Of = Shape<kDim, kTiles>;
  using Warp = CodesWarp<kDim, kTiles>;
  extern __shared__ __align__(16) float memory[];
  auto& shared = *reinterpret_cast<CodesShared<kDim, kTiles>*>(memory);
  const Place at(p);
  prefetch_dense<kDim>(p, at);
  Queries<kDim, kTiles> queries;
  if (!p.is_settled) {
    griddepcontrol_wait();
    queries.load_first(p, at);  // before copies of codes, which it would wait behind
  }
  const Sight sight(p, at.b);
  const Mask mask(p, sight, p.front, sight.length);
  const TileShare share(p, mask.seen);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const CodedCopy<kDim> copy(p, static_cast<int64_t>(at.unit) * p.capacity, address_of(&shared.stage[warp][0]), lane);
  int tile = share.begin + warp;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (tile + i * Of::kWarps < share.end) copy.begin(tile + i * Of::kWarps, i);
    cp_async_commit();
  }
  griddepcontrol_wait();  // again, for what is not settled
  griddepcontrol_launch_dependents();
  if (p.is_settled) queries.load_first(p, at);
  queries.place(p, at, shared);
  __syncthreads();
  Warp mine;
  mine.load_queries(shared.q[0], lane);
  if (share.dense_begin < share.dense_end) {  // while the first codes are under way
    if (p.dtype == Dtype::kBf16) {
      attend_dense_tiles<Bf16>(p, at, sight, share, shared, mine, warp, lane);
    } else {
      attend_dense_tiles<__half>(p, at, sight, share, shared, mine, warp, lane);
    }
  }
  int stage = 0;
#pragma unroll 1
  for (; tile < share.end; tile += Of::kWarps) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // and all lanes have read the tile before, which the next copy overwrites
    const int next = tile + (kStages - 1) * Of::kWarps;
    if (next < share.end) copy.begin(next, (stage + kStages - 1) % kStages);
    cp_async_commit();
    const CodedStage<kDim>& here = shared.stage[warp][stage];
    float s[kTiles][4];
    const CodedKeys<kDim> keys(here, lane);
    mine.score(keys, s);
    const float factor[2] = {keys.factor(0), keys.factor(1)};
    Warp::template scale<true>(p.softcap, p.scale * (1.0f / Decoder<Bf16>::kUnit), factor, lane, s);
    CodedValues<kDim> values(here, lane);
    if (mask.cuts(tile * kCodeTile)) {
      Warp::hide(p, sight, mask, at.first_row, tile * kCodeTile, lane, s);
      values.clear_outside(mask.seen.begin - tile * kCodeTile, mask.seen.end - tile * kCodeTile, lane);
    }
    mine.weigh(s);
    mine.add(values, s, lane);
    stage = (stage + 1) % kStages;
  }
  __syncthreads();
  auto& left = shared.left;
  mine.leave(
      lane, [&](int row, float most, float total) { left.most[warp][row] = most, left.total[warp][row] = total; },
      [&](int row, int d, float2 both) { *reinterpret_cast<float2*>(&left.sum[warp][row][d]) = both; });
  __syncthreads();
  const Place here(p);  // again, so that the loop needs no registers for it
  leave_block<kDim, kTiles>(p, here, shared);
}

}  // namespace attention
}  // namespace nvfp4
