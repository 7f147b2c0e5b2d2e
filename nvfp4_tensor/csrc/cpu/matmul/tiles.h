// Products in registers that hold tiles, 16 x 16 words of two bfloat16 (AMX): x @ w^T and x @ w, for all but the fewest
// rows of x, in the vocabulary of common.h and simd/tiles_amx.h.
//
// A stretch of the weight is decoded, scales applied, into the cache and multiplied with as many tiles of x as there
// are. For x @ w^T the weight is the left operand, as its rows lie, and y comes out transposed: its rows are decoded to
// rows of a tile, and only x, once, has to be turned into columns of pairs.
#pragma once

#include "cpu/matmul/common.h"

namespace nvfp4::NVFP4_ISA {
namespace {

constexpr int kTileSide = 16;
constexpr int kTileWords = kTileSide * kTileSide;
constexpr int kStepDepth = 2 * kTileSide;  // elements of the depth that a tile has
constexpr int kChunkSteps = kChunk / kStepDepth;
// What is summed at a time, because longer sums lose bits: 32 rows of the weight so decoded are 32 KiB.
constexpr int kPartSteps = 16;
constexpr int kPartDepth = kPartSteps * kStepDepth, kPartChunks = kPartSteps / kChunkSteps;
constexpr int kPartWords = kPartSteps * kTileWords;  // of a tile's rows
constexpr int kGroupTiles = 32;                      // of rows of x whose sums are kept at a time

// Registers: sums 0 to 3 (left tile + 2 * right tile), left operands 4 and 5, right operands 6 and 7.
constexpr int kLeft = 4, kRight = 6;

// Loads the operands of step (i, j) that no step before it has loaded, and multiplies.
template <int i, int j>
inline __attribute__((always_inline)) void multiply_pair(const float* left, const float* right) {
  if constexpr (j == 0) tile_load<kLeft + i>(left);
  if constexpr (i == 0) tile_load<kRight + j>(right);
  tile_multiply<i + 2 * j, kLeft + i, kRight + j>();
}

template <int kLefts, int kRights>
void zero_sums() {
  each<kLefts>([&](auto i) { each<kRights>([&](auto j) { tile_zero<i + 2 * j>(); }); });
}

// out = or += a tile of sums. spare: a tile's memory.
template <int t>
void add_sums(float* out, bool first, float* spare) {
  if (first) return tile_store<t>(out);
  tile_store<t>(spare);
  for (int i = 0; i < kTileWords; i += kLanes) store(out + i, add(load(out + i), load(spare + i)));
}

// Sums over `steps` tiles of the depth: left (kLefts, steps) tiles with rows of left_step words, right (kRights,
// steps). out(i, j): where the sums of left tile i and right tile j are.
template <int kLefts, int kRights, typename Out>
void multiply_tiles(const float* left, int64_t left_step, const float* right, int64_t right_step, int64_t steps,
                    bool first, float* spare, Out out) {
  zero_sums<kLefts, kRights>();
  for (int64_t s = 0; s < steps; ++s, left += kTileWords, right += kTileWords) {
    each<kRights>([&](auto j) {
      each<kLefts>([&](auto i) { multiply_pair<i, j>(left + i * left_step, right + j * right_step); });
    });
  }
  each<kRights>([&](auto j) { each<kLefts>([&](auto i) { add_sums<i + 2 * j>(out(i, j), first, spare); }); });
}

inline int64_t x_tiles(const Product& p) { return ceil_div(p.x_rows, kTileSide); }
inline int64_t row_groups(const Product& p) { return ceil_div(x_tiles(p), kGroupTiles); }

// What a row of the weight has of a chunk, with zeros beyond its end.
struct PaddedChunk {
  uint8_t codes[kChunkBytes] = {}, scales[kChunkBlocks] = {};

