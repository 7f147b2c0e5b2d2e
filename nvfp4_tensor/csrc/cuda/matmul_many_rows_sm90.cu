// Which shape of Hopper's many-rows kernel serves a problem, and the tensor maps that it copies by.
#include <cudaTypedefs.h>

#include <algorithm>

#include "matmul_many_rows_sm90.cuh"

namespace nvfp4 {
namespace many_rows {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encode;
}

struct Matrix2d {
  const void* data;
  CUtensorMapDataType type;
  int64_t columns, rows, row_bytes;
};

CUtensorMap tensor_map(const Matrix2d& m, int box_columns, int box_rows, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(m.row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  tensor_map_encoder()(&map, m.type, 2, const_cast<void*>(m.data), sizes, strides, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

constexpr int kTokenGroup = 4;  // token tiles whose blocks run together

int token_tiles(const Problem& p, int tokens) {
  return p.offs ? most_token_tiles(p, tokens) : ceil_div(p.M, tokens);
}

template <typename T, typename S>
void launch(const Problem& p, const void* permuted, int ranks, cudaStream_t stream) {
  auto kernel = many_rows::kernel<T, S>;
  thread_local int prepared = -1;
  int device = 0;
  cudaGetDevice(&device);
  if (prepared != device) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    prepared = device;
  }
  const auto x_type = p.x_dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t columns = ceil_div(p.K, kStageK) * kStageK;
  const int64_t rows = static_cast<int64_t>(p.experts) * p.N;
  const CUtensorMap x =
      tensor_map({permuted, x_type, columns, p.rows, columns * 2}, 64, S::kTokens, CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap codes = tensor_map({p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.Kp / 2, rows, p.code_row}, 64,
                                       S::kRows, CU_TENSOR_MAP_SWIZZLE_64B);
  Work work;
  work.ranks = ranks;
  work.token_tiles = token_tiles(p, S::kTokens);
  work.token_group = std::min(kTokenGroup, work.token_tiles);
  const int bands = p.N % kBand == 0 ? p.N / kBand : ceil_div(p.N, kBand) + (p.experts > 1);
  work.row_tiles = ceil_div(bands * kBand, S::kRows);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // begins while permute_x runs, waits for it
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = ranks;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ranks * work.row_tiles * work.token_tiles, 1, p.offs ? 1 : p.experts);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1 + (ranks > 1);
  cudaLaunchKernelEx(&config, kernel, p, x, codes, work);
}

template <typename S>
void launch_shape(const Problem& p, const void* permuted, cudaStream_t stream) {
  // Two blocks split K where tiles are fewer than half of the multiprocessors (four were slower: 22 us, not 18, at
  // 4096 x 4096, M = 32).
  const int tiles = (p.offs ? 1 : p.experts) * ceil_div(p.N, S::kRows) * token_tiles(p, S::kTokens);
  const int steps = ceil_div(p.Kp, kStageK);
  const int ranks = tiles * 2 <= this_machine().multiprocessors && steps >= 8 ? 2 : 1;
  if (p.x_dtype == Dtype::kBf16) {
    launch<__nv_bfloat16, S>(p, permuted, ranks, stream);
  } else {
    launch<__half, S>(p, permuted, ranks, stream);
  }
}

// H200, us, 8 experts of 14336 x 4096 with 32 and 128 rows each on average, 64 of 2048 x 7168 with 64 and 512: tiles of
// 32 tokens by 256 rows of w 152, 470, 516, -; of 64 164, 427, 475, 3022; of 128 232, 374, 444, 2267; of 256 -, 369,
// 687, 2177.
void launch_groups(const Problem& p, const void* permuted, cudaStream_t stream) {
  const int mean = p.rows / p.experts;
  if (mean <= 48) {
    launch_shape<Shape<32, 4, 8>>(p, permuted, stream);
  } else if (mean <= 192) {
    launch_shape<Shape<128, 2, 5>>(p, permuted, stream);
  } else {
    launch_shape<Shape<256, 2, 3>>(p, permuted, stream);
  }
}

}  // namespace
}  // namespace many_rows

bool fits_matmul_many_rows(const Problem& p) {
  const auto aligned = [](const void* data, int64_t row_bytes) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_bytes)) % 16 == 0;
  };
  return this_machine().capability == 90 && aligned(p.codes, p.code_row) && aligned(p.scales, p.scale_band) &&
         many_rows::tensor_map_encoder() != nullptr;
}

int64_t matmul_many_rows_scratch(const Problem& p) {
  return static_cast<int64_t>(p.rows) * many_rows::ceil_div(p.K, many_rows::kStageK) * many_rows::kStageK * 2;
}

void launch_matmul_many_rows(const Problem& p, void* scratch, cudaStream_t stream) {
  using namespace many_rows;
  const int64_t threads = matmul_many_rows_scratch(p) / 64;
  const int64_t blocks = std::min<int64_t>((threads + 127) / 128, this_machine().multiprocessors * 16);
  permute_x<<<static_cast<unsigned>(blocks), 128, 0, stream>>>(p, static_cast<uint4*>(scratch));
  if (p.offs) return launch_groups(p, scratch, stream);
  // H200, us at 14336 x 8192 and 4096 x 4096: M = 32 in tiles of 32 tokens by 256 rows 39 and 24, by 128 rows 44 and
  // 18; M = 256 in tiles of 256 tokens 110 and 62 (41 where two blocks split K), of 128 tokens 124 and 40 (29).
  const int row_tiles = p.experts * ceil_div(p.N, 128);
  if (p.M <= 32) {
    row_tiles >= 100 ? launch_shape<Shape<32, 4, 8>>(p, scratch, stream)
                     : launch_shape<Shape<32, 2, 10>>(p, scratch, stream);
  } else if (p.M <= 64) {
    launch_shape<Shape<64, 2, 8>>(p, scratch, stream);
  } else if (p.M <= 128 || row_tiles * ceil_div(p.M, 256) * 2 <= this_machine().multiprocessors) {
    launch_shape<Shape<128, 2, 5>>(p, scratch, stream);
  } else {
    launch_shape<Shape<256, 2, 3>>(p, scratch, stream);
  }
}

}  // namespace nvfp4
