// Prints a choice (NVFP4_TENSOR_PRINT_PLANS). No CUDA headers.
#pragma once

#include <cstdio>
#include <string>

#include "cuda/host/machine.h"
#include "cuda/matmul/choice.h"

namespace nvfp4 {

template <typename... Values>
std::string text_of(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// As in "many_rows_sm90:256x16:shared:permuted_in_copy".
inline std::string name_of(const costs::ManyRowsKernel& kernel) {
  const char* x = kernel.x == many_rows::X::kAsItLies         ? "as_it_lies"
                  : kernel.x == many_rows::X::kPermutedBefore ? "permuted_before"
                                                              : "permuted_in_copy";
  const char* tiles = kernel.tiles == many_rows::Tiles::kShared ? "shared" : "runs";
  return text_of("many_rows_sm90:%dx%d:%s:%s", kernel.rows, kernel.tokens, tiles, x);
}

inline std::string describe(const many_rows::PlannedKernel& planned, bool grouped) {
  const many_rows::Plan& plan = planned.plan;
  const std::string name = name_of(planned.its());
  if (grouped) return name + text_of(", at most %d tiles, which %d blocks divide", plan.tiling.tiles, plan.blocks);
  if (plan.sharers > 1) {
    return name + text_of(", split-K: %d tiles by %d blocks each", plan.tiling.tiles, plan.sharers);
  }
  if (plan.cut_tiles == 0) return name + text_of(", %d whole tiles on %d blocks", plan.whole_tiles, plan.blocks);
  const char* format = ", stream-K: %d whole tiles, %d cut into %d runs";
  return name + text_of(format, plan.whole_tiles, plan.cut_tiles, plan.blocks);
}

inline std::string describe_few_rows(const ProductSize& size, const Fits& fits, const Machine& machine) {
  const char* parts = size.M > 16 ? ", 16 rows of x at a time" : "";
  if (!fits.few_rows_sm90) return text_of("few_rows%s", parts);
  const bool is_long = size.M <= 8 && !few_rows_sm90::are_slices_short(size, machine.multiprocessors);
  const few_rows_sm90::Split split = few_rows_sm90::Split::of(
      size.K, is_long ? few_rows_sm90::kSliceOf8Rows : few_rows_sm90::kSliceOf16Rows);
  return text_of("few_rows_sm90, split-K over %d blocks of %d warps%s", split.cluster, split.warps_in_k, parts);
}

// The costs that decided, in cycles.
inline std::string describe_costs(const Choice& choice) {
  std::string text;
  const auto add = [&](const std::string& name, int64_t cost) {
    text += (text.empty() ? "; cycles: " : ", ") + name + text_of(" %lld", static_cast<long long>(cost));
  };
  if (choice.many_rows.kernel >= 0) add(name_of(choice.many_rows.its()), choice.many_rows.plan.cost);
  if (choice.few_rows_cost >= 0) add("few_rows_sm90", choice.few_rows_cost);
  if (choice.decoded_cost >= 0) add("decoded", choice.decoded_cost);
  return text;
}

inline std::string describe(const ProductSize& size, const char* dtype, const Machine& machine) {
  const std::string experts = size.experts > 1 || size.grouped ? text_of("%d, ", size.experts) : "";
  const std::string x = size.grouped ? text_of("(%d, %d)", size.rows, size.K)
                                     : "(" + experts + text_of("%d, %d)", size.M, size.K);
  return "x " + x + " " + dtype + ", w (" + experts + text_of("%d, %d)", size.N, size.K) +
         text_of(", sm_%d with %d multiprocessors", machine.capability, machine.multiprocessors);
}

// One line: the product, its kernel, why, and the costs that decided.
inline std::string describe(const Choice& choice, const ProductSize& size, const Fits& fits, const char* dtype,
                            const Machine& machine) {
  const std::string kernel = choice.family == KernelFamily::kManyRows  ? describe(choice.many_rows, size.grouped)
                             : choice.family == KernelFamily::kFewRows ? describe_few_rows(size, fits, machine)
                                                                       : "decoded, then a dense product";
  const std::string product = size.grouped ? "nvfp4.grouped_linear " : "nvfp4.matmul ";
  return product + describe(size, dtype, machine) + ": " + kernel + " (" + choice.why + ")" + describe_costs(choice);
}

}  // namespace nvfp4
