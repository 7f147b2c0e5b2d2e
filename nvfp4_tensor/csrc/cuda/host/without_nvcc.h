// What the plain headers of plans (cuda/matmul/*/plan.h, runs.h) take from nvcc, for programs that another compiler
// builds: a test sets blockIdx and gridDim, and walks through each block's work. Included before them.
#pragma once

#ifndef __CUDACC__

#include <algorithm>

#define __device__
struct float4;
inline struct {
  unsigned x;
} blockIdx, gridDim;
using std::max;
using std::min;

#endif
