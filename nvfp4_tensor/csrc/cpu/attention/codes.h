// What the ops of a cache in NVFP4 ask of its tensors.
#pragma once

#include <string>

#include "arguments.h"
#include "cpu/attention/kernels.h"

namespace nvfp4 {

// Codes of keys or values (batch, heads, capacity, bytes), their block scales and the factors of their rows.
struct CodedHeads {
  uint8_t *codes, *scales, *factors;
  int64_t batch, heads, capacity, blocks;

  CodedHeads(const Tensor& codes, const Tensor& scale, const Tensor& factor, int64_t size, const std::string& name,
             const Tensor& x, const char* x_name) {
    const auto check = [&](const Tensor& t, const char* what) {
      check_beside(t, (name + what).c_str(), x, x_name);
      STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte && t.is_contiguous(), name, what,
                      " must be contiguous bytes (uint8), not ", text_of(t));
    };
    check(codes, "_codes"), check(scale, "_scale"), check(factor, "_factor");
    blocks = ceil_div(size, kBlock);
    STD_TORCH_CHECK(codes.dim() == 4 && codes.size(3) == blocks * kBlock / 2, name, "_codes must be (batch, heads, ",
                    "capacity, ", blocks * kBlock / 2, ") for heads of ", size, ", not ", text_of(codes));
    batch = codes.size(0), heads = codes.size(1), capacity = codes.size(2);
    STD_TORCH_CHECK(capacity % kTokenStep == 0, "the capacity of ", name, "_codes must be a multiple of ", kTokenStep,
                    " tokens, not ", capacity);
    STD_TORCH_CHECK(scale.dim() == 4 && scale.size(0) == batch && scale.size(1) == heads && scale.size(2) == capacity &&
                        scale.size(3) == blocks,
                    name, "_scale must be (", batch, ", ", heads, ", ", capacity, ", ", blocks, "), not ",
                    text_of(scale));
    STD_TORCH_CHECK(
        factor.dim() == 3 && factor.size(0) == batch && factor.size(1) == heads && factor.size(2) == capacity, name,
        "_factor must be (", batch, ", ", heads, ", ", capacity, "), not ", text_of(factor));
    this->codes = static_cast<uint8_t*>(const_cast<void*>(codes.const_data_ptr()));
    scales = static_cast<uint8_t*>(const_cast<void*>(scale.const_data_ptr()));
    factors = static_cast<uint8_t*>(const_cast<void*>(factor.const_data_ptr()));
  }

  // The first token of head `row` of all (batch, heads).
  Stretch stretch(int64_t row) const {
    const int64_t token = row * capacity;
    Stretch s;
    s.codes = codes + token * blocks * 8, s.scales = scales + token * blocks, s.factors = factors + token;
    return s;
  }
};

// Lengths or positions, int64 (batch,).
inline Tensor counts_of(const Tensor& t, const char* name, int64_t batch) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && t.dim() == 1 && t.size(0) == batch && t.is_cpu(), name,
                  " must be int64 (", batch, "), one per sequence, not ", text_of(t));
  return in_order(t);
}

// Rows of dense heads (batch, heads, tokens, size), the elements of a row side by side.
inline Tensor dense_heads(const Tensor& t, const char* name, const Tensor& q, int64_t batch, int64_t heads,
                          int64_t size) {
  check_beside(t, name, q, "q");
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ", q.scalar_type(), ", not ",
                  t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch && t.size(1) == heads && t.size(3) == size, name, " must be (",
                  batch, ", ", heads, ", tokens, ", size, "), not ", text_of(t));
  return t.stride(3) == 1 && begins_on(t, t.element_size()) ? t : aligned(t, t.element_size());
}

}  // namespace nvfp4
