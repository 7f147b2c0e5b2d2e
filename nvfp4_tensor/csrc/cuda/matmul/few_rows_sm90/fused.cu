// The launches of Hopper's few-rows kernel that fuse a norm before the products, or a gate behind them.
#include "cuda/matmul/few_rows_sm90/launch.cuh"

namespace nvfp4 {
namespace few_rows_sm90 {

void launch_fused(const Problem* sets, int count, const Fused& fused, cudaStream_t stream) {
  if (fused.gated) {
    return fused.normed ? launch_form<Form<2, Input::kNormed, Output::kGated>>(sets, fused, stream)
                        : launch_form<Form<2, Input::kPlain, Output::kGated>>(sets, fused, stream);
  }
  count == 1 ? launch_form<Form<1, Input::kNormed, Output::kPlain>>(sets, fused, stream)
             : launch_form<Form<3, Input::kNormed, Output::kPlain>>(sets, fused, stream);
}

}  // namespace few_rows_sm90
}  // namespace nvfp4
