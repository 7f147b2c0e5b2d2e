// The largest finite magnitude of a matrix or of its Hadamard transform, and the transform itself.
#pragma once

#include "cpu/quantize/group_io.h"

namespace nvfp4::NVFP4_ISA {

// The largest of the magnitudes below `limit` (finite ones), as bits.
template <typename U>
U finite_max(const U* x, int64_t count, U limit) {
  constexpr U mask = U(~U(0)) >> 1;
  U most = 0;
  for (int64_t i = 0; i < count; ++i) {  // compilers vectorize this form
    const U magnitude = x[i] & mask;
    const U finite = magnitude & U(-U(magnitude < limit));
    most = most > finite ? most : finite;
  }
  return most;
}

inline uint32_t finite_max_bits(const Bf16* x, int64_t count) {
  return uint32_t(finite_max<uint16_t>(&x->bits, count, 0x7F80)) << 16;
}
inline uint32_t finite_max_bits(const Fp16* x, int64_t count) {
  return float_bits(float_of(Fp16{finite_max<uint16_t>(&x->bits, count, 0x7C00)}));
}
inline uint32_t finite_max_bits(const float* x, int64_t count) {
  return finite_max<uint32_t>(reinterpret_cast<const uint32_t*>(x), count, kInfBits);
}

template <typename T>
uint32_t amax_plain(const Matrix& x, int64_t begin, int64_t end) {
  const T* data = static_cast<const T*>(x.data);
  const int64_t last = std::min(end * kGroupElements, x.rows * x.columns);
  uint32_t most = 0;
  for (int64_t at = begin * kGroupElements; at < last;) {
    const int64_t row = at / x.columns, column = at % x.columns;
    const int64_t count = x.row_stride == x.columns ? last - at : std::min(x.columns - column, last - at);
    most = std::max(most, finite_max_bits(data + row * x.row_stride + column, count));
    at += count;
  }
  return most;
}

template <typename T, typename Function>
void for_each_transformed(const Matrix& x, int sign, int64_t begin, int64_t end, Function f) {
  const HadamardSigns signs(sign);
  T gathered[kGroupElements];
  Bf16 transformed[kGroupElements];
  for (int64_t g = begin; g < end; ++g) {
    const Group group = Group::at(g, x.rows, x.blocks());
    hadamard_group(fetch(x, group, gathered), signs.even, signs.odd, transformed);
    f(group, transformed);
  }
}

template <typename T>
uint32_t amax_groups(const Matrix& x, int sign, int64_t begin, int64_t end) {
  if (sign < 0) return amax_plain<T>(x, begin, end);
  uint32_t most = 0;
  for_each_transformed<T>(x, sign, begin, end, [&](const Group& group, const Bf16* y) {
    most = std::max(most, finite_max_bits(y, group.count * kBlock));
  });
  return most;
}

template <typename T>
void hadamard_groups(const Matrix& x, int sign, uint16_t* out, int64_t begin, int64_t end) {
  for_each_transformed<T>(x, sign, begin, end, [&](const Group& group, const Bf16* y) {
    std::memcpy(out + (group.row * x.blocks() + group.block) * kBlock, y, sizeof(Bf16) * kBlock * group.count);
  });
}

}  // namespace nvfp4::NVFP4_ISA
