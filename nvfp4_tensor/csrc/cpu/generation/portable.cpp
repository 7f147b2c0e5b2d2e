// Rows of one token in plain C++, for the target's baseline.
#define NVFP4_ISA portable
#include "cpu/simd/products_portable.h"
//
#include "cpu/generation/attention.h"

namespace nvfp4 {
const RowKernels& portable_row_kernels() { return portable::kRowKernels; }
}  // namespace nvfp4
