// The 16 bytes i of a tile of scales are those of rows i, i + 32, i + 64 and i + 96, four blocks of each: a lane that
// has one block column of these rows makes whole words with its three neighbours.
#pragma once

#include <cstdint>

namespace nvfp4 {

constexpr int kGroups = 4, kGroupRows = 32;  // rows per lane, and their distance

// Transposes 4 x 4 bytes among four neighbouring lanes: lane g gets byte g of each, the lowest lane's in the low byte.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t mine, uint32_t lane) {
  const uint32_t next = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  const uint32_t pairs = lane & 1 ? __byte_perm(next, mine, 0x7351) : __byte_perm(mine, next, 0x6240);
  const uint32_t far = __shfl_xor_sync(0xFFFFFFFFu, pairs, 2);
  return lane & 2 ? __byte_perm(far, pairs, 0x7632) : __byte_perm(pairs, far, 0x5410);
}

}  // namespace nvfp4
