// What of a product its plan depends on, and nothing of CUDA: tests compile this and the plans for the host.
#pragma once

#include <cstdint>

namespace nvfp4 {

// x (rows, K) times w (experts * N, K) transposed. Of groups, whose sizes only the device knows, M is 0; of others each
// expert has M rows of x.
struct ProductSize {
  int experts, M, N, K;
  int rows;  // of x over all experts
  bool grouped;

  // Tiles of so many tokens; of groups as many as there can be, the last of each expert not whole.
  int token_tiles(int tokens) const {
    if (!grouped) return (M + tokens - 1) / tokens;
    return rows / tokens + (experts < rows ? experts : rows);
  }
};

constexpr int ceil_quotient(int a, int b) { return (a + b - 1) / b; }

}  // namespace nvfp4
