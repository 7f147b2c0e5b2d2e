// Few rows of x: x @ w^T with the weight decoded in registers for each 8 rows of x, in the vocabulary of common.h.
//
// Codes become numbers by one table lookup; the block scales, which would cost a multiplication for each, are applied
// to sums over part of a block instead: a lane holds elements of one block only, of a chunk half a block, of a pair of
// chunks all of it (Math::kHalves).
#pragma once

#include "cpu/matmul/common.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kFewDepth = 64;  // chunks, shared by the rows of a group of x, which so stay in the first-level cache
// Rows of the weight that meet a part of x together, where that leaves each worker kFewShare such units: more spare the
// second-level cache reading x (16 rows, two threads: 0.77 -> 0.69 ms), fewer keep many workers busy.
constexpr int kFewRowStep = 32, kMostFewUnitRows = 128, kFewShare = 8;
// How far ahead rows are prefetched, in bytes of codes, and at least four rows. 4096^2: with eight, two threads are up
// to 10 % slower.
constexpr int64_t kFewAhead = 4608, kFewAheadRows = 4;
static_assert(kFewRowStep % kLanes == 0 && kMostFewUnitRows % kFewRowStep == 0);

// p, of which the compiler no longer knows where it points: sums stay in memory from chunk to chunk. GCC kept them in
// registers that it did not have: 4 rows of 4096^2 took 0.46 ms of one thread, with this and pairs of chunks 0.39.
template <typename T>
inline __attribute__((always_inline)) T* reread(T* p) {
  asm("" : "+r"(p));
  return p;
}

template <class Math>
struct Few {
  using Value = typename Math::Value;
  static constexpr int kVectors = Math::kFewVectors, kVectorValues = kChunk / kVectors;
  static constexpr int kHalves = Math::kHalves;  // chunks that are multiplied together

  static_assert(Math::kMostFewRows <= kMostFewRows);

  static int64_t row_values(const Product& p) { return chunks_of(p.columns) * kChunk; }
  static int64_t paired_chunks(const Product& p) { return p.blocks / (kHalves * kChunkBlocks) * kHalves; }
  static int64_t packed_words(const Product& p) {
    return p.batches * p.x_rows * row_values(p) * int64_t(sizeof(Value)) / int64_t(sizeof(float));
  }
  static int64_t pack_units(const Product& p) { return p.batches * p.x_rows; }

  // Rows of x go in groups of at most kFewX, as equal as they can be: first_row(g) to first_row(g + 1).
  static int64_t groups(const Product& p) { return ceil_div(p.x_rows, kFewX); }
  static int64_t first_row(const Product& p, int64_t group) { return group * p.x_rows / groups(p); }
  static int64_t group_of(const Product& p, int64_t row) { return ((row + 1) * groups(p) - 1) / p.x_rows; }

