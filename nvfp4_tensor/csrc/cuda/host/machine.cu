#include "cuda/host/machine.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace nvfp4 {

namespace {

// Limits that a build or the environment sets below those of the device. A library of older code than the device's
// (-DNVFP4_CUDA_ARCHS=80on90) has no clusters and no PDL.
Machine most() {
#if defined(NVFP4_CODE_OF)
  Machine limits{NVFP4_CODE_OF, INT32_MAX, INT32_MAX};
#else
  Machine limits{INT32_MAX, INT32_MAX, INT32_MAX};
#endif
  const char* pretended = std::getenv("NVFP4_TENSOR_PRETEND");
  if (pretended == nullptr) return limits;
  const auto lower = [=](const char* name, int& limit) {
    const char* found = std::strstr(pretended, name);
    if (found) limit = std::min(limit, std::max(std::atoi(found + std::strlen(name)), 1));
  };
  lower("capability=", limits.capability);
  lower("multiprocessors=", limits.multiprocessors);
  lower("shared_bytes=", limits.shared_bytes);
  return limits;
}

}  // namespace

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
    static const Machine limits = most();
    machine.capability = std::min(10 * major + minor, limits.capability);
    machine.multiprocessors = std::min(machine.multiprocessors, limits.multiprocessors);
    machine.shared_bytes = std::min(machine.shared_bytes, limits.shared_bytes);
    known = device;
  }
  return machine;
}

void allow_shared_bytes(const void* kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       std::min(bytes, this_machine().shared_bytes));
}

unsigned grid_of(int64_t blocks_per_sm, int64_t most) {
  return static_cast<unsigned>(std::max<int64_t>(std::min(this_machine().multiprocessors * blocks_per_sm, most), 1));
}

}  // namespace nvfp4
