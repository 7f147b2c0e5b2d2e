// Products on NEON.
#include "cpu/matmul/products.h"

#if defined(__aarch64__)
#define NVFP4_ISA neon
#include "cpu/simd/products_neon.h"
//
#include "cpu/matmul/many.h"

namespace nvfp4 {
const ProductKernels* neon_products() { return &neon::kProducts<neon::FloatMath>; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* neon_products() { return nullptr; }
}  // namespace nvfp4
#endif
