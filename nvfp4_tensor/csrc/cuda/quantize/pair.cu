// quantize_pair and quantize_pair_values: a bfloat16 matrix and its (Hadamard-transformed) transpose, both sides in
// blocks of 16, to codes and scales or to decoded bfloat16 values, which products read on hardware without FP4 tensor
// cores.
//
// By rows a thread reads 16 elements of one, by columns 16 rows of two of them. Both ways it stays within one group of
// 16 rows, so that all its shared memory lies at constants from one place.
#include "cuda/block/pair_rows.cuh"

namespace nvfp4 {
namespace {

struct CodesShared {
  alignas(16) uint8_t scale[kScaleBytes];
  Encoder::Table table;
};

template <Fast mode>
__device__ __forceinline__ void quantize_one(const Elements<Bf16, kBlock>& x, const Encoder& encoder,
                                             ScaleRounding rounding, uint64_t number, bool inside, uint2* codes,
                                             uint8_t* scale) {
  const uint8_t s_bits = scale_from_bits<Bf16>(x.amax_bits(), encoder.sixth, rounding);
  const uint2 coded = encode16<mode>(x, s_bits, encoder.enc[s_bits], encoder.source, number);
  if (inside) *codes = coded;
  *scale = inside ? s_bits : 0;
}

template <Fast mode>
struct CodeRows : CodeSide {
  static constexpr bool kValues = false, kDraws = false;
  using Shared = CodesShared;

  __device__ __forceinline__ Encoder begin(Shared& shared) const { return Encoder::of<mode>(how, shared.table); }

  __device__ __forceinline__ void quantize(const Encoder& encoder, Chunks* x, Shared& shared, uint32_t row0,
                                           uint32_t column0) const {
    const PairRows at;
    const uint32_t inside = column0 / kBlock + at.block < blocks ? rows_left(rows, row0 + at.first) : 0;
    uint2* codes = codes_at(row0 + at.first, column0 / kBlock + at.block);
    uint8_t* scale = shared.scale + scale_offset(at.first, at.block, kTileBlocks / kTileColumns);
    for_rows(how.random, at, x, row0, column0, [&](int turn, const auto& elements, uint64_t number, uint4*, uint4*) {
      const int row = turn * PairRows::kStep;
      quantize_one<mode>(elements, encoder, how.spec.scale_rounding, number, row < inside, codes, scale + row * 16);
      codes += PairRows::kStep * static_cast<int64_t>(blocks);
    });
  }

  __device__ __forceinline__ void store(const Chunks*, Shared& shared, uint32_t row0, uint32_t column0) const {
    store_scales(shared.scale, row0, column0 / kBlock);
  }
};

// A thread's columns of a tile, two neighbouring ones a turn, and their group of 16 rows: a block of the transpose.
struct PairColumns {
  static constexpr int kATurn = kThreads / 32 * 8;
  uint32_t group, first;

  __device__ __forceinline__ PairColumns()
      : group(threadIdx.x % 32 / 4), first(threadIdx.x / 32 * 8 + threadIdx.x % 4 * 2) {}

  // Calls take(block, column, number) for each, column counted from first.
  template <bool transform, typename Take>
  __device__ __forceinline__ void for_each(const RandomOffset& random, const HadamardFactors& factors, const Chunks* x,
                                           uint32_t row0, uint32_t column0, Take take) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&x[group * kBlock][threadIdx.x / 32 ^ group]) +
                            threadIdx.x % 4;
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
struct CodeColumns : CodeSide {
  static constexpr bool kValues = false, kDraws = false;
  using Shared = CodesShared;
  using Order = BlockOrder;
  HadamardFactors factors;

  __device__ __forceinline__ Encoder begin(Shared& shared) const { return Encoder::of<mode>(how, shared.table); }

  __device__ __forceinline__ void quantize(const Encoder& encoder, const Chunks* x, Shared& shared, uint32_t row0,
                                           uint32_t column0) const {
    const PairColumns at;
    const uint32_t inside = column0 / kBlock + at.group < blocks ? rows_left(rows, row0 + at.first) : 0;
    uint2* codes = codes_at(row0 + at.first, column0 / kBlock + at.group);
    uint8_t* scale = shared.scale + scale_offset(at.first, at.group, kTileBlocks / kTileColumns);
    at.for_each<transform>(how.random, factors, x, row0, column0, [&](const auto& block, int column, uint64_t number) {
      const int which = column % 2, turn = column - which;
      quantize_one<mode>(block, encoder, how.spec.scale_rounding, number, turn < inside,
                         codes + which * static_cast<int64_t>(blocks), scale + column / 32 * 4 + which * 16);
      if (which) codes += PairColumns::kATurn * static_cast<int64_t>(blocks);
    });
  }

