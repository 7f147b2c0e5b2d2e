// A bfloat16 matrix and its transpose in one pass over it, one or both of them rotated by EDEN: what
// quantize_pair_values is to other specs, and the largest magnitudes that it needs.
//
// A tile of 128 x 128 elements holds whole rotations of the rows and of the columns (rotation_tile.cuh), so a thread
// block has all that EDEN needs of either: nothing but results leaves it. The random bits of a tile's 256 rotations,
// one call of Philox each, are drawn by as many threads and shared. Barriers and stages are those of
// quantize_pair_values.
#include "cuda/block/finite.cuh"
#include "cuda/block/rotation_tile.cuh"
#include "cuda/block/tile_values.cuh"

namespace nvfp4 {
namespace {

// A side that is rotated: its first line's first rotation is number first_group.
struct EdenCodes : Side {
  int64_t first_group;
};
struct EdenValues : ValueSide {
  int64_t first_group;
};

// kEdenBack: the rotation is taken back after the values are known, which are rounded to bfloat16 again.
enum class RowsBy { kNearest, kSearched, kEden, kEdenBack };

constexpr bool rotates(RowsBy rows) { return rows == RowsBy::kEden || rows == RowsBy::kEdenBack; }

// What the rotations of one side of a tile share.
struct Rotations {
  uint32_t sign[kSignWords];
  uint32_t draw[kTile][kRotationBlocks / 2];  // 16 bits a block
  float enc[128];
};
struct Scales {
  uint8_t of[kScaleBytes];
};

template <RowsBy rows, bool values_t>
struct Shared {
  RotationTile x[2];  // the tile at work and the next
  std::conditional_t<values_t, RotationTile, Scales> transposed;
  std::conditional_t<rotates(rows), Rotations, RowTable<rows == RowsBy::kSearched>> side;
  Rotations side_transposed;
};

struct RotationKeys {
  RandomKey signs, draws;

