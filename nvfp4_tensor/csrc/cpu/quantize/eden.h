// EDEN (numerics contract, section 9) on sixteen blocks at a time, two rotations of eight. A lane is a block and a
// register an element of all blocks: the first four butterflies then add registers and the last three swap lanes, sums
// over a block run in order, and sums over a rotation swap lanes again.
#pragma once

#include "cpu/quantize/group_io.h"
#include "cpu/simd/transpose.h"
#include "numerics/eden.h"

namespace nvfp4::NVFP4_ISA {

struct Rotations {
  F y[kBlock];  // element e of each block
};

// --- the rotation ----------------------------------------------------------------------------------------------------

template <int distance>
inline F butterfly(F v, F signs) {
  return add_exact_product(v, signs, swap_lanes<distance>(v));
}

// 1 in lanes without `bit`, -1 in the others.
template <int bit>
inline F butterfly_signs() {
  const I lane = load(kLaneNumbers);
  return select(equal(bit_and(lane, set(bit)), set(bit)), set(-1.0f), set(1.0f));
}

NVFP4_INLINE void butterflies(F (&y)[kBlock]) {
#pragma GCC unroll 4
  for (int distance = 1; distance < kBlock; distance *= 2) {
#pragma GCC unroll 16
    for (int e = 0; e < kBlock; ++e) {
      if (e & distance) continue;
      const F low = y[e], high = y[e + distance];
      y[e] = add(low, high);
      y[e + distance] = sub(low, high);
    }
  }
  const F signs1 = butterfly_signs<1>(), signs2 = butterfly_signs<2>(), signs4 = butterfly_signs<4>();
#pragma GCC unroll 16
  for (int e = 0; e < kBlock; ++e) {
    y[e] = butterfly<4>(butterfly<2>(butterfly<1>(y[e], signs1), signs2), signs4);
  }
}

// The factors of a group's two rotations, as Plan has them.
struct GroupSigns {
  const float *low, *high;

  GroupSigns(const float* signs, const Group& group, int64_t blocks) {
    const int64_t next = group.block + kRotationBlocks;
    low = signs + group.block * kBlock;
    high = group.count < kGroupBlocks ? low : signs + (next == blocks ? 0 : next) * kBlock;
  }
  F operator[](int e) const { return load_halves(low + kRotationBlocks * e, high + kRotationBlocks * e); }
};

// The group's 256 elements as `fetch` gives them, of rows that are filled up to `blocks` with zeros.
template <typename T>
const T* fetch_filled(const Matrix& x, const Group& group, int64_t blocks, T* buffer) {
  if (x.columns == blocks * kBlock) return fetch(x, group, buffer);
  const T* data = static_cast<const T*>(x.data);
  if (group.count == kGroupBlocks && (group.block + kGroupBlocks) * kBlock <= x.columns) {
    return data + group.row * x.row_stride + group.block * kBlock;
  }
  std::memset(static_cast<void*>(buffer), 0, sizeof(T) * kGroupElements);
  group.for_each(blocks, [&](int lane, int64_t row, int64_t block) {
    const int64_t count = std::min<int64_t>(kBlock, x.columns - block * kBlock);
    if (count > 0) std::memcpy(buffer + lane * kBlock, data + row * x.row_stride + block * kBlock, sizeof(T) * count);
  });
  return buffer;
}

// x: 256 elements in order.
template <typename T>
NVFP4_INLINE void rotate(const T* x, const GroupSigns& signs, bool inverse, Rotations& out) {
  alignas(64) T elements[kGroupElements];
  transpose(x, kBlock, kGroupBlocks, kBlock, elements, kGroupBlocks);
  F y[kBlock];
#pragma GCC unroll 16
  for (int e = 0; e < kBlock; ++e) {
    y[e] = load_floats(elements + kGroupBlocks * e);
    if (!inverse) y[e] = mul(y[e], signs[e]);
  }
  butterflies(y);
  for (int e = 0; e < kBlock; ++e) out.y[e] = inverse ? mul(y[e], signs[e]) : y[e];
}

// Bits of the largest magnitude of each block, and in `broken` the lanes of rotations that are not finite.
NVFP4_INLINE I block_magnitudes(const Rotations& r, Mask& broken) {
  I most = bits(abs(r.y[0]));
  for (int e = 1; e < kBlock; ++e) most = max(most, bits(abs(r.y[e])));
  I widest = max(most, bits(swap_lanes<4>(as_float(most))));
  widest = max(widest, bits(swap_lanes<2>(as_float(widest))));
  widest = max(widest, bits(swap_lanes<1>(as_float(widest))));
  broken = greater(widest, set(kInfBits - 1));
  return most;
}

// Per row, the last rotation padded.
inline int64_t filled_blocks(int64_t columns) { return ceil_div(columns, kRotation) * kRotationBlocks; }

template <typename T, typename Function>
void for_each_rotated(const Matrix& x, const float* signs, bool inverse, int64_t begin, int64_t end, Function f) {
  const int64_t blocks = filled_blocks(x.columns);
  alignas(64) T gathered[kGroupElements];
  Rotations rotated;
  for (int64_t g = begin; g < end; ++g) {
    const Group group = Group::at(g, x.rows, blocks);
    rotate(fetch_filled(x, group, blocks, gathered), GroupSigns(signs, group, blocks), inverse, rotated);
    f(group, blocks, rotated);
  }
}

template <typename T>
uint32_t amax_rotated(const Matrix& x, const float* signs, int64_t begin, int64_t end) {
  I most = set(0);
  for_each_rotated<T>(x, signs, false, begin, end, [&](const Group&, int64_t, const Rotations& r) {
    Mask broken;
    const I magnitudes = block_magnitudes(r, broken);  // lanes that hold no block are zeros
    most = max(most, select(broken, set(0), magnitudes));
  });
  alignas(64) int32_t of_lanes[16];
  store(of_lanes, most);
  return uint32_t(*std::max_element(of_lanes, of_lanes + 16));
}

// To rows of a multiple of 128 columns.
template <typename T>
void rotate_groups(const Matrix& x, const float* signs, bool inverse, float* out, int64_t begin, int64_t end) {
  alignas(64) float elements[kGroupElements], buffer[kGroupElements];
  for_each_rotated<T>(x, signs, inverse, begin, end, [&](const Group& group, int64_t blocks, const Rotations& r) {
    for (int e = 0; e < kBlock; ++e) store(elements + kGroupBlocks * e, r.y[e]);
    float* values = destination(out, group, blocks * kBlock, buffer);
    transpose(elements, kGroupBlocks, kBlock, kGroupBlocks, values, kBlock);
    scatter(values, out, group, blocks * kBlock, blocks, buffer);
  });
}

// --- codes and scales ------------------------------------------------------------------------------------------------

// s1, enc(s1) and the lanes to be NaN.
struct NearestScales {
  F s1, encode;
  uint32_t nan_lanes;

