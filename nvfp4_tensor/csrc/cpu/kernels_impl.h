// The CPU kernels, written once on the vocabulary of a simd_*.h and compiled once for each instruction set.
#pragma once

#include "cpu/group_io.h"
#include "cpu/transpose.h"

namespace nvfp4::NVFP4_ISA {

// --- amax, Hadamard --------------------------------------------------------------------------------------------------

// The largest of the magnitudes below `limit` (finite ones), as bits.
template <typename U>
U finite_max(const U* x, int64_t count, U limit) {
  constexpr U mask = U(~U(0)) >> 1;
  U most = 0;
  for (int64_t i = 0; i < count; ++i) {  // compilers vectorize this form
    const U magnitude = x[i] & mask;
    const U finite = magnitude & U(-U(magnitude < limit));
    most = most > finite ? most : finite;
  }
  return most;
}

inline uint32_t finite_max_bits(const Bf16* x, int64_t count) {
  return uint32_t(finite_max<uint16_t>(&x->bits, count, 0x7F80)) << 16;
}
inline uint32_t finite_max_bits(const Fp16* x, int64_t count) {
  return half_to_float_bits(finite_max<uint16_t>(&x->bits, count, 0x7C00));
}
inline uint32_t finite_max_bits(const float* x, int64_t count) {
  return finite_max<uint32_t>(reinterpret_cast<const uint32_t*>(x), count, kInfBits);
}

template <typename T>
uint32_t amax_plain(const Matrix& x, int64_t begin, int64_t end) {
  const T* data = static_cast<const T*>(x.data);
  const int64_t last = std::min(end * kGroupElements, x.rows * x.columns);
  uint32_t most = 0;
  for (int64_t at = begin * kGroupElements; at < last;) {
    const int64_t row = at / x.columns, column = at % x.columns;
    const int64_t count = x.row_stride == x.columns ? last - at : std::min(x.columns - column, last - at);
    most = std::max(most, finite_max_bits(data + row * x.row_stride + column, count));
    at += count;
  }
  return most;
}

template <typename T, typename Function>
void for_each_transformed(const Matrix& x, int sign, int64_t begin, int64_t end, Function f) {
  const HadamardSigns signs(sign);
  T gathered[kGroupElements];
  Bf16 transformed[kGroupElements];
  for (int64_t g = begin; g < end; ++g) {
    const Group group = Group::at(g, x.rows, x.blocks());
    hadamard_group(fetch(x, group, gathered), signs.even, signs.odd, transformed);
    f(group, transformed);
  }
}

template <typename T>
uint32_t amax_groups(const Matrix& x, int sign, int64_t begin, int64_t end) {
  if (sign < 0) return amax_plain<T>(x, begin, end);
  uint32_t most = 0;
  for_each_transformed<T>(x, sign, begin, end, [&](const Group& group, const Bf16* y) {
    most = std::max(most, finite_max_bits(y, group.count * kBlock));
  });
  return most;
}

template <typename T>
void hadamard_groups(const Matrix& x, int sign, uint16_t* out, int64_t begin, int64_t end) {
  for_each_transformed<T>(x, sign, begin, end, [&](const Group& group, const Bf16* y) {
    std::memcpy(out + (group.row * x.blocks() + group.block) * kBlock, y, sizeof(Bf16) * kBlock * group.count);
  });
}

// --- quantize --------------------------------------------------------------------------------------------------------

template <Rounding rounding, typename T>
void quantize_group(const T* x, const BlockScales& scales, const RandomWindows* random, uint8_t* codes) {
  const Spread encode(scales.encode);
  I bytes[kPairs];
  for (int p = 0; p < kPairs; ++p) {
    F even, odd;
    load_pairs(x + 32 * p, even, odd);
    even = mul(even, encode.pair(p));
    odd = mul(odd, encode.pair(p));
    I even_random, odd_random;
    if (rounding == Rounding::kStochastic16 || rounding == Rounding::kStochastic8) {
      random->pair(p, even_random, odd_random);
    } else {
      even_random = odd_random = set(0);
    }
    bytes[p] = pack_codes(round_to_code<rounding>(even, even_random), round_to_code<rounding>(odd, odd_random), even,
                          odd);
  }
  store_codes(codes, bytes);
  if (__builtin_expect(scales.nan_lanes != 0, 0)) {
    for (int lane = 0; lane < kGroupBlocks; ++lane) {
      if (scales.nan_lanes >> lane & 1) std::memset(codes + lane * 8, 0, 8);
    }
  }
}

template <typename T>
void as_floats(const T* x, float* out) {
  for (int p = 0; p < kPairs; ++p) {
    F even, odd;
    load_pairs(x + 32 * p, even, odd);
    store_pairs(out + 32 * p, even, odd);
  }
}

template <typename T>
BlockScales group_scales(const T* x, const Plan& plan) {
  const I magnitudes = block_magnitudes(x);
  if (plan.spec.four_over_six == FourOverSix::kNone) return block_scales(magnitudes, plan);
  alignas(64) float elements[kGroupElements];
  as_floats(x, elements);
  const Candidates candidates = candidate_scales(magnitudes, plan);
  const F error6 = block_errors(elements, candidates.bytes[0], plan);
  const F error4 = block_errors(elements, candidates.bytes[1], plan);
  return finish_scales(choose(candidates, error6, error4), magnitudes, plan.tensor);
}

// Rows' errors added in halves: row i + row i+8, then +4, +2, +1.
inline F add_in_halves(F* rows) {
  for (int half = 8; half; half /= 2) {
    for (int i = 0; i < half; ++i) rows[i] = add(rows[i], rows[i + half]);
  }
  return rows[0];
}

// The scales of 16 tiles, each 16 rows of one block; absent rows of the last band count as zeros.
template <typename T>
BlockScales tile_scales(const T* const* x, int rows, const Plan& plan) {
  I magnitudes = block_magnitudes(x[0]);
  for (int i = 1; i < rows; ++i) magnitudes = max(magnitudes, block_magnitudes(x[i]));
  if (plan.spec.four_over_six == FourOverSix::kNone) return block_scales(magnitudes, plan);
  alignas(64) float elements[kGroupElements];
  const Candidates candidates = candidate_scales(magnitudes, plan);
  F errors[2][kBlock];
  for (int i = 0; i < kBlock; ++i) {
    if (i < rows) as_floats(x[i], elements);
    for (int k = 0; k < 2; ++k) {
      errors[k][i] = i < rows ? block_errors(elements, candidates.bytes[k], plan) : set(0.0f);
    }
  }
  return finish_scales(choose(candidates, add_in_halves(errors[0]), add_in_halves(errors[1])), magnitudes,
                       plan.tensor);
}

// A Sink takes (group, scales, encode) and says where encode(codes) may put the codes. This one stores both.
struct ToMemory {
  const Quantized& out;
  int64_t blocks;

