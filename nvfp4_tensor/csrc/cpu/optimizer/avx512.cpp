// The optimizer's step on AVX-512 (F, BW, VL, DQ, VBMI).
#include "cpu/optimizer/kernels.h"

#if defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define NVFP4_ISA avx512
#include "cpu/simd/avx512.h"
//
#include "cpu/optimizer/adamw.h"

namespace nvfp4 {
const OptimizerKernels* avx512_optimizer_kernels() { return &avx512::kOptimizerKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const OptimizerKernels* avx512_optimizer_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
