// The kernels on AVX2, FMA and F16C.
#include "cpu/kernels.h"

namespace nvfp4 {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace nvfp4
