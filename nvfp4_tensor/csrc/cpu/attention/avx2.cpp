// Attention to codes on AVX2, FMA and F16C.
#include "cpu/attention/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NVFP4_ISA avx2
#include "cpu/simd/products_avx2.h"
//
#include "cpu/attention/attend.h"

namespace nvfp4 {
const AttendKernels* avx2_attend_kernels() { return &avx2::kAttendKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const AttendKernels* avx2_attend_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
