// Which instruction set this process uses: the best that the machine has, or the one that NVFP4_TENSOR_ISA names.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cpu/host/kernels.h"

namespace nvfp4 {
namespace {

const Kernels* named(const char* name) {
  const Kernels* all[] = {amx_kernels(),       avx512_bf16_kernels(), avx512_kernels(),   avx2_kernels(),
                          neon_bf16_kernels(), neon_kernels(),        &portable_kernels()};
  for (const Kernels* k : all) {
    if (k && (!*name || std::strcmp(k->name, name) == 0)) return k;
  }
  return nullptr;
}

const Kernels* initial() {
  const char* wanted = std::getenv("NVFP4_TENSOR_ISA");
  const Kernels* found = wanted ? named(wanted) : nullptr;
  return found ? found : named("");
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> kernels{initial()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

}  // namespace nvfp4

extern "C" __attribute__((visibility("default"))) const char* nvfp4_cpu_isa() { return nvfp4::kernels().name; }

// 0 where the machine and the build have it.
extern "C" __attribute__((visibility("default"))) int nvfp4_cpu_set_isa(const char* name) {
  const nvfp4::Kernels* found = nvfp4::named(name);
  if (!found) return 1;
  nvfp4::current() = found;
  return 0;
}
