// What the ops of a cache in NVFP4 ask of their tensors, on any device.
#pragma once

#include <string>

#include "arguments.h"
#include "numerics/cache.h"

namespace nvfp4 {

// Codes of keys or values (batch, heads, capacity, bytes), their block scales and the factors of their rows.
struct CodedHeads {
  uint8_t *codes, *scales, *factors;
  int64_t batch, heads, capacity, blocks;

  CodedHeads(const Tensor& codes, const Tensor& scale, const Tensor& factor, int64_t size, const std::string& name,
             const Tensor& x, const char* x_name) {
    const auto check = [&](const Tensor& t, const char* what) {
      check_beside(t, (name + what).c_str(), x, x_name);
      NVFP4_CHECK(t.scalar_type() == ScalarType::Byte && t.is_contiguous(), name, what,
                  " must be contiguous bytes (uint8), not ", text_of(t));
    };
    check(codes, "_codes"), check(scale, "_scale"), check(factor, "_factor");
    blocks = ceil_div(size, kBlock);
    NVFP4_CHECK(codes.dim() == 4 && codes.size(3) == blocks * kBlock / 2, name, "_codes must be (batch, heads, ",
                "capacity, ", blocks * kBlock / 2, ") for heads of ", size, ", not ", text_of(codes));
    batch = codes.size(0), heads = codes.size(1), capacity = codes.size(2);
    NVFP4_CHECK(capacity % kTokenStep == 0, "the capacity of ", name, "_codes must be a multiple of ", kTokenStep,
                " tokens, not ", capacity);
    NVFP4_CHECK(scale.dim() == 4 && scale.size(0) == batch && scale.size(1) == heads && scale.size(2) == capacity &&
                    scale.size(3) == blocks,
                name, "_scale must be (", batch, ", ", heads, ", ", capacity, ", ", blocks, "), not ", text_of(scale));
    NVFP4_CHECK(factor.dim() == 3 && factor.size(0) == batch && factor.size(1) == heads && factor.size(2) == capacity,
                name, "_factor must be (", batch, ", ", heads, ", ", capacity, "), not ", text_of(factor));
    this->codes = static_cast<uint8_t*>(const_cast<void*>(codes.const_data_ptr()));
    scales = static_cast<uint8_t*>(const_cast<void*>(scale.const_data_ptr()));
    factors = static_cast<uint8_t*>(const_cast<void*>(factor.const_data_ptr()));
  }
};

// Lengths or positions, int64 (batch,).
inline Tensor counts_of(const Tensor& t, const char* name, int64_t batch, const Tensor& x, const char* x_name) {
  check_beside(t, name, x, x_name);
  NVFP4_CHECK(t.scalar_type() == ScalarType::Long && t.dim() == 1 && t.size(0) == batch, name, " must be int64 (",
              batch, "), one per sequence, not ", text_of(t));
  return in_order(t);
}

// Rows of dense heads (batch, heads, tokens, size), the elements of a row side by side.
inline Tensor dense_heads(const Tensor& t, const char* name, const Tensor& q, int64_t batch, int64_t heads,
                          int64_t size) {
  check_beside(t, name, q, "q");
  NVFP4_CHECK(t.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ", q.scalar_type(), ", not ",
              t.scalar_type());
  NVFP4_CHECK(t.dim() == 4 && t.size(0) == batch && t.size(1) == heads && t.size(3) == size, name, " must be (", batch,
              ", ", heads, ", tokens, ", size, "), not ", text_of(t));
  return t.stride(3) == 1 && begins_on(t, t.element_size()) ? t : aligned(t, t.element_size());
}

// The arguments of nvfp4::attend_codes, all but what lengths hold.
struct AttendArguments {
  Dtype dtype;
  int64_t key_size, value_size;
  Tensor q, lengths, first, front_keys, front_values, latest_keys, latest_values;
  bool has_first, has_front;
  CodedHeads keys, values;
  int64_t batch, heads, tokens, front, latest;
  float scale, softcap;
  int64_t window;
  bool is_rotated;

  int64_t kv_heads() const { return keys.heads; }

