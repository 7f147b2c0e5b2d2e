// A bfloat16 matrix and its transpose in one pass over it, one or both of them rotated by EDEN.
//
// A tile of 128 x 128 elements holds whole rotations of the rows and of the columns (rotation_tile.cuh), so a thread
// block has all that EDEN needs of either: nothing but results leaves it. The random bits of a tile's 256 rotations,
// one call of Philox each, are drawn by as many threads and shared.
#include "cuda/block/pair_rows.cuh"
#include "cuda/block/rotation_tile.cuh"

namespace nvfp4 {
namespace {

// What the rotations of one side of a tile share.
struct Rotations {
  uint32_t sign[kSignWords];
  uint32_t draw[kTile][kRotationBlocks / 2];  // 16 bits a block
  float enc[128];
};

// A side that is rotated.
template <typename Side>
struct EdenSide : Side {
  static constexpr bool kDraws = true;

  template <typename Shared>
  __device__ __forceinline__ EdenScale begin(Shared& shared) const {
    const TensorScale tensor = tensor_scale_by_maxima(this->how);
    fill_encode_table(tensor, shared.rotations.enc);
    return EdenScale::of(tensor);
  }

  // The random bits of the rotations from column0 on of 128 lines from row0 on, by as many threads.
  template <typename Shared>
  __device__ __forceinline__ void draw(Shared& shared, uint32_t row0, uint32_t column0, uint32_t thread) const {
    const RandomOffset& random = this->how.random;
    const int64_t seed = random.rng_state[0], offset = random.rng_state[1];
    const uint32_t group = column0 / kRotation;
    const auto scales = RandomKey::of(seed, offset, static_cast<int>(kScaleStream) + random.stream);
    const Words4 words = scales.block_words(block_number(random, row0 + thread, group));
    store_shared_16(address_of(shared.rotations.draw[thread]),
                    make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
    if (thread < kSignWords) {
      const auto signs = RandomKey::of(seed, offset, static_cast<int>(kSignStream));
      write_sign_masks(signs, static_cast<uint64_t>(random.first_group + group), thread, shared.rotations.sign);
    }
  }
};

// Loads, rotates and rounds this thread's parts of a tile's lines. Calls take(lane, turn, line, y, rounded) for each.
template <bool values, typename Lane, typename Take>
__device__ __forceinline__ void for_lines(const EdenScale& scale, const Rotations& rotations, const Chunks* tile,
                                          Take take) {
  const Lane lane;
  const uint32_t x = address_of(tile), signs = address_of(rotations.sign);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const uint32_t line = lane.line + turn * Lane::kLinesATurn;
    uint32_t word[kLaneWords];
    float y[kLaneBlocks][kBlock];
    lane.load(x, turn, word);
    rotate_words(lane, word, signs, y);
    const auto rounded = round_lane<values>(lane, y, scale, rotations.enc, [&](int block) {
      return rotations.draw[line][lane.part] >> (16 * block) & 0xFFFFu;
    });
    take(lane, turn, line, y, rounded);
  }
}

// Chunk k of y times a factor for each block; masks: of the signs that change.
__device__ __forceinline__ uint4 scaled_chunk(const float (&y)[kLaneBlocks][kBlock], int k, float factor,
                                              uint4 masks = {}) {
  const uint32_t mask[4] = {masks.x, masks.y, masks.z, masks.w};
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = &y[k / 2][k % 2 * 8 + 2 * i];
    word[i] = packed_pair<Bf16>(mul(v[0], factor), mul(v[1], factor)) ^ mask[i];
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Values of the rows, in place. back: the rotation is taken back after they are known, and rounded to bfloat16 again.
template <bool back>
struct EdenRows : EdenSide<ValueSide> {
  static constexpr bool kValues = true;
  struct Shared {
    Rotations rotations;
  };

  __device__ __forceinline__ void quantize(const EdenScale& scale, Chunks* x, Shared& shared, uint32_t,
                                           uint32_t) const {
    const uint32_t tile = address_of(x), signs = address_of(shared.rotations.sign);
    for_lines<true, RowLane>(scale, shared.rotations, x,
                             [&](const RowLane& lane, int turn, uint32_t, auto& y, const auto& rounded) {
                               if constexpr (back) {
#pragma unroll
                                 for (int block = 0; block < kLaneBlocks; ++block) {
                                   const float s_b = e4m3_value(rounded.s_bits[block]);
#pragma unroll
                                   for (int i = 0; i < kBlock; ++i) y[block][i] = mul(y[block][i], s_b);
                                 }
                                 lane.butterflies(y);
                               }
#pragma unroll
                               for (int k = 0; k < kLaneChunks; ++k) {
                                 store_shared_16(lane.address(tile, turn, k),
                                                 back ? scaled_chunk(y, k, kRotationFactor, sign_masks(lane, signs, k))
                                                      : scaled_chunk(y, k, e4m3_value(rounded.s_bits[k / 2])));
                               }
                             });
  }

  __device__ __forceinline__ void store(const Chunks* x, Shared&, uint32_t row0, uint32_t column0) const {
    store_tile(x, row0, column0, [](uint32_t row, uint32_t chunk) { return chunk ^ RotationOrder::swizzle(row); });
  }
};

struct EdenValueColumns : EdenSide<ValueSide> {
  static constexpr bool kValues = true;
  using Order = RotationOrder;
  struct Shared {
    Chunks x[kTile];
    Rotations rotations;
  };

  // Where chunk c of column r of the transpose lies in a row of its tile: eight lanes, the parts of two columns, then
  // write different banks.
  __device__ __forceinline__ static uint32_t place(uint32_t column, uint32_t chunk) {
    return chunk ^ chunk / 8 ^ column % 2 * 2;
  }

  __device__ __forceinline__ void quantize(const EdenScale& scale, const Chunks* x, Shared& shared, uint32_t,
                                           uint32_t) const {
    for_lines<true, ColumnLane>(scale, shared.rotations, x,
                                [&](const ColumnLane& lane, int, uint32_t column, auto& y, const auto& rounded) {
#pragma unroll
                                  for (int k = 0; k < kLaneChunks; ++k) {
                                    shared.x[column][place(lane.line, lane.part * kLaneChunks + k)] = scaled_chunk(
                                        y, k, e4m3_value(rounded.s_bits[k / 2]));
                                  }
                                });
  }

  __device__ __forceinline__ void store(Shared& shared, uint32_t row0, uint32_t column0) const {
    store_tile(shared.x, row0, column0, place);
  }
};

struct EdenCodeColumns : EdenSide<CodeSide> {
  static constexpr bool kValues = false;
  using Order = RotationOrder;
  struct Shared {
    alignas(16) uint8_t scale[kScaleBytes];
    Rotations rotations;
  };

  __device__ __forceinline__ void quantize(const EdenScale& scale, const Chunks* x, Shared& shared, uint32_t row0,
                                           uint32_t column0) const {
    for_lines<false, ColumnLane>(
        scale, shared.rotations, x, [&](const ColumnLane& lane, int, uint32_t column, auto&, const auto& rounded) {
          const uint32_t block = lane.part * kLaneBlocks;
          const uint2* codes = rounded.codes;
          const bool inside = row0 + column < rows;
          if (inside) {
            *reinterpret_cast<uint4*>(codes_at(row0 + column, column0 / kBlock + block)) = make_uint4(
                codes[0].x, codes[0].y, codes[1].x, codes[1].y);
          }
          *reinterpret_cast<uint16_t*>(shared.scale + scale_offset(column, block, kTileBlocks / kTileColumns)) =
              inside ? static_cast<uint16_t>(rounded.s_bits[0] | rounded.s_bits[1] << 8) : uint16_t{0};
        });
  }

  __device__ __forceinline__ void store(Shared& shared, uint32_t row0, uint32_t column0) const {
    store_scales(shared.scale, row0, column0 / kBlock);
  }
};

template <typename By>
using PlainRows = ValueRows<Fast::kNearestEven, By, RotationRows>;

}  // namespace

bool fits_quantize_pair_eden(bool codes_t) {
  return codes_t ? fits_pair<PlainRows<SearchEncoder>, EdenCodeColumns>()
                 : fits_pair<EdenRows<false>, EdenValueColumns>();
}

void launch_quantize_pair_eden(const Matrix& x, const PairQuantization& how, bool rotates_back, const PairOutputs& out,
                               cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t padded = static_cast<uint32_t>(ceil_div(x.columns, kRotation) * kRotation);
  const uint32_t padded_t = static_cast<uint32_t>(ceil_div(x.rows, kRotation) * kRotation);
  const QuantizeSpec& spec = how.rows.spec;
  const bool keeps_padding = spec.is_eden() && !rotates_back;
  const ValueSide side{how.rows, static_cast<Bf16*>(out.values), rows, keeps_padding ? padded : columns};
  if (spec.is_eden()) {
    const EdenValueColumns side_t{{{how.columns, static_cast<Bf16*>(out.values_transposed), columns, padded_t}}};
    if (rotates_back) return launch_pair(x, EdenRows<true>{{side}}, side_t, stream);
    return launch_pair(x, EdenRows<false>{{side}}, side_t, stream);
  }
  const EdenCodeColumns side_t{{{how.columns, out.codes_transposed, columns, padded_t / kBlock}}};
  if (spec.scale_search != ScaleSearch::kNone) return launch_pair(x, PlainRows<SearchEncoder>{side}, side_t, stream);
  launch_pair(x, PlainRows<Encoder>{side}, side_t, stream);
}

}  // namespace nvfp4
