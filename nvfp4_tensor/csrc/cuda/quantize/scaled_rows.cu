// Quantization with a scale a row, for 1x16 blocks: a row's amax and its codes in one pass.
//
// A unit is 4 rows, i, i + 32, i + 64 and i + 96, whose scales fill 16 bytes of each of their tiles. A lane has one or
// two block columns of all four, so that a warp stores 256 bytes of codes a row, and whole groups of scales. The
// elements wait in registers between their amax and their codes. Eight warps have 4096 or 8192 columns, a cluster of
// thread blocks up to eight times as many: its warps tell the largest magnitudes to the shared memory of all of them,
// where a barrier counts the bytes, so that none waits for another's stores. Thread blocks of fewer columns have
// several units.
//
// Rows that do not fit (65536 columns by a cluster, 8192 where there are none) are read twice, the second time from L2.
#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"
#include "cuda/block/values.cuh"
#include "cuda/ptx/shared_sm90.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kThreads / 32;

constexpr int kUnitsOfTile = kGroupRows;

// Blocks: of each row that a lane holds in registers. Resident: thread blocks of a multiprocessor. Held: rows stay in
// registers from their amax to their codes, else they are read again.
template <int kBlocks_, int kResident_, bool kHeld_ = true>
struct Shape {
  static constexpr int kBlocks = kBlocks_, kResident = kResident_;
  static constexpr bool kHeld = kHeld_;
  static constexpr bool kKeepsMaxima = kResident == 2;  // of blocks: registers are left for them
};

// How warps share the columns of a unit: `across` of each of `ranks` thread blocks, `pieces` times.
struct Shares {
  int ranks, across, pieces;
};

// The largest magnitudes of a unit's rows from each warp of the cluster, and a barrier that counts their bytes; two of
// them, in turn.
struct Maxima {
  uint4 of[2][kMostBlocksInCluster * kWarps];
  uint64_t full[2];
};

__device__ __forceinline__ uint32_t shuffle_max(uint32_t v, int distance) {
  return max(v, __shfl_xor_sync(0xFFFFFFFFu, v, distance));
}

// All lanes' four maxima: lane l gets that of row group l % 4.
__device__ __forceinline__ uint32_t max_of_group(const uint32_t (&most)[kGroups], uint32_t lane) {
  uint32_t half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lane & 1 ? most[2 * i] : most[2 * i + 1], 1);
    half[i] = max(lane & 1 ? most[2 * i + 1] : most[2 * i], other);
  }
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lane & 2 ? half[0] : half[1], 2);
  uint32_t own = max(lane & 2 ? half[1] : half[0], other);
#pragma unroll
  for (int distance = kGroups; distance < 32; distance *= 2) own = shuffle_max(own, distance);
  return own;
}

// Tells all thread blocks of the cluster the maxima of a warp's unit; own: as max_of_group gives them.
__device__ __forceinline__ void tell(Maxima& maxima, int turn, uint32_t rank, uint32_t ranks, uint32_t own,
                                     uint32_t lane, uint32_t warp) {
  uint4* slot = &maxima.of[turn][rank * kWarps + warp];
  if (ranks == 1) {
    if (lane < kGroups) reinterpret_cast<uint32_t*>(slot)[lane] = own;
    __syncthreads();
    return;
  }
#if __CUDA_ARCH__ >= 900
  float4 all;
  all.x = bits_float(__shfl_sync(0xFFFFFFFFu, own, 0));
  all.y = bits_float(__shfl_sync(0xFFFFFFFFu, own, 1));
  all.z = bits_float(__shfl_sync(0xFFFFFFFFu, own, 2));
  all.w = bits_float(__shfl_sync(0xFFFFFFFFu, own, 3));
  const uint32_t full = address_of(&maxima.full[turn]);
  if (lane < ranks) {
    st_async_floats(mapa_shared_cluster(address_of(slot), lane), all, mapa_shared_cluster(full, lane));
  }
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, ranks * kWarps * sizeof(uint4));
#endif
}

