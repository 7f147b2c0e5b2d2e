// Attention of a few queries to a stretch of a context in plain float32 arithmetic, through shared memory: to dense
// tokens, and to codes for what the tensor cores do not take (float32 queries, other sizes of heads).
//
// Scores are in units of log2(e), and a row that has seen nothing has the largest score kNothing and the total 0.
#pragma once

#include "cuda/attention/attend.h"
#include "cuda/block/elements.cuh"
#include "cuda/host/launch.h"
#include "cuda/ptx/lanes.cuh"
#include "cuda/ptx/shared.cuh"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace nvfp4 {
namespace attention {

constexpr float kNothing = -3.402823466e38f;  // finite: differences of it are no NaN

__device__ __forceinline__ float load_element(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kFloat) return static_cast<const float*>(from)[i];
  if (dtype == Dtype::kBf16) return to_float(static_cast<const __nv_bfloat16*>(from)[i]);
  return to_float(static_cast<const __half*>(from)[i]);
}

__device__ __forceinline__ void store_element(void* to, Dtype dtype, int64_t i, float v) {
  if (dtype == Dtype::kFloat) {
    static_cast<float*>(to)[i] = v;
  } else if (dtype == Dtype::kBf16) {
    static_cast<__nv_bfloat16*>(to)[i] = from_float<__nv_bfloat16>(v);
  } else {
    static_cast<__half*>(to)[i] = from_float<__half>(v);
  }
}

// A row's factor, of its byte.
__device__ __forceinline__ float factor_of(uint32_t byte) { return bits_float(byte << 23); }

struct Range {
  int begin, end;
  __device__ Range(int64_t from, int64_t behind, int most)
      : begin(static_cast<int>(max(int64_t{0}, min(from, static_cast<int64_t>(most))))),
        end(static_cast<int>(max(static_cast<int64_t>(begin), min(behind, static_cast<int64_t>(most))))) {}
};

// The positions that the new tokens of a sequence see: each a range, which moves on with the token.
struct Sight {
  int length;  // of the codes
  int tokens;  // new ones
  int64_t own, window, first;

  __device__ Sight(const AttendCodes& p, int b) : tokens(p.tokens), window(p.window) {
    length = static_cast<int>(max(int64_t{0}, min(p.lengths[b], static_cast<int64_t>(p.capacity))));
    own = static_cast<int64_t>(p.front) + length + p.latest - p.tokens;
    first = p.first ? p.first[b] : 0;
  }
  // Of new token i, both included.
  __device__ int64_t from(int i) const { return max(window ? own + i + 1 - window : int64_t{0}, first); }
  __device__ int64_t to(int i) const { return own + i; }
  // By any of them, of a stretch of so many tokens of which the first has this position.
  __device__ Range seen(int64_t position, int count) const {
    return Range(from(0) - position, to(tokens - 1) + 1 - position, count);
  }
};

// Where a block stands: its queries, of one head of keys of a sequence.
struct Place {
  int b, kv_head, first_row, rows, unit;

  __device__ Place(const AttendCodes& p) {
    b = blockIdx.z, kv_head = blockIdx.y / p.passes;
    first_row = blockIdx.y % p.passes * p.block_rows;
    rows = min(p.block_rows, p.rows() - first_row);
    unit = b * p.kv_heads + kv_head;
  }
  __device__ int64_t q_row(const AttendCodes& p, int row) const {
    return static_cast<int64_t>(unit) * p.rows() + first_row + row;
  }
  __device__ float* partial(const AttendCodes& p) const {
    return p.partials().of(unit, blockIdx.y % p.passes, blockIdx.x);
  }
};

// The share of a block: tiles of dense tokens, each of which counts as kDenseCost, and then tiles of codes.
constexpr int kDenseCost = 2;

struct TileShare {
  int begin, end, dense_begin, dense_end;

