// amax_pair: the amax of a bfloat16 matrix, or of its rotation, and of its transpose, Hadamard-transformed or rotated
// by EDEN, in one pass: over the pair's tiles (pair_tile.cuh), the next one on its way to shared memory while a thread
// has its part of this one in registers. H200, 8192 x 4096 and 8192 x 28672, Hadamard: 21 and 110 us; straight to
// registers, 16 rows of 4 columns a thread, 29 and 134, for a thread then waits for its loads (with the next turn's
// loads ahead 22 and 114).
#include "cuda/block/rotation_tile.cuh"

namespace nvfp4 {
namespace {

constexpr int kBlocksPerSm = 3;

// Magnitudes of float32 as their bits, which order like them.
struct Most {
  uint32_t rows = 0, columns = 0;
};

struct OfHadamard {
  using Order = BlockOrder;
  struct Shared {
    Chunks x[2][kTile];
  };
  HadamardFactors factors;

  __device__ __forceinline__ void draw(Shared&, uint32_t, const Walk&) const {}

  __device__ __forceinline__ void raise(Shared& shared, uint32_t stage, Most& most) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t group = lane / 4;  // of 16 rows
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&shared.x[stage][group * kBlock][warp ^ group]) +
                            lane % 4;
#pragma unroll
    for (int column = 0; column < kTile; column += kThreads / 32 * 8) {
      Elements<Bf16, 2 * kBlock> both;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) both.word[i] = words[(i * kChunks + column / 8) * 4];
      most.rows = max(most.rows, finite_amax_bits(both) << 16);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        most.columns = max(most.columns, finite_amax_bits(column_block<true>(both.word, which, factors)) << 16);
      }
    }
  }
};

template <bool rotates_rows>
struct OfRotation {
  using Order = RotationOrder;
  struct Shared {
    Chunks x[2][kTile];
    uint32_t sign[2][2][kSignWords];  // of a tile's rows and columns, in two stages
  };
  Rotation rows, columns;

  __device__ __forceinline__ void draw(Shared& shared, uint32_t stage, const Walk& tile) const {
    if (threadIdx.x >= 2 * kSignWords) return;
    const bool of_columns = threadIdx.x < kSignWords;
    const int64_t group = of_columns ? columns.first_group + tile.row : rows.first_group + tile.column;
    const auto key = RandomKey::of(rows.rng_state[0], rows.rng_state[1], static_cast<int>(kSignStream));
    write_sign_masks(key, static_cast<uint64_t>(group), threadIdx.x % kSignWords, shared.sign[stage][of_columns]);
  }

  // To the largest magnitude of a lane's rotated elements, where all of the rotation is finite.
  template <typename Lane>
  __device__ __forceinline__ static void raise_by(const Lane& lane, const uint32_t (&word)[kLaneWords], uint32_t signs,
                                                  uint32_t& most) {
    float y[kLaneBlocks][kBlock];
    rotate_words(lane, word, signs, y);
    const float first = magnitude_or_nan(y[0]), second = magnitude_or_nan(y[1]);
    if (lane.is_broken(is_finite(first) && is_finite(second))) return;
    most = max(most, float_bits(fmaxf(first, second)));
  }

  __device__ __forceinline__ void raise(Shared& shared, uint32_t stage, Most& most) const {
    const RowLane row_lane;
    const ColumnLane column_lane;
    const uint32_t x = address_of(shared.x[stage]);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      Elements<Bf16, kLaneElements> block;
      column_lane.load(x, turn, block.word);
      if constexpr (!rotates_rows) most.rows = max(most.rows, finite_amax_bits(block) << 16);
      raise_by(column_lane, block.word, address_of(shared.sign[stage][1]), most.columns);
      if constexpr (rotates_rows) {
        row_lane.load(x, turn, block.word);
        raise_by(row_lane, block.word, address_of(shared.sign[stage][0]), most.rows);
      }
    }
  }
};

