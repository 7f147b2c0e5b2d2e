// torch.ops.nvfp4.adamw_step, adamw_step_codes and adamw_step_vector on the CPU.
#include <algorithm>

#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "cpu/optimizer/kernels.h"
#include "optimizer.h"

namespace nvfp4 {
namespace {

constexpr int64_t kGroupsPerThread = 64;      // 16,384 elements, some 20 us
constexpr int64_t kElementsPerThread = 1024;  // of float32 moments, as long

template <typename G, typename W>
void step_elements(const VectorStep& a, int64_t begin, int64_t end) {
  const float* h = a.hyper;
  const AdamwNumbers numbers = {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
  const RandomKey key = RandomKey::of(a.rng_state[0], a.rng_state[1], 0);
  const G* grad = static_cast<const G*>(a.grad);
  W* weight = static_cast<W*>(a.weight);
  const auto value = [](auto x) {
    if constexpr (sizeof(x) == 4) return x;
    else return from_bfloat16(x);
  };
  for (int64_t i = begin; i < end; ++i) {
    const float next = stepped_exactly(value(weight[i]), value(grad[i]), a.m[i], a.v[i], numbers);
    if constexpr (sizeof(W) == 4) {
      weight[i] = next;
    } else {
      weight[i] = stochastic_bfloat16(next, random16(key.block_words(uint64_t(a.first_block + i)), 0));
    }
  }
}

}  // namespace

namespace optimizer {

void run(const AdamwStep& a, const Tensor&) {
  const int64_t blocks = a.rows * a.blocks, groups = ceil_div(blocks, kGroupBlocks);
  parallel(groups, kGroupsPerThread, [&](int64_t begin, int64_t end) {
    instruction_set().compiled.optimizer.step(a, begin * kGroupBlocks, std::min(end * kGroupBlocks, blocks));
  });
}

void run(const VectorStep& a, const Tensor&) {
  const bool float_grad = a.grad_dtype == Dtype::kFloat, float_weight = a.weight_dtype == Dtype::kFloat;
  const auto steps = float_grad     ? float_weight ? step_elements<float, float> : step_elements<float, uint16_t>
                     : float_weight ? step_elements<uint16_t, float>
                                    : step_elements<uint16_t, uint16_t>;
  parallel(a.count, kElementsPerThread, [&](int64_t begin, int64_t end) { steps(a, begin, end); });
}

}  // namespace optimizer

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) {
  m.impl("adamw_step", TORCH_BOX(&optimizer::adamw_step));
  m.impl("adamw_step_codes", TORCH_BOX(&optimizer::adamw_step_codes));
  m.impl("adamw_step_vector", TORCH_BOX(&optimizer::adamw_step_vector));
}

}  // namespace nvfp4
