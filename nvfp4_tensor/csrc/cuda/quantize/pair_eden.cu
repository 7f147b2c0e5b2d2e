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
  uint32_t scale[kTile][kRotationBlocks / 2];  // 16 bits a block
  float enc[128];

  // The random bits of the rotations from `column` on of 128 lines from `line` on, by as many threads.
  __device__ __forceinline__ void draw(const RandomOffset& random, uint32_t line, uint32_t column, uint32_t thread) {
    const int64_t seed = random.rng_state[0], offset = random.rng_state[1];
    const uint32_t group = column / kRotation;
    const auto scales = RandomKey::of(seed, offset, static_cast<int>(kScaleStream) + random.stream);
    const Words4 words = scales.block_words(block_number(random, line + thread, group));
    store_shared_16(address_of(scale[thread]), make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
    if (thread < kSignWords) {
      const auto signs = RandomKey::of(seed, offset, static_cast<int>(kSignStream));
      write_sign_masks(signs, static_cast<uint64_t>(random.first_group + group), thread, sign);
    }
  }
};

struct ByEden {
  static constexpr bool kDraws = true;
  using Table = Rotations;
  EdenScale scale;

  __device__ __forceinline__ ByEden(const Quantization& how, Table& table) {
    const TensorScale tensor = tensor_scale_by_maxima(how);
    fill_encode_table(tensor, table.enc);
    scale = EdenScale::of(tensor);
  }

  // Loads, rotates and rounds this thread's parts of a tile's lines. Calls take(lane, turn, line, y, rounded) for each.
  template <bool values, typename Lane, typename Take>
  __device__ __forceinline__ void for_lines(const Rotations& rotations, const Chunks* tile, Take take) const {
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
        return rotations.scale[line][lane.part] >> (16 * block) & 0xFFFFu;
      });
      take(lane, turn, line, y, rounded);
    }
  }
};

// Chunk k of y times a factor; masks: of the signs that change.
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

// back: the rotation is taken back after the values are known, and rounded to bfloat16 again.
template <bool back>
struct EdenRows : ValueRowsOf<ByEden, RotationOrder> {
  __device__ __forceinline__ void quantize(const ByEden& by, Chunks* x, Shared& shared, uint32_t, uint32_t) const {
    const uint32_t tile = address_of(x), signs = address_of(shared.table.sign);
    by.for_lines<true, RowLane>(
        shared.table, x, [&](const auto& lane, int turn, uint32_t, auto& y, const auto& rounded) {
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
};

// Where chunk c of column r of the transpose lies in a row of its tile: eight lanes, the parts of two columns, then
// write different banks.
struct RotatedPlace {
  __device__ __forceinline__ static uint32_t of(uint32_t column, uint32_t chunk) {
    return chunk ^ chunk / 8 ^ column % 2 * 2;
  }
};

struct EdenValueColumns : ValueColumnsOf<ByEden, RotatedPlace> {
  using Order = RotationOrder;

  __device__ __forceinline__ void quantize(const ByEden& by, const Chunks* x, Shared& shared, uint32_t,
                                           uint32_t) const {
    by.for_lines<true, ColumnLane>(
        shared.table, x, [&](const auto& lane, int, uint32_t column, auto& y, const auto& rounded) {
#pragma unroll
          for (int k = 0; k < kLaneChunks; ++k) {
            shared.x[column][RotatedPlace::of(lane.line, lane.part * kLaneChunks + k)] = scaled_chunk(
                y, k, e4m3_value(rounded.s_bits[k / 2]));
          }
        });
  }
};

struct EdenCodeColumns : CodeSide<ByEden> {
  using Order = RotationOrder;

  __device__ __forceinline__ void quantize(const ByEden& by, const Chunks* x, Shared& shared, uint32_t row0,
                                           uint32_t column0) const {
    by.for_lines<false, ColumnLane>(
        shared.table, x, [&](const auto& lane, int, uint32_t column, auto&, const auto& rounded) {
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
};

}  // namespace

bool fits_quantize_pair_eden(bool codes_t) {
  return codes_t || this_machine().shared_bytes >= kPairBytes<EdenRows<false>, EdenValueColumns>;
}

void launch_quantize_pair_eden(const Matrix& x, const PairQuantization& how, bool rotates_back, const PairOutputs& out,
                               cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t padded = static_cast<uint32_t>(ceil_div(x.columns, kRotation) * kRotation);
  const uint32_t padded_t = static_cast<uint32_t>(ceil_div(x.rows, kRotation) * kRotation);
  const QuantizeSpec& spec = how.rows.spec;
  const auto launch = [&](auto type, const auto& side_t) {
    using Rows = typename decltype(type)::type;
    const bool cut = !spec.is_eden() || rotates_back;
    launch_pair(x, Rows{{{how.rows, static_cast<Bf16*>(out.values), rows, cut ? columns : padded}}}, side_t, stream);
  };
  if (spec.is_eden()) {
    const EdenValueColumns side_t{{{how.columns, static_cast<Bf16*>(out.values_transposed), columns, padded_t}}};
    return for_flag(rotates_back, [&](auto back) { launch(std::type_identity<EdenRows<back.value>>{}, side_t); });
  }
  using Plain = ValueRows<Encoder<Fast::kNearestEven>, RotationRows>;
  using Searched = ValueRows<SearchEncoder, RotationRows>;
  const EdenCodeColumns side_t{{how.columns, out.codes_transposed, columns, padded_t / kBlock}};
  if (spec.scale_search != ScaleSearch::kNone) return launch(std::type_identity<Searched>{}, side_t);
  launch(std::type_identity<Plain>{}, side_t);
}

}  // namespace nvfp4
