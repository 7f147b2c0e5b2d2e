// Rows of one token on AVX2, FMA and F16C.
#include "cpu/generation/row_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NVFP4_ISA avx2
#include "cpu/simd/products_avx2.h"
//
#include "cpu/generation/attention.h"

namespace nvfp4 {
const RowKernels* avx2_row_kernels() { return &avx2::kRowKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const RowKernels* avx2_row_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