  __device__ __forceinline__ static RotationKeys of(const RandomOffset& random) {
    const int64_t seed = random.rng_state[0], offset = random.rng_state[1];
    return {RandomKey::of(seed, offset, kSignStream),
            RandomKey::of(seed, offset, static_cast<int>(kScaleStream) + random.stream)};
  }
};

// The random bits of rotation `group` of 128 lines from line0 on, by as many threads.
template <typename EdenSide>
__device__ __forceinline__ void draw_rotations(const EdenSide& side, const RotationKeys& keys, uint32_t line0,
                                               uint32_t group, uint32_t thread, Rotations& to) {
  const Words4 words = keys.draws.block_words(block_number(side.how.random, line0 + thread, group));
  store_shared_16(address_of(to.draw[thread]), make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
  if (thread < kSignWords) {
    write_sign_masks(keys.signs, static_cast<uint64_t>(side.first_group + group), thread, to.sign);
  }
}

// A lane's two blocks, rounded: to codes, or y to values without a scale.
struct RoundedLane {
  uint2 codes[kLaneBlocks];
  uint8_t s_bits[kLaneBlocks];
};

template <bool values, typename Lane>
__device__ __forceinline__ RoundedLane round_lane(const Lane& lane, float (&y)[kLaneBlocks][kBlock],
                                                  const EdenScale& scale, const Rotations& rotations, uint32_t line) {
  float s1[kLaneBlocks];
  EdenSums sums[kLaneBlocks];
  RoundedLane out{};
  bool finite = !scale.no_amax;
#pragma unroll
  for (int block = 0; block < kLaneBlocks; ++block) {
    const float most = magnitude_or_nan(y[block]);
    const uint8_t first_bits = e4m3_nearest(mul(most, scale.onto_grid));
    const float enc = rotations.enc[first_bits];
    s1[block] = e4m3_value(first_bits);
    finite &= is_finite(most);
    if constexpr (values) {
      eden_values(y[block], s1[block], enc, scale.encode, sums[block]);
    } else {
      out.codes[block] = eden_codes(y[block], s1[block], enc, scale.encode, sums[block]);
    }
  }
  const bool broken = is_rotation_broken<Lane>(finite);
  const float correction = div(rotation_total<Lane>(sums[0].a, sums[1].a), rotation_total<Lane>(sums[0].b, sums[1].b));
  const uint32_t draw = rotations.draw[line][lane.part];
#pragma unroll
  for (int block = 0; block < kLaneBlocks; ++block) {
    const uint8_t s_bits = round_scale(corrected_scale(s1[block], correction), draw >> (16 * block) & 0xFFFFu);
    out.s_bits[block] = broken ? kE4M3Nan : s_bits;
    if (!values && broken) out.codes[block] = make_uint2(0u, 0u);
  }
  return out;
}

// Chunk k of a lane's values.
__device__ __forceinline__ uint4 value_chunk(const float (&y)[kLaneBlocks][kBlock], const RoundedLane& rounded, int k) {
  const float s_b = e4m3_value(rounded.s_bits[k / 2]);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = &y[k / 2][k % 2 * 8 + 2 * i];
    const __nv_bfloat162 pair = __floats2bfloat162_rn(mul(v[0], s_b), mul(v[1], s_b));
    memcpy(&word[i], &pair, 4);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// The same after the rotation is taken back, of values in y that are scaled and rotated back but for the last factor.
__device__ __forceinline__ uint4 unrotated_chunk(const float (&y)[kLaneBlocks][kBlock], uint4 masks, int k) {
  const uint32_t mask[4] = {masks.x, masks.y, masks.z, masks.w};
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = &y[k / 2][k % 2 * 8 + 2 * i];
    const __nv_bfloat162 pair = __floats2bfloat162_rn(mul(v[0], kRotationFactor), mul(v[1], kRotationFactor));
    memcpy(&word[i], &pair, 4);
    word[i] ^= mask[i];
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// In place.
template <bool back>
__device__ __forceinline__ void eden_values_by_rows(const EdenScale& scale, const Rotations& rotations,
                                                    RotationTile& tile) {
  const RowLane lane;
  const uint32_t x = address_of(&tile), signs = address_of(rotations.sign);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    uint32_t word[kLaneWords];
    float y[kLaneBlocks][kBlock];
    lane.load(x, turn, word);
    rotate_words(lane, word, signs, y);
    const auto rounded = round_lane<true>(lane, y, scale, rotations, lane.line + turn * RowLane::kLinesATurn);
    if constexpr (back) {
#pragma unroll
      for (int block = 0; block < kLaneBlocks; ++block) {
        const float s_b = e4m3_value(rounded.s_bits[block]);
#pragma unroll
        for (int i = 0; i < kBlock; ++i) y[block][i] = mul(y[block][i], s_b);
      }
      lane_butterflies(lane, y);
    }
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      const uint4 chunk = back ? unrotated_chunk(y, sign_masks(lane, signs, k), k) : value_chunk(y, rounded, k);
      store_shared_16(lane.address(x, turn, k), chunk);
    }
  }
}

// Where chunk c of column r of the transpose lies in a row of its tile: eight lanes, the parts of two columns, then
// write different banks.
__device__ __forceinline__ uint32_t column_place(uint32_t column, uint32_t chunk) {
  return chunk ^ chunk / 8 ^ column % 2 * 2;
}

__device__ __forceinline__ void eden_values_by_columns(const EdenScale& scale, const Rotations& rotations,
                                                       const RotationTile& tile, RotationTile& out) {
  const ColumnLane lane;
  const uint32_t x = address_of(&tile), signs = address_of(rotations.sign);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const uint32_t column = lane.line + turn * ColumnLane::kLinesATurn;
    uint32_t word[kLaneWords];
    float y[kLaneBlocks][kBlock];
    lane.load(x, turn, word);
    rotate_words(lane, word, signs, y);
    const auto rounded = round_lane<true>(lane, y, scale, rotations, column);
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      out.chunk[column][column_place(lane.line, lane.part * kLaneChunks + k)] = value_chunk(y, rounded, k);
    }
  }
}

__device__ __forceinline__ void eden_codes_by_columns(const EdenCodes& side, const EdenScale& scale,
                                                      const Rotations& rotations, uint32_t column0, uint32_t block0,
                                                      const RotationTile& tile, uint8_t* scales) {
  const ColumnLane lane;
  const uint32_t x = address_of(&tile), signs = address_of(rotations.sign);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const uint32_t column = lane.line + turn * ColumnLane::kLinesATurn, block = lane.part * kLaneBlocks;
    uint32_t word[kLaneWords];
    float y[kLaneBlocks][kBlock];
    lane.load(x, turn, word);
    rotate_words(lane, word, signs, y);
    const auto rounded = round_lane<false>(lane, y, scale, rotations, column);
    const bool inside = column0 + column < side.rows;
    const uint4 codes = make_uint4(rounded.codes[0].x, rounded.codes[0].y, rounded.codes[1].x, rounded.codes[1].y);
    if (inside) *reinterpret_cast<uint4*>(codes_at(side, column0 + column, block0 + block)) = codes;
    *reinterpret_cast<uint16_t*>(scales + scale_offset(column, block, kTileBlocks / kTileColumns)) =
        inside ? static_cast<uint16_t>(rounded.s_bits[0] | rounded.s_bits[1] << 8) : uint16_t{0};
  }
}

