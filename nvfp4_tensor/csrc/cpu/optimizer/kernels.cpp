// The optimizer's step, compiled once for each instruction set.
#include "cpu/host/instruction_set.h"
// clang-format off
#include NVFP4_STRING(cpu/simd/NVFP4_ISA.h)
// clang-format on
#include "cpu/optimizer/adamw.h"

namespace nvfp4::NVFP4_ISA {

extern const OptimizerKernels kOptimizerKernels = {[](const AdamwStep& a, int64_t begin, int64_t end) {
  a.grad_dtype == Dtype::kFloat ? step<float>(a, begin, end) : step<Bf16>(a, begin, end);
}};

}  // namespace nvfp4::NVFP4_ISA