  __device__ TileShare(const AttendCodes& p, const Range& seen) {
    const int first = seen.begin / kCodeTile;
    const int coded = seen.begin < seen.end ? (seen.end + kCodeTile - 1) / kCodeTile - first : 0;
    const int dense = kDenseCost * (dense_tiles(p.front) + dense_tiles(p.latest));
    const int all = coded + dense, shares = p.counts.of(all), each = all / shares, more = all % shares;
    const int split = min(static_cast<int>(blockIdx.x), shares), from = split * each + min(split, more);
    const int to = min(from + each + (split < more), all);
    begin = first + max(from - dense, 0), end = first + max(to - dense, 0);
    dense_begin = begins(min(from, dense)), dense_end = begins(min(to, dense));
  }
  // Dense tiles that begin before this cost.
  __device__ static int begins(int cost) { return (cost + kDenseCost - 1) / kDenseCost; }
  __device__ static int dense_tiles(int tokens) { return (tokens + kCodeTile - 1) / kCodeTile; }
};

__host__ __device__ inline int plain_tile(int size) { return size > 256 ? kPlainTile / 2 : kPlainTile; }

// Floats of shared memory.
__host__ __device__ inline int plain_shared(int rows, int key_size, int value_size) {
  const int widest = key_size > value_size ? key_size : value_size;
  return rows * (key_size + value_size + kPlainTile + 3) + plain_tile(widest) * widest;
}

class PlainUnit {
 public:
  __device__ PlainUnit(const AttendCodes& p, const Place& at, const Sight& sight, float* shared)
      : p_(p), at_(at), sight_(sight) {
    q_ = shared, shared += at.rows * p.key_size;
    sums_ = shared, shared += at.rows * p.value_size;
    weights_ = shared, shared += at.rows * kPlainTile;
    most_ = shared, shared += at.rows;
    total_ = shared, shared += at.rows;
    correction_ = shared, shared += at.rows;
    tile_ = shared;
    tile_tokens_ = plain_tile(max(p.key_size, p.value_size));
    for (int i = threadIdx.x; i < at.rows * p.key_size; i += blockDim.x) {
      q_[i] = load_element(p.q, p.dtype, at.q_row(p, 0) * p.key_size + i);
    }
    for (int i = threadIdx.x; i < at.rows * p.value_size; i += blockDim.x) sums_[i] = 0;
    for (int i = threadIdx.x; i < at.rows; i += blockDim.x) most_[i] = kNothing, total_[i] = 0;
    __syncthreads();
  }

  // Queries times H, over each so many elements: as keys of codes are.
  __device__ void rotate() {
    const int size = p_.key_size & -p_.key_size;
    for (int distance = 1; distance < size; distance *= 2) {
      for (int i = threadIdx.x; i < at_.rows * p_.key_size / 2; i += blockDim.x) {
        float* const low = q_ + i / distance * 2 * distance + i % distance;
        const float a = low[0], b = low[distance];
        low[0] = a + b, low[distance] = a - b;
      }
      __syncthreads();
    }
  }

  __device__ void dense(const TileShare& share) {
    const int fronts = TileShare::dense_tiles(p_.front);
    dense(p_.front_keys, p_.front_values, 0, p_.front, share.dense_begin, share.dense_end);
    dense(p_.latest_keys, p_.latest_values, static_cast<int64_t>(p_.front) + sight_.length, p_.latest,
          share.dense_begin - fronts, share.dense_end - fronts);
  }
  __device__ void codes(const TileShare& share) {
    run(p_.front, sight_.length, share.begin, share.end, [&](bool is_keys, int first, int count) {
      load_codes(is_keys ? p_.keys : p_.values, is_keys ? p_.key_size : p_.value_size, first, count);
    });
  }

  __device__ void leave() {
    float *const to = at_.partial(p_), *const most = to + p_.partials().most();
    for (int i = threadIdx.x; i < at_.rows * p_.value_size; i += blockDim.x) to[i] = sums_[i];
    for (int i = threadIdx.x; i < at_.rows; i += blockDim.x) {
      most[i] = most_[i], most[p_.block_rows + i] = total_[i];
    }
  }

 private:
  __device__ void dense(const DenseRows& keys, const DenseRows& values, int64_t position, int tokens, int begin,
                        int end) {
    run(position, tokens, begin, end, [&](bool is_keys, int first, int count) {
      load_dense(is_keys ? keys : values, is_keys ? p_.key_size : p_.value_size, first, count);
    });
  }

