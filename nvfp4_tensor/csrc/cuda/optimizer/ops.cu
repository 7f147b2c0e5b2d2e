// torch.ops.nvfp4.adamw_step, adamw_step_codes and adamw_step_vector on CUDA.
#include "cuda/host/tensors.h"
#include "cuda/optimizer/kernels.h"
#include "optimizer.h"

namespace nvfp4 {
namespace {

void adamw_step(const Tensor& weight, const Tensor& grad, const Tensor& r, const Tensor& r_scale, const Tensor& v,
                const Tensor& v_exponent, const Tensor& hyper, const Tensor& rng_state, int64_t row0) {
  const OnDeviceOf guard(weight, "weight");
  optimizer::Step step(weight, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  AdamwStep& a = step.arguments;
  a.weight_dtype = optimizer::weight_dtype(weight);
  a.weight = const_cast<void*>(weight.const_data_ptr());
  launch_adamw(a, current_stream(weight));
  check_launched("nvfp4::adamw_step");
}

void adamw_step_codes(const Tensor& qdata, const Tensor& scale, const Tensor& per_tensor_scale, const Tensor& grad,
                      const Tensor& r, const Tensor& r_scale, const Tensor& v, const Tensor& v_exponent,
                      const Tensor& hyper, const Tensor& rng_state, int64_t row0) {
  const OnDeviceOf guard(qdata, "qdata");
  optimizer::Step step(grad, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  AdamwStep& a = step.arguments;
  NVFP4_CHECK(a.rows < INT32_MAX && a.blocks < INT32_MAX, "the weight has more than 2^31 - 1 rows or blocks");
  const optimizer::CodedWeight w(qdata, scale, per_tensor_scale, a.columns, grad);
  a.weight = w.qdata, a.scale = w.scale, a.per_tensor_scale = w.per_tensor_scale;
  launch_adamw(a, current_stream(qdata));
  check_launched("nvfp4::adamw_step_codes");
}

void adamw_step_vector(const Tensor& weight, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                       const Tensor& hyper, const Tensor& rng_state, int64_t element0) {
  const OnDeviceOf guard(weight, "weight");
  const optimizer::VectorArguments step(weight, grad, exp_avg, exp_avg_sq, hyper, rng_state, element0);
  launch_adamw_vector(step.arguments, current_stream(weight));
  check_launched("nvfp4::adamw_step_vector");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("adamw_step", TORCH_BOX(&adamw_step));
  m.impl("adamw_step_codes", TORCH_BOX(&adamw_step_codes));
  m.impl("adamw_step_vector", TORCH_BOX(&adamw_step_vector));
}

}  // namespace nvfp4