  template <typename Encode>
  void operator()(const Group& group, const BlockScales& scales, Encode encode) const {
    CodeTarget target(out.qdata + (group.row * blocks + group.block) * 8, group.count);
    encode(target.data());
    target.flush();
    store_scales(out.scale, out.column_tiles, group, blocks, scales.bytes);
  }
};

// Groups x[i] with their scales; tiles share scales[0].
template <Rounding rounding, typename T, typename Sink>
void encode_groups(const T* const* x, const Group* groups, int count, const BlockScales* scales, int64_t blocks,
                   const Plan& plan, Sink& sink) {
  for (int i = 0; i < count; ++i) {
    const BlockScales& own = scales[plan.spec.block_rows == 1 ? i : 0];
    sink(groups[i], own, [&](uint8_t* codes) {
      if constexpr (rounding == Rounding::kStochastic16 || rounding == Rounding::kStochastic8) {
        const RandomWindows random = random_windows(plan, groups[i].row, groups[i].block, blocks);
        quantize_group<rounding>(x[i], own, &random, codes);
      } else {
        quantize_group<rounding>(x[i], own, nullptr, codes);
      }
    });
  }
}

template <typename T, typename Sink>
void encode_groups(const T* const* x, const Group* groups, int count, const BlockScales* scales, int64_t blocks,
                   const Plan& plan, Sink& sink) {
  switch (rounding_of(plan.spec)) {
    case Rounding::kEven: return encode_groups<Rounding::kEven>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kAway: return encode_groups<Rounding::kAway>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kZero: return encode_groups<Rounding::kZero>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kStochastic16:
      return encode_groups<Rounding::kStochastic16>(x, groups, count, scales, blocks, plan, sink);
    case Rounding::kStochastic8:
      return encode_groups<Rounding::kStochastic8>(x, groups, count, scales, blocks, plan, sink);
  }
}

// Up to 16 groups at a time: 16 rows of a column of tiles, or neighbours with scales of their own. All scales are made
// before the first code: a group's scales are one long chain of dependent instructions, and the chains of neighbours
// run side by side (4.2 -> 2.4 ms for 2^24 elements in the cache, one thread).
constexpr int kBatch = 16;

template <typename T>
struct Batch {
  Group groups[kBatch];
  int count = 0;
  const T* plain[kBatch];
  const Bf16* transformed[kBatch];
  BlockScales scales[kBatch];
  alignas(64) T gathered[kBatch][kGroupElements];
  alignas(64) Bf16 hadamard[kBatch][kGroupElements];

