// Products of x in bfloat16 on AVX-512 with its bfloat16 instructions (Cooper Lake, Sapphire Rapids, Zen 4 and later).
#include "cpu/matmul/products.h"

#if defined(__AVX512BF16__)
#define NVFP4_ISA avx512
#include "cpu/simd/products/avx512.h"
//
#include "cpu/matmul/bf16.h"
#include "cpu/matmul/many.h"

namespace nvfp4 {
const ProductKernels* avx512_bf16_products() {
  return __builtin_cpu_supports("avx512bf16") ? &avx512::kProducts<avx512::Bf16Math> : nullptr;
}
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* avx512_bf16_products() { return nullptr; }
}  // namespace nvfp4
#endif
