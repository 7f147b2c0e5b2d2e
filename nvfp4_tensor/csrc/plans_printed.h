// NVFP4_TENSOR_PRINT_PLANS=1 in the environment: each distinct product says once, in one line on stderr, which kernel
// serves it and why. Read once in a process; where it is not set a product asks one bool.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "numerics/matrix.h"

namespace nvfp4 {

inline const char* name_of(Dtype dtype) {
  return dtype == Dtype::kBf16 ? "bfloat16" : dtype == Dtype::kFp16 ? "float16" : "float32";
}

inline bool are_plans_printed() {
  static const bool are = [] {
    const char* value = std::getenv("NVFP4_TENSOR_PRINT_PLANS");
    return value && std::strcmp(value, "1") == 0;
  }();
  return are;
}

// `line` names the product, so one that was printed is not printed again.
inline void print_plan(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard lock(mutex);
  if (printed.insert(line).second) std::fprintf(stderr, "nvfp4_tensor: %s\n", line.c_str());
}

}  // namespace nvfp4