  __device__ __forceinline__ void store(Shared& shared, uint32_t row0, uint32_t column0) const {
    store_scales(shared.scale, row0, column0 / kBlock);
  }
};

template <Fast mode, bool transform>
struct ValueColumns : ValueSide {
  static constexpr bool kValues = true, kDraws = false;
  using Order = BlockOrder;
  struct Shared {
    Chunks x[kTile];
    Encoder::Table table;
  };
  HadamardFactors factors;

  // Chunk c of column r lies at chunk c ^ this: eight lanes, four even or odd columns by two neighbouring groups of
  // rows, then write different banks.
  __device__ __forceinline__ static uint32_t swizzle(uint32_t column) { return column / 2 % 2 + column / 4 % 2 * 4; }

  __device__ __forceinline__ Encoder begin(Shared& shared) const { return Encoder::of<mode>(how, shared.table); }

  __device__ __forceinline__ void quantize(const Encoder& encoder, const Chunks* x, Shared& shared, uint32_t row0,
                                           uint32_t column0) const {
    const PairColumns at;
    uint4* low = &shared.x[at.first][(2 * at.group) ^ swizzle(at.first)];
    uint4* high = &shared.x[at.first][(2 * at.group + 1) ^ swizzle(at.first)];
    at.for_each<transform>(how.random, factors, x, row0, column0, [&](const auto& block, int column, uint64_t number) {
      store_chunks(encoder.values<mode>(block, how.spec.scale_rounding, number), low + column * kChunks,
                   high + column * kChunks);
    });
  }

  __device__ __forceinline__ void store(Shared& shared, uint32_t row0, uint32_t column0) const {
    store_tile(shared.x, row0, column0, [](uint32_t row, uint32_t chunk) { return chunk ^ swizzle(row); });
  }
};

template <Fast mode, typename By>
using PairValues = ValueRows<mode, By, PairRows>;

}  // namespace

bool fits_quantize_pair_values(bool codes_t) {
  constexpr Fast kAny = Fast::kNearestEven;
  return codes_t ? fits_pair<PairValues<kAny, SearchEncoder>, CodeColumns<kAny, true>>()
                 : fits_pair<PairValues<kAny, SearchEncoder>, ValueColumns<kAny, true>>();
}

void launch_quantize_pair(const Matrix& x, const PairQuantization& how, const PairOutputs& out, cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(x.rows), columns = static_cast<uint32_t>(x.columns);
  const uint32_t blocks_t = static_cast<uint32_t>(ceil_div(x.rows, kBlock));
  const int sign = how.columns.spec.hadamard_sign;
  const auto factors = HadamardFactors::from(static_cast<uint32_t>(sign));
  const CodeSide codes{how.rows, out.codes, rows, columns / kBlock};
  const CodeSide codes_t{how.columns, out.codes_transposed, columns, blocks_t};
  const ValueSide values{how.rows, static_cast<Bf16*>(out.values), rows, columns};
  const ValueSide values_t{how.columns, static_cast<Bf16*>(out.values_transposed), columns, blocks_t * kBlock};
  for_mode(how.rows.spec, [&](auto mode) {
    constexpr Fast kMode = mode.value;
    for_flag(sign >= 0, [&](auto transform) {
      const CodeColumns<kMode, transform.value> to_codes{codes_t, factors};
      const auto launch = [&](const auto& of_rows) {
        if (!out.values_transposed) return launch_pair(x, of_rows, to_codes, stream);
        launch_pair(x, of_rows, ValueColumns<kMode, transform.value>{values_t, factors}, stream);
      };
      if (!out.values) return launch_pair(x, CodeRows<kMode>{codes}, to_codes, stream);
      if constexpr (kMode == Fast::kNearestEven) {
        if (how.rows.spec.scale_search != ScaleSearch::kNone) return launch(PairValues<kMode, SearchEncoder>{values});
      }
      launch(PairValues<kMode, Encoder>{values});
    });
  });
}

}  // namespace nvfp4
