// What this AArch64 CPU has beyond NEON.
#pragma once

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace nvfp4 {

struct ArmFeatures {
  bool bf16;  // products of bfloat16 (BFDOT, BFMMLA)
  bool fhm;   // of float16, summed in float32 (FMLAL)
};

inline ArmFeatures arm_features() {
#if defined(__linux__)
  // The bits of HWCAP2_BF16 and HWCAP_ASIMDFHM, which older headers do not name.
  return {(getauxval(AT_HWCAP2) >> 14 & 1) != 0, (getauxval(AT_HWCAP) >> 23 & 1) != 0};
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return {has("hw.optional.arm.FEAT_BF16"), has("hw.optional.arm.FEAT_FHM")};
#else
  return {false, false};
#endif
}

}  // namespace nvfp4
#endif