// The maxima of a warp's unit over all its columns: lane l gets that of row group l % 4. A slot is written again two
// units on, by a warp that was told those of the unit between by this one, which had read the slot.
__device__ __forceinline__ uint32_t hear(const Maxima& maxima, int turn, int phase, const Shares& shares, uint32_t lane,
                                         uint32_t warp) {
  if (shares.ranks > 1) mbarrier_wait(address_of(&maxima.full[turn]), phase);
  const uint32_t first = shares.ranks == 1 ? warp / shares.across * shares.across : 0;
  const uint32_t count = shares.ranks == 1 ? shares.across : shares.ranks * kWarps;
  uint32_t most[kGroups] = {};
  for (uint32_t i = lane; i < count; i += 32) {
    const uint4 v = maxima.of[turn][first + i];
    most[0] = max(most[0], v.x), most[1] = max(most[1], v.y);
    most[2] = max(most[2], v.z), most[3] = max(most[3], v.w);
  }
  return max_of_group(most, lane);
}

// A unit's rows.
struct UnitRows {
  uint32_t rows, blocks, row_tile, row;  // row: of group 0

  __device__ __forceinline__ UnitRows(const Matrix& x, uint32_t unit)
      : rows(static_cast<uint32_t>(x.rows)),
        blocks(static_cast<uint32_t>(x.blocks())),
        row_tile(unit / kUnitsOfTile),
        row(row_tile * kTileRows + unit % kUnitsOfTile) {}

  __device__ __forceinline__ bool inside(int group, uint32_t column) const {
    return column < blocks && row + group * kGroupRows < rows;
  }
};

// values: where blocks go as values, in place of codes.
template <typename T, Fast mode, bool kValues, typename Transform, typename S>
__global__ void __launch_bounds__(kThreads, S::kResident)
    quantize_scaled_rows(Matrix x, Quantization how, Transform transform, Shares shares, Codes out, uint4* values) {
  __shared__ Maxima maxima;
#if __CUDA_ARCH__ >= 900
  if (shares.ranks > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(address_of(&maxima.full[0]), 1);
      mbarrier_init(address_of(&maxima.full[1]), 1);
    }
    fence_mbarrier_init_cluster();
    cluster_arrive();
  }
