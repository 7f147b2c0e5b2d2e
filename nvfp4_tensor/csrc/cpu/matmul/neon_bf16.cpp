// Products of x in bfloat16 on NEON with its bfloat16 instructions (Neoverse V1, N2 and later, Apple M2 and later).
#include "cpu/matmul/products.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NVFP4_ISA neon_bf16
#include "cpu/simd/products/neon_bf16.h"
//
#include "cpu/host/arm_features.h"
#include "cpu/matmul/many.h"

namespace nvfp4 {
namespace neon_bf16 {
namespace {

template <int kRows>
void Bf16Math::tile(const float* a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step,
                    bool first) {
  static_assert(kMostVectors == 1 && kRows % 2 == 0);
  constexpr int kPairs = kRows / 2, kColumns = kLanes / 2;
  float32x4_t sums[kPairs][kColumns];  // (rows 2i, 2i + 1) x (columns 2j, 2j + 1)
  for (int i = 0; i < kPairs; ++i) {
    for (int j = 0; j < kColumns; ++j) sums[i][j] = vdupq_n_f32(0.0f);
  }
  // next: the second word's row of b, null for a row of zeros.
  const auto step = [&](const float* next) {
    const F low = load(b), high = next ? load(next) : set(0.0f);
    bfloat16x8_t rows[kPairs];
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const float *even = a + 2 * i * kDepthWords, *odd = even + kDepthWords;
      const float32x2_t none = vdup_n_f32(0.0f);
      rows[i] = pairs_of(next ? vcombine_f32(vld1_f32(even), vld1_f32(odd))
                              : vcombine_f32(vld1_lane_f32(even, none, 0), vld1_lane_f32(odd, none, 0)));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kColumns / 2; ++j) {
      const bfloat16x8_t left = pairs_of(vzip1q_f32(low.v[j], high.v[j]));
      const bfloat16x8_t right = pairs_of(vzip2q_f32(low.v[j], high.v[j]));
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        sums[i][2 * j] = vbfmmlaq_f32(sums[i][2 * j], rows[i], left);
        sums[i][2 * j + 1] = vbfmmlaq_f32(sums[i][2 * j + 1], rows[i], right);
      }
    }
  };
  int64_t d = 0;
  for (; d + 2 <= depth; d += 2, a += 2, b += 2 * b_step) step(b + b_step);
  if (d < depth) step(nullptr);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) {
    F even, odd;
    for (int j = 0; j < 4; ++j) {
      even.v[j] = vcombine_f32(vget_low_f32(sums[i][2 * j]), vget_low_f32(sums[i][2 * j + 1]));
      odd.v[j] = vcombine_f32(vget_high_f32(sums[i][2 * j]), vget_high_f32(sums[i][2 * j + 1]));
    }
    float* at = c + 2 * i * c_step;
    store(at, first ? even : add(load(at), even));
    store(at + c_step, first ? odd : add(load(at + c_step), odd));
  }
}

}  // namespace
}  // namespace neon_bf16

const ProductKernels* neon_bf16_products() {
  return arm_features().bf16 ? &neon_bf16::kProducts<neon_bf16::Bf16Math> : nullptr;
}
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* neon_bf16_products() { return nullptr; }
}  // namespace nvfp4
#endif
