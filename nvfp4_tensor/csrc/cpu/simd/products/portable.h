// What products need beyond simd/portable.h.
#pragma once

#include "cpu/simd/portable.h"
#include "numerics/e4m3.h"

namespace nvfp4::portable {
namespace {

constexpr int kMostVectors = 1;
constexpr int tile_rows(int) { return 2; }
constexpr int kFewX = 2;
constexpr int few_rows(int) { return 1; }
constexpr int kMostFewFloatRows = 16;

NVFP4_INLINE F multiply_add(F a, F b, F c) { return add(mul(a, b), c); }
inline float sum(F x) {
  float lanes[16];
  store(lanes, x);
  for (int half : {8, 4, 2, 1}) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}
// Lane i: the sum of the lanes of the register at p + i * step.
inline F sums_of_lanes(const float* p, int64_t step) {
  alignas(64) float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum(load(p + i * step));
  return load(sums);
}

// Lane i of register j and lane j of register i are swapped, for 16 registers.
inline void transpose(F* r) {
  float rows[16][16], columns[16][16];
  std::memcpy(rows, r, sizeof rows);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) columns[j][i] = rows[i][j];
  }
  std::memcpy(static_cast<void*>(r), columns, sizeof columns);
}

// Code v of each lane's eight.
template <int v>
F code_values(I codes) {
  return e2m1_values(bit_and(shift_right<4 * v>(codes), set(15)));
}
// Scales of eight blocks, four at each address, in two lanes each.
inline F chunk_scales(const uint8_t* first, const uint8_t* second) {
  return each_lane<F>([&](int lane) { return e4m3_value(lane < 8 ? first[lane / 2] : second[lane / 2 - 4]); });
}

}  // namespace
}  // namespace nvfp4::portable
