// torch.ops.nvfp4.train_linear and its backward on CUDA, and the source of a call's random bits.
#include "cuda/host/tensors.h"
#include "training.h"

namespace nvfp4 {
namespace training {

Tensor draw_rng_state(const Tensor& like) {
  const OnDeviceOf guard(like, "like");
  return fill_rng_state(empty({2}, ScalarType::Long, like));
}

}  // namespace training

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("draw_rng_state", TORCH_BOX(&training::draw_rng_state));
  m.impl("train_linear", TORCH_BOX(&training::train_linear));
  m.impl("train_linear_forward", TORCH_BOX(&training::train_linear_forward));
  m.impl("train_linear_backward", TORCH_BOX(&training::train_linear_backward));
}

}  // namespace nvfp4
