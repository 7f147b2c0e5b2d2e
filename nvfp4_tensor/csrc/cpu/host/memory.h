// New CPU tensors, aligned memory for intermediate results, and torch's threads.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "arguments.h"

namespace nvfp4 {

// The system maps new memory page by page, which costs more than the arithmetic: one thread decodes 4096^2 to
// bfloat16 in 14.4 ms onto pages of 4 KiB, in 4.4 ms onto pages of 2 MiB, where the system grants them.
constexpr size_t kHugePageBytes = 2 << 20;

inline void ask_for_huge_pages(const torch::stable::Tensor& t) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = (begin + t.numel() * t.element_size()) / kHugePageBytes * kHugePageBytes;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)t;
#endif
}

// Bypasses the dispatcher: torch::stable::new_empty would take a third of a small quantize's time.
inline torch::stable::Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType type) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(shape.size()), shape.data(), contiguous_strides(shape).data(),
                                                  dtype, aoti_torch_device_type_cpu(), 0, &handle));
  const torch::stable::Tensor out(handle);
  ask_for_huge_pages(out);
  return out;
}

inline torch::stable::Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType type,
                                   const torch::stable::Tensor&) {
  return empty(shape, type);
}

// f(begin, end) of units [0, count), at least `grain` at a time among torch's threads; so few are not worth a second.
template <typename Function>
void parallel(int64_t count, int64_t grain, Function f) {
  if (count <= 0) return;
  if (count <= grain) return f(0, count);
  torch::stable::parallel_for(0, count, grain, f);
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float[], Free>;

inline AlignedFloats allocate(int64_t words) {
  void* p = std::aligned_alloc(64, std::max<int64_t>(1, ceil_div(words, 16)) * 64);
  NVFP4_CHECK(p != nullptr, "out of memory");
  return AlignedFloats(static_cast<float*>(p));
}

}  // namespace nvfp4
