// Which shape of the few-rows kernel serves a problem, and how the machine is divided.
#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/matmul/few_rows/kernel.cuh"

namespace nvfp4 {
namespace few_rows {
namespace {

// 16 warps with slices of 256: K = 4096 fills a block. In flight an SM has 40 to 80 KB of w; more only delays what the
// first tiles need (H200, 14336 x 8192, M = 8: depth 2 28.6 us, 3 29.2, 4 34.0), and with 32 warps of 64 registers or
// slices of 128 each weight takes more instructions (36 and 32 us).
using UpTo8 = Shape<1, 2, 4, 32>;
using UpTo16 = Shape<2, 2, 4, 32>;
// The same for devices whose blocks have 99 KB of shared memory.
using SmallUpTo8 = Shape<1, 1, 2, 8>;
using SmallUpTo16 = Shape<2, 1, 2, 8>;

int log2_ceil(int n) {
  int log = 0;
  while (1 << log < n) ++log;
  return log;
}

template <typename T, typename S, bool kPlain, bool kGrouped>
void launch(const Problem& p, cudaStream_t stream) {
  constexpr auto kKernel = kernel<T, S, kPlain, kGrouped>;
  const int slices = ceil_quotient(p.Kp, kSlice);
  Work work;
  work.log2_warps_in_k = std::clamp(log2_ceil(slices), log2_ceil(kWarps / kTilesPerBand), log2_ceil(kWarps));
  const int shares = ceil_quotient(slices, 1 << work.log2_warps_in_k);  // of K, a block each
  work.cluster = this_machine().capability >= 90 ? std::min(shares, kMostBlocksInCluster) : 1;
  work.passes = ceil_quotient(shares, work.cluster);
  const bool begin_inside = p.experts > 1 && p.N % 128 != 0;  // of a band
  const int bands = ceil_quotient(p.N, 128) + begin_inside;
  const int tiles = bands * kTilesPerBand;
  const int64_t all = kGrouped ? static_cast<int64_t>(tiles) * size_of(p).token_tiles(S::kColumns * 8) : tiles;
  const int resident = resident_clusters<kKernel>(work.cluster, kThreads, S::kSharedBytes);
  const int clusters = static_cast<int>(std::min<int64_t>(all, resident));
  work.tiles_of_expert = tiles;
  work.tiles = tiles / clusters;
  work.more_tiles = tiles % clusters;
  const Launch launch(dim3(work.cluster, clusters, kGrouped ? 1 : p.experts), work.cluster, kThreads, S::kSharedBytes,
                      stream, Begins::kAfterPrevious);
  cudaLaunchKernelEx(&launch.config, kKernel, p, work);
}

template <typename S, bool kGrouped>
void launch_shape(const Problem& p, cudaStream_t stream) {
  const bool plain = on_16_bytes(p.codes, p.code_row) && p.N % 128 == 0 && p.Kp % kSlice == 0;
  if (p.x_dtype == Dtype::kBf16) {
    plain ? launch<__nv_bfloat16, S, true, kGrouped>(p, stream) : launch<__nv_bfloat16, S, false, kGrouped>(p, stream);
  } else {
    plain ? launch<__half, S, true, kGrouped>(p, stream) : launch<__half, S, false, kGrouped>(p, stream);
  }
}

template <bool kGrouped>
void launch_columns(const Problem& p, int columns, cudaStream_t stream) {
  const bool roomy = this_machine().shared_bytes >= std::max(UpTo8::kSharedBytes, UpTo16::kSharedBytes);
  if (columns <= 8) {
    roomy ? launch_shape<UpTo8, kGrouped>(p, stream) : launch_shape<SmallUpTo8, kGrouped>(p, stream);
  } else {
    roomy ? launch_shape<UpTo16, kGrouped>(p, stream) : launch_shape<SmallUpTo16, kGrouped>(p, stream);
  }
}

}  // namespace
}  // namespace few_rows

void launch_matmul_few_rows(const Problem& p, cudaStream_t stream) {
  for (int m = 0; m < p.M; m += 16) {
    Problem part = p;
    part.first_m = m;
    part.some_m = std::min(p.M - m, 16);
    if (fits_matmul_few_rows_sm90(part)) {
      launch_matmul_few_rows_sm90(part, stream);
    } else {
      few_rows::launch_columns<false>(part, part.some_m, stream);
    }
  }
}

void launch_matmul_few_rows_grouped(const Problem& p, cudaStream_t stream) {
  // H200, us, 8 or 16 columns: 8 experts of 14336 x 4096 with 2 rows each 85 or 97, with 8 119 or 105; 64 of
  // 2048 x 7168 with 4 rows 193 or 220, with 8 264 or 232.
  few_rows::launch_columns<true>(p, p.rows <= 4 * p.experts ? 8 : 16, stream);
}

}  // namespace nvfp4
