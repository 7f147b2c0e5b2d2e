// Products of x in bfloat16 on AMX (Sapphire Rapids and later): tiles for all but the fewest rows, which AVX-512
// serves.
#include "cpu/matmul/products.h"

#if defined(NVFP4_EMULATE_AMX)
#define NVFP4_ISA portable
#define NVFP4_FEW_MATH FloatMath
#include "cpu/simd/tiles_emulated.h"
#elif defined(__AVX512BF16__) && defined(NVFP4_HAS_AMX)
#define NVFP4_ISA avx512
#define NVFP4_FEW_MATH Bf16Math
#include "cpu/simd/tiles_amx.h"
//
#include "cpu/matmul/bf16.h"
#endif

#if defined(NVFP4_ISA)
#include "cpu/host/amx.h"
#include "cpu/matmul/few.h"
#include "cpu/matmul/tiles.h"

namespace nvfp4 {
namespace NVFP4_ISA {
namespace {

constexpr int64_t kMostFewAmxRows = 1;  // 4096^2, two threads: 1 row few 683 us, tiles 817; 2 rows 849 and 801
constexpr ProductKernels kAmxProducts = {kMostFewAmxRows, Few<NVFP4_FEW_MATH>::kernel(), TiledMany::kernel(),
                                         TiledAcross::kernel()};

}  // namespace
}  // namespace NVFP4_ISA

const ProductKernels* amx_products() { return amx_is_granted() ? &NVFP4_ISA::kAmxProducts : nullptr; }
}  // namespace nvfp4
#else
namespace nvfp4 {
const ProductKernels* amx_products() { return nullptr; }
}  // namespace nvfp4
#endif
