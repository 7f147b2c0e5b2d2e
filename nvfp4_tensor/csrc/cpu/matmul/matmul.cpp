// nvfp4.matmul on the CPU: it checks arguments, chooses a kernel and divides the work among torch's threads.
#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"
#include "cpu/matmul/products.h"
#include "ops.h"
#include "plans_printed.h"

namespace nvfp4 {
namespace {

constexpr int64_t kProductsPerThread = 1 << 17;  // at one row of x about 5 us: less is not worth a second thread

// --- which kernel ----------------------------------------------------------------------------------------------------

// Returns false where x has numbers that this kernel does not support.
bool multiply(const ProductKernel& kernel, const Product& p) {
  const int64_t workers = p.workers;
  const AlignedFloats packed = allocate(kernel.packed_words(p)), scratch = allocate(workers * kernel.scratch_words);
  Claims packing(kernel.pack_units(p), workers), multiplying(kernel.units(p), workers);
  std::atomic<unsigned> range{0};
  const auto work = [&](int64_t worker, int64_t) {
    packing.run(worker, [&](int64_t begin, int64_t end) { range |= kernel.pack(p, packed.get(), begin, end); });
    packing.wait();
    if (range & kernel.refuses) return;
    float* own = scratch.get() + worker * kernel.scratch_words;
    multiplying.run(worker, [&](int64_t begin, int64_t end) { kernel.multiply(p, packed.get(), own, begin, end); });
  };
  parallel(workers, 1, work);
  return !(range & kernel.refuses);
}

struct NamedKernel {
  const ProductKernel& kernel;
  const char* name;
  const char* why;

  static NamedKernel of(const ProductKernels& kernels, const Product& p) {
    if (p.transposed) return {kernels.across, "across", "x w, across the rows of w"};
    if (p.x_rows <= kernels.most_few_rows) return {kernels.few, "few", "few rows of x"};
    return {kernels.many, "many", "many rows of x"};
  }
};

// The line of NVFP4_TENSOR_PRINT_PLANS.
std::string describe(const Product& p, const NamedKernel& chosen, const char* instructions) {
  const std::string experts = p.batches > 1 ? std::to_string(p.batches) + ", " : "";
  const auto shape = [&](int64_t rows, int64_t columns) {
    return "(" + experts + std::to_string(rows) + ", " + std::to_string(columns) + ")";
  };
  return "nvfp4.matmul x " + shape(p.x_rows, p.depth()) + " " + name_of(p.x_dtype) + ", w " + shape(p.rows, p.columns) +
         ", cpu: " + chosen.name + " of " + instructions + ", " + std::to_string(p.workers) + " threads (" +
         chosen.why + ")";
}

bool multiply(const NamedKernel& chosen, const Product& p, const char* instructions) {
  if (!multiply(chosen.kernel, p)) return false;
  if (are_plans_printed()) print_plan(describe(p, chosen, instructions));
  return true;
}

void multiply(const Product& p) {
  const InstructionSet& set = instruction_set();
  const bool is_bf16 = p.x_dtype == Dtype::kBf16, is_fp16 = p.x_dtype == Dtype::kFp16;
  const ProductKernels *narrow = is_bf16 ? set.bf16 : is_fp16 ? set.fp16 : nullptr, &wide = set.compiled.products;
  const char* narrow_name = is_bf16 ? set.name : "neon_fp16";
  if (narrow && !p.summand_factors && multiply(NamedKernel::of(*narrow, p), p, narrow_name)) return;
  if (multiply(NamedKernel::of(wide, p), p, set.compiled.name)) return;
  multiply({wide.many, "many", "the few rows would overflow before their block scales"}, p, set.compiled.name);
}

// --- arguments -------------------------------------------------------------------------------------------------------

// bias: contiguous, broadcast to y of this shape.
void set_bias(const Tensor& bias, const std::vector<int64_t>& shape, Product& p) {
  const int64_t dims = int64_t(shape.size()), missing = dims - bias.dim();
  NVFP4_CHECK(missing >= 0 && dims <= kMostDims, "bias has more dimensions than the product");
  p.bias = static_cast<const float*>(bias.const_data_ptr());
  int64_t repeat = 1, stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    const int64_t size = i < missing ? 1 : bias.size(i - missing);
    NVFP4_CHECK(size == 1 || size == shape[i], "bias of size ", size, " in dimension ", i,
                " does not broadcast to a product of size ", shape[i]);
    const int64_t step = size == 1 ? 0 : stride;
    stride *= size;
    if (i == dims - 1) {
      p.bias_step = step;
      continue;
    }
    if (step) {
      const int at = p.bias_rows.dims++;
      p.bias_rows.repeat[at] = repeat;
      p.bias_rows.size[at] = size;
      p.bias_rows.stride[at] = step;
    }
    repeat *= shape[i];
  }
}

Product describe(const Tensor& x, const Tensor& qdata, const Tensor& scale, int64_t columns, bool transposed) {
  const int64_t dims = qdata.dim();
  NVFP4_CHECK(dims == 2 || dims == 3, "qdata must be (N, K/2) or (E, N, K/2), not ", text_of(qdata));
  check_beside(qdata, "qdata", x);
  Product p{};
  p.blocks = check_coded(qdata, scale, columns).blocks;
  p.batches = dims == 3 ? qdata.size(0) : 1;
  p.rows = qdata.size(dims - 2);
  p.columns = columns;
  p.column_tiles = scale.size(1);
  p.transposed = transposed;
  NVFP4_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == p.depth(), "x must have ", p.depth(),
              " columns to be multiplied with this weight");
  NVFP4_CHECK(dims == 2 || (x.dim() == 3 && x.size(0) == p.batches), "x must be (", p.batches,
              ", M, K): as many matrices as the weight has");
  p.x_rows = 1;
  for (int64_t i = dims == 3 ? 1 : 0; i + 1 < x.dim(); ++i) p.x_rows *= x.size(i);
  return p;
}

}  // namespace

