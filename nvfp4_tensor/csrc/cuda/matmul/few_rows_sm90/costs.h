// What Hopper's few-rows kernel takes for 9 to 16 rows of x, in cycles (cuda/matmul/costs.h). Fitted to 20 weights by
// 9, 12 and 16 rows: what is chosen by it is 0.2 % slower than the faster of the two kernels in the mean, 5 % at most.
#pragma once

#include "cuda/matmul/costs.h"

namespace nvfp4 {
namespace costs {

inline constexpr int kFewCycles = 2500;           // a launch in a chain, and its end
inline constexpr int kFewTileCycles = 2900;       // 16 rows of w by what 16 warps have of K
inline constexpr int kFewXPerKilocycle = 62'000;  // elements of x, which every block reads ahead of w

}  // namespace costs
}  // namespace nvfp4
