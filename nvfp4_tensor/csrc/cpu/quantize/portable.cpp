// The kernels in plain C++, for the target's baseline.
#define NVFP4_ISA portable
#include "cpu/simd/portable.h"
//
#include "cpu/quantize/table.h"

namespace nvfp4 {
const Kernels& portable_kernels() { return portable::kKernels; }
}  // namespace nvfp4
