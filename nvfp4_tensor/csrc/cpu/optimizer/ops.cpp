// torch.ops.nvfp4.adamw_step and adamw_step_codes on the CPU.
#include <algorithm>
#include <string>

#include "cpu/optimizer/kernels.h"
#include "optimizer.h"

namespace nvfp4 {
namespace {

constexpr int64_t kGroupsPerThread = 64;  // 16,384 elements, some 20 us

// Of the instruction set that all kernels of this process use.
const OptimizerKernels& optimizer_kernels() {
  static const OptimizerKernels& chosen = [&]() -> const OptimizerKernels& {
    const std::string name = kernels().name;
    if (name.rfind("avx512", 0) == 0) return *avx512_optimizer_kernels();
    if (name.rfind("avx2", 0) == 0) return *avx2_optimizer_kernels();
    if (name.rfind("neon", 0) == 0) return *neon_optimizer_kernels();
    return portable_optimizer_kernels();
  }();
  return chosen;
}

void run(const AdamwStep& a) {
  const int64_t blocks = a.rows * a.blocks, groups = ceil_div(blocks, kGroupBlocks);
  const auto work = [&](int64_t begin, int64_t end) {
    optimizer_kernels().step(a, begin * kGroupBlocks, std::min(end * kGroupBlocks, blocks));
  };
  if (groups <= kGroupsPerThread) {
    if (groups) work(0, groups);
  } else {
    torch::stable::parallel_for(0, groups, kGroupsPerThread, work);
  }
}

void adamw_step(const Tensor& weight, const Tensor& grad, const Tensor& r, const Tensor& r_scale, const Tensor& v,
                const Tensor& v_exponent, const Tensor& hyper, const Tensor& rng_state, int64_t row0) {
  optimizer::Step step(weight, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  step.arguments.weight_dtype = optimizer::weight_dtype(weight);
  step.arguments.weight = const_cast<void*>(weight.const_data_ptr());
  run(step.arguments);
}

void adamw_step_codes(const Tensor& qdata, const Tensor& scale, const Tensor& per_tensor_scale, const Tensor& grad,
                      const Tensor& r, const Tensor& r_scale, const Tensor& v, const Tensor& v_exponent,
                      const Tensor& hyper, const Tensor& rng_state, int64_t row0) {
  optimizer::Step step(grad, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  const optimizer::CodedWeight w(qdata, scale, per_tensor_scale, step.arguments.columns, grad);
  step.arguments.weight = w.qdata, step.arguments.scale = w.scale;
  step.arguments.per_tensor_scale = w.per_tensor_scale;
  run(step.arguments);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) {
  m.impl("adamw_step", TORCH_BOX(&adamw_step));
  m.impl("adamw_step_codes", TORCH_BOX(&adamw_step_codes));
}

}  // namespace nvfp4