// How one side is scaled, its table of enc filled. For all threads of the block.
__device__ __forceinline__ EdenScale eden_scale(const Quantization& how, Rotations& table) {
  const TensorScale tensor = tensor_scale(how);
  if (threadIdx.x < 128) table.enc[threadIdx.x] = tensor.block_encode(e4m3_value(static_cast<uint8_t>(threadIdx.x)));
  return EdenScale::of(tensor);
}

// Thread blocks a multiprocessor; with codes of the transpose three find room.
template <typename Transposed>
constexpr int kBlocksPerSm = std::is_same_v<Transposed, EdenValues> ? kPairBlocksPerSm : 3;

// Transposed: EdenValues, or EdenCodes.
template <RowsBy rows, typename RowSide, typename Transposed>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Transposed>)
    quantize_pair_eden(Matrix x, RowSide side, Transposed transposed) {
  constexpr bool values_t = std::is_same_v<Transposed, EdenValues>, rotates_rows = rotates(rows);
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<rows, values_t>*>(memory);
  write_per_tensor_scale(side.how);
  write_per_tensor_scale(transposed.how);
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  shared.x[0].load(x, tile.row * kTile, tile.column * kTile);
  cp_async_commit();
  const auto scale = [&] {
    if constexpr (rotates_rows) {
      return eden_scale(side.how, shared.side);
    } else {
      return row_encoder<Fast::kNearestEven>(side.how, shared.side);
    }
  }();
  const EdenScale scale_transposed = eden_scale(transposed.how, shared.side_transposed);
  const RotationKeys keys = RotationKeys::of(transposed.how.random);
  for (uint32_t stage = 0; tile.inside(); stage ^= 1) {
    const uint32_t row_tile = tile.row, column_tile = tile.column;
    const uint32_t row0 = row_tile * kTile, column0 = column_tile * kTile;
    tile.step();
    if (tile.inside()) shared.x[stage ^ 1].load(x, tile.row * kTile, tile.column * kTile);
    cp_async_commit();
    if (threadIdx.x < kTile) {
      draw_rotations(transposed, keys, column0, row_tile, threadIdx.x, shared.side_transposed);
    } else if constexpr (rotates_rows) {
      draw_rotations(side, RotationKeys::of(side.how.random), row0, column_tile, threadIdx.x - kTile, shared.side);
    }
    cp_async_wait<1>();
    __syncthreads();
    RotationTile& elements = shared.x[stage];
    if constexpr (values_t) {
      eden_values_by_columns(scale_transposed, shared.side_transposed, elements, shared.transposed);
    } else {
      eden_codes_by_columns(transposed, scale_transposed, shared.side_transposed, column0, row0 / kBlock, elements,
                            shared.transposed.of);
    }
    __syncthreads();
    if constexpr (rotates_rows) {
      eden_values_by_rows<rows == RowsBy::kEdenBack>(scale, shared.side, elements);
    } else {
      values_by_rows<Fast::kNearestEven, RotationRows>(side.how, scale, row0, column0 / kBlock, elements.chunk);
    }
    __syncthreads();
    store_tile(elements.chunk, side, row0, column0,
               [](uint32_t row, uint32_t chunk) { return chunk ^ rotation_swizzle(row); });
    if constexpr (values_t) {
      store_tile(shared.transposed.chunk, transposed, column0, row0, column_place);
    } else {
      store_scales(shared.transposed.of, transposed, column0, row0 / kBlock);
    }
  }
}

