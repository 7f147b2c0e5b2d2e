// What the ops' registrations share: torch's tensors by its stable ABI, and checks of them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels.h"

namespace nvfp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Makes the device of a tensor current, at no cost where it is already.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) {
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
  STD_TORCH_CHECK(error != cudaErrorNoKernelImageForDevice, op, ": the library was built for other GPUs; with "
                  "NVFP4_TENSOR_NATIVE=0 in the environment plain torch serves this one");
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

inline bool is_native(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
}

inline Dtype dtype_of(ScalarType type, const char* name) {
  STD_TORCH_CHECK(is_native(type), name,
                  " must be bfloat16, float16 or float32; cast it, for example with .to(torch.bfloat16)");
  return type == ScalarType::BFloat16 ? Dtype::kBf16 : type == ScalarType::Half ? Dtype::kFp16 : Dtype::kFloat;
}

inline int64_t leading_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

// A tensor (..., K) as rows of K with last stride 1: itself where it is (2-D with strided rows, or contiguous), else a
// copy.
struct Rows {
  Tensor held;
  Matrix matrix;

  explicit Rows(const Tensor& x) : held(x) {
    STD_TORCH_CHECK(x.dim() >= 1, "x must have at least one dimension");
    const Dtype dtype = dtype_of(x.scalar_type(), "x");
    const bool strided_rows = x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1) && x.stride(0) >= x.size(1);
    if (!strided_rows && !x.is_contiguous()) held = torch::stable::contiguous(x);
    const int64_t columns = x.size(x.dim() - 1), rows = leading_rows(x);
    const int64_t row_stride = strided_rows && rows > 1 ? x.stride(0) : columns;
    STD_TORCH_CHECK(rows < INT32_MAX && columns < INT32_MAX, "x has more than 2^31 - 1 rows or columns: split it");
    matrix = {held.const_data_ptr(), rows, columns, row_stride, dtype};
  }
};

// Contiguous, on the device of `like`. On CUDA this is the dispatcher still: 0.8 us, and 0.2 to free it. Results in one
// allocation would take 5 of the 16 us of six results, but those of a functional op may not share a storage.
inline Tensor empty(const std::vector<int64_t>& shape, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), dtype, aoti_torch_device_type_cuda(),
                                                         like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

}  // namespace nvfp4
