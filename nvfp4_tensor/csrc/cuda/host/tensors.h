// What the ops' registrations share: torch's tensors on CUDA by its stable ABI.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "arguments.h"
#include "cuda/host/kernels.h"

namespace nvfp4 {

// Makes the device of a tensor current, at no cost where it is already. The dispatcher comes here too where another
// argument alone is on CUDA.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t, const char* name = "x") {
    NVFP4_CHECK(t.is_cuda(), name, " is on the CPU and another argument on CUDA: move one to the other's device");
    int current = -1;
    cudaGetDevice(&current);
    if (current != t.get_device_index()) guard_.emplace(t.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

inline cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launched(const char* op) {
  const cudaError_t error = cudaGetLastError();
  NVFP4_CHECK(error != cudaErrorNoKernelImageForDevice, op,
              ": the library was built for other GPUs; with "
              "NVFP4_TENSOR_NATIVE=0 in the environment plain torch serves this one");
  NVFP4_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// The kernels count rows and columns in 32 bits.
struct CudaRows : Rows {
  explicit CudaRows(const Tensor& x) : Rows(x) {
    NVFP4_CHECK(matrix.rows < INT32_MAX && matrix.columns < INT32_MAX,
                "x has more than 2^31 - 1 rows or columns: split it");
  }
};

// Contiguous, on the device of `like`. On CUDA this is the dispatcher still: 0.8 us, and 0.2 to free it. Results in one
// allocation would take 5 of the 16 us of six results, but those of a functional op may not share a storage.
inline Tensor empty(const std::vector<int64_t>& shape, ScalarType type, const Tensor& like) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  contiguous_strides(shape).data(), dtype,
                                                  aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

// Codes and scales for the kernels that decode them. A block of codes has 8 bytes, so a view of whole rows always fits;
// those that load 16 bytes of codes look at the address themselves.
inline Tensor aligned_codes(const Tensor& qdata) { return aligned(qdata, kBlock / 2); }
inline Tensor aligned_scales(const Tensor& scale) { return aligned(scale, 16); }

}  // namespace nvfp4
