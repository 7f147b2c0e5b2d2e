// torch.ops.nvfp4.rms_norm, attend_one, place_one and gated on CUDA: arguments checked, kernels launched.
#include <optional>
#include <tuple>

#include "cuda/attention/arguments.h"
#include "cuda/generation/ops.h"
#include "cuda/generation/step.h"
#include "cuda/host/scratch.h"
#include "cuda/host/tensors.h"

namespace nvfp4 {
namespace step {
namespace {

Dtype half_dtype_of(const Tensor& x, const char* op, const char* name) {
  const Dtype dtype = dtype_of(x.scalar_type(), name);
  NVFP4_CHECK(dtype != Dtype::kFloat, op, ": ", name, " must be bfloat16 or float16, not ", text_of(x));
  return dtype;
}

// Of x's dtype or float32, as wide says.
Tensor vector_of(const Tensor& t, const char* op, const char* name, const Tensor& x, int64_t count, bool& wide) {
  check_beside(t, name, x);
  wide = t.scalar_type() == ScalarType::Float;
  NVFP4_CHECK((wide || t.scalar_type() == x.scalar_type()) && t.numel() == count, op, ": ", name, " must be ", count,
              " elements of x's dtype or float32, not ", text_of(t));
  return in_order(t);
}

void check_same(const Tensor& t, const char* op, const char* name, const Tensor& x) {
  check_beside(t, name, x);
  bool same = t.scalar_type() == x.scalar_type() && t.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = t.size(i) == x.size(i);
  NVFP4_CHECK(same, op, ": ", name, " must be as x, ", text_of(x), ", not ", text_of(t));
}

std::vector<int64_t> shape_of(const Tensor& x) { return with_last(x, x.size(x.dim() - 1)); }

}  // namespace

void check_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, const char* op) {
  half_dtype_of(x, op, "x");
  bool wide = false;
  if (residual) check_same(*residual, op, "residual", x);
  vector_of(weight, op, "norm", x, x.size(x.dim() - 1), wide);
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_given, std::optional<Tensor> residual, std::optional<Tensor> weight,
                                    double eps, double offset, bool round_before_weight, double multiplier,
                                    std::optional<Tensor> first_weight) {
  constexpr const char* kOp = "nvfp4::rms_norm";
  const OnDeviceOf device(x_given);
  NormRows p = {};
  p.dtype = half_dtype_of(x_given, kOp, "x");
  NVFP4_CHECK(x_given.dim() >= 1 && x_given.size(x_given.dim() - 1) <= kMostNormColumns, kOp,
              ": x must have rows of at most ", kMostNormColumns, " elements, not ", text_of(x_given));
  const Tensor x = in_order(x_given);
  p.columns = static_cast<int>(x.size(x.dim() - 1)), p.rows = leading_rows(x);
  NVFP4_CHECK(p.rows < INT32_MAX, kOp, ": x has more than 2^31 - 1 rows: split it");
  p.x = x.const_data_ptr();
  Tensor added, w, first;  // live as long as p
  if (residual)
    check_same(*residual, kOp, "residual", x_given), added = in_order(*residual), p.residual = added.const_data_ptr();
  if (weight) w = vector_of(*weight, kOp, "weight", x, p.columns, p.wide_weight), p.weight = w.const_data_ptr();
  if (first_weight) {
    first = vector_of(*first_weight, kOp, "first_weight", x, p.columns, p.wide_first);
    p.first_weight = first.const_data_ptr();
  }
  p.norm = {static_cast<float>(eps), static_cast<float>(offset), round_before_weight};
  p.multiplier = static_cast<float>(multiplier);
  const bool changed = residual || first_weight || multiplier != 1.0;
  const std::vector<int64_t> none = {0};
  Tensor y = empty(weight ? shape_of(x) : none, x.scalar_type(), x);
  Tensor sum = empty(changed ? shape_of(x) : none, x.scalar_type(), x);
  if (weight) p.y = y.mutable_data_ptr();
  if (changed) p.sum = sum.mutable_data_ptr();
  if (x.numel() > 0 && (weight || changed)) {
    launch_rms_norm(p, current_stream(x));
    check_launched(kOp);
  }
  return {y, sum};
}

Tensor gated(const Tensor& given, int64_t activation, double limit, double alpha, bool interleaved) {
  constexpr const char* kOp = "nvfp4::gated";
  const OnDeviceOf device(given, "gate_up");
  Gated p = {};
  p.dtype = half_dtype_of(given, kOp, "gate_up");
  const int64_t kinds = static_cast<int64_t>(Activation::kCount);
  NVFP4_CHECK(activation >= 0 && activation < kinds, kOp, ": activation must be from 0 to ", kinds - 1, ", not ",
              activation);
  NVFP4_CHECK(given.dim() >= 1 && given.size(given.dim() - 1) % 2 == 0, kOp,
              ": gate_up must have an even number of columns, not ", text_of(given));
  const Tensor gate_up = in_order(given);
  const int64_t columns = gate_up.size(gate_up.dim() - 1) / 2;
  p.rows = leading_rows(gate_up), p.columns = static_cast<int>(columns);
  NVFP4_CHECK(p.rows < INT32_MAX && columns < (1 << 23), kOp, ": gate_up is too large: split it");
  p.activation = static_cast<Activation>(activation);
  p.limit = static_cast<float>(limit), p.alpha = static_cast<float>(alpha), p.interleaved = interleaved;
  Tensor out = empty(with_last(gate_up, columns), gate_up.scalar_type(), gate_up);
  if (out.numel() == 0) return out;
  p.gate_up = gate_up.const_data_ptr(), p.out = out.mutable_data_ptr();
  launch_gated(p, current_stream(gate_up));
  check_launched(kOp);
  return out;
}

namespace {

// --- attention -------------------------------------------------------------------------------------------------------

constexpr const char* kAttend = "nvfp4::attend_one";

void place_cache(Attend& p, const Tensor& qkv, const Tensor& keys, const Tensor& values, int64_t heads) {
  const auto fits = [&](const Tensor& t) {
    return t.dim() == 4 && t.scalar_type() == qkv.scalar_type() && t.is_contiguous() && begins_on(t, 16);
  };
  check_beside(keys, "keys", qkv, "qkv");
  check_beside(values, "values", qkv, "qkv");
  NVFP4_CHECK(fits(keys) && fits(values), kAttend, ": keys and values must be (B, kv_heads, length, dim), of qkv's ",
              "dtype, contiguous and aligned to 16 bytes, not ", text_of(keys), " and ", text_of(values));
  for (int64_t i = 0; i < 4; ++i) {
    NVFP4_CHECK(keys.size(i) == values.size(i) && keys.size(i) > 0 && keys.size(i) < (1 << 30), kAttend,
                ": keys and values must be of one shape, not ", text_of(keys), " and ", text_of(values));
  }
  p.batch = static_cast<int>(keys.size(0)), p.kv_heads = static_cast<int>(keys.size(1));
  p.length = static_cast<int>(keys.size(2)), p.dim = static_cast<int>(keys.size(3));
  NVFP4_CHECK(p.dim % 8 == 0 && p.dim <= kMostHeadDim, kAttend, ": the dimension of a head must be a ",
              "multiple of 8 up to ", kMostHeadDim, ", not ", p.dim);
  NVFP4_CHECK(heads > 0 && heads < (1 << 16) && heads % p.kv_heads == 0, kAttend, ": heads must be a multiple of ",
              "the cache's ", p.kv_heads, ", not ", heads);
  NVFP4_CHECK(p.batch <= 65535 && heads <= 65535, kAttend, ": more rows or heads than a grid has places");
  p.heads = static_cast<int>(heads);
  const int64_t width = (heads + 2 * static_cast<int64_t>(p.kv_heads)) * p.dim;
  NVFP4_CHECK(qkv.dim() == 2 && qkv.size(0) == p.batch && qkv.size(1) == width, kAttend, ": qkv must be (", p.batch,
              ", ", width, ") for ", heads, " heads and this cache, not ", text_of(qkv));
  p.keys = keys.mutable_data_ptr(), p.values = values.mutable_data_ptr();
}

Tensor place_norm(const Tensor& weight, const char* name, const Tensor& qkv, int64_t heads, int dim, bool& wide,
                  bool& joint) {
  joint = weight.numel() != dim;
  return vector_of(weight, kAttend, name, qkv, joint ? heads * dim : dim, wide);
}

Tensor place_angles(Attend& p, const Tensor& t, const char* name, const Tensor& qkv) {
  const int64_t rotary = t.dim() ? t.size(t.dim() - 1) : 0, rows = rotary ? t.numel() / rotary : 0;
  NVFP4_CHECK(rotary > 0 && rotary % 2 == 0 && rotary <= p.dim && (rows == 1 || rows == p.batch), kAttend, ": ", name,
              " must be (1 or ", p.batch, ", rotary), rotary even and at most ", p.dim, ", not ", text_of(t));
  const Tensor held = vector_of(t, kAttend, name, qkv, t.numel(), p.wide_angles);
  p.rotary = static_cast<int>(rotary);
  p.angle_step = rows > 1 ? p.rotary : 0;
  return held;
}

// What the ops of one token share: its queries, keys and values, their norms and rotation, a cache and a position.
struct Held {
  Tensor qkv, q_weight, k_weight, cosines, sines, position;  // live as long as the struct that points to them
};

Attend placed(Held& held, const Tensor& qkv_given, const std::optional<Tensor>& q_norm,
              const std::optional<Tensor>& k_norm, double eps, double offset, bool round_before_weight,
              const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& keys,
              const Tensor& values, const Tensor& position_given, int64_t heads) {
  Attend p = {};
  p.dtype = half_dtype_of(qkv_given, kAttend, "qkv");
  place_cache(p, qkv_given, keys, values, heads);
  const Tensor& qkv = held.qkv = in_order(qkv_given);
  p.qkv = qkv.const_data_ptr();
  bool wide_k = false, wide_sine = false;
  if (q_norm) {
    held.q_weight = place_norm(*q_norm, "q_norm", qkv, heads, p.dim, p.wide_norms, p.q_joint);
    p.q_norm = held.q_weight.const_data_ptr();
  }
  if (k_norm) {
    held.k_weight = place_norm(*k_norm, "k_norm", qkv, p.kv_heads, p.dim, wide_k, p.k_joint);
    p.k_norm = held.k_weight.const_data_ptr();
    NVFP4_CHECK(!q_norm || wide_k == p.wide_norms, kAttend, ": q_norm and k_norm must be of one dtype");
    p.wide_norms = wide_k;
  }
  NVFP4_CHECK(cos.has_value() == sin.has_value(), kAttend, ": give cos and sin, or neither");
  if (cos) {
    held.sines = place_angles(p, *sin, "sin", qkv);
    wide_sine = p.wide_angles;
    const int rotary = p.rotary, step = p.angle_step;
    held.cosines = place_angles(p, *cos, "cos", qkv);
    NVFP4_CHECK(wide_sine == p.wide_angles && rotary == p.rotary && step == p.angle_step, kAttend,
                ": cos and sin must be of one shape and dtype");
    p.cos = held.cosines.const_data_ptr(), p.sin = held.sines.const_data_ptr();
  }
  check_beside(position_given, "position", qkv, "qkv");
  NVFP4_CHECK(position_given.scalar_type() == ScalarType::Long &&
                  (position_given.numel() == 1 || position_given.numel() == p.batch),
              kAttend, ": position must be int64, one or one per row, not ", text_of(position_given));
  held.position = in_order(position_given);
  p.position = static_cast<const int64_t*>(held.position.const_data_ptr());
  p.position_step = held.position.numel() > 1;
  p.norm = {static_cast<float>(eps), static_cast<float>(offset), round_before_weight};
  return p;
}

Tensor attend_one(const Tensor& qkv, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double eps,
                  double offset, bool round_before_weight, std::optional<Tensor> cos, std::optional<Tensor> sin,
                  const Tensor& keys, const Tensor& values, const Tensor& position, int64_t heads, double scaling,
                  int64_t window, double softcap, std::optional<Tensor> sinks, std::optional<Tensor> starts) {
  const OnDeviceOf device(qkv, "qkv");
  Held held;
  Attend p = placed(held, qkv, q_norm, k_norm, eps, offset, round_before_weight, cos, sin, keys, values, position,
                    heads);
  Tensor sink, start;
  if (starts) {
    check_beside(*starts, "starts", qkv, "qkv");
    NVFP4_CHECK(starts->scalar_type() == ScalarType::Long && starts->dim() == 1 && starts->size(0) == p.batch, kAttend,
                ": starts must be int64, one per row, not ", text_of(*starts));
    start = in_order(*starts), p.starts = static_cast<const int64_t*>(start.const_data_ptr());
  }
  if (sinks) sink = vector_of(*sinks, kAttend, "sinks", qkv, heads, p.wide_sinks), p.sinks = sink.const_data_ptr();
  NVFP4_CHECK(window >= 0 && window < INT32_MAX, kAttend, ": window must not be negative, not ", window);
  p.window = static_cast<int>(window);
  p.scaling = static_cast<float>(scaling), p.softcap = static_cast<float>(softcap);
  Tensor out = empty({p.batch, heads * p.dim}, qkv.scalar_type(), qkv);
  p.out = out.mutable_data_ptr();
  RawScratch scratch;
  const int64_t floats = plan_attend(p);
  if (floats > 0) p.partial = static_cast<float*>(scratch(floats * 4));
  launch_attend(p, current_stream(qkv));
  check_launched(kAttend);
  return out;
}

Tensor place_one(const Tensor& qkv, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double eps,
                 double offset, bool round_before_weight, std::optional<Tensor> cos, std::optional<Tensor> sin,
                 const Tensor& keys, const Tensor& values, const Tensor& position, int64_t heads, int64_t spec,
                 const Tensor& key_codes, const Tensor& key_scale, const Tensor& key_factor, const Tensor& value_codes,
                 const Tensor& value_scale, const Tensor& value_factor, const Tensor& starts, bool rotate) {
  const OnDeviceOf device(qkv, "qkv");
  Held held;
  PlaceOne p = {};
  p.of = placed(held, qkv, q_norm, k_norm, eps, offset, round_before_weight, cos, sin, keys, values, position, heads);
  NVFP4_CHECK(p.of.length > 1, "nvfp4::place_one: a ring has at least 2 slots, not ", p.of.length);
  const AppendArguments a(keys, values, spec, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor,
                          starts, rotate);
  p.append = attention::append_of(a);
  p.append.tokens = 1, p.append.ring = p.of.length;
  p.append.position = p.of.position, p.append.position_step = p.of.position_step;
  Tensor q = empty({p.of.batch, heads, 1, p.of.dim}, qkv.scalar_type(), qkv);
  p.of.out = q.mutable_data_ptr();
  launch_place_one(p, current_stream(qkv));
  check_launched("nvfp4::place_one");
  return q;
}

}  // namespace
}  // namespace step

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&step::rms_norm));
  m.impl("gated", TORCH_BOX(&step::gated));
  m.impl("attend_one", TORCH_BOX(&step::attend_one));
  m.impl("place_one", TORCH_BOX(&step::place_one));
}

}  // namespace nvfp4
