// The launcher of nvfp4.adamw_step.
#pragma once

#include <cuda_runtime.h>

#include "numerics/adamw.h"

namespace nvfp4 {

void launch_adamw(const AdamwStep& step, cudaStream_t stream);

}  // namespace nvfp4