  PaddedChunk() = default;
  PaddedChunk(const WeightRow& row, int64_t chunk) {
    const int64_t count = least(kChunkBlocks, row.blocks - chunk * kChunkBlocks);
    const uint8_t* first = row.scales + chunk * 2 * kTileBytes;
    std::memcpy(codes, row.codes + chunk * kChunkBytes, count * (kBlock / 2));
    for (int64_t b = 0; b < count; ++b) scales[b] = first[b / kTileColumns * kTileBytes + b % kTileColumns];
  }
};

// --- x @ w^T ---------------------------------------------------------------------------------------------------------

struct TiledMany {
  static constexpr int kPairRows = 2 * kTileSide;  // of the weight, multiplied together
  static constexpr int kMostPairs = 4;             // decoded before the next tiles of x come
  static constexpr int kUnitShare = 4;             // so many units a worker at least, where there are so many rows
  // While a row's chunk is decoded, its chunk four further is prefetched, and in its turn a line of the next 32 rows to
  // the second level, in the order of memory: the hardware's own prefetching then joins in.
  static constexpr int kAheadChunks = 4, kLineBytes = 64, kToSecondLevel = 2;
  static constexpr int kChunkWords = kChunkSteps * kTileWords;

  static int64_t parts(const Product& p) { return most(1, ceil_div(chunks_of(p.columns), kPartChunks)); }
  static int64_t part_chunks(const Product& p, int64_t part) {
    return least(kPartChunks, chunks_of(p.columns) - part * kPartChunks);
  }
  static int64_t packed_words(const Product& p) {
    return p.batches * x_tiles(p) * chunks_of(p.columns) * kChunkSteps * kTileWords;
  }
  // x lies in parts of the depth, for each of these in tiles of rows, whose steps lie beside each other: (batches,
  // parts, tiles of rows, steps, 16 pairs of columns, 16 rows).
  static int64_t start(const Product& p, int64_t batch, int64_t part, int64_t tile) {
    const int64_t before = (batch * chunks_of(p.columns) + part * kPartChunks) * x_tiles(p);
    return (before + tile * part_chunks(p, part)) * kChunkSteps * kTileWords;
  }
  static int64_t pack_units(const Product& p) { return p.batches * parts(p) * x_tiles(p); }

  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    unsigned range = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t tile = unit % x_tiles(p), part = unit / x_tiles(p) % parts(p), batch = unit / x_tiles(p) / parts(p);
      const int64_t row = tile * kTileSide, count = least(kTileSide, p.x_rows - row);
      float* out = packed + start(p, batch, part, tile);
      for (int64_t chunk = 0; chunk < part_chunks(p, part); ++chunk) {
        alignas(64) float words[kTileSide][kChunk / 2];
        for (int64_t i = 0; i < count; ++i) {
          range |= load_x(p, batch * p.x_rows + row + i, (part * kPartChunks + chunk) * kChunk,
                          reinterpret_cast<uint16_t*>(words[i]));
        }
        if (count < kTileSide) std::memset(words[count], 0, (kTileSide - count) * sizeof words[0]);
        for (int s = 0; s < kChunkSteps; ++s, out += kTileWords) {
          F lines[kTileSide];
          for (int i = 0; i < kTileSide; ++i) lines[i] = arrange_blocks(load(words[i] + s * kLanes));
          transpose(lines);
          for (int i = 0; i < kTileSide; ++i) store(out + i * kLanes, lines[i]);
        }
      }
    }
    return range;
  }

  static int64_t unit_pairs(const Product& p) {
    if (x_tiles(p) <= 2) return 1;  // nothing decoded is kept
    return least(kMostPairs, most(1, p.batches * row_groups(p) * p.rows / (p.workers * kUnitShare * kPairRows)));
  }
  static int64_t row_units(const Product& p) { return ceil_div(p.rows, unit_pairs(p) * kPairRows); }
  static int64_t units(const Product& p) { return p.batches * row_groups(p) * row_units(p); }

  // 32 rows of the weight, of which those beyond the last are the last again.
  struct Rows {
    WeightRow row[kPairRows];
    const uint8_t* next_codes;                  // of the next 32 rows
    int64_t chunks, codes_ahead, scales_ahead;  // from the last chunks to what is prefetched while they are decoded

