// Codes of a cache in NVFP4 as the CPU kernels take them.
#pragma once

#include "attention.h"
#include "cpu/attention/kernels.h"

namespace nvfp4 {

// The first token of head `row` of all (batch, heads).
inline Stretch stretch_of(const CodedHeads& heads, int64_t row) {
  const int64_t token = row * heads.capacity;
  Stretch s;
  s.codes = heads.codes + token * heads.blocks * 8, s.scales = heads.scales + token * heads.blocks;
  s.factors = heads.factors + token;
  return s;
}

}  // namespace nvfp4
