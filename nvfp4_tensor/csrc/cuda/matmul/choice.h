// Chooses the kernel family for a product of dense x and NVFP4 w on CUDA, and says why. No CUDA headers, so that a test
// can choose for machines that it does not run on.
#pragma once

#include <cstdint>

#include "cuda/matmul/costs.h"
#include "cuda/matmul/few_rows_sm90/plan.h"
#include "cuda/matmul/many_rows_sm90/plan.h"
#include "cuda/matmul/size.h"

namespace nvfp4 {

enum class KernelFamily { kFewRows, kManyRows, kDecoded };

struct Choice {
  KernelFamily family;
  const char* why;
  many_rows::PlannedKernel many_rows{{}, -1};     // kernel -1: not asked for
  int64_t few_rows_cost = -1, decoded_cost = -1;  // in cycles; -1: not asked for

  int64_t cost() const {
    return family == KernelFamily::kFewRows   ? few_rows_cost
           : family == KernelFamily::kDecoded ? decoded_cost
                                              : many_rows.plan.cost;
  }
};

// Which kernels support the problem's alignment and dtypes.
struct Fits {
  bool many_rows, few_rows_sm90;
};

// Decoding w, then cuBLASLt: tiles in waves, of the best of a few sizes.
inline int64_t decoded_cost(const ProductSize& size, int multiprocessors) {
  const int64_t M = size.M, N = size.N, K = size.K;
  double least = 1e18;
  for (const auto& tile : costs::kDenseTiles) {
    const int64_t tiles = (N + tile.rows - 1) / tile.rows * ((M + tile.tokens - 1) / tile.tokens);
    const int64_t waves = (tiles + multiprocessors - 1) / multiprocessors;
    const double cycles = waves * tile.factor * K * tile.rows * tile.tokens / 2048;
    if (cycles < least) least = cycles;
  }
  return static_cast<int64_t>(least) + costs::kDecodeCycles + N * K * 1000 / costs::kDecodedPerKilocycle;
}

// 9 to 16 rows of x, which both kernels support.
inline Choice choose_few_or_many(const ProductSize& size, const Fits& fits, int multiprocessors) {
  if (!fits.few_rows_sm90) {
    const bool is_large = static_cast<int64_t>(size.N) * size.K > costs::kLargestUneven;
    if (is_large) return {KernelFamily::kFewRows, "9 to 16 rows of x, and a large w"};
    return {KernelFamily::kManyRows, "9 to 16 rows of x, and a w that Hopper's few-rows kernel does not take",
            many_rows::best_plan(size, multiprocessors)};
  }
  Choice choice{KernelFamily::kFewRows, "9 to 16 rows of x, by cost", many_rows::best_plan(size, multiprocessors)};
  choice.few_rows_cost = few_rows_sm90::cost(size, multiprocessors);
  if (choice.many_rows.its().tokens != 16) {  // wider tiles were not measured beside few rows
    choice.why = "9 to 16 rows of x, and no room for tiles of 16";
  } else if (choice.many_rows.plan.cost < choice.few_rows_cost) {
    choice.family = KernelFamily::kManyRows;
  }
  return choice;
}

// fits_dense(): whether cuBLASLt serves; asked only where decoding is cheaper.
template <typename FitsDense>
Choice choose(const ProductSize& size, const Fits& fits, int multiprocessors, FitsDense fits_dense) {
  if (size.M <= costs::kMostRowsByMma) return {KernelFamily::kFewRows, "at most 8 rows of x, the columns of an mma"};
  if (!fits.many_rows) {
    const char* why = "no wgmma: not a Hopper, or codes and scales not aligned to 16 bytes";
    return {size.M <= costs::kMostFewRows ? KernelFamily::kFewRows : KernelFamily::kDecoded, why};
  }
  if (size.M <= costs::kMostRowsOfFewRows) return choose_few_or_many(size, fits, multiprocessors);
  Choice choice{KernelFamily::kManyRows, "more than 16 rows of x", many_rows::best_plan(size, multiprocessors)};
  if (size.M >= costs::kFewestRowsDecoded && static_cast<int64_t>(size.N) * size.K <= costs::kLargestDecoded) {
    choice.decoded_cost = decoded_cost(size, multiprocessors);
    choice.why = "many rows of x and a small w, by cost";
    if (choice.decoded_cost < choice.many_rows.plan.cost) {
      if (fits_dense()) choice.family = KernelFamily::kDecoded;
      else choice.why = "many rows of x and a small w; decoding is cheaper, but cuBLASLt does not serve";
    }
  }
  return choice;
}

}  // namespace nvfp4
