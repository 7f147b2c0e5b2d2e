// Keys and values to codes: a lane has a block of 16 elements, 1 to 32 lanes a row (one token of a head).
//
// Its bits are those of nvfp4::quantize on each row alone (numerics contract, section 11).
#pragma once

#include <algorithm>

#include "cuda/attention/plain.cuh"
#include "cuda/block/choose_scale.cuh"

namespace nvfp4 {
namespace attention {

// Of a ring, the slot behind that of a position: the next token's, which has the oldest one.
__device__ __forceinline__ int slot_behind(int64_t position, int ring) {
  const int64_t slot = (position + 1) % ring;
  return static_cast<int>(slot < 0 ? slot + ring : slot);
}

// The row of a lane: of which head, and where it lies.
struct Row {
  int b, head, token, block, size, from;  // from: its token in x
  bool inside;

  __device__ Row(const AppendCodes& p, int which, int64_t thread, int lanes) : size(p.size[which]) {
    const int64_t row = thread / lanes, of_head = row / p.tokens;
    block = static_cast<int>(thread % lanes), token = static_cast<int>(row % p.tokens);
    head = static_cast<int>(of_head % p.kv_heads), b = static_cast<int>(of_head / p.kv_heads);
    inside = b < p.batch && block * kBlock < size;
    from = token;
    if (p.ring && inside) from = slot_behind(p.position[static_cast<int64_t>(b) * p.position_step], p.ring);
  }
};

template <typename T>
__device__ __forceinline__ void load_row_block(const DenseRows& x, const Row& row, bool is_wide, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = 0;
  if (!row.inside) return;
  const T* const from = static_cast<const T*>(x.data) + row.b * x.batch_step + row.head * x.head_step +
                        row.from * x.token_step + row.block * kBlock;
  if (is_wide) {
    const auto block = Elements<T, kBlock>::template load<Read::kAfterWait>(from);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = block.value(i);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = row.block * kBlock + i < row.size ? to_float(from[i]) : 0.0f;
  }
}

// A row times H / n, for each n elements: butterflies over distances 1, 2, 4, ..., from 16 on between lanes.
__device__ __forceinline__ void rotate_row(float (&v)[kBlock], int size, int block) {
  const int count = size & -size;
  const float unit = 1.0f / static_cast<float>(count);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = mul(v[i], unit);
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
    if (distance < count) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        if (i & distance) continue;
        const float low = v[i], high = v[i + distance];
        v[i] = add(low, high), v[i + distance] = sub(low, high);
      }
    }
  }
  for (int distance = 1; distance < count / kBlock; distance *= 2) {
    const bool is_high = block & distance;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
      v[i] = is_high ? sub(other, v[i]) : add(v[i], other);
    }
  }
}

// The exponent of the factor of a row: its largest finite magnitude moves into the binade of 2^top.
__device__ __forceinline__ int exponent_of(const float (&v)[kBlock], int lanes, int top) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t bits = float_bits(v[i]) & 0x7FFFFFFFu;
    if (bits < 0x7F800000u) most = max(most, bits);
  }
  for (int step = 1; step < lanes; step *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  int exponent = static_cast<int>(most >> 23) - 127;
  if (most < 0x00800000u) exponent = most ? 31 - __clz(most) - 149 : -1;  // frexp of 0 is 0
  return max(-126, min(exponent - top, 126));
}

// What blocks of threads share: how to choose scales. Made by all of them.
struct AppendShared {
  SearchTable table;
  __device__ __forceinline__ static TensorScale scale_of(const QuantizeSpec& spec) {  // whose per-tensor scale is 1
    return TensorScale::of(mul(kE2M1Max, spec.scale_ceiling), spec.scale_ceiling);
  }
  __device__ __forceinline__ void fill(const QuantizeSpec& spec) {
    if (spec.scale_search != ScaleSearch::kNone) table.fill(scale_of(spec));
    __syncthreads();
  }
};

// The work of thread `thread` of those that append keys (which: 0) or values (1). Whole warps call it.
template <typename T>
__device__ __forceinline__ void append_codes(const AppendCodes& p, int which, int64_t thread, AppendShared& shared) {
  const float largest = mul(kE2M1Max, p.spec.scale_ceiling);
  const TensorScale tensor = AppendShared::scale_of(p.spec);
  const bool searches = p.spec.scale_search != ScaleSearch::kNone;
  const int blocks = (p.size[which] + kBlock - 1) / kBlock;
  int lanes = 1;
  while (lanes < blocks) lanes *= 2;
  const Row row(p, which, thread, lanes);
  float v[kBlock];
  load_row_block<T>(p.x[which], row, p.is_wide[which], v);
  if (which == 0 && p.rotates) rotate_row(v, row.size, row.block);
  const int top = static_cast<int>(float_bits(largest) >> 23) - 127 - 1;
  const int exponent = exponent_of(v, lanes, top);
  const float power = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = mul(v[i], power);
  uint8_t s_bits;
  if (searches) {
    const float most = largest_of(v);
    s_bits = search_scale(v, most, tensor.block_scale(most, p.spec.scale_rounding), p.spec.scale_rounding, shared.table,
                          [](float sum) { return sum; });
  } else {
    s_bits = choose_scale(v, tensor, p.spec, false);
  }
  const int64_t at = row.inside ? p.starts[row.b] + row.token : -1;
  if (at < 0 || at >= p.capacity) return;
  const float enc = tensor.block_encode(e4m3_value(s_bits));
  uint32_t code[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    code[i / 8] |= round_e2m1(mul(v[i], enc), p.spec.round_mode, 0) << (4 * (i % 8));
  }
  const bool is_nan = s_bits == kE4M3Nan;
  const CodedRows& out = p.out[which];
  const int64_t to = (static_cast<int64_t>(row.b) * p.kv_heads + row.head) * p.capacity + at;
  reinterpret_cast<uint2*>(out.codes)[to * blocks + row.block] = make_uint2(is_nan ? 0 : code[0], is_nan ? 0 : code[1]);
  out.scales[to * blocks + row.block] = s_bits;
  if (row.block == 0) out.factors[to] = static_cast<uint8_t>(exponent + 127);
}

// Lanes of a row: a power of two.
inline int64_t lanes_of(int size) {
  int64_t lanes = 1;
  while (lanes * kBlock < size) lanes *= 2;
  return lanes;
}

// Threads that append keys, or values, whichever need more.
inline int64_t append_threads(const AppendCodes& p) {
  return static_cast<int64_t>(p.batch) * p.kv_heads * p.tokens * std::max(lanes_of(p.size[0]), lanes_of(p.size[1]));
}

}  // namespace attention
}  // namespace nvfp4
