// y = round(alpha * x w + bias) of a w that is dense already, by the cuBLASLt that torch has loaded.
#pragma once

#include "cuda/matmul/problem.cuh"

namespace nvfp4 {

enum class Sum { kAlongRowsOfW, kAcrossRowsOfW };  // x w^T of w (N, K), or x w of w (K, N)

// Whether that library is here, its epilogue is that of the problem, and it has a kernel for it.
bool fits_matmul_dense(const Problem& p, Sum sum);
// Of a problem that fits. False where cuBLASLt refuses after all: then y is still to be computed.
bool launch_matmul_dense(const Problem& p, const void* w, Sum sum, const std::function<void*(int64_t)>& scratch,
                         cudaStream_t stream);

}  // namespace nvfp4
