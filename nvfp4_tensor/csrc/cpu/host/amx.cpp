// AMX's registers are 8 KiB of state a thread, which Linux saves only for processes that have asked for it.
#include "cpu/host/amx.h"

#if defined(NVFP4_HAS_AMX) && !defined(NVFP4_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace nvfp4 {
namespace {

constexpr unsigned kAmxBf16 = 1 << 22, kAmxTile = 1 << 24, kOsXsave = 1 << 27;  // of CPUID, leaves 7 and 1
constexpr uint32_t kTileState = 0b11 << 17;                                     // of XCR0: configuration and data
constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

bool is_there() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (kAmxBf16 | kAmxTile))) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (~low & kTileState) == 0;
}

}  // namespace

bool amx_is_granted() {
  static const bool granted = is_there() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace nvfp4
#elif defined(NVFP4_EMULATE_AMX)
namespace nvfp4 {
bool amx_is_granted() { return true; }
}  // namespace nvfp4
#else
namespace nvfp4 {
bool amx_is_granted() { return false; }
}  // namespace nvfp4
#endif
