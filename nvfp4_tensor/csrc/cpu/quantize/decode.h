// Dequantization, and fake quantization, which decodes the codes that quantization would have stored.
#pragma once

#include "cpu/quantize/quantize.h"

namespace nvfp4::NVFP4_ISA {

// factor: of each lane's block, or null.
template <typename Out>
void decode_group(const uint8_t* codes, const uint8_t* scale_bytes, const F* factor, Out* values) {
  const Spread scales(e4m3_values(load_bytes(scale_bytes))), factors(factor ? *factor : set(1.0f));
  for (int p = 0; p < kPairs; ++p) {
    I even, odd;
    load_codes(codes + 16 * p, even, odd);
    F low = mul(e2m1_values(even), scales.pair(p)), high = mul(e2m1_values(odd), scales.pair(p));
    if (factor) {
      low = plain_nan(mul(low, factors.pair(p)));
      high = plain_nan(mul(high, factors.pair(p)));
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
    if constexpr (possible) {
      for (int p = 0; p < kPairs; ++p) {
        lookup_pair(codes + 16 * p, row(scale_bytes[2 * p]), row(scale_bytes[2 * p + 1]), values + 32 * p);
      }
    }
  }

 private:
  // Where looking values up beats computing them, an instruction set has the function for it.
  static constexpr bool possible = sizeof(Out) == 2 && requires(const uint8_t* codes, const uint16_t* row, Out* to) {
    lookup_pair(codes, row, row, to);
  };

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

// Decodes what a kernel would have stored, a batch behind: codes that are loaded right after they were stored make the
// next group's encoding wait (4.0 -> 2.4 ms for 2^24 elements in the cache, one thread).
template <typename Out>
struct ToValues {
  Out* out;
  int64_t columns, blocks;
  const Decoder<Out>& decode;

  int count = 0;
  Group groups[kBatch];
  alignas(64) uint8_t codes[kBatch][kGroupBytes];
  alignas(64) uint8_t scale_bytes[kBatch][kGroupBlocks];

  ToValues(Out* out, int64_t columns, int64_t blocks, const Decoder<Out>& decode)
      : out(out), columns(columns), blocks(blocks), decode(decode) {}

  template <typename Encode>
  void operator()(const Group& group, const BlockScales& scales, Encode encode) {
    encode(codes[count]);
    store_bytes(scale_bytes[count], scales.bytes);
    groups[count++] = group;
  }
};

template <typename Out>
void end_batch(ToValues<Out>& sink) {
  Out buffer[kGroupElements];
  for (int i = 0; i < sink.count; ++i) {
    Out* values = destination(sink.out, sink.groups[i], sink.columns, buffer);
    sink.decode(sink.codes[i], sink.scale_bytes[i], values);
    scatter(values, sink.out, sink.groups[i], sink.columns, sink.blocks, buffer);
  }
  sink.count = 0;
}

template <typename T>
void fake_quantize(const Matrix& x, const Plan& plan, const float* factor, Dtype dtype, void* out, int64_t columns,
                   int64_t begin, int64_t end) {
  const F lane_factor = set(factor ? *factor : 1.0f);
  const auto run = [&](auto* typed) {
    using Out = std::remove_pointer_t<decltype(typed)>;
    const int64_t groups = (end - begin) * (plan.banded ? x.blocks() : 1);
    const Decoder<Out> decode(factor ? &lane_factor : nullptr, groups);
    ToValues<Out> sink(typed, columns, x.blocks(), decode);
    quantize_units<T>(x, plan, begin, end, sink);
  };
  switch (dtype) {
    case Dtype::kBf16: return run(static_cast<Bf16*>(out));
    case Dtype::kFp16: return run(static_cast<Fp16*>(out));
    case Dtype::kFloat: return run(static_cast<float*>(out));
  }
}

}  // namespace nvfp4::NVFP4_ISA
