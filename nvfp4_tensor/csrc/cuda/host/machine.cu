#include "cuda/host/machine.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace nvfp4 {

const Machine& this_machine() {
  thread_local Machine machine;
  thread_local int known = -1;
  int device = 0;
  cudaGetDevice(&device);
  if (known != device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&machine.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&machine.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    machine.capability = 10 * major + minor;
    known = device;
  }
  return machine;
}

unsigned grid_of(int64_t blocks_per_sm, int64_t most) {
  return static_cast<unsigned>(std::max<int64_t>(std::min(this_machine().multiprocessors * blocks_per_sm, most), 1));
}

}  // namespace nvfp4
