// The optimizer's step in plain C++, for the target's baseline.
#define NVFP4_ISA portable
#include "cpu/simd/portable.h"
//
#include "cpu/optimizer/adamw.h"

namespace nvfp4 {
const OptimizerKernels& portable_optimizer_kernels() { return portable::kOptimizerKernels; }
}  // namespace nvfp4
