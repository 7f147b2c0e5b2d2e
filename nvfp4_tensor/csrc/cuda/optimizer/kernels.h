// The launchers of nvfp4.adamw_step, adamw_step_codes and adamw_step_vector.
#pragma once

#include <cuda_runtime.h>

#include "numerics/adamw.h"

namespace nvfp4 {

void launch_adamw(const AdamwStep& step, cudaStream_t stream);
void launch_adamw_vector(const VectorStep& step, cudaStream_t stream);

}  // namespace nvfp4
