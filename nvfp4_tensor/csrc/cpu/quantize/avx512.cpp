// The kernels on AVX-512 (F, BW, VL, DQ, VBMI: Ice Lake, Zen 4 and later).
#include "cpu/host/kernels.h"

#if defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define NVFP4_ISA avx512
#include "cpu/simd/avx512.h"
//
#include "cpu/quantize/table.h"

namespace nvfp4 {
const Kernels* avx512_kernels() {
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vbmi");
  return runs ? &avx512::kKernels : nullptr;
}
const Kernels* avx512_bf16_kernels() {
  static const Kernels named = [] {
    Kernels kernels = avx512::kKernels;
    kernels.name = "avx512_bf16";
    return kernels;
  }();
  return avx512_kernels() && __builtin_cpu_supports("avx512bf16") ? &named : nullptr;
}
}  // namespace nvfp4
#else
namespace nvfp4 {
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx512_bf16_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
