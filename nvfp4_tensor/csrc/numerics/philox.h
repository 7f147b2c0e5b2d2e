// The random bits of stochastic rounding (numerics contract, section 4): Philox-4x32 with 7 rounds, one call a block.
#pragma once

#include "platform.h"

namespace nvfp4 {

struct Words4 {
  uint32_t word[4];
};

// All 64 bits of a product. Written out for the device, since nvcc adds zeros to the upper word of the C++ form.
NVFP4_HD uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

NVFP4_HD Words4 philox4x32_7(uint32_t key0, uint32_t key1, Words4 counter) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = wide_product(c0, 0xD2511F53u);
    const uint64_t product1 = wide_product(c2, 0xCD9E8D57u);
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a call's random bits depend on, in addition to the block number: rng_state = (seed, offset), and the stream.
struct RandomKey {
  uint32_t seed_low, seed_high, offset, stream;

  NVFP4_HD static RandomKey of(int64_t seed, int64_t offset, int stream) {
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32),
            static_cast<uint32_t>(offset), static_cast<uint32_t>(stream)};
  }

  // block = logical row * ceil(full width / 16) + column / 16.
  NVFP4_HD Words4 block_words(uint64_t block) const {
    const Words4 counter = {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), offset, stream}};
    return philox4x32_7(seed_low, seed_high, counter);
  }
};

// The 16 bits of element 0..15: bits [8e, 8e + 16) of the words, word 0 lowest, cyclic.
NVFP4_HD uint32_t random16(const Words4& words, int element) {
  const uint32_t low = words.word[element / 4], high = words.word[(element / 4 + 1) % 4];
  const int shift = 8 * (element % 4);
  return (shift == 24 ? low >> 24 | high << 8 : low >> shift) & 0xFFFFu;
}

}  // namespace nvfp4
