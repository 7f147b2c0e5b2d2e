// Ops of a step that others are made of.
#pragma once

#include <optional>
#include <tuple>

#include "cuda/host/tensors.h"

namespace nvfp4 {
namespace step {

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, std::optional<Tensor> residual, std::optional<Tensor> weight,
                                    double eps, double offset, bool round_before_weight, double multiplier,
                                    std::optional<Tensor> first_weight);
Tensor gated(const Tensor& gate_up, int64_t activation, double limit, double alpha, bool interleaved);

// Raises an error where rms_norm would.
void check_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, const char* op);

}  // namespace step
}  // namespace nvfp4