#endif
  griddepcontrol_wait();
  if (gridDim.x <= kFewBlocks) griddepcontrol_launch_dependents();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t rank = blockIdx.x % shares.ranks, units_here = kWarps / shares.across;
  const uint32_t units = static_cast<uint32_t>(ceil_div(x.rows, kTileRows)) * kUnitsOfTile;
  const uint32_t step = gridDim.x / shares.ranks * units_here;
  const uint32_t first_column = (warp % shares.across * shares.ranks + rank) * 32 + lane;
  const uint32_t column_step = shares.across * shares.ranks * 32;
  const uint32_t column_tiles = static_cast<uint32_t>(x.column_tiles());
  const int64_t group_stride = kGroupRows * x.row_stride;
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  uint32_t unit = blockIdx.x / shares.ranks * units_here + warp / shares.across;

  Elements<T, kBlock> block[S::kBlocks][kGroups];
  uint32_t bits[S::kBlocks][kGroups];  // of their largest magnitudes
  const auto load = [&](const UnitRows& at, const T* from, int b, int group, uint32_t column) {
    block[b][group] = Elements<T, kBlock>::zero();
    if (at.inside(group, column)) {
      block[b][group] = Elements<T, kBlock>::template load<Read::kAfterWait>(from + group * group_stride);
    }
  };
  const auto load_all = [&](const UnitRows& at, uint32_t column) {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b, column += column_step) {
      const T* from = element_at<T>(x, at.row, column * kBlock);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) load(at, from, b, group, column);
    }
  };
  uint32_t most[kGroups];
  const auto see_all = [&] {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (!std::is_same_v<Transform, Plain>) block[b][group] = transform(block[b][group]);
        const uint32_t own = block[b][group].amax_bits();
        if constexpr (S::kKeepsMaxima) bits[b][group] = own;
        most[group] = max(most[group], own < kInfinity<T> ? own : finite_amax_bits(block[b][group]));
      }
    }
  };

  load_all(UnitRows(x, unit), first_column);
  if (shares.ranks > 1) cluster_wait();  // all of it has begun: its shared memory may be written
  for (int turn = 0, phase = 0; unit - warp / shares.across < units; phase ^= turn, turn ^= 1) {
    const UnitRows at(x, unit);
    const uint32_t own_row = at.row + lane % kGroups * kGroupRows;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) most[group] = 0;
    see_all();
    float amax = 0.0f;
    if (how.amax) {
      if (own_row < at.rows) amax = fabsf(how.amax[own_row]);
    } else {
      if constexpr (!S::kHeld) {
        for (int piece = 1; piece < shares.pieces; ++piece) {
          load_all(at, first_column + piece * S::kBlocks * column_step);
          see_all();
        }
      }
      tell(maxima, turn, rank, shares.ranks, max_of_group(most, lane), lane, warp);
      amax = Elements<T, kBlock>::magnitude_of(hear(maxima, turn, phase, shares, lane, warp));
    }
    const TensorScale own_scale = TensorScale::of(amax, how.spec.scale_ceiling);
    if (rank == 0 && warp % shares.across == 0 && lane < kGroups && own_row < at.rows) {
      how.per_tensor_scale[own_row] = per_tensor_scale(amax, how.spec.scale_ceiling);
    }
    unit += step;
    const UnitRows next(x, unit);
    for (int piece = 0; piece < (S::kHeld ? 1 : shares.pieces); ++piece) {
      uint32_t column = first_column + piece * S::kBlocks * column_step;
      if constexpr (!S::kHeld) {
        load_all(at, column);
        see_all();
      }
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b, column += column_step) {
        const T* from = element_at<T>(x, next.row, column * kBlock);
        const int64_t index = static_cast<int64_t>(at.row) * at.blocks + column;
        const uint64_t first_number = block_number(how.random, at.row, column);
        uint32_t s_bytes = 0;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          TensorScale row{};
          row.sixth = __shfl_sync(0xFFFFFFFFu, own_scale.sixth, group);
          row.decode = __shfl_sync(0xFFFFFFFFu, own_scale.decode, group);
          const uint8_t s_bits = scale_from_bits<T>(S::kKeepsMaxima ? bits[b][group] : block[b][group].amax_bits(),
                                                    row.sixth, how.spec.scale_rounding);
          const float s_b = e4m3_value(s_bits), enc = row.block_encode(s_b);
          if (at.inside(group, column)) {
            const int64_t to = index + group * kGroupRows * static_cast<int64_t>(at.blocks);
            const uint64_t number = first_number + group * kGroupRows * how.random.width;
            if constexpr (kValues) {
              block_values<mode>(block[b][group], s_b, enc, source, number).store(values + 2 * to);
            } else {
              reinterpret_cast<uint2*>(out.qdata)[to] = encode16<mode>(block[b][group], s_bits, enc, source, number);
            }
            s_bytes |= static_cast<uint32_t>(s_bits) << (8 * group);
          }
          if constexpr (S::kHeld) load(next, from, b, group, column);  // in flight while the others are encoded
        }
        if constexpr (!kValues) {
          const uint32_t word = transpose_bytes(s_bytes, lane), tile = column / kTileColumns;
          if (at.row_tile * kTileRows < at.rows && tile < column_tiles) {
            reinterpret_cast<uint32_t*>(
                out.scale)[(static_cast<uint64_t>(at.row_tile) * column_tiles + tile) * (kTileBytes / 4) +
                           at.row % kGroupRows * kGroups + lane % kTileColumns] = word;
          }
        }
      }
    }
    if constexpr (!S::kHeld) load_all(next, first_column);
  }
}

// A warp a row.
template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads)
    row_amax(Matrix x, const float* given, float ceiling, float* amax, float* factors) {
  const uint32_t lane = threadIdx.x % 32, step = gridDim.x * kWarps;
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  for (uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += step) {
    float most = 0.0f;
    if (given) {
      most = fabsf(given[row]);
    } else if constexpr (whole) {
      const T* from = element_at<T>(x, row, 0);
      uint32_t bits = 0;
#pragma unroll 4
      for (uint32_t i = lane * kBlock; i < columns; i += 32 * kBlock) {
        bits = max(bits, finite_amax_bits(Elements<T, kBlock>::load(from + i)));
      }
      most = Elements<T, kBlock>::magnitude_of(warp_max(bits));
    } else {
      const T* from = element_at<T>(x, row, 0);
      for (uint32_t i = lane; i < columns; i += 32) {
        const float v = magnitude(to_float(from[i]));
        most = is_finite(v) ? fmaxf(most, v) : most;
      }
      most = bits_float(warp_max(float_bits(most)));
    }
    if (lane) continue;
    amax[row] = most;
    factors[row] = per_tensor_scale(most, ceiling);
  }
}

