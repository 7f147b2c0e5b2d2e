// torch.ops.nvfp4.train_linear and its backward on the CPU, and the source of a call's random bits.
#include "cpu/host/memory.h"
#include "training.h"

namespace nvfp4 {
namespace training {

Tensor draw_rng_state(const Tensor&) { return fill_rng_state(empty({2}, ScalarType::Long)); }

}  // namespace training

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) {
  m.impl("draw_rng_state", TORCH_BOX(&training::draw_rng_state));
  m.impl("train_linear", TORCH_BOX(&training::train_linear));
  m.impl("train_linear_forward", TORCH_BOX(&training::train_linear_forward));
  m.impl("train_linear_backward", TORCH_BOX(&training::train_linear_backward));
}

}  // namespace nvfp4