  void add(const Group& group) { groups[count++] = group; }
};

template <typename T, typename U, typename Sink>
void quantize_loaded(const U* const* x, Batch<T>& batch, int64_t blocks, const Plan& plan, Sink& sink) {
  if (plan.spec.block_rows == 1) {
    for (int i = 0; i < batch.count; ++i) batch.scales[i] = group_scales(x[i], plan);
  } else {
    batch.scales[0] = tile_scales(x, batch.count, plan);
  }
  encode_groups(x, batch.groups, batch.count, batch.scales, blocks, plan, sink);
}

// Quantizes the batch and empties it.
template <typename T, typename Sink>
void quantize_batch(const Matrix& x, Batch<T>& batch, const Plan& plan, const HadamardSigns& signs, Sink& sink) {
  for (int i = 0; i < batch.count; ++i) {
    batch.plain[i] = fetch(x, batch.groups[i], batch.gathered[i]);
    if (plan.spec.hadamard_sign < 0) continue;
    hadamard_group(batch.plain[i], signs.even, signs.odd, batch.hadamard[i]);
    batch.transformed[i] = batch.hadamard[i];
  }
  if (plan.spec.hadamard_sign < 0) {
    quantize_loaded(batch.plain, batch, x.blocks(), plan, sink);
  } else {
    quantize_loaded(batch.transformed, batch, x.blocks(), plan, sink);
  }
  batch.count = 0;
}

// Units [begin, end) of Kernels::quantize.
template <typename T, typename Sink>
void quantize_units(const Matrix& x, const Plan& plan, int64_t begin, int64_t end, Sink& sink) {
  Batch<T> batch;
  const HadamardSigns signs(plan.spec.hadamard_sign);
  if (!plan.banded) {
    for (int64_t first = begin; first < end; first += kBatch) {
      for (int64_t unit = first; unit < std::min(end, first + kBatch); ++unit) {
        batch.add(Group::at(unit, x.rows, x.blocks()));
      }
      quantize_batch(x, batch, plan, signs, sink);
    }
    return;
  }
  for (int64_t band = begin; band < end; ++band) {
    const int64_t row0 = band * kBlock, last = std::min<int64_t>(row0 + kBlock, x.rows);
    for (int64_t block = 0; block < x.blocks(); block += kGroupBlocks) {
      const int count = int(std::min<int64_t>(kGroupBlocks, x.blocks() - block));
      for (int64_t row = row0; row < last; ++row) batch.add({row, block, count});
      quantize_batch(x, batch, plan, signs, sink);
    }
  }
}

template <typename T>
void quantize(const Matrix& x, const Plan& plan, const Quantized& out, int64_t begin, int64_t end) {
  ToMemory sink{out, x.blocks()};
  quantize_units<T>(x, plan, begin, end, sink);
}

// --- dequantize, fake quantize ---------------------------------------------------------------------------------------

// factor: of each lane's block, or null.
template <typename Out>
void decode_group(const uint8_t* codes, const uint8_t* scale_bytes, const F* factor, Out* values) {
  const Spread scales(e4m3_values(load_bytes(scale_bytes))), factors(factor ? *factor : set(1.0f));
  for (int p = 0; p < kPairs; ++p) {
    I even, odd;
    load_codes(codes + 16 * p, even, odd);
    F low = mul(e2m1_values(even), scales.pair(p)), high = mul(e2m1_values(odd), scales.pair(p));
    if (factor) {
      low = mul(low, factors.pair(p));
      high = mul(high, factors.pair(p));
    }
    store_pairs(values + 32 * p, low, high);
  }
}

// Decodes groups that share one factor. A block scale is a byte and a code a nibble, so a block's 16-bit values are
// among 16 that its scale's row of a table holds: 8 KiB, made by decode_group itself, and worth it from so many groups
// (1.9 -> 0.7 ms for 2^24 elements in the cache, one thread).
constexpr int64_t kTableGroups = 64;

template <typename Out>
class Decoder {
 public:
  Decoder(const F* factor, int64_t groups) : factor_(factor), by_table_(possible && groups >= kTableGroups) {
    if (!by_table_) return;
    uint8_t codes[kGroupBytes], scale_bytes[kGroupBlocks];
    for (int i = 0; i < kGroupBytes; ++i) codes[i] = uint8_t(i % 8 * 0x22 + 0x10);  // codes 0 to 15, for each block
    for (int first = 0; first < 256; first += kGroupBlocks) {
      for (int lane = 0; lane < kGroupBlocks; ++lane) scale_bytes[lane] = uint8_t(first + lane);
      decode_group(codes, scale_bytes, factor, table_[first]);
    }
  }

