// Products on AVX2, FMA and F16C.
#include "cpu/matmul/products.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NVFP4_ISA avx2
#include "cpu/simd/products_avx2.h"
//
#include "cpu/matmul/many.h"

namespace nvfp4 {
const ProductKernels* avx2_products() { return &avx2::kProducts<avx2::FloatMath>; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* avx2_products() { return nullptr; }
}  // namespace nvfp4
#endif
