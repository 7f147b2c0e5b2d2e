// nvfp4.attend_codes and nvfp4.append_codes on CUDA: arguments checked, kernels launched.
#include "cuda/attention/arguments.h"
#include "cuda/host/scratch.h"

namespace nvfp4 {
namespace attention {
namespace {

// A copy where rows do not.
Tensor on_sixteen_bytes(const Tensor& t) {
  return rows_on_16_bytes(t) ? t : torch::stable::clone(torch::stable::contiguous(t));
}

Tensor attend_codes(const Tensor& q, const Tensor& key_codes, const Tensor& key_scale, const Tensor& key_factor,
                    const Tensor& value_codes, const Tensor& value_scale, const Tensor& value_factor,
                    const Tensor& lengths, std::optional<Tensor> first, std::optional<Tensor> front_keys,
                    std::optional<Tensor> front_values, const Tensor& latest_keys, const Tensor& latest_values,
                    double scale, double softcap, int64_t window, bool rotated, bool settled) {
  const OnDeviceOf device(q, "q");
  const AttendArguments a(q, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor, lengths, first,
                          front_keys, front_values, latest_keys, latest_values, scale, softcap, window, rotated);
  check_begin(a.keys, "key_codes"), check_begin(a.values, "value_codes");
  Tensor out = empty({a.batch, a.heads, a.tokens, a.value_size}, a.q.scalar_type(), q);
  if (out.numel() == 0) return out;
  AttendCodes p = {};
  const Tensor queries = aligned(a.q, 16);
  p.dtype = a.dtype, p.q = queries.const_data_ptr(), p.out = out.mutable_data_ptr();
  p.keys = coded_rows(a.keys), p.values = coded_rows(a.values);
  const Tensor front_k = on_sixteen_bytes(a.front_keys), front_v = on_sixteen_bytes(a.front_values);
  const Tensor latest_k = on_sixteen_bytes(a.latest_keys), latest_v = on_sixteen_bytes(a.latest_values);
  p.front_keys = dense_rows(front_k), p.front_values = dense_rows(front_v);
  p.latest_keys = dense_rows(latest_k), p.latest_values = dense_rows(latest_v);
  p.lengths = static_cast<const int64_t*>(a.lengths.const_data_ptr());
  if (a.has_first) p.first = static_cast<const int64_t*>(a.first.const_data_ptr());
  p.batch = narrow(a.batch, "sequences"), p.kv_heads = narrow(a.kv_heads(), "heads");
  p.group = narrow(a.heads / a.kv_heads(), "heads"), p.tokens = narrow(a.tokens, "new tokens");
  narrow(a.heads * a.tokens, "queries");
  p.key_size = static_cast<int>(a.key_size), p.value_size = static_cast<int>(a.value_size);
  p.capacity = narrow(a.keys.capacity, "tokens"), p.front = narrow(a.front, "tokens");
  p.latest = narrow(a.latest, "tokens");
  p.window = a.window, p.scale = a.scale, p.softcap = a.softcap, p.is_rotated = a.is_rotated, p.is_settled = settled;
  RawScratch scratch;
  p.partial = nullptr;
  const int64_t floats = plan_attend_codes(p);
  NVFP4_CHECK(p.batch <= 65535 && static_cast<int64_t>(p.kv_heads) * p.passes <= 65535,
              "more sequences or queries than a grid has places");
  p.partial = static_cast<float*>(scratch(floats * 4));
  launch_attend_codes(p, current_stream(q));
  check_launched("nvfp4::attend_codes");
  return out;
}

void append_codes(const Tensor& keys, const Tensor& values, int64_t spec, const Tensor& key_codes,
                  const Tensor& key_scale, const Tensor& key_factor, const Tensor& value_codes,
                  const Tensor& value_scale, const Tensor& value_factor, const Tensor& starts, bool rotate) {
  const OnDeviceOf device(keys, "keys");
  const AppendArguments a(keys, values, spec, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor,
                          starts, rotate);
  NVFP4_CHECK(a.tokens <= a.key_out.capacity, a.tokens, " tokens do not fit into a capacity of ", a.key_out.capacity);
  const AppendCodes p = append_of(a);
  if (a.tokens == 0 || a.keys.numel() + a.values.numel() == 0) return;
  launch_append_codes(p, current_stream(keys));
  check_launched("nvfp4::append_codes");
}

}  // namespace
}  // namespace attention

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("attend_codes", TORCH_BOX(&attention::attend_codes));
  m.impl("append_codes", TORCH_BOX(&attention::append_codes));
}

}  // namespace nvfp4
