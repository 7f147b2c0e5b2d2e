// Products of few rows of x in float16 on NEON with FMLAL (Armv8.4 and many before it: Apple M1, Neoverse V1, N2).
#include "cpu/matmul/products.h"

#if defined(__ARM_FEATURE_FP16_FML)
#define NVFP4_ISA neon_fp16
#include "cpu/simd/products/neon_fp16.h"
//
#include "cpu/host/arm_features.h"
#include "cpu/matmul/many.h"

namespace nvfp4 {
namespace neon_fp16 {
namespace {

// FMLAL multiplies no more numbers than FMLA does: many rows, whose decoded weight is used often, stay float32.
constexpr ProductKernels kFp16Products = {Fp16Math::kMostFewRows, Few<Fp16Math>::kernel(), Many<FloatMath>::kernel(),
                                          Across<FloatMath>::kernel()};

}  // namespace
}  // namespace neon_fp16

const ProductKernels* neon_fp16_products() { return arm_features().fhm ? &neon_fp16::kFp16Products : nullptr; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* neon_fp16_products() { return nullptr; }
}  // namespace nvfp4
#endif
