// A launch of Hopper's few-rows kernel: its shapes, its tensor maps, and how the machine is divided.
#pragma once

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/matmul/few_rows_sm90/kernel.cuh"

namespace nvfp4 {
namespace few_rows_sm90 {

using UpTo8 = Shape<1, 2, 4, 4>;
using UpTo8Short = Shape<1, 1, 4, 4>;  // rows of at most 16 slices of 256, and not many of them
// Slots for more units than are in flight, or warps wait for the slowest of them instead of for memory: 14336 x 8192
// and 28672 x 8192, M = 16, us in a chain, with 4 units in flight and 3 slots 28.8 and 48.5, with 3 and 5 27.2 and 47.3
// (without decoding and products 21.6 and 46.3, and 19.0 and 35.8).
using UpTo16 = Shape<2, 1, 3, 5>;
static_assert(UpTo16::kSlice == kSliceOf16Rows && UpTo8Short::kSlice == kSliceOf16Rows &&
                  UpTo8::kSlice == kSliceOf8Rows,
              "plan.h divides K into slices of the length that the kernels have");

// Codes come to L2 by 128 bytes: by 256, two units' at once, M = 1, 8 and 16 of 14336 x 8192, 28672 x 8192, 28672 x
// 4096 and 4096 x 4096, single and in chains, took up to 5 % longer (H200; 45 of 48 medians in two turns, 2 % in the
// middle).
template <typename S>
Maps maps_of(const Problem& p) {
  using u64 = cuuint64_t;
  const u64 row = p.code_row, bands = static_cast<u64>(p.experts) * p.N / 128, groups = ceil_quotient(p.Kp, 64);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return {tensor_map<4>(p.codes, kBytes, {static_cast<u64>(p.Kp / 2), 32, 4, bands}, {row, row * 32, row * 128},
                        {kUnitElements / 2, 4, 4, 1}, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
          tensor_map<3>(p.scales, kBytes, {512, groups, bands}, {512, static_cast<u64>(p.scale_band)},
                        {64, kUnitElements / 64, 1}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE)};
}

template <typename T, typename S, typename F>
void launch(const Problem* sets, const Fused& fused, cudaStream_t stream) {
  constexpr auto kKernel = kernel<T, S, F>;
  const Problem& p = sets[0];
  const Split split = Split::of(p.Kp, S::kSlice);
  Work work;
  work.cluster = split.cluster, work.warps_in_k = split.warps_in_k, work.row_groups = split.row_groups;
  work.share = 65536 / work.warps_in_k + 1;
  Sets<F> all;
  all.fused = fused;
  int tiles = 0;
  for (int set = 0; set < F::kSets; ++set) {
    all.problems[set] = sets[set], all.maps[set] = maps_of<S>(sets[set]), all.first[set] = tiles;
    tiles += sets[set].N / kTileRows;
  }
  if constexpr (F::kOutput == Output::kGated) tiles /= 2;  // pairs
  const int clusters = std::min(tiles, resident_clusters<kKernel>(work.cluster, kThreads, S::kSharedBytes));
  work.tiles = tiles / clusters;
  work.more_tiles = tiles % clusters;
  const Launch launch(dim3(work.cluster, clusters, p.experts), work.cluster, kThreads, S::kSharedBytes, stream,
                      Begins::kBeforePreviousEnds);
  cudaLaunchKernelEx(&launch.config, kKernel, all, work);
}

template <typename F, typename S>
void launch_dtype(const Problem* sets, const Fused& fused, cudaStream_t stream) {
  sets->x_dtype == Dtype::kBf16 ? launch<__nv_bfloat16, S, F>(sets, fused, stream)
                                : launch<__half, S, F>(sets, fused, stream);
}

inline bool are_short(const Problem& p) { return are_slices_short(size_of(p), this_machine().multiprocessors); }

template <typename F>
void launch_form(const Problem* sets, const Fused& fused, cudaStream_t stream) {
  if (sets->some_m > 8) {
    if constexpr (F::kInput == Input::kPlain) launch_dtype<F, UpTo16>(sets, fused, stream);
  } else if (are_short(*sets)) {
    launch_dtype<F, UpTo8Short>(sets, fused, stream);
  } else {
    launch_dtype<F, UpTo8>(sets, fused, stream);
  }
}

// What fused.cu has.
void launch_fused(const Problem* sets, int count, const Fused& fused, cudaStream_t stream);

}  // namespace few_rows_sm90
}  // namespace nvfp4
