// Kernels of a token's rows, compiled once for each instruction set.
#include "cpu/host/instruction_set.h"
// clang-format off
#include NVFP4_STRING(cpu/simd/products/NVFP4_ISA.h)
// clang-format on
#include "cpu/generation/attention.h"

namespace nvfp4::NVFP4_ISA {

extern const RowKernels kRowKernels = {add_row, norm_row, gate_row, attend_head, multiply_dense};

}  // namespace nvfp4::NVFP4_ISA
