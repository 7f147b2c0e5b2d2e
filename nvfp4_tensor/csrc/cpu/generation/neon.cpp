// Rows of one token on NEON.
#include "cpu/generation/row_kernels.h"

#if defined(__aarch64__)
#define NVFP4_ISA neon
#include "cpu/simd/products_neon.h"
//
#include "cpu/generation/attention.h"

namespace nvfp4 {
const RowKernels* neon_row_kernels() { return &neon::kRowKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const RowKernels* neon_row_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
