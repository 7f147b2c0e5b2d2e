// What kernels quantize of the blocks that they load.
#pragma once

#include <type_traits>

#include "cuda/block/columns.cuh"

namespace nvfp4 {

// The elements as they are, or their Hadamard transform.
struct Plain {
  template <typename T>
  __device__ __forceinline__ const Elements<T, kBlock>& operator()(const Elements<T, kBlock>& block) const {
    return block;
  }
};

struct Transformed {
  HadamardFactors factors;

  template <typename T>
  __device__ __forceinline__ Elements<__nv_bfloat16, kBlock> operator()(const Elements<T, kBlock>& block) const {
    return transformed_block(block, factors);
  }
};

// The type of what it gives.
template <typename T, typename Transform>
using Given = std::conditional_t<std::is_same_v<Transform, Plain>, T, __nv_bfloat16>;

}  // namespace nvfp4