  void operator()(const uint8_t* codes, const uint8_t* scale_bytes, Out* values) const {
    if (!by_table_) return decode_group(codes, scale_bytes, factor_, values);
    for (int p = 0; p < kPairs; ++p) {
      lookup_pair(codes + 16 * p, row(scale_bytes[2 * p]), row(scale_bytes[2 * p + 1]), values + 32 * p);
    }
  }

 private:
  static constexpr bool possible = kDecodesByTable && sizeof(Out) == 2;

  const uint16_t* row(uint8_t scale) const { return reinterpret_cast<const uint16_t*>(table_[scale]); }

  const F* factor_;
  bool by_table_;
  alignas(64) Out table_[possible ? 256 : 1][kBlock];
};

template <typename Out>
void dequantize_groups(const Encoded& in, Out* out, int64_t begin, int64_t end) {
  Out buffer[kGroupElements];
  uint8_t last_codes[kGroupBytes], scale_bytes[kGroupBlocks] = {};
  const F shared_factor = set(in.factors ? in.factors[0] : 1.0f);
  const Decoder<Out> decode(in.factors ? &shared_factor : nullptr, in.factor_per_row ? 0 : end - begin);
  for (int64_t g = begin; g < end; ++g) {
    const Group group = Group::at(g, in.rows, in.blocks);
    const uint8_t* codes = in.qdata + (group.row * in.blocks + group.block) * 8;
    if (group.count < kGroupBlocks) {
      std::memcpy(last_codes, codes, group.count * 8);
      codes = last_codes;
    }
    load_scales(in.scale, in.column_tiles, group, in.blocks, scale_bytes);
    Out* values = destination(out, group, in.columns, buffer);
    if (in.factor_per_row) {
      alignas(64) float lane_factors[16] = {};
      group.for_each(in.blocks, [&](int lane, int64_t row, int64_t) { lane_factors[lane] = in.factors[row]; });
      const F factor = load(lane_factors);
      decode_group(codes, scale_bytes, &factor, values);
    } else {
      decode(codes, scale_bytes, values);
    }
    scatter(values, out, group, in.columns, in.blocks, buffer);
  }
}

inline void dequantize(const Encoded& in, Dtype dtype, void* out, int64_t begin, int64_t end) {
  switch (dtype) {
    case Dtype::kBf16: return dequantize_groups(in, static_cast<Bf16*>(out), begin, end);
    case Dtype::kFp16: return dequantize_groups(in, static_cast<Fp16*>(out), begin, end);
    case Dtype::kFloat: return dequantize_groups(in, static_cast<float*>(out), begin, end);
  }
}

// Decodes what a kernel would have stored.
template <typename Out>
struct ToValues {
  Out* out;
  int64_t columns, blocks;
  const Decoder<Out>& decode;