  // What any new token sees of tiles [begin, end) of a stretch of so many tokens, of which the first has this position.
  template <typename Load>
  __device__ void run(int64_t position, int tokens, int begin, int end, Load load) {
    const Range seen = sight_.seen(position, tokens);
    const int behind = min(seen.end, end * kCodeTile);
    for (int first = max(seen.begin, begin * kCodeTile); first < behind; first += tile_tokens_) {
      const int count = min(tile_tokens_, behind - first);
      load(true, first, count);
      __syncthreads();
      score(position + first, count);
      __syncthreads();
      load(false, first, count);
      weigh(count);
      __syncthreads();
      add(count);
      __syncthreads();
    }
  }

  // Four loads of a thread are under way at a time.
  __device__ void load_dense(const DenseRows& rows, int size, int first, int count) {
    const int64_t start = at_.b * rows.batch_step + at_.kv_head * rows.head_step + first * rows.token_step;
    const int whole = count * size, step = blockDim.x;
    for (int i = threadIdx.x; i < whole; i += 8 * step) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = i + j * step, token = at / size;
        v[j] = at < whole ? load_element(rows.data, p_.dtype, start + token * rows.token_step + (at - token * size))
                          : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (i + j * step < whole) tile_[i + j * step] = v[j];
      }
    }
  }

  __device__ void load_codes(const CodedRows& rows, int size, int first, int count) {
    const int blocks = (size + kBlock - 1) / kBlock;
    const int64_t token0 = static_cast<int64_t>(at_.unit) * p_.capacity + first;
    for (int i = threadIdx.x; i < count * blocks; i += blockDim.x) {
      const int token = i / blocks, block = i - token * blocks;
      const int64_t row = token0 + token;
      const uint2 codes = reinterpret_cast<const uint2*>(rows.codes)[row * blocks + block];
      const float scale = e4m3_value(rows.scales[row * blocks + block]) * factor_of(rows.factors[row]);
      float* const to = tile_ + token * size + block * kBlock;
#pragma unroll
      for (int e = 0; e < kBlock; ++e) {
        const uint32_t word = e < 8 ? codes.x : codes.y;
        if (block * kBlock + e < size) to[e] = e2m1_value(word >> (4 * (e % 8)) & 15u) * scale;
      }
    }
  }

  __device__ void score(int64_t position, int count) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int token = threadIdx.x / 32; token < kPlainTile; token += warps) {
      for (int row = 0; row < at_.rows; ++row) {
        float s = -INFINITY;
        if (token < count) {
          const float *const q = q_ + row * p_.key_size, *const k = tile_ + token * p_.key_size;
          float sum = 0;
          for (int d = lane; d < p_.key_size; d += 32) sum = __fmaf_rn(q[d], k[d], sum);
          s = sum_of_lanes(sum) * p_.scale;
          if (p_.softcap != 0.0f) s = tanhf(s / p_.softcap) * p_.softcap;
          const int own = (at_.first_row + row) % p_.tokens;
          s = position + token < sight_.from(own) || position + token > sight_.to(own) ? -INFINITY : s * kLog2E;
        }
        if (lane == 0) weights_[row * kPlainTile + token] = s;
      }
    }
  }

  // Scores to weights. fmaxf drops NaN; a score that is NaN makes its sums NaN by itself.
  __device__ void weigh(int count) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < at_.rows; row += blockDim.x / 32) {
      const float s = weights_[row * kPlainTile + lane];
      const float before = most_[row], now = fmaxf(most_of_lanes(s), before);
      const float weight = exp2f(s - now), sum = sum_of_lanes(weight), correction = exp2f(before - now);
      weights_[row * kPlainTile + lane] = weight;
      __syncwarp();
      if (lane == 0) {
        most_[row] = now, correction_[row] = correction;
        total_[row] = total_[row] * correction + sum;
      }
    }
  }

  __device__ void add(int count) {
    for (int i = threadIdx.x; i < at_.rows * p_.value_size; i += blockDim.x) {
      const int row = i / p_.value_size, d = i - row * p_.value_size;
      const float* const weights = weights_ + row * kPlainTile;
      float sum = sums_[i] * correction_[row];
      for (int token = 0; token < count; ++token) {
        sum = __fmaf_rn(weights[token], tile_[token * p_.value_size + d], sum);
      }
      sums_[i] = sum;
    }
  }

  const AttendCodes& p_;
  const Place& at_;
  const Sight& sight_;
  float *q_, *sums_, *weights_, *most_, *total_, *correction_, *tile_;
  int tile_tokens_;
};

}  // namespace attention
}  // namespace nvfp4