  // Elements [first, first + kChunk) of a row of x, in a chunk's order.
  static unsigned pack_chunk(const Product& p, int64_t row, int64_t first, Value* out) {
    Value values[kChunk];
    const unsigned range = load_x(p, row, first, values);
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < kVectorValues; ++i) out[v * kVectorValues + i] = values[i * kVectors + v];
    }
    return range;
  }

  // An arithmetic may want the numbers of a register in another order, in which its codes come, too.
  static void arrange([[maybe_unused]] Value* chunk) {
    if constexpr (requires { Math::arrange(chunk); }) Math::arrange(chunk);
  }

  // The rows of a group lie beside each other chunk by chunk, those of a pair of chunks half by half.
  static unsigned pack_row(const Product& p, int64_t row, Value* out, int64_t step) {
    unsigned range = 0;
    int64_t chunk = 0;
    if constexpr (kHalves == 2) {
      for (; chunk < paired_chunks(p); chunk += 2, out += 2 * step) {
        alignas(64) Value chunks[2][kChunk];
        each<2>([&](auto c) { range |= pack_chunk(p, row, (chunk + c) * kChunk, chunks[c]); });
        each<kVectors>([&](auto v) {
          constexpr int at = v * kVectorValues;
          const I first = bits(load(reinterpret_cast<const float*>(chunks[0] + at)));
          const I second = bits(load(reinterpret_cast<const float*>(chunks[1] + at)));
          each<2>([&](auto half) {
            const I words = Math::template half_of_pair<half>(first, second);
            store(reinterpret_cast<float*>(out + half * step + at), as_float(words));
          });
        });
        each<2>([&](auto half) { arrange(out + half * step); });
      }
    }
    for (; chunk < chunks_of(p.columns); ++chunk, out += step) {
      range |= pack_chunk(p, row, chunk * kChunk, out);
      arrange(out);
    }
    return range;
  }

  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    unsigned range = 0;
    for (int64_t flat = begin; flat < end; ++flat) {
      const int64_t row = flat % p.x_rows, group = group_of(p, row), first = first_row(p, group);
      Value* out = reinterpret_cast<Value*>(packed) + (flat - row + first) * row_values(p) + (row - first) * kChunk;
      range |= pack_row(p, flat, out, (first_row(p, group + 1) - first) * kChunk);
    }
    return range;
  }

  static int64_t unit_rows(const Product& p) {
    const int64_t steps = p.batches * p.rows / (p.workers * kFewShare * kFewRowStep);
    return least(kMostFewUnitRows, most(1, steps) * kFewRowStep);
  }
  static int64_t row_units(const Product& p) { return ceil_div(p.rows, unit_rows(p)); }
  static int64_t units(const Product& p) { return p.batches * row_units(p); }

  // Rows are prefetched in fours, which share the cache lines of their scales.
  static int64_t ahead(const Product& p) {
    return most(1, kFewAhead / (kFewAheadRows * p.blocks * (kBlock / 2))) * kFewAheadRows;
  }

  // Adds the sums over parts of blocks, times the scales, to sums (kRows, kX, kLanes). codes(r, half), scales(r): of
  // row r of the weight.
  template <int kRows, int kX, int kParts, typename Codes, typename Scales>
  static __attribute__((always_inline)) inline void add_products(Codes codes, Scales scales, const Value* x,
                                                                 float* sums) {
    F factors[kRows];
    each<kRows>([&](auto r) { factors[r] = scales(r); });
    F parts[kRows][kX];  // GCC keeps them in registers where each<> unrolls, not where a loop does: 2.5 times faster
    each<kRows>([&](auto r) { each<kX>([&](auto m) { parts[r][m] = set(0.0f); }); });
    each<kParts>([&](auto half) {
      I bytes[kRows];
      each<kRows>([&](auto r) { bytes[r] = codes(r, half); });
      each<kVectors>([&](auto v) {
        F w[kRows];
        each<kRows>([&](auto r) { w[r] = Math::template codes<v>(bytes[r]); });
        each<kX>([&](auto m) {
          const Value* at = x + (half * kX + m) * kChunk + v * kVectorValues;
          const F xs = load(reinterpret_cast<const float*>(at));
          each<kRows>([&](auto r) { parts[r][m] = Math::dot(parts[r][m], w[r], xs); });
        });
      });
    });
    sums = reread(sums);
    each<kRows>([&](auto r) {
      each<kX>([&](auto m) {
        float* at = sums + (r * kX + m) * kLanes;
        store(at, multiply_add(parts[r][m], factors[r], load(at)));
      });
    });
  }

  // Adds chunks [begin, end) of rows first, first + 1, .. of the weight with a group of x to sums (kRows, kX, kLanes).
  template <int kRows, int kX>
  static void multiply_rows(const Product& p, int64_t first, int64_t begin, int64_t end, const Value* x, float* sums) {
    WeightRow rows[kRows];
    each<kRows>([&](auto r) { rows[r] = WeightRow(p, first + r); });
    const int64_t rows_ahead = ahead(p), codes_ahead = rows_ahead * p.blocks * (kBlock / 2);
    const uint8_t* scales_ahead = WeightRow(p, first + rows_ahead).scales;
    int64_t chunk = begin;
    for (const int64_t paired = least(end, paired_chunks(p)); chunk < paired; chunk += kHalves) {
      const int64_t code_at = chunk * kChunkBytes, scale_at = chunk * 2 * kTileBytes;
      // The hardware's own prefetching leaves one thread at 0.55 ms, this at 0.38 (4096^2, M = 1).
      each<2 * kHalves>([&](auto tile) { __builtin_prefetch(scales_ahead + scale_at + tile * kTileBytes); });
      const auto codes = [&](auto r, auto half) {
        if constexpr (half == 0) {
          each<kHalves>([&](auto c) { __builtin_prefetch(rows[r].codes + code_at + codes_ahead + c * kChunkBytes); });
        }
        const uint8_t* at = rows[r].codes + code_at;
        const I bytes = load_chunk(at);
        if constexpr (kHalves == 2) return Math::template half_of_pair<half>(bytes, load_chunk(at + kChunkBytes));
        return bytes;
      };
      const auto scales = [&](auto r) {
        const uint8_t* at = rows[r].scales + scale_at;
        if constexpr (kHalves == 2) return Math::pair_scales(at);
        return chunk_scales(at, at + kTileBytes);
      };
      add_products<kRows, kX, kHalves>(codes, scales, x + chunk * kX * kChunk, sums);
    }
    for (; chunk < end; ++chunk) {
      each<2>([&](auto tile) { __builtin_prefetch(scales_ahead + (chunk * 2 + tile) * kTileBytes); });
      each<kRows>([&](auto r) { __builtin_prefetch(rows[r].codes + chunk * kChunkBytes + codes_ahead); });
      Chunk chunks[kRows];
      each<kRows>([&](auto r) { chunks[r] = Chunk::of(rows[r], chunk); });
      const auto codes = [&](auto r, auto) { return chunks[r].codes; };
      const auto scales = [&](auto r) { return chunks[r].scales; };
      add_products<kRows, kX, 1>(codes, scales, x + chunk * kX * kChunk, sums);
    }
  }

  // Rows [first, first + count) of the weight with a group of kX rows of x: sums[m * kMostFewUnitRows + r].
  template <int kX>
  static void multiply_group(const Product& p, int64_t first, int64_t count, const Value* x, float* partial,
                             float* sums) {
    constexpr int rows = few_rows(kX);
    constexpr int64_t part = kFewDepth / kX / kHalves * kHalves;
    std::memset(partial, 0, ceil_div(count, kLanes) * kLanes * kX * kLanes * sizeof *partial);
    for (int64_t begin = 0; begin < chunks_of(p.columns); begin += part) {
      const int64_t end = least(begin + part, chunks_of(p.columns));
      int64_t r = 0;
      for (; r + rows <= count; r += rows) {
        multiply_rows<rows, kX>(p, first + r, begin, end, x, partial + r * kX * kLanes);
      }
      for (; r < count; ++r) multiply_rows<1, kX>(p, first + r, begin, end, x, partial + r * kX * kLanes);
    }
    for (int64_t r = 0; r < count; r += kLanes) {
      for (int m = 0; m < kX; ++m) {
        store(sums + m * kMostFewUnitRows + r, sums_of_lanes(partial + (r * kX + m) * kLanes, kX * kLanes));
      }
    }
  }

  // The same with a group of x_rows, 1 to kX.
  template <int kX>
  static void multiply_group(const Product& p, int64_t x_rows, int64_t first, int64_t count, const Value* x,
                             float* partial, float* sums) {
    if (x_rows == kX) return multiply_group<kX>(p, first, count, x, partial, sums);
    if constexpr (kX > 1) multiply_group<kX - 1>(p, x_rows, first, count, x, partial, sums);
  }

  static constexpr int64_t kSumWords = kMostFewRows * kMostFewUnitRows;
  static constexpr int64_t kScratchWords = kSumWords + kMostFewUnitRows * kFewX * kLanes;

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / row_units(p), row = unit % row_units(p) * unit_rows(p);
      const int64_t count = least(unit_rows(p), p.rows - row);
      const Value* x = reinterpret_cast<const Value*>(packed) + batch * p.x_rows * row_values(p);
      for (int64_t group = 0; group < groups(p); ++group) {
        const int64_t m = first_row(p, group), x_rows = first_row(p, group + 1) - m;
        multiply_group<kFewX>(p, x_rows, batch * p.rows + row, count, x + m * row_values(p), scratch + kSumWords,
                              scratch + m * kMostFewUnitRows);
      }
      for (int64_t m = 0; m < p.x_rows; ++m) finish(p, batch, m, row, count, scratch + m * kMostFewUnitRows);
    }
  }

  static constexpr ProductKernel kernel() {
    return {Math::kRefusedByFew, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
