// Which product kernels this process uses.
#pragma once

#include <string_view>

#include "cpu/matmul/products.h"

namespace nvfp4 {

struct Choice {
  const ProductKernels* bf16;  // null where the instruction set in use has none
  const ProductKernels* wide;
  const char* wide_name;

  static Choice current() {
    const std::string_view name = kernels().name;
    if (name == "avx512_bf16" && avx512_bf16_products()) return {avx512_bf16_products(), avx512_products(), "avx512"};
    if (name.substr(0, 6) == "avx512" && avx512_products()) return {nullptr, avx512_products(), "avx512"};
    if (name == "avx2" && avx2_products()) return {nullptr, avx2_products(), "avx2"};
    return {nullptr, &portable_products(), "portable"};
  }
};

}  // namespace nvfp4
