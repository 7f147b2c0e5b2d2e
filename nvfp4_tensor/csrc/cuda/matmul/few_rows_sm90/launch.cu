// Which products Hopper's few-rows kernel takes, and its launches that fuse nothing.
#include "cuda/matmul/few_rows_sm90/launch.cuh"

namespace nvfp4 {

bool fits_matmul_few_rows_sm90(const Problem& p) {
  using namespace few_rows_sm90;
  const Machine& machine = this_machine();
  return machine.capability >= 90 && machine.shared_bytes >= std::max(UpTo8::kSharedBytes, UpTo16::kSharedBytes) &&
         p.N % 128 == 0 && p.K % 8 == 0 && p.Kp % 64 == 0 && p.Kp <= kMostBlocksInCluster * kWarps * UpTo16::kSlice &&
         on_16_bytes(p.x, p.x_row * 2) && on_16_bytes(p.codes, p.code_row) && on_16_bytes(p.scales, p.scale_band) &&
         tensor_map_encoder() != nullptr;
}

bool fits_matmul_sets_sm90(const Problem* sets, int count, const Fused& fused) {
  using namespace few_rows_sm90;
  if (count < 1 || count > kMostSets) return false;
  for (int i = 0; i < count; ++i) {
    const bool is_alike = sets[i].some_m > 8 || are_short(sets[i]) == are_short(sets[0]);
    if (!fits_matmul_few_rows_sm90(sets[i]) || !is_alike) return false;
  }
  if (fused.normed) {
    const int slice = are_short(*sets) ? kSliceOf16Rows : kSliceOf8Rows;
    const bool aligned = on_16_bytes(fused.residual) && on_16_bytes(fused.norm) && on_16_bytes(fused.sum);
    const bool compiled = count != 2 || fused.gated;  // no model norms x for two weights and no gate
    if (!compiled || !aligned || sets->some_m > 8 || Split::of(sets->Kp, slice).cluster > 1) return false;
  }
  return !fused.gated || (count == 2 && sets[0].N == sets[1].N);
}

void launch_matmul_sets_sm90(const Problem* sets, int count, const Fused& fused, cudaStream_t stream) {
  using namespace few_rows_sm90;
  if (fused.normed || fused.gated) return launch_fused(sets, count, fused, stream);
  static_assert(kMostSets == 3);
  switch (count) {
    case 1: return launch_form<Form<1, Input::kPlain, Output::kPlain>>(sets, fused, stream);
    case 2: return launch_form<Form<2, Input::kPlain, Output::kPlain>>(sets, fused, stream);
    default: return launch_form<Form<3, Input::kPlain, Output::kPlain>>(sets, fused, stream);
  }
}

void launch_matmul_few_rows_sm90(const Problem& p, cudaStream_t stream) {
  launch_matmul_sets_sm90(&p, 1, Fused{}, stream);
}

}  // namespace nvfp4
