// nvfp4.linear_row on the CPU: a dense output layer for one token.
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
  const Bf16 *from = row_of(x, "x", size), *weight = row_of(w, "w", rows * size);
  Tensor y = empty({1, rows}, ScalarType::BFloat16);
  Bf16* out = static_cast<Bf16*>(y.mutable_data_ptr());
  const RowKernels& kernels = instruction_set().compiled.rows;
  const int64_t workers = torch::stable::get_num_threads();
  Claims claims(ceil_div(rows, kHeadRows), workers);
  const auto work = [&](int64_t worker, int64_t) {
    claims.run(worker, [&](int64_t begin, int64_t end) {
      kernels.multiply(from, weight, nullptr, size, out, begin * kHeadRows, std::min(rows, end * kHeadRows));
    });
  };
  parallel(workers, 1, work);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("linear_row", TORCH_BOX(&linear_row)); }

}  // namespace nvfp4