  NVFP4_INLINE NearestScales(const Rotations& r, const TensorScale& tensor) {
    Mask broken;
    const F block_amax = as_float(block_magnitudes(r, broken));
    const F onto_grid = set(nvfp4::mul(tensor.encode, kOntoGrid));
    s1 = e4m3_values(to_e4m3(mul(block_amax, onto_grid), block_amax, ScaleRounding::kNearest));
    encode = block_encode(s1, tensor);
    nan_lanes = tensor.encode != tensor.encode ? 0xFFFF : lanes(broken);
  }
  NearestScales() = default;
};

// The sum over a rotation of what its eight lanes hold, in halves, in each of them.
inline F rotation_sum(F v) {
  v = add(v, swap_lanes<4>(v));
  v = add(v, swap_lanes<2>(v));
  return add(v, swap_lanes<1>(v));
}

// Codes to nearest, 128 bytes, and A / B of each lane's rotation.
NVFP4_INLINE F encode_nearest(const Rotations& r, const NearestScales& scales, const TensorScale& tensor,
                              uint8_t* codes) {
  const F s_enc = set(tensor.encode);
  F a = set(0.0f), b = set(0.0f);
  I words[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    I bytes[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F u[2];
      I code[2];
      for (int odd = 0; odd < 2; ++odd) {
        const F y = r.y[8 * half + 2 * j + odd], v = abs(mul(y, s_enc));
        u[odd] = mul(y, scales.encode);
        code[odd] = round_to_code<Rounding::kEven>(u[odd], set(0));
        a = fma(v, v, a);
        b = fma(v, mul(nearest_magnitude(u[odd]), scales.s1), b);
      }
      bytes[j] = pack_codes(code[0], code[1], u[0], u[1]);
    }
    words[half] = bit_or(bit_or(bytes[0], shift_left<8>(bytes[1])),
                         bit_or(shift_left<16>(bytes[2]), shift_left<24>(bytes[3])));
  }
  alignas(64) float in_order[2 * kGroupBlocks];
  store_pairs(in_order, as_float(words[0]), as_float(words[1]));
  std::memcpy(codes, in_order, sizeof in_order);
  return div(rotation_sum(a), rotation_sum(b));
}

// The bytes of 0 <= t <= 448, rounded stochastically: round_scale of numerics/eden.h.
inline I round_scales(F t, I r16) {
  const I normal = sub(shift_right<4>(bits(t)), set(120 << 19));
  // Float addition rounds to whole steps around 2^23; where that was up, one less is the floor.
  const F steps = mul(min(t, set(1.0f / 64.0f)), set(33554432.0f)), magic = set(8388608.0f);
  const F shifted = add(steps, magic);
  const I count = sub(bits(shifted), bits(magic));
  const I small = select(less(steps, sub(shifted, magic)), sub(count, set(1)), count);
  return shift_right<16>(add(select(less(t, set(1.0f / 64.0f)), small, normal), r16));
}

inline I corrected_scales(const NearestScales& scales, F correction, I r16) {
  const Mask finite = greater(set(kInfBits), bits(abs(correction)));
  const F t = min(select(finite, mul(scales.s1, correction), scales.s1), set(kE4M3Max));
  return round_scales(t, r16);
}

// Groups whose scales are made side by side, as in quantize.h: as many as one Philox has draws for.
constexpr int kRotatedBatch = 8;

// The draws of the scales of up to eight groups, of which each has two rotations.
class ScaleDraws {
 public:
  ScaleDraws(const Plan& plan, const Group* groups, int count, int64_t blocks) {
    alignas(64) int32_t low[16] = {}, high[16] = {};
    for (int i = 0; i < count; ++i) {
      const Group& group = groups[i];
      const bool wraps = group.block + kRotationBlocks == blocks;
      const uint64_t first = plan.first_block + group.row * plan.row_blocks + group.block / kRotationBlocks;
      const uint64_t second = wraps ? plan.first_block + (group.row + 1) * plan.row_blocks : first + 1;
      low[2 * i] = int32_t(uint32_t(first));
      high[2 * i] = int32_t(uint32_t(first >> 32));
      low[2 * i + 1] = int32_t(uint32_t(second));
      high[2 * i + 1] = int32_t(uint32_t(second >> 32));
    }
    const PhiloxWords drawn = philox(load(low), load(high), plan.key);
    for (int k = 0; k < 4; ++k) store(words_[k], drawn.word[k]);
  }