template <typename S>
Shares shares_of(const Matrix& x) {
  const int most_ranks = this_machine().capability >= 90 ? kMostBlocksInCluster : 1;
  const int64_t warps = ceil_div(x.blocks(), 32 * S::kBlocks);
  Shares shares{1, kWarps, 1};
  if (warps <= kWarps) {
    while (shares.across / 2 >= warps) shares.across /= 2;
    return shares;
  }
  shares.ranks = static_cast<int>(std::min<int64_t>(most_ranks, ceil_div(warps, kWarps)));
  shares.pieces = static_cast<int>(ceil_div(warps, kWarps * shares.ranks));
  return shares;
}

// How many clusters of so many thread blocks run at a time.
template <auto kKernel>
int clusters_at_a_time(int ranks) {
  static std::array<std::atomic<int>, kMostBlocksInCluster + 1> known{};
  if (known[ranks] == 0) {
    int count = 0;
    const Launch launch(dim3(ranks), ranks, kThreads, 0, nullptr, Begins::kAfterPrevious);
    cudaOccupancyMaxActiveClusters(&count, kKernel, &launch.config);
    known[ranks] = std::max(count, 1);
  }
  return known[ranks];
}

// A request, and its kernels by shape.
template <typename T, Fast mode, bool kValues, typename Transform>
struct Request {
  const Matrix& x;
  const Quantization& how;
  Codes out;
  uint4* values;
  Transform transform;
  cudaStream_t stream;

  template <typename S>
  void launch() const {
    constexpr auto kKernel = quantize_scaled_rows<T, mode, kValues, Transform, S>;
    const Shares shares = shares_of<S>(x);
    const int64_t needed = ceil_div(ceil_div(x.rows, kTileRows) * kUnitsOfTile, kWarps / shares.across);
    const unsigned grid = shares.ranks == 1 ? grid_of_walk<kKernel>(1, needed * kThreads)
                                            : static_cast<unsigned>(
                                                  shares.ranks *
                                                  std::min<int64_t>(needed, clusters_at_a_time<kKernel>(shares.ranks)));
    const Launch launch(dim3(grid), shares.ranks, kThreads, 0, stream,
                        grid <= kFewBlocks ? Begins::kBeforePreviousEnds : Begins::kAfterPrevious);
    cudaLaunchKernelEx(&launch.config, kKernel, x, how, transform, shares, out, values);
  }

  // H200, us, 16384 rows of bfloat16 to nearest: 16384 and 14336 columns by two blocks a lane 222 and 217, by one (and
  // twice as many thread blocks) 235 and 226; 8192 and 5120 116 and 98, 111 and 89.
  void launch_best() const {
    constexpr bool kWide = sizeof(T) == 4, kTransforms = !std::is_same_v<Transform, Plain>;
    using One = Shape<1, kWide ? 2 : kValues || kTransforms ? 3 : 4>;
    constexpr bool kByTwo = !kWide && !kTransforms;
    const bool one_fits = shares_of<One>(x).pieces == 1;
    if (one_fits && (!kByTwo || x.blocks() <= 8192 / kBlock)) return launch<One>();
    if constexpr (kByTwo) {
      if (shares_of<Shape<2, 2>>(x).pieces == 1) return launch<Shape<2, 2>>();
    }
    launch<Shape<1, kWide || kTransforms ? 2 : 3, false>>();
  }
};

}  // namespace

void launch_row_amax(const Matrix& x, const float* given, float ceiling, float* amax, float* factors,
                     cudaStream_t stream) {
  for_matrix(x, [&](auto type, auto whole) {
    launch_walk<row_amax<decltype(type), whole.value>, 4>(x.rows * 32, stream, x, given, ceiling, amax, factors);
  });
}

void launch_quantize_scaled_rows(const Matrix& x, const Quantization& how, const Codes& out, void* values,
                                 cudaStream_t stream) {
  using Bf16 = __nv_bfloat16;
  for_mode(how.spec, [&](auto mode) {
    constexpr Fast kMode = mode.value;
    const auto sign = static_cast<uint32_t>(how.spec.hadamard_sign);
    if (values) {
      Request<Bf16, kMode, true, Plain>{x, how, out, static_cast<uint4*>(values), {}, stream}.launch_best();
    } else if (how.spec.hadamard_sign >= 0) {
      const Transformed transform{HadamardFactors::from(sign)};
      Request<Bf16, kMode, false, Transformed>{x, how, out, nullptr, transform, stream}.launch_best();
    } else {
      for_dtype(x.dtype, [&](auto type) {
        Request<decltype(type), kMode, false, Plain>{x, how, out, nullptr, {}, stream}.launch_best();
      });
    }
  });
}

}  // namespace nvfp4
