// Tensor maps, by which TMA, Hopper's bulk copy engine, knows a matrix.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

namespace nvfp4 {

// The driver's function, looked up at run time so that nothing has to be linked; nullptr where the driver has none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encode;
}

// Elements in dimensions of these sizes, the first contiguous, the others at these steps in bytes; copied in boxes.
template <int kDimensions>
CUtensorMap tensor_map(const void* data, CUtensorMapDataType type, const cuuint64_t (&sizes)[kDimensions],
                       const cuuint64_t (&steps)[kDimensions - 1], const cuuint32_t (&box)[kDimensions],
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  CUtensorMap map;
  cuuint32_t ones[kDimensions];
  std::fill_n(ones, kDimensions, 1);
  tensor_map_encoder()(&map, type, kDimensions, const_cast<void*>(data), sizes, steps, box, ones,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace nvfp4
