// Rows of one token on AVX-512 (F, BW, VL, DQ, VBMI).
#include "cpu/generation/row_kernels.h"

#if defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define NVFP4_ISA avx512
#include "cpu/simd/products_avx512.h"
//
#include "cpu/generation/attention.h"

namespace nvfp4 {
const RowKernels* avx512_row_kernels() { return &avx512::kRowKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const RowKernels* avx512_row_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
