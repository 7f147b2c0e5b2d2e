// activation(gate) * up of one element: torch's formulas in float32, each operator's result rounded to T.
#pragma once

#include "cuda/block/elements.cuh"
#include "cuda/generation/activation.h"

namespace nvfp4 {
namespace step {

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

template <typename T>
__device__ __forceinline__ float gate_of(float gate, float up, Activation activation, float limit, float alpha) {
  const auto round = [](float v) { return to_float(from_float<T>(v)); };
  float y;
  switch (activation) {
    case Activation::kSilu: y = gate / (1.0f + expf(-gate)); break;
    case Activation::kGeluTanh: {
      constexpr float kBeta = 0.7978845608028654f, kKappa = 0.044715f;  // sqrt(2 / pi)
      y = 0.5f * gate * (1.0f + tanhf(kBeta * (gate + kKappa * (gate * gate * gate))));
      break;
    }
    case Activation::kGelu: y = gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f)); break;
    default: {
      const float most = round(limit);
      gate = gate > most ? most : gate;  // NaN stays
      up = up > most ? most : up < -most ? -most : up;
      y = round(gate * round(sigmoid(round(gate * alpha))));
      return round(up + 1.0f) * y;
    }
  }
  return round(y) * up;
}

}  // namespace step
}  // namespace nvfp4
