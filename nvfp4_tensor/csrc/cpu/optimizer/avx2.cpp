// The optimizer's step on AVX2, FMA and F16C.
#include "cpu/optimizer/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NVFP4_ISA avx2
#include "cpu/simd/avx2.h"
//
#include "cpu/optimizer/adamw.h"

namespace nvfp4 {
const OptimizerKernels* avx2_optimizer_kernels() { return &avx2::kOptimizerKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const OptimizerKernels* avx2_optimizer_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