    Rows() = default;
    Rows(const Product& p, int64_t first, int64_t count) : chunks(chunks_of(p.columns)) {
      for (int64_t r = 0; r < kPairRows; ++r) row[r] = WeightRow(p, first + least(r, count - 1));
      const WeightRow next(p, first + kPairRows);
      next_codes = next.codes;
      codes_ahead = next.codes - row[0].codes - (chunks - kAheadChunks) * kChunkBytes;
      scales_ahead = next.scales - row[0].scales - (chunks - kAheadChunks) * 2 * kTileBytes;
    }
    bool is_whole(int64_t chunk) const { return (chunk + 1) * kChunkBlocks <= row[0].blocks; }
  };

  // A whole chunk of rows, decoded a few rows at a time. out: (2 tiles of rows, kPartSteps) tiles.
  struct Decoding {
    const Rows& rows;
    int64_t chunk, codes_ahead, scales_ahead;
    float* out;

    Decoding(const Rows& rows, int64_t chunk, float* out) : rows(rows), chunk(chunk), out(out) {
      const bool is_near = chunk + kAheadChunks < rows.chunks;
      codes_ahead = is_near ? kAheadChunks * kChunkBytes : rows.codes_ahead;
      scales_ahead = is_near ? kAheadChunks * 2 * kTileBytes : rows.scales_ahead;
    }
    template <int kCount>
    __attribute__((always_inline)) void decode(int64_t first) const {
      const uint8_t* near_scales = rows.row[first].scales + chunk * 2 * kTileBytes + scales_ahead;
      if (first % 4 == 0) {  // rows share the cache lines of their scales in fours
        __builtin_prefetch(near_scales);
        __builtin_prefetch(near_scales + kTileBytes);
      }
      const uint8_t* next_lines = rows.next_codes + (chunk * kPairRows + first) * kLineBytes;
      each<kCount>([&](auto r) {
        const WeightRow& row = rows.row[first + r];
        const uint8_t *codes = row.codes + chunk * kChunkBytes, *scales = row.scales + chunk * 2 * kTileBytes;
        __builtin_prefetch(codes + codes_ahead);
        __builtin_prefetch(next_lines + r * kLineBytes, 0, kToSecondLevel);
        float* at = out + (first + r) / kTileSide * kPartWords + (first + r) % kTileSide * kTileSide;
        decode_row(codes, scales, scales + kTileBytes, at, kTileWords);
      });
    }
  };

  static void decode_chunk(const Rows& rows, int64_t chunk, float* out) {
    if (rows.is_whole(chunk)) {
      const Decoding whole(rows, chunk, out);
      for (int64_t r = 0; r < kPairRows; r += 2) whole.decode<2>(r);
      return;
    }
    for (int64_t r = 0; r < kPairRows; ++r) {
      const PaddedChunk padded(rows.row[r], chunk);
      float* at = out + r / kTileSide * kPartWords + r % kTileSide * kTileSide;
      decode_row(padded.codes, padded.scales, padded.scales + kTileColumns, at, kTileWords);
    }
  }

  // Adds a chunk's products to the sums in registers and decodes another chunk: tiles are multiplied while the vector
  // units decode, if either's instructions are near enough to the other's.
  template <int kTiles>
  static void multiply_and_decode(const float* weight, const float* x, int64_t x_step, const Decoding& next) {
    constexpr int share = kPairRows / kChunkSteps / 4;  // rows, four times a step
    for (int64_t s = 0; s < kChunkSteps; ++s, weight += kTileWords, x += kTileWords) {
      const int64_t row = s * kPairRows / kChunkSteps;
      each<2>([&](auto j) {
        each<2>([&](auto i) {
          if constexpr (j < kTiles) multiply_pair<i, j>(weight + i * kPartWords, x + j * x_step);
          next.template decode<share>(row + (i + 2 * j) * share);
        });
      });
    }
  }
  template <int kTiles>
  static void multiply_chunk(const float* weight, const float* x, int64_t x_step) {
    for (int64_t s = 0; s < kChunkSteps; ++s, weight += kTileWords, x += kTileWords) {
      each<kTiles>(
          [&](auto j) { each<2>([&](auto i) { multiply_pair<i, j>(weight + i * kPartWords, x + j * x_step); }); });
    }
  }