template <RowsBy rows, typename RowSide, typename Transposed>
void launch(const Matrix& x, const RowSide& side, const Transposed& transposed, cudaStream_t stream) {
  constexpr auto kernel = quantize_pair_eden<rows, RowSide, Transposed>;
  constexpr bool values_t = std::is_same_v<Transposed, EdenValues>;
  constexpr int kBytes = sizeof(Shared<rows, values_t>);
  allow_shared_memory<kernel>(kBytes);
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const unsigned grid = grid_of(kPairWaves * kBlocksPerSm<Transposed>, tiles);
  kernel<<<grid, kThreads, kBytes, stream>>>(x, side, transposed);
}

// --- amax ------------------------------------------------------------------------------------------------------------

constexpr int kAmaxBlocksPerSm = 3;

struct AmaxShared {
  RotationTile x[2];
  uint32_t sign[2][2][kSignWords];  // of a tile's rows and columns, in two stages
};

// Raises `most` to the largest magnitude of a lane's rotated elements, where all of the rotation is finite.
template <typename Lane>
__device__ __forceinline__ void raise_by_rotation(const Lane& lane, const uint32_t (&word)[kLaneWords], uint32_t signs,
                                                  float& most) {
  float y[kLaneBlocks][kBlock];
  rotate_words(lane, word, signs, y);
  const float first = magnitude_or_nan(y[0]), second = magnitude_or_nan(y[1]);
  if (!is_rotation_broken<Lane>(is_finite(first) && is_finite(second))) most = fmaxf(most, fmaxf(first, second));
}

// Of x, or of its rotation, and of the rotation of its transpose.
template <bool rotates_rows>
__global__ void __launch_bounds__(kThreads, kAmaxBlocksPerSm)
    amax_pair_eden(Matrix x, const int64_t* rng_state, int64_t first_group, int64_t first_group_t, float* out,
                   float* out_transposed) {
  extern __shared__ __align__(16) unsigned char memory[];
  AmaxShared& shared = *reinterpret_cast<AmaxShared*>(memory);
  griddepcontrol_wait();
  const RandomKey key = RandomKey::of(rng_state[0], rng_state[1], static_cast<int>(kSignStream));
  const RowLane row_lane;
  const ColumnLane column_lane;
  uint32_t most_bits = 0;
  float most = 0.0f, most_transposed = 0.0f;
  Walk tile(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x);
  shared.x[0].load(x, tile.row * kTile, tile.column * kTile);
  cp_async_commit();
  for (uint32_t stage = 0; tile.inside(); stage ^= 1) {
    uint32_t (*sign)[kSignWords] = shared.sign[stage];
    if (threadIdx.x < 2 * kSignWords) {
      const bool of_columns = threadIdx.x < kSignWords;
      const int64_t group = of_columns ? first_group_t + tile.row : first_group + tile.column;
      write_sign_masks(key, static_cast<uint64_t>(group), threadIdx.x % kSignWords, sign[of_columns]);
    }
    tile.step();
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no thread reads the last one any more
    if (tile.inside()) shared.x[stage ^ 1].load(x, tile.row * kTile, tile.column * kTile);
    cp_async_commit();
    const uint32_t elements = address_of(&shared.x[stage]);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      Elements<Bf16, kLaneElements> block;
      column_lane.load(elements, turn, block.word);
      if constexpr (!rotates_rows) most_bits = max(most_bits, finite_amax_bits(block));
      raise_by_rotation(column_lane, block.word, address_of(sign[1]), most_transposed);
      if constexpr (rotates_rows) {
        row_lane.load(elements, turn, block.word);
        raise_by_rotation(row_lane, block.word, address_of(sign[0]), most);
      }
    }
  }
  raise(out, rotates_rows ? float_bits(most) : most_bits << 16);
  raise(out_transposed, float_bits(most_transposed));
}

