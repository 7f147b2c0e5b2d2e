// From the arguments of the ops of a cache in NVFP4 to what its CUDA kernels take.
#pragma once

#include "attention.h"
#include "cuda/attention/attend.h"
#include "cuda/host/machine.h"
#include "cuda/host/tensors.h"

namespace nvfp4 {
namespace attention {

inline DenseRows dense_rows(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }
inline CodedRows coded_rows(const CodedHeads& heads) { return {heads.codes, heads.scales, heads.factors}; }

// Codes are copied 16 bytes at a time, and a view of a tensor may begin anywhere.
inline void check_begin(const CodedHeads& heads, const char* name) {
  for (const uint8_t* const each : {heads.codes, heads.scales, heads.factors}) {
    NVFP4_CHECK(on_16_bytes(each), name,
                ", its scales and its factors must begin on 16 bytes: clone() what is a part of a tensor");
  }
}

inline int narrow(int64_t size, const char* what) {
  NVFP4_CHECK(size < (int64_t{1} << 30), what, " are too many: ", size);
  return static_cast<int>(size);
}

// Whether every row of dense heads begins on 16 bytes.
inline bool rows_on_16_bytes(const Tensor& t) {
  const int64_t step = 16 / t.element_size();
  return begins_on(t, 16) && t.stride(0) % step == 0 && t.stride(1) % step == 0 && t.stride(2) % step == 0;
}

// What is appended to codes.
inline AppendCodes append_of(const AppendArguments& a) {
  check_begin(a.key_out, "key_codes"), check_begin(a.value_out, "value_codes");
  NVFP4_CHECK(a.keys.size(3) <= kMostHeadSize && a.values.size(3) <= kMostHeadSize, "heads have at most ",
              kMostHeadSize, " elements, not ", a.keys.size(3), " and ", a.values.size(3));
  AppendCodes p = {};
  p.dtype = dtype_of(a.keys.scalar_type(), "keys"), p.spec = a.spec;
  p.x[0] = dense_rows(a.keys), p.x[1] = dense_rows(a.values);
  p.out[0] = coded_rows(a.key_out), p.out[1] = coded_rows(a.value_out);
  const Tensor* const given[2] = {&a.keys, &a.values};
  for (int i = 0; i < 2; ++i) {
    const Tensor& t = *given[i];
    p.size[i] = static_cast<int>(t.size(3)), p.is_wide[i] = t.size(3) % kBlock == 0 && rows_on_16_bytes(t);
  }
  p.starts = static_cast<const int64_t*>(a.starts.const_data_ptr());
  p.batch = narrow(a.key_out.batch, "sequences"), p.kv_heads = narrow(a.key_out.heads, "heads");
  p.tokens = narrow(a.tokens, "tokens"), p.capacity = narrow(a.key_out.capacity, "tokens");
  p.rotates = a.rotates;
  return p;
}

}  // namespace attention
}  // namespace nvfp4
