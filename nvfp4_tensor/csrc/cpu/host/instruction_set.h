// What is compiled for an instruction set, and the set that this process uses.
#pragma once

#include "cpu/host/kernels.h"

namespace nvfp4 {

struct ProductKernels;
struct AttendKernels;
struct RowKernels;
struct OptimizerKernels;

// The kernels.cpp of each family, compiled with the flags of one instruction set.
struct CompiledKernels {
  const char* name;
  const Kernels& quantize;
  const ProductKernels& products;
  const AttendKernels& attend;
  const RowKernels& rows;
  const OptimizerKernels& optimizer;
};

// An instruction set by the name that a user gives it: compiled kernels, and products that some of its CPUs add to
// them.
struct InstructionSet {
  const char* name;
  const CompiledKernels& compiled;
  const ProductKernels *bf16, *fp16;  // for x in these dtypes; null: none
};

const InstructionSet& instruction_set();
inline const Kernels& kernels() { return instruction_set().compiled.quantize; }

}  // namespace nvfp4
