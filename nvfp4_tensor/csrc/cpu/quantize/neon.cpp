// The kernels on NEON, which every AArch64 has.
#include "cpu/host/kernels.h"

#if defined(__aarch64__)
#define NVFP4_ISA neon
#include "cpu/simd/neon.h"
//
#include "cpu/host/arm_features.h"
#include "cpu/quantize/table.h"

namespace nvfp4 {
const Kernels* neon_kernels() { return &neon::kKernels; }
const Kernels* neon_bf16_kernels() {
  static const Kernels named = [] {
    Kernels kernels = neon::kKernels;
    kernels.name = "neon_bf16";
    return kernels;
  }();
  return arm_features().bf16 ? &named : nullptr;
}
}  // namespace nvfp4
#else
namespace nvfp4 {
const Kernels* neon_kernels() { return nullptr; }
const Kernels* neon_bf16_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