  AttendArguments(const Tensor& q_given, const Tensor& key_codes, const Tensor& key_scale, const Tensor& key_factor,
                  const Tensor& value_codes, const Tensor& value_scale, const Tensor& value_factor,
                  const Tensor& lengths_given, const std::optional<Tensor>& first_given,
                  const std::optional<Tensor>& front_keys_given, const std::optional<Tensor>& front_values_given,
                  const Tensor& latest_keys_given, const Tensor& latest_values_given, double scale_given,
                  double softcap_given, int64_t window_given, bool rotated)
      : dtype(checked_dtype(q_given, latest_values_given)),
        key_size(checked_size(q_given.size(3))),
        value_size(checked_size(latest_values_given.size(3))),
        q(aligned(q_given, q_given.element_size())),
        has_first(first_given.has_value()),
        has_front(front_keys_given.has_value()),
        keys(key_codes, key_scale, key_factor, key_size, "key", q_given, "q"),
        values(value_codes, value_scale, value_factor, value_size, "value", q_given, "q"),
        batch(q.size(0)),
        heads(q.size(1)),
        tokens(q.size(2)),
        scale(float(scale_given)),
        softcap(float(softcap_given)),
        window(window_given),
        is_rotated(rotated) {
    NVFP4_CHECK(keys.batch == batch && keys.heads > 0 && heads % keys.heads == 0 && values.batch == batch &&
                    values.heads == keys.heads && values.capacity == keys.capacity,
                "q ", text_of(q), " does not fit keys ", text_of(key_codes), " and values ", text_of(value_codes),
                ": the batch must be the same, and query heads a multiple of the others");
    NVFP4_CHECK(has_front == front_values_given.has_value(), "give front_keys and front_values, or neither");
    NVFP4_CHECK(window >= 0 && softcap >= 0, "window and softcap must not be negative, not ", window, " and ",
                softcap_given);
    const auto dense = [&](const Tensor& t, const char* name, int64_t size) {
      return dense_heads(t, name, q_given, batch, keys.heads, size);
    };
    latest_keys = dense(latest_keys_given, "latest_keys", key_size);
    latest_values = dense(latest_values_given, "latest_values", value_size);
    front_keys = has_front ? dense(*front_keys_given, "front_keys", key_size) : latest_keys;
    front_values = has_front ? dense(*front_values_given, "front_values", value_size) : latest_values;
    NVFP4_CHECK(latest_keys.size(2) == latest_values.size(2) && front_keys.size(2) == front_values.size(2),
                "there must be as many keys as values at the front, ", front_keys.size(2), " and ",
                front_values.size(2), ", and at the end, ", latest_keys.size(2), " and ", latest_values.size(2));
    front = has_front ? front_keys.size(2) : 0, latest = latest_keys.size(2);
    lengths = counts_of(lengths_given, "lengths", batch, q_given, "q");
    first = has_first ? counts_of(*first_given, "first", batch, q_given, "q") : lengths;
  }

 private:
  static Dtype checked_dtype(const Tensor& q, const Tensor& latest_values) {
    NVFP4_CHECK(q.dim() == 4, "q must be (batch, heads, tokens, head size), not ", text_of(q));
    NVFP4_CHECK(latest_values.dim() == 4, "latest_values must be (batch, heads, tokens, size), not ",
                text_of(latest_values));
    return dtype_of(q.scalar_type(), "q");
  }
  static int64_t checked_size(int64_t size) {
    NVFP4_CHECK(size > 0 && size <= kMostHeadSize, "heads have 1 to ", kMostHeadSize, " elements, not ", size);
    return size;
  }
};

// How a cache quantizes.
inline QuantizeSpec cache_spec(int64_t bits) {
  const QuantizeSpec spec = spec_of(bits);
  NVFP4_CHECK(!spec.takes_random_bits() && !spec.is_eden() && spec.block_rows == 1 && spec.hadamard_sign < 0,
              "a cache needs a spec that rounds to nearest, in 1x16 blocks, without a transform");
  return spec;
}

// The arguments of nvfp4::append_codes, all but what starts hold.
struct AppendArguments {
  QuantizeSpec spec;
  Tensor keys, values, starts;
  CodedHeads key_out, value_out;
  int64_t tokens;
  bool rotates;

  AppendArguments(const Tensor& keys_given, const Tensor& values_given, int64_t spec_bits, const Tensor& key_codes,
                  const Tensor& key_scale, const Tensor& key_factor, const Tensor& value_codes,
                  const Tensor& value_scale, const Tensor& value_factor, const Tensor& starts_given, bool rotate)
      : spec(checked_spec(spec_bits, keys_given, values_given)),
        key_out(key_codes, key_scale, key_factor, keys_given.size(3), "key", keys_given, "keys"),
        value_out(value_codes, value_scale, value_factor, values_given.size(3), "value", keys_given, "keys"),
        tokens(keys_given.size(2)),
        rotates(rotate) {
    keys = dense_heads(keys_given, "keys", keys_given, key_out.batch, key_out.heads, keys_given.size(3));
    values = dense_heads(values_given, "values", keys_given, key_out.batch, key_out.heads, values_given.size(3));
    NVFP4_CHECK(values.size(2) == tokens && value_out.batch == key_out.batch && value_out.heads == key_out.heads &&
                    value_out.capacity == key_out.capacity,
                "keys ", text_of(keys), " and values ", text_of(values), " must be of the same heads and tokens");
    starts = counts_of(starts_given, "starts", key_out.batch, keys_given, "keys");
  }

 private:
  static QuantizeSpec checked_spec(int64_t bits, const Tensor& keys, const Tensor& values) {
    const QuantizeSpec spec = cache_spec(bits);
    NVFP4_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.size(3) > 0 && values.size(3) > 0,
                "keys and values must be (batch, heads, tokens, head size), not ", text_of(keys), " and ",
                text_of(values));
    return spec;
  }
};

}  // namespace nvfp4
