// The kernels on AVX2, FMA and F16C.
#include "cpu/host/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NVFP4_ISA avx2
#include "cpu/simd/avx2.h"
//
#include "cpu/quantize/table.h"

namespace nvfp4 {
const Kernels* avx2_kernels() {
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return runs ? &avx2::kKernels : nullptr;
}
}  // namespace nvfp4
#else
namespace nvfp4 {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