  template <typename Encode>
  void operator()(const Group& group, const BlockScales& scales, Encode encode) const {
    alignas(64) uint8_t codes[kGroupBytes], scale_bytes[kGroupBlocks];
    Out buffer[kGroupElements];
    encode(codes);
    store_bytes(scale_bytes, scales.bytes);
    Out* values = destination(out, group, columns, buffer);
    decode(codes, scale_bytes, values);
    scatter(values, out, group, columns, blocks, buffer);
  }
};

template <typename T>
void fake_quantize(const Matrix& x, const Plan& plan, const float* factor, Dtype dtype, void* out, int64_t columns,
                   int64_t begin, int64_t end) {
  const F lane_factor = set(factor ? *factor : 1.0f);
  const auto run = [&](auto* typed) {
    using Out = std::remove_pointer_t<decltype(typed)>;
    const int64_t groups = (end - begin) * (plan.banded ? x.blocks() : 1);
    const Decoder<Out> decode(factor ? &lane_factor : nullptr, groups);
    ToValues<Out> sink{typed, columns, x.blocks(), decode};
    quantize_units<T>(x, plan, begin, end, sink);
  };
  switch (dtype) {
    case Dtype::kBf16: return run(static_cast<Bf16*>(out));
    case Dtype::kFp16: return run(static_cast<Fp16*>(out));
    case Dtype::kFloat: return run(static_cast<float*>(out));
  }
}

// --- a matrix and its transpose in one pass --------------------------------------------------------------------------

// A unit is kPairRows rows by kPairColumns columns: read once from memory, its rows first, then, from the cache, its
// columns, kStrip at a time through a transposed copy in which each column is one group.
constexpr int64_t kStrip = 32;

template <typename T>
struct Strip {
  alignas(64) T columns[kStrip][kPairRows];

  void fill(const Matrix& x, int64_t row0, int64_t rows, int64_t column0, int64_t count) {
    const T* data = static_cast<const T*>(x.data) + row0 * x.row_stride + column0;
    if (rows < kPairRows) std::memset(columns, 0, sizeof columns);
    transpose(data, x.row_stride, rows, count, &columns[0][0], kPairRows);
  }
};

// Calls rows(row, first column, one past the last) for each row of units [begin, end), and strip(strip, first row, count
// of rows, first column, count of columns) for each strip of their columns.
template <typename T, typename Rows, typename Columns>
void for_each_strip(const Matrix& x, int64_t begin, int64_t end, Rows rows, Columns columns) {
  Strip<T> strip;
  const int64_t across = ceil_div(x.columns, kPairColumns);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row0 = unit / across * kPairRows, row_count = std::min<int64_t>(kPairRows, x.rows - row0);
    const int64_t first = unit % across * kPairColumns, last = std::min(first + kPairColumns, x.columns);
    rows(row0, row_count, first, last);
    for (int64_t column = first; column < last; column += kStrip) {
      const int64_t count = std::min(kStrip, last - column);
      strip.fill(x, row0, row_count, column, count);
      columns(strip, row0, row_count, column, count);
    }
  }
}

template <typename T>
void amax_pair(const Matrix& x, int sign, int64_t begin, int64_t end, uint32_t* row, uint32_t* column) {
  const HadamardSigns signs(sign);
  Bf16 transformed[kGroupElements];
  uint32_t row_most = 0, column_most = 0;
  for_each_strip<T>(
      x, begin, end,
      [&](int64_t row0, int64_t rows, int64_t first, int64_t last) {
        for (int64_t r = row0; r < row0 + rows; ++r) {
          const T* data = static_cast<const T*>(x.data) + r * x.row_stride + first;
          row_most = std::max(row_most, finite_max_bits(data, last - first));
        }
      },
      [&](const Strip<T>& strip, int64_t, int64_t, int64_t, int64_t count) {
        for (int64_t c = 0; c < count; ++c) {
          hadamard_group(strip.columns[c], signs.even, signs.odd, transformed);
          column_most = std::max(column_most, finite_max_bits(transformed, kGroupElements));
        }
      });
  *row = row_most;
  *column = column_most;
}