namespace ops {

Tensor matmul(const Tensor& x_given, OptionalTensor x_scale, const Tensor& qdata, const Tensor& scale,
              const Tensor& per_tensor_scale, OptionalTensor bias, int64_t columns, bool transposed,
              ScalarType out_dtype) {
  if (!is_native(out_dtype)) {
    return torch::stable::to(
        matmul(x_given, x_scale, qdata, scale, per_tensor_scale, bias, columns, transposed, ScalarType::Float),
        out_dtype);
  }
  Product p = describe(x_given, qdata, scale, columns, transposed);
  const Tensor x = contiguous_as(x_given, is_native(x_given.scalar_type()) ? x_given.scalar_type() : ScalarType::Float);
  const Tensor codes = in_order(qdata), scales = in_order(scale);
  p.qdata = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  p.x = x.const_data_ptr();
  p.x_dtype = dtype_of(x.scalar_type(), "x");

  const Tensor factors = factors_of(per_tensor_scale, "per_tensor_scale", p.batches * p.rows, x);
  const float* factor_data = static_cast<const float*>(factors.const_data_ptr());
  const bool factor_a_row = per_tensor_scale.dim() != 0 && factors.numel() != 1;
  (factor_a_row && transposed ? p.summand_factors : p.factors) = factor_data;
  p.factor_step = factor_a_row;
  std::optional<Tensor> x_factors, wide_bias;
  if (x_scale.has_value()) {
    x_factors = factors_of(*x_scale, "x_scale", p.batches * p.x_rows, x);
    p.x_scale = static_cast<const float*>(x_factors->const_data_ptr());
    p.x_scale_step = x_factors->numel() != 1;
  }
  const std::vector<int64_t> shape = with_last(x, p.width());
  if (bias.has_value()) {
    check_beside(*bias, "bias", x);
    wide_bias = contiguous_as(*bias, ScalarType::Float);
    set_bias(*wide_bias, shape, p);
  }
  const int64_t products = p.batches * p.x_rows * p.rows * p.columns;
  p.workers = std::clamp<int64_t>(products / kProductsPerThread, 1, torch::stable::get_num_threads());
  Tensor out = empty(shape, out_dtype);
  p.out = out.mutable_data_ptr();
  p.out_dtype = dtype_of(out_dtype, "out_dtype");
  if (out.numel()) multiply(p);
  return out;
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("matmul", TORCH_BOX(&ops::matmul)); }

}  // namespace nvfp4
