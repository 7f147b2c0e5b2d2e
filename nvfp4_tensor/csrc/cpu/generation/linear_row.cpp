// nvfp4.linear_row on the CPU: a dense output layer for one token of each text.
#include "cpu/generation/blocks.h"
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"

namespace nvfp4 {

namespace {

constexpr int64_t kHeadRows = 64;  // of a dense output layer, a unit of work

Tensor linear_row(const Tensor& x, const Tensor& w) {
  NVFP4_CHECK(w.dim() == 2 && w.size(1) % kDenseStep == 0, "w must be (N, K), K a multiple of ", kDenseStep, ", not ",
              text_of(w));
  const int64_t rows = w.size(0), size = w.size(1);
  NVFP4_CHECK(x.dim() == 2, "x must be (B, ", size, "), not ", text_of(x));
  const Bf16 *from = row_of(x, "x", x.size(0) * size), *weight = row_of(w, "w", rows * size);
  Tensor y = empty({x.size(0), rows}, ScalarType::BFloat16);
  const DenseProduct product{from, weight, nullptr, x.size(0), rows, size, static_cast<Bf16*>(y.mutable_data_ptr())};
  const RowKernels& kernels = instruction_set().compiled.rows;
  const int64_t workers = torch::stable::get_num_threads();
  Claims claims(ceil_div(rows, kHeadRows), workers);
  const auto work = [&](int64_t worker, int64_t) {
    claims.run(worker, [&](int64_t begin, int64_t end) {
      kernels.multiply(product, begin * kHeadRows, std::min(rows, end * kHeadRows));
    });
  };
  parallel(workers, 1, work);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("linear_row", TORCH_BOX(&linear_row)); }

}  // namespace nvfp4