  // Decodes chunks [begin, end) of 32 rows of the weight, the last `kept` of which stay in `weight`, and multiplies
  // them with kTiles tiles of x, packed from `x` on.
  template <int kTiles, typename Out>
  static void decode_and_multiply(const Product& p, const Rows& rows, int64_t begin, int64_t end, float* weight,
                                  int64_t kept, const float* x, int64_t batch, int64_t tile, float* spare, Out out) {
    const auto place = [&](int64_t chunk) { return weight + chunk % kept * kChunkWords; };
    zero_sums<2, kTiles>();
    if (begin < end) decode_chunk(rows, begin, place(begin));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t part = chunk / kPartChunks, next = chunk + 1, x_step = part_chunks(p, part) * kChunkWords;
      const float *left = place(chunk), *right = x + start(p, batch, part, tile) + chunk % kPartChunks * kChunkWords;
      if (next < end && rows.is_whole(next)) {
        multiply_and_decode<kTiles>(left, right, x_step, Decoding(rows, next, place(next)));
      } else {
        multiply_chunk<kTiles>(left, right, x_step);
        if (next < end) decode_chunk(rows, next, place(next));
      }
      if (next % kPartChunks && next < end) continue;
      each<kTiles>([&](auto j) { each<2>([&](auto i) { add_sums<i + 2 * j>(out(i, j), part == 0, spare); }); });
      zero_sums<2, kTiles>();
    }
    if (begin == end) each<kTiles>([&](auto j) { each<2>([&](auto i) { tile_store<i + 2 * j>(out(i, j)); }); });
  }

  static constexpr int64_t kUnitTiles = 2 * kMostPairs;  // of rows of the weight
  static constexpr int64_t kWeightWords = kUnitTiles * kPartWords;
  static constexpr int64_t kSumWords = kGroupTiles * kUnitTiles * kTileWords;
  static constexpr int64_t kScratchWords = kWeightWords + kSumWords + kTileWords;

  // Rows [row, row + count) of the weight with tiles [first, last) of rows of x.
  static void multiply_unit(const Product& p, const float* packed, int64_t batch, int64_t row, int64_t count,
                            int64_t first, int64_t last, float* scratch) {
    float *weight = scratch, *sums = weight + kWeightWords, *spare = sums + kSumWords;
    const int64_t pairs = ceil_div(count, kPairRows);
    const auto sums_of = [&](int64_t tile, int64_t pair) {
      float* own = sums + ((tile - first) * pairs + pair) * 2 * kTileWords;
      return [own, pairs](int i, int j) { return own + (2 * j * pairs + i) * kTileWords; };
    };
    Rows rows[kMostPairs];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t at = pair * kPairRows;
      rows[pair] = Rows(p, batch * p.rows + row + at, least(kPairRows, count - at));
    }
    const auto decode_and = last - first > 1 ? decode_and_multiply<2, decltype(sums_of(0, 0))>
                                             : decode_and_multiply<1, decltype(sums_of(0, 0))>;
    const bool is_kept = last - first > 2;
    const int64_t kept = is_kept ? kPartChunks : 2;
    for (int64_t begin = 0, end; begin == 0 || begin < chunks_of(p.columns); begin = end) {
      end = is_kept ? least(begin + kPartChunks, chunks_of(p.columns)) : chunks_of(p.columns);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        decode_and(p, rows[pair], begin, end, weight + pair * 2 * kPartWords, kept, packed, batch, first, spare,
                   sums_of(first, pair));
      }
      const int64_t part = begin / kPartChunks, x_step = (end - begin) * kChunkWords;
      for (int64_t tile = first + 2; tile < last; tile += 2) {
        const float* x = packed + start(p, batch, part, tile);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const auto run = tile + 1 < last ? multiply_tiles<2, 2, decltype(sums_of(0, 0))>
                                           : multiply_tiles<2, 1, decltype(sums_of(0, 0))>;
          run(weight + pair * 2 * kPartWords, kPartWords, x, x_step, (end - begin) * kChunkSteps, part == 0, spare,
              sums_of(tile, pair));
        }
      }
      if (begin == end) break;
    }
    for (int64_t tile = first; tile < last; ++tile) {
      finish_tiles(p, batch, tile * kTileSide, row, count, sums_of(tile, 0)(0, 0));
    }
  }

  // Sums (columns, 16 rows) to columns [column, column + count) of 16 rows of y, from x_row on.
  static void finish_tiles(const Product& p, int64_t batch, int64_t x_row, int64_t column, int64_t count,
                           const float* sums) {
    alignas(64) float lines[kTileSide][kUnitTiles * kTileSide];
    for (int64_t first = 0; first < count; first += kTileSide) {
      F block[kTileSide];
      for (int64_t i = 0; i < kTileSide; ++i) block[i] = load(sums + (first + i) * kTileSide);
      transpose(block);
      for (int64_t i = 0; i < kTileSide; ++i) store(lines[i] + first, block[i]);
    }
    const int64_t rows = least(kTileSide, p.x_rows - x_row);
    for (int64_t i = 0; i < rows; ++i) finish(p, batch, x_row + i, column, count, lines[i]);
  }

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    const TileRegisters registers;
    const int64_t unit_rows = unit_pairs(p) * kPairRows;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit % row_units(p) * unit_rows, group = unit / row_units(p) % row_groups(p);
      const int64_t batch = unit / row_units(p) / row_groups(p), first = group * kGroupTiles;
      multiply_unit(p, packed, batch, row, least(unit_rows, p.rows - row), first,
                    least(first + kGroupTiles, x_tiles(p)), scratch);
    }
  }

  static constexpr ProductKernel kernel() {
    return {kTiny, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

// --- across the blocks: x @ w ----------------------------------------------------------------------------------------

struct TiledAcross {
  static constexpr int kColumnTiles = kChunk / kTileSide;  // of a unit: a chunk of columns of the weight

  static int64_t parts(const Product& p) { return most(1, ceil_div(p.rows, kPartDepth)); }
  static int64_t part_steps(const Product& p, int64_t part) {
    return ceil_div(least(kPartDepth, p.rows - part * kPartDepth), kStepDepth);
  }
  static int64_t packed_words(const Product& p) {
    return p.batches * x_tiles(p) * ceil_div(p.rows, kStepDepth) * kTileWords;
  }
  // (batches, parts, tiles of rows, steps, 16 rows, 16 pairs of columns).
  static int64_t start(const Product& p, int64_t batch, int64_t part, int64_t tile) {
    const int64_t before = (batch * ceil_div(p.rows, kStepDepth) + part * kPartSteps) * x_tiles(p);
    return (before + tile * part_steps(p, part)) * kTileWords;
  }
  static int64_t pack_units(const Product& p) { return p.batches * parts(p) * x_tiles(p); }

  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    unsigned range = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t tile = unit % x_tiles(p), part = unit / x_tiles(p) % parts(p), batch = unit / x_tiles(p) / parts(p);
      const int64_t steps = part_steps(p, part);
      float* out = packed + start(p, batch, part, tile);
      for (int64_t i = 0; i < kTileSide; ++i, out += kTileSide) {
        const int64_t row = tile * kTileSide + i;
        for (int64_t s = 0; s < steps; s += kChunkSteps) {
          alignas(64) float words[kChunk / 2];
          if (row < p.x_rows) {
            range |= load_x(p, batch * p.x_rows + row, part * kPartDepth + s * kStepDepth,
                            reinterpret_cast<uint16_t*>(words));
          } else {
            std::memset(words, 0, sizeof words);
          }
          for (int64_t n = 0; n < least(kChunkSteps, steps - s); ++n) {
            store(out + (s + n) * kTileWords, load(words + n * kLanes));
          }
        }
      }
    }
    return range;
  }

  static int64_t units(const Product& p) { return p.batches * row_groups(p) * chunks_of(p.columns); }

  // A part of the depth of a chunk of columns: (kColumnTiles, kPartSteps) tiles, each 16 pairs of rows by 16 columns.
  static void decode(const Product& p, int64_t batch, int64_t chunk, int64_t part, float* out) {
    static constexpr PaddedChunk none;
    const bool is_whole = (chunk + 1) * kChunkBlocks <= p.blocks;
    const int64_t first = part * kPartDepth, depth = part_steps(p, part) * kStepDepth;
    for (int64_t d = 0; d < depth; d += 2, out += kTileSide) {
      PaddedChunk padded[2];
      const uint8_t *codes[2], *low[2], *high[2];
      for (int r = 0; r < 2; ++r) {
        const int64_t at = first + d + r;
        const PaddedChunk* from = at < p.rows ? nullptr : &none;
        const WeightRow row(p, batch * p.rows + (from ? 0 : at));
        if (!from && !is_whole) from = &(padded[r] = PaddedChunk(row, chunk));
        const uint8_t* scales = row.scales + chunk * 2 * kTileBytes;
        codes[r] = from ? from->codes : row.codes + chunk * kChunkBytes;
        low[r] = from ? from->scales : scales;
        high[r] = from ? from->scales + kTileColumns : scales + kTileBytes;
        __builtin_prefetch(codes[r] + kAheadRows * p.blocks * (kBlock / 2));
      }
      decode_row_pair(codes, low, high, out, kPartWords);
    }
  }
  static constexpr int64_t kAheadRows = 16;

  static constexpr int64_t kWeightWords = kColumnTiles * kPartWords;
  static constexpr int64_t kSumWords = kGroupTiles * kColumnTiles * kTileWords;
  static constexpr int64_t kScratchWords = kWeightWords + kSumWords + kTileWords;

  // Tiles [first, last) of rows of x with a chunk of columns. Sums: (tiles of rows, kColumnTiles) tiles.
  static void multiply_unit(const Product& p, const float* packed, int64_t batch, int64_t chunk, int64_t first,
                            int64_t last, float* scratch) {
    float *weight = scratch, *sums = weight + kWeightWords, *spare = sums + kSumWords;
    const auto sums_of = [&](int64_t tile, int64_t column) {
      float* own = sums + ((tile - first) * kColumnTiles + column) * kTileWords;
      return [own](int i, int j) { return own + (i * kColumnTiles + j) * kTileWords; };
    };
    for (int64_t part = 0; part < parts(p); ++part) {
      const int64_t steps = part_steps(p, part), x_step = steps * kTileWords;
      decode(p, batch, chunk, part, weight);
      for (int64_t tile = first; tile < last; tile += 2) {
        const float* x = packed + start(p, batch, part, tile);
        const auto run = tile + 1 < last ? multiply_tiles<2, 2, decltype(sums_of(0, 0))>
                                         : multiply_tiles<1, 2, decltype(sums_of(0, 0))>;
        for (int64_t column = 0; column < kColumnTiles; column += 2) {
          run(x, x_step, weight + column * kPartWords, kPartWords, steps, part == 0, spare, sums_of(tile, column));
        }
      }
    }
    const int64_t column = chunk * kChunk, count = least(kChunk, p.columns - column);
    for (int64_t row = first * kTileSide; row < least(last * kTileSide, p.x_rows); ++row) {
      const float* from = sums_of(row / kTileSide, 0)(0, 0) + row % kTileSide * kTileSide;
      alignas(64) float line[kChunk];
      for (int64_t b = 0; b < kColumnTiles; ++b) store(line + b * kLanes, restore_block(load(from + b * kTileWords)));
      finish(p, batch, row, column, count, line);
    }
  }

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    const TileRegisters registers;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t chunk = unit % chunks_of(p.columns), group = unit / chunks_of(p.columns) % row_groups(p);
      const int64_t first = group * kGroupTiles;
      multiply_unit(p, packed, unit / chunks_of(p.columns) / row_groups(p), chunk, first,
                    least(first + kGroupTiles, x_tiles(p)), scratch);
    }
  }

  static constexpr ProductKernel kernel() {
    return {kTiny, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
