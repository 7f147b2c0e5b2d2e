// What the current device is, and how many thread blocks it takes.
#pragma once

#include <cstdint>

namespace nvfp4 {

struct Machine {
  int capability;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes;  // that a block may have
};
const Machine& this_machine();

// So many thread blocks a multiprocessor, but no more than there is work for, and at least one.
unsigned grid_of(int64_t blocks_per_sm, int64_t most);

}  // namespace nvfp4
