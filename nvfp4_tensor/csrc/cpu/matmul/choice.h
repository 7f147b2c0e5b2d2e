// Which product kernels this process uses.
#pragma once

#include <string_view>

#include "cpu/matmul/products.h"

namespace nvfp4 {

struct Choice {
  const ProductKernels* bf16;  // for x in bfloat16; null where the instruction set in use has none
  const char* bf16_name;
  const ProductKernels* fp16;  // the same for x in float16
  const char* fp16_name;
  const ProductKernels* wide;
  const char* wide_name;

  static Choice current() {
    const std::string_view name = kernels().name;
    if (name == "amx" && amx_products()) {
      if (avx512_kernels()) return {amx_products(), "amx", nullptr, "", avx512_products(), "avx512"};
      return {amx_products(), "amx", nullptr, "", &portable_products(), "portable"};  // emulated
    }
    if (name.substr(0, 6) == "avx512" && avx512_products()) {
      const ProductKernels* bf16 = name == "avx512_bf16" ? avx512_bf16_products() : nullptr;
      return {bf16, "avx512_bf16", nullptr, "", avx512_products(), "avx512"};
    }
    if (name == "avx2" && avx2_products()) return {nullptr, "", nullptr, "", avx2_products(), "avx2"};
    if (name.substr(0, 4) == "neon" && neon_products()) {
      const ProductKernels* bf16 = name == "neon_bf16" ? neon_bf16_products() : nullptr;
      return {bf16, "neon_bf16", neon_fp16_products(), "neon_fp16", neon_products(), "neon"};
    }
    return {nullptr, "", nullptr, "", &portable_products(), "portable"};
  }
};

}  // namespace nvfp4
