// Products in plain C++, for the target's baseline.
#define NVFP4_ISA portable
#include "cpu/simd/products_portable.h"
//
#include "cpu/matmul/many.h"

namespace nvfp4 {
const ProductKernels& portable_products() { return portable::kProducts<portable::FloatMath>; }
}  // namespace nvfp4
