// quantize_pair and quantize_pair_values: a bfloat16 matrix and its (Hadamard-transformed) transpose, both sides in
// blocks of 16, to codes and scales or to decoded bfloat16 values, which products read on hardware without FP4 tensor
// cores.
//
// By rows a thread reads 16 elements of one, by columns 16 rows of two of them. Both ways it stays within one group of
// 16 rows, so that all its shared memory lies at constants from one place.
#include "cuda/block/pair_rows.cuh"

namespace nvfp4 {
namespace {

template <Fast mode>
__device__ __forceinline__ void quantize_one(const Elements<Bf16, kBlock>& x, const Encoder<mode>& encoder,
                                             ScaleRounding rounding, uint64_t number, bool inside, uint2* codes,
                                             uint8_t* scale) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  const uint2 coded = encode16<mode>(x, s_bits, encoder.enc[s_bits], encoder.source, number);
  if (inside) *codes = coded;
  *scale = inside ? s_bits : 0;
}

template <Fast mode>
struct CodeRows : CodeSide<Encoder<mode>> {
  __device__ __forceinline__ void quantize(const Encoder<mode>& encoder, Chunks* x, CodeRows::Shared& shared,
                                           uint32_t row0, uint32_t column0) const {
    const Quantization& how = this->how;
    const PairRows at;
    const uint32_t block = column0 / kBlock + at.block;
    const uint32_t inside = block < this->blocks ? rows_left(this->rows, row0 + at.first) : 0;
    uint2* codes = this->codes_at(row0 + at.first, block);
    uint8_t* scale = shared.scale + scale_offset(at.first, at.block, kTileBlocks / kTileColumns);
    for_rows(how.random, at, x, row0, column0, [&](int turn, const auto& elements, uint64_t number, uint4*, uint4*) {
      const int row = turn * PairRows::kStep;
      quantize_one(elements, encoder, how.spec.scale_rounding, number, row < inside, codes, scale + row * 16);
      codes += PairRows::kStep * static_cast<int64_t>(this->blocks);
    });
  }
};

// A thread's columns of a tile, two neighbouring ones a turn, and their group of 16 rows: a block of the transpose.
struct PairColumns {
  static constexpr int kATurn = kThreads / 32 * 8;
  uint32_t group, first;

  __device__ __forceinline__ PairColumns() {
    group = threadIdx.x % 32 / 4, first = threadIdx.x / 32 * 8 + threadIdx.x % 4 * 2;
  }

  // Calls take(elements, column, number) for each, column counted from first.
  template <bool transform, typename Take>
  __device__ __forceinline__ void for_each(const RandomOffset& random, const HadamardFactors& factors, const Chunks* x,
                                           uint32_t row0, uint32_t column0, Take take) const {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&x[group * kBlock][warp ^ group]) + threadIdx.x % 4;
    uint64_t number = block_number(random, row0 + first, column0 / kBlock + group);
#pragma unroll
    for (int column = 0; column < kTile; column += kATurn) {
      uint32_t word[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) word[i] = words[(i * kChunks + column / 8) * 4];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        take(column_block<transform>(word, which, factors), column + which, number + which * random.width);
      }
      number += kATurn * random.width;
    }
  }
};

template <Fast mode, bool transform>
struct CodeColumns : CodeSide<Encoder<mode>> {
  using Order = BlockOrder;
  HadamardFactors factors;

  __device__ __forceinline__ void quantize(const Encoder<mode>& encoder, const Chunks* x, CodeColumns::Shared& shared,
                                           uint32_t row0, uint32_t column0) const {
    const Quantization& how = this->how;
    const PairColumns at;
    const uint32_t block = column0 / kBlock + at.group;
    const uint32_t inside = block < this->blocks ? rows_left(this->rows, row0 + at.first) : 0;
    uint2* codes = this->codes_at(row0 + at.first, block);
    uint8_t* scale = shared.scale + scale_offset(at.first, at.group, kTileBlocks / kTileColumns);
    at.for_each<transform>(how.random, factors, x, row0, column0, [&](const auto& v, int column, uint64_t number) {
      const int which = column % 2;
      quantize_one(v, encoder, how.spec.scale_rounding, number, column - which < inside,
                   codes + which * static_cast<int64_t>(this->blocks), scale + column / 32 * 4 + which * 16);
      if (which) codes += PairColumns::kATurn * static_cast<int64_t>(this->blocks);
    });
  }
};

// Chunk c of column r lies at chunk c ^ this: eight lanes, four even or odd columns by two neighbouring groups of rows,
// then write different banks.
struct ColumnPlace {
  __device__ __forceinline__ static uint32_t of(uint32_t column, uint32_t chunk) {
    return chunk ^ (column / 2 % 2 + column / 4 % 2 * 4);
  }
};

template <Fast mode, bool transform>
struct ValueColumns : ValueColumnsOf<Encoder<mode>, ColumnPlace> {
  using Order = BlockOrder;
  HadamardFactors factors;

  __device__ __forceinline__ void quantize(const Encoder<mode>& encoder, const Chunks* x, ValueColumns::Shared& shared,
                                           uint32_t row0, uint32_t column0) const {
    const Quantization& how = this->how;
    const PairColumns at;
    uint4* low = &shared.x[at.first][ColumnPlace::of(at.first, 2 * at.group)];
    uint4* high = &shared.x[at.first][ColumnPlace::of(at.first, 2 * at.group + 1)];
    at.for_each<transform>(how.random, factors, x, row0, column0, [&](const auto& v, int column, uint64_t number) {
      store_chunks(encoder.values(v, how.spec.scale_rounding, number), low + column * kChunks, high + column * kChunks);
    });
  }
};

// The largest, on the least shared memory of any device that there are kernels for.
static_assert(kPairBytes<ValueRows<SearchEncoder, PairRows>, ValueColumns<Fast::kNearestEven, true>> <= 99 * 1024);

}  // namespace

void launch_quantize_pair(const Matrix& x, const PairQuantization& how, const PairOutputs& out, cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t blocks_t = static_cast<uint32_t>(ceil_div(x.rows, kBlock));
  const int sign = how.columns.spec.hadamard_sign;
  const auto factors = HadamardFactors::from(static_cast<uint32_t>(sign));
  for_mode(how.rows.spec, [&](auto mode) {
    for_flag(sign >= 0, [&](auto transform) {
      const CodeColumns<mode.value, transform.value> codes_t{{how.columns, out.codes_transposed, columns, blocks_t},
                                                             factors};
      const ValueColumns<mode.value, transform.value> values_t{
          {{how.columns, static_cast<Bf16*>(out.values_transposed), columns, blocks_t * kBlock}}, factors};
      const auto launch_values = [&](auto by) {
        const ValueRows<typename decltype(by)::type, PairRows> values{
            {{how.rows, static_cast<Bf16*>(out.values), rows, columns}}};
        out.values_transposed ? launch_pair(x, values, values_t, stream) : launch_pair(x, values, codes_t, stream);
      };
      if (!out.values) {
        const CodeRows<mode.value> codes{{how.rows, out.codes, rows, columns / kBlock}};
        return launch_pair(x, codes, codes_t, stream);
      }
      if constexpr (mode.value == Fast::kNearestEven) {
        if (how.rows.spec.scale_search != ScaleSearch::kNone) return launch_values(std::type_identity<SearchEncoder>{});
      }
      launch_values(std::type_identity<Encoder<mode.value>>{});
    });
  });
}

}  // namespace nvfp4
