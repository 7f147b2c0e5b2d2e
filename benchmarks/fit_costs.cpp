// The cost model of products on Hopper, asked line by line: what benchmarks/fit_costs.py compiles and drives.
//
//   constants                   each constant: name, value; then an empty line
//   kernels                     each name that NVFP4_TENSOR_FORCE_KERNEL takes; then an empty line
//   set NAME VALUE              changes a constant
//   choice M N K BLOCKS         name and cycles of what serves on so many multiprocessors, by the constants as they are
//   cost KERNEL M N K BLOCKS    cycles; "none" where the kernel does not take the product
#include "cuda/host/without_nvcc.h"

#define NVFP4_COST inline
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <type_traits>

#include "cuda/matmul/describe.h"

using namespace nvfp4;

namespace {

struct Constant {
  std::function<double()> get;
  std::function<void(double)> set;

  template <typename T>
  static Constant of(T& constant) {
    return {
        [&constant] { return static_cast<double>(constant); },
        [&constant](double value) { constant = static_cast<T>(std::is_integral_v<T> ? std::llround(value) : value); }};
  }
};

std::map<std::string, Constant> all_constants() {
  std::map<std::string, Constant> all = {
      {"kDecodeCycles", Constant::of(costs::kDecodeCycles)},
      {"kDecodedPerKilocycle", Constant::of(costs::kDecodedPerKilocycle)},
      {"kFewCycles", Constant::of(costs::kFewCycles)},
      {"kFewTileCycles", Constant::of(costs::kFewTileCycles)},
      {"kFewXPerKilocycle", Constant::of(costs::kFewXPerKilocycle)},
      {"kWaitCycles", Constant::of(costs::kWaitCycles)},
      {"kSumsPerCycle", Constant::of(costs::kSumsPerCycle)},
      {"kWriteCycles", Constant::of(costs::kWriteCycles)},
      {"kMissedPerCycle", Constant::of(costs::kMissedPerCycle)},
      {"kShareCycles", Constant::of(costs::kShareCycles)},
      {"kSharedSumsPerCycle", Constant::of(costs::kSharedSumsPerCycle)},
      {"kPermuteCycles", Constant::of(costs::kPermuteCycles)},
      {"kPermutedPerCycle", Constant::of(costs::kPermutedPerCycle)},
  };
  for (costs::ManyRowsKernel& kernel : costs::kManyRowsKernels) {
    all.emplace("stage_cycles:" + name_of(kernel), Constant::of(kernel.stage_cycles));
  }
  return all;
}

// Cycles, or -1 where the kernel does not take the product.
int64_t cost_of(const std::string& kernel, const ProductSize& size, int blocks) {
  const std::optional<Forced> forced = forced_of(kernel);
  if (!forced) return -1;
  if (forced->family == KernelFamily::kDecoded) return decoded_cost(size, blocks);
  if (forced->family == KernelFamily::kFewRows) {
    const bool is_modelled = size.M > costs::kMostRowsByMma && size.M <= costs::kMostRowsOfFewRows;
    return is_modelled ? few_rows_sm90::cost(size, blocks) : -1;
  }
  const std::optional<Choice> choice = choose_forced(*forced, size, {true, true}, blocks);
  return choice ? choice->many_rows.plan.cost : -1;
}

std::string kernel_of(const Choice& choice) {
  if (choice.family == KernelFamily::kManyRows) return name_of(choice.many_rows.its());
  return choice.family == KernelFamily::kFewRows ? "few_rows" : "decoded";
}

ProductSize read_size(int& blocks) {
  ProductSize size{};
  std::cin >> size.M >> size.N >> size.K >> blocks;
  size.experts = 1, size.rows = size.M;
  return size;
}

void print_cost(int64_t cost) {
  if (cost < 0) std::cout << "none" << std::endl;
  else std::cout << cost << std::endl;
}

}  // namespace

int main() {
  const std::map<std::string, Constant> constants = all_constants();
  std::string command, name;
  double value = 0;
  int blocks = 0;
  while (std::cin >> command) {
    if (command == "constants") {
      for (const auto& [constant, its] : constants) std::cout << constant << " " << its.get() << "\n";
      std::cout << std::endl;
    } else if (command == "kernels") {
      std::cout << "few_rows\ndecoded\n";
      for (const costs::ManyRowsKernel& kernel : costs::kManyRowsKernels) std::cout << name_of(kernel) << "\n";
      std::cout << std::endl;
    } else if (command == "set") {
      std::cin >> name >> value;
      constants.at(name).set(value);
    } else if (command == "choice") {
      const ProductSize size = read_size(blocks);
      const std::string kernel = kernel_of(choose(size, {true, true}, blocks, [] { return true; }));
      std::cout << kernel << " ";
      print_cost(cost_of(kernel, size, blocks));
    } else if (command == "cost") {
      std::cin >> name;
      const ProductSize size = read_size(blocks);
      print_cost(cost_of(name, size, blocks));
    }
  }
}