template <bool rotates_rows>
void launch_maxima(const Matrix& x, const int64_t* rng_state, int64_t first_group, int64_t first_group_t, float* out,
                   float* out_transposed, cudaStream_t stream) {
  constexpr auto kernel = amax_pair_eden<rotates_rows>;
  allow_shared_memory<kernel>(sizeof(AmaxShared));
  const int64_t tiles = ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  const Launch launch(dim3(grid_of(kAmaxBlocksPerSm, tiles)), 1, kThreads, sizeof(AmaxShared), stream,
                      Begins::kBesideClear);
  cudaLaunchKernelEx(&launch.config, kernel, x, rng_state, first_group, first_group_t, out, out_transposed);
}

}  // namespace

bool fits_quantize_pair_eden(bool codes_t) {
  constexpr size_t kCodes = sizeof(Shared<RowsBy::kSearched, false>), kValues = sizeof(Shared<RowsBy::kEden, true>);
  return this_machine().shared_bytes >= static_cast<int>(codes_t ? kCodes : kValues);
}

void launch_quantize_pair_eden(const Matrix& x, const EdenPair& how, void* values, void* values_transposed,
                               const Codes& codes_transposed, cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t row_groups = static_cast<uint32_t>(ceil_div(x.columns, kRotation));
  const uint32_t column_groups = static_cast<uint32_t>(ceil_div(x.rows, kRotation));
  const QuantizeSpec& spec = how.rows.spec;
  const bool keeps_padding = spec.is_eden() && !how.rotates_back;
  const ValueSide side{how.rows, static_cast<Bf16*>(values), rows, keeps_padding ? row_groups * kRotation : columns};
  if (spec.is_eden()) {
    const ValueSide side_t{how.columns, static_cast<Bf16*>(values_transposed), columns, column_groups * kRotation};
    const EdenValues eden{side, how.first_group}, eden_t{side_t, how.first_group_t};
    if (how.rotates_back) return launch<RowsBy::kEdenBack>(x, eden, eden_t, stream);
    return launch<RowsBy::kEden>(x, eden, eden_t, stream);
  }
  const EdenCodes side_t{{how.columns, codes_transposed, columns, column_groups * kRotationBlocks}, how.first_group_t};
  if (spec.scale_search != ScaleSearch::kNone) return launch<RowsBy::kSearched>(x, side, side_t, stream);
  launch<RowsBy::kNearest>(x, side, side_t, stream);
}

void launch_amax_pair_eden(const Matrix& x, bool rotates_rows, const int64_t* rng_state, int64_t first_group,
                           int64_t first_group_t, float* out, float* out_transposed, cudaStream_t stream) {
  launch_clear(out, out_transposed, stream);
  if (x.rows * x.columns == 0) return;
  if (rotates_rows) {
    launch_maxima<true>(x, rng_state, first_group, first_group_t, out, out_transposed, stream);
  } else {
    launch_maxima<false>(x, rng_state, first_group, first_group_t, out, out_transposed, stream);
  }
}

}  // namespace nvfp4
