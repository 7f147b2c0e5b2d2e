// Products in float32, compiled once for each instruction set.
#include "cpu/host/instruction_set.h"
// clang-format off
#include NVFP4_STRING(cpu/simd/products/NVFP4_ISA.h)
// clang-format on
#include "cpu/matmul/many.h"

namespace nvfp4::NVFP4_ISA {

extern const ProductKernels kFloatProducts = kProducts<FloatMath>;

}  // namespace nvfp4::NVFP4_ISA
