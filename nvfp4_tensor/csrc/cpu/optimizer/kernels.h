// An AdamW step on moments of four bits: a table of functions per instruction set.
#pragma once

#include "cpu/host/kernels.h"
#include "numerics/adamw.h"

namespace nvfp4 {

struct OptimizerKernels {
  // Blocks [begin, end) of the parameter, row by row; begin is a multiple of kGroupBlocks.
  void (*step)(const AdamwStep&, int64_t begin, int64_t end);
};

}  // namespace nvfp4
