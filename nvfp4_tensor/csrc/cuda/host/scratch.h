// Memory of torch's allocator that is not a tensor's, for what one op needs between its kernels: a tensor takes the
// host more than a microsecond.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

namespace nvfp4 {

// Of the current device and stream, as a std::function<void*(int64_t)>, once. Freed for what the stream does next.
class RawScratch {
 public:
  RawScratch() = default;
  RawScratch(const RawScratch&) = delete;
  ~RawScratch() {
    if (held_) aoti_torch_cuda_caching_allocator_raw_delete(held_);
  }
  void* operator()(int64_t bytes) {
    if (bytes == 0) return nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &held_));
    return held_;
  }

 private:
  void* held_ = nullptr;
};

}  // namespace nvfp4
