// Products on AVX-512 (F, BW, VL, DQ, VBMI), in float32.
#include "cpu/matmul/products.h"

#if defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define NVFP4_ISA avx512
#include "cpu/simd/products_avx512.h"
//
#include "cpu/matmul/many.h"

namespace nvfp4 {
const ProductKernels* avx512_products() { return &avx512::kProducts<avx512::FloatMath>; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* avx512_products() { return nullptr; }
}  // namespace nvfp4
#endif
