// Attention to codes on AVX-512 (F, BW, VL, DQ, VBMI).
#include "cpu/attention/kernels.h"

#if defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define NVFP4_ISA avx512
#include "cpu/simd/products_avx512.h"
//
#include "cpu/attention/attend.h"

namespace nvfp4 {
const AttendKernels* avx512_attend_kernels() { return &avx512::kAttendKernels; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const AttendKernels* avx512_attend_kernels() { return nullptr; }
}  // namespace nvfp4
#endif