template <typename T>
void quantize_pair(const Matrix& x, const Plan& plan, const Quantized& out, const Plan& plan_t, const Quantized& out_t,
                   int64_t begin, int64_t end) {
  Batch<T> batch;
  const HadamardSigns signs(plan.spec.hadamard_sign), signs_t(plan_t.spec.hadamard_sign);
  ToMemory sink{out, x.blocks()}, sink_t{out_t, ceil_div(x.rows, kBlock)};
  for_each_strip<T>(
      x, begin, end,
      [&](int64_t row0, int64_t rows, int64_t first, int64_t last) {
        for (int64_t band = row0; band < row0 + rows; band += kBlock) {
          for (int64_t column = first; column < last; column += kGroupElements) {
            const int count = int(ceil_div(std::min<int64_t>(kGroupElements, last - column), kBlock));
            for (int64_t r = band; r < std::min<int64_t>(band + kBlock, row0 + rows); ++r) {
              batch.add({r, column / kBlock, count});
            }
            quantize_batch(x, batch, plan, signs, sink);
          }
        }
      },
      [&](const Strip<T>& strip, int64_t row0, int64_t rows, int64_t column0, int64_t columns) {
        // The strip is a matrix of `columns` rows of x^T, one group each, that stand further down and right in x^T.
        const Matrix x_t{strip.columns, columns, kPairRows, kPairRows, x.dtype};
        Plan placed = plan_t;
        placed.first_block += column0 * plan_t.row_blocks + row0 / kBlock;
        const auto shifted = [&](Group group, const BlockScales& scales, auto encode) {
          group.row += column0;
          group.block += row0 / kBlock;
          sink_t(group, scales, encode);
        };
        for (int64_t c = 0; c < columns; c += kBlock) {
          for (int64_t i = c; i < std::min<int64_t>(c + kBlock, columns); ++i) {
            batch.add({i, 0, int(ceil_div(rows, kBlock))});
          }
          quantize_batch(x_t, batch, placed, signs_t, shifted);
        }
      });
}

// --- the table -------------------------------------------------------------------------------------------------------

template <typename Function>
auto with_dtype(Dtype dtype, Function f) {
  switch (dtype) {
    case Dtype::kBf16: return f(Bf16{});
    case Dtype::kFp16: return f(Fp16{});
    default: return f(float{});
  }
}

inline constexpr Kernels kKernels = {
    NVFP4_STRING(NVFP4_ISA),
    [](const Matrix& x, int sign, int64_t begin, int64_t end) {
      return with_dtype(x.dtype, [&](auto t) { return amax_groups<decltype(t)>(x, sign, begin, end); });
    },
    [](const Matrix& x, int sign, int64_t begin, int64_t end, uint32_t* row, uint32_t* column) {
      with_dtype(x.dtype, [&](auto t) { amax_pair<decltype(t)>(x, sign, begin, end, row, column); });
    },
    [](const Matrix& x, int sign, uint16_t* out, int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { hadamard_groups<decltype(t)>(x, sign, out, begin, end); });
    },
    [](const Matrix& x, const Plan& plan, const Quantized& out, int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { quantize<decltype(t)>(x, plan, out, begin, end); });
    },
    [](const Matrix& x, const Plan& plan, const Quantized& out, const Plan& plan_t, const Quantized& out_t,
       int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { quantize_pair<decltype(t)>(x, plan, out, plan_t, out_t, begin, end); });
    },
    dequantize,
    [](const Matrix& x, const Plan& plan, const float* factor, Dtype dtype, void* out, int64_t columns, int64_t begin,
       int64_t end) {
      with_dtype(x.dtype, [&](auto t) {
        fake_quantize<decltype(t)>(x, plan, factor, dtype, out, columns, begin, end);
      });
    },
};

}  // namespace nvfp4::NVFP4_ISA
