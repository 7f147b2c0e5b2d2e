// torch.ops.nvfp4.adamw_step, adamw_step_codes and adamw_step_vector on CUDA.
#include "cuda/host/tensors.h"
#include "cuda/optimizer/kernels.h"
#include "optimizer.h"

namespace nvfp4 {
namespace optimizer {

void run(const AdamwStep& a, const Tensor& weight) {
  const OnDeviceOf guard(weight, "weight");
  NVFP4_CHECK(!a.scale || (a.rows < INT32_MAX && a.blocks < INT32_MAX),
              "the weight has more than 2^31 - 1 rows or blocks");
  launch_adamw(a, current_stream(weight));
  check_launched("nvfp4::adamw_step");
}

void run(const VectorStep& a, const Tensor& weight) {
  const OnDeviceOf guard(weight, "weight");
  launch_adamw_vector(a, current_stream(weight));
  check_launched("nvfp4::adamw_step_vector");
}

}  // namespace optimizer

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("adamw_step", TORCH_BOX(&optimizer::adamw_step));
  m.impl("adamw_step_codes", TORCH_BOX(&optimizer::adamw_step_codes));
  m.impl("adamw_step_vector", TORCH_BOX(&optimizer::adamw_step_vector));
}

}  // namespace nvfp4
