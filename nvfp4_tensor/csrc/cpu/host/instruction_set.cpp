// Which instruction set this process uses: the best that the machine has, or the one that NVFP4_TENSOR_ISA names.
#include "cpu/host/instruction_set.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/matmul/products.h"

#define NVFP4_COMPILED(isa)                                                               \
  namespace isa {                                                                         \
  extern const Kernels kKernels;                                                          \
  extern const ProductKernels kFloatProducts;                                             \
  extern const AttendKernels kAttendKernels;                                              \
  extern const RowKernels kRowKernels;                                                    \
  extern const OptimizerKernels kOptimizerKernels;                                        \
  constexpr CompiledKernels kCompiled = {#isa,           kKernels,    kFloatProducts,     \
                                         kAttendKernels, kRowKernels, kOptimizerKernels}; \
  }

namespace nvfp4 {

NVFP4_COMPILED(portable)
#if defined(__x86_64__)
NVFP4_COMPILED(avx2)
NVFP4_COMPILED(avx512)
#elif defined(__aarch64__)
NVFP4_COMPILED(neon)
#endif

namespace {

// Those that the machine has, the best first.
std::vector<InstructionSet> available() {
  std::vector<InstructionSet> out;
#if defined(NVFP4_EMULATE_AMX)
  out.push_back({"amx", portable::kCompiled, amx_products(), nullptr});
#endif
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi")) {
    if (const ProductKernels* bf16 = avx512_bf16_products()) {
#if !defined(NVFP4_EMULATE_AMX)
      if (const ProductKernels* amx = amx_products()) out.push_back({"amx", avx512::kCompiled, amx, nullptr});
#endif
      out.push_back({"avx512_bf16", avx512::kCompiled, bf16, nullptr});
    }
    out.push_back({"avx512", avx512::kCompiled, nullptr, nullptr});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    out.push_back({"avx2", avx2::kCompiled, nullptr, nullptr});
  }
#elif defined(__aarch64__)
  const ProductKernels *bf16 = neon_bf16_products(), *fp16 = neon_fp16_products();
  if (bf16) out.push_back({"neon_bf16", neon::kCompiled, bf16, fp16});
  out.push_back({"neon", neon::kCompiled, nullptr, fp16});
#endif
  out.push_back({"portable", portable::kCompiled, nullptr, nullptr});
  return out;
}

// The best, for an empty name; null where the machine or the build has none of that name.
const InstructionSet* named(const char* name) {
  static const std::vector<InstructionSet> all = available();
  for (const InstructionSet& each : all) {
    if (!*name || std::strcmp(each.name, name) == 0) return &each;
  }
  return nullptr;
}

std::atomic<const InstructionSet*>& current() {
  static std::atomic<const InstructionSet*> set{[] {
    const char* wanted = std::getenv("NVFP4_TENSOR_ISA");
    const InstructionSet* found = wanted ? named(wanted) : nullptr;
    return found ? found : named("");
  }()};
  return set;
}

}  // namespace

const InstructionSet& instruction_set() { return *current().load(std::memory_order_relaxed); }

}  // namespace nvfp4

extern "C" __attribute__((visibility("default"))) const char* nvfp4_cpu_isa() { return nvfp4::instruction_set().name; }

// 0 where the machine and the build have it.
extern "C" __attribute__((visibility("default"))) int nvfp4_cpu_set_isa(const char* name) {
  const nvfp4::InstructionSet* found = nvfp4::named(name);
  if (!found) return 1;
  nvfp4::current() = found;
  return 0;
}
