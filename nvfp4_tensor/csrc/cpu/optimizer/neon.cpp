// The optimizer's step on NEON.
#include "cpu/optimizer/kernels.h"

#if defined(__aarch64__)
#define NVFP4_ISA neon
#include "cpu/simd/neon.h"
//
#include "cpu/optimizer/adamw.h"

namespace nvfp4 {
const OptimizerKernels* neon_optimizer_kernels() { return &neon::kOptimizerKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const OptimizerKernels* neon_optimizer_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
