// What the current device is, and how many thread blocks it takes.
#pragma once

#include <cstdint>

namespace nvfp4 {

struct Machine {
  int capability;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes;  // that a block may have
};
// Limited by NVFP4_TENSOR_PRETEND where it is set, "capability=86,shared_bytes=101376,multiprocessors=82": plans and
// launches are then those of a smaller device. Nothing else asks CUDA for these limits.
const Machine& this_machine();

// Whether loads of 16 bytes, and TMA, take rows that begin at `data` and so many bytes apart.
inline bool on_16_bytes(const void* data, int64_t row_bytes = 0) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_bytes)) % 16 == 0;
}

// Lets a kernel have so much dynamic shared memory, if the device (or the one pretended) has it; else launches fail.
void allow_shared_bytes(const void* kernel, int bytes);

// So many thread blocks a multiprocessor, but no more than there is work for, and at least one.
unsigned grid_of(int64_t blocks_per_sm, int64_t most);

}  // namespace nvfp4