// parts: each thread block leaves its maxima, those of the transpose after all of the rows; else it raises out.
template <typename Of, bool parts>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    amax_pair(Matrix x, Of of, float* out, float* out_transposed) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Of::Shared*>(memory);
  griddepcontrol_wait();
  Most most;
  TileWalk<typename Of::Order> tile(x, shared.x);
  for (uint32_t stage = 0; tile.at.inside(); stage ^= 1) {
    of.draw(shared, stage, tile.at);
    tile.at.step();
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no thread reads the last one any more
    tile.load_next(stage ^ 1);
    of.raise(shared, stage, most);
  }
  if constexpr (parts) {
    const uint32_t rows = block_max(most.rows), columns = block_max(most.columns);
    if (threadIdx.x) return;
    out[blockIdx.x] = __uint_as_float(rows), out_transposed[blockIdx.x] = __uint_as_float(columns);
  } else {
    raise(out, most.rows);
    raise(out_transposed, most.columns);
  }
}

template <bool parts, typename Of>
void launch(const Matrix& x, const Of& of, unsigned grid, float* out, float* out_transposed, cudaStream_t stream) {
  constexpr auto kernel = amax_pair<Of, parts>;
  constexpr int kBytes = sizeof(typename Of::Shared);
  allow_shared_memory<kernel>(kBytes);
  const Launch launch(dim3(grid), 1, kThreads, kBytes, stream, parts ? Begins::kAfterPrevious : Begins::kBesideClear);
  cudaLaunchKernelEx(&launch.config, kernel, x, of, out, out_transposed);
}

unsigned grid_for(const Matrix& x) { return grid_of(kBlocksPerSm, tiles_of(x)); }

template <typename Of>
void launch_amax(const Matrix& x, const Of& of, float* out, float* out_transposed, cudaStream_t stream) {
  launch_clear(out, out_transposed, stream);
  if (x.rows * x.columns) launch<false>(x, of, grid_for(x), out, out_transposed, stream);
}

template <typename Of>
std::array<Amax, 2> launch_maxima(const Matrix& x, const Of& of, const std::function<void*(int64_t)>& scratch,
                                  cudaStream_t stream) {
  const unsigned grid = grid_for(x);
  float* const out = static_cast<float*>(scratch(grid * int64_t{2 * sizeof(float)}));
  launch<true>(x, of, grid, out, out + grid, stream);
  return {Amax{out, static_cast<int>(grid)}, Amax{out + grid, static_cast<int>(grid)}};
}

OfHadamard of_hadamard(int sign) { return {HadamardFactors::from(static_cast<uint32_t>(sign))}; }

}  // namespace

void launch_amax_pair(const Matrix& x, int hadamard_sign, float* out, float* out_transposed, cudaStream_t stream) {
  launch_amax(x, of_hadamard(hadamard_sign), out, out_transposed, stream);
}

void launch_amax_pair_eden(const Matrix& x, bool rotates_rows, const Rotation& rows, const Rotation& columns,
                           float* out, float* out_transposed, cudaStream_t stream) {
  for_flag(rotates_rows, [&](auto rotates) {
    launch_amax(x, OfRotation<rotates.value>{rows, columns}, out, out_transposed, stream);
  });
}

std::array<Amax, 2> launch_maxima_of_pair(const Matrix& x, int hadamard_sign,
                                          const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  return launch_maxima(x, of_hadamard(hadamard_sign), scratch, stream);
}

std::array<Amax, 2> launch_maxima_of_pair_eden(const Matrix& x, bool rotates_rows,
                                               const std::array<Rotation, 2>& rotations,
                                               const std::function<void*(int64_t)>& scratch, cudaStream_t stream) {
  const auto& [rows, columns] = rotations;
  if (rotates_rows) return launch_maxima(x, OfRotation<true>{rows, columns}, scratch, stream);
  return launch_maxima(x, OfRotation<false>{rows, columns}, scratch, stream);
}

}  // namespace nvfp4