  // 16 bits of each block of group i.
  I of_group(int i) const {
    Bf16 halves[kGroupBlocks];  // two to a word
    for (int k = 0; k < 4; ++k) {
      std::memcpy(halves + 2 * k, &words_[k][2 * i], 4);
      std::memcpy(halves + kRotationBlocks + 2 * k, &words_[k][2 * i + 1], 4);
    }
    return shift_right<16>(bits(load_floats(halves)));
  }

 private:
  alignas(64) int32_t words_[4][16];
};

template <typename T>
struct RotatedBatch {
  Group groups[kRotatedBatch];  // the blocks that they are stored as
  const T* x[kRotatedBatch];
  int count = 0;
  alignas(64) T gathered[kRotatedBatch][kGroupElements];
  Rotations rotated[kRotatedBatch];
  NearestScales scales[kRotatedBatch];

  T* buffer() { return gathered[count]; }

  // Quantizes the batch if that is full (or in any case), and empties it.
  void add(const Group& group, const T* elements, const Plan& plan, const Quantized& out, int64_t blocks) {
    groups[count] = group;
    x[count++] = elements;
    if (count == kRotatedBatch) finish(plan, out, blocks);
  }

  void finish(const Plan& plan, const Quantized& out, int64_t blocks) {
    for (int i = 0; i < count; ++i) {
      rotate(x[i], GroupSigns(plan.signs.data(), groups[i], blocks), false, rotated[i]);
    }
    for (int i = 0; i < count; ++i) scales[i] = NearestScales(rotated[i], plan.tensor);
    const ScaleDraws draws(plan, groups, count, blocks);
    for (int i = 0; i < count; ++i) store_group(i, draws.of_group(i), plan, out, blocks);
    count = 0;
  }

 private:
  void store_group(int i, I r16, const Plan& plan, const Quantized& out, int64_t blocks) const {
    const Group& group = groups[i];
    CodeTarget target(out.qdata + (group.row * blocks + group.block) * 8, group.count);
    const F correction = encode_nearest(rotated[i], scales[i], plan.tensor, target.data());
    alignas(16) uint8_t bytes[kGroupBlocks];
    store_bytes(bytes, corrected_scales(scales[i], correction, r16));
    if (__builtin_expect(scales[i].nan_lanes != 0, 0)) {
      for (int lane = 0; lane < kGroupBlocks; ++lane) {
        if (!(scales[i].nan_lanes >> lane & 1)) continue;
        std::memset(target.data() + lane * 8, 0, 8);
        bytes[lane] = kE4M3Nan;
      }
    }
    target.flush();
    store_scales(out.scale, out.column_tiles, group, blocks, load_bytes(bytes));
  }
};

// Groups [begin, end) of x, filled up to whole rotations.
template <typename T>
void quantize_rotated(const Matrix& x, const Plan& plan, const Quantized& out, int64_t begin, int64_t end) {
  const int64_t blocks = filled_blocks(x.columns);
  RotatedBatch<T> batch;
  for (int64_t g = begin; g < end; ++g) {
    const Group group = Group::at(g, x.rows, blocks);
    batch.add(group, fetch_filled(x, group, blocks, batch.buffer()), plan, out, blocks);
  }
  batch.finish(plan, out, blocks);
}

}  // namespace nvfp4::NVFP4_ISA
