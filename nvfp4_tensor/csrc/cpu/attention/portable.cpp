// Attention to codes in plain C++, for the target's baseline.
#define NVFP4_ISA portable
#include "cpu/simd/products_portable.h"
//
#include "cpu/attention/attend.h"

namespace nvfp4 {
const AttendKernels& portable_attend_kernels() { return portable::kAttendKernels; }
}  // namespace nvfp4
