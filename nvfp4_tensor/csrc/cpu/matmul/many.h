// Many rows of x: the weight is decoded, exactly and blockwise, and multiplied in tiles of the output that fill the
// registers (x @ w^T with rows of x in lanes, x @ w with columns of the weight in lanes).
#pragma once

#include "cpu/matmul/few.h"

namespace nvfp4::NVFP4_ISA {
namespace {

// 4-byte words of a row that are multiplied at a time: longer sums lose bits, and 64 columns of these fill the
// first-level cache.
constexpr int kDepthWords = 128;
constexpr int kPanelRows = 48;      // rows of the weight decoded together: every word of x loaded serves so many
constexpr int kMostTileRows = 512;  // rows of x whose sums are kept at a time

// --- output tiles ----------------------------------------------------------------------------------------------------

// Whether an arithmetic has instructions for small matrices (Math::tile), not just for lanes (Math::dot).
template <class Math>
constexpr bool kMultipliesTiles = requires { &Math::template tile<1>; };

// c (kRows, 16 * kVectors) = or += a (kRows, depth) @ b (depth, 16 * kVectors), in words; a has rows of kDepthWords.
// The depth's sum starts from zero and is added as a whole, so that a long sum is one of short ones.
template <class Math, int kRows, int kVectors>
void multiply_tile(const float* a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step,
                   bool first) {
  if constexpr (kMultipliesTiles<Math>) return Math::template tile<kRows>(a, b, b_step, depth, c, c_step, first);
  F sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) sums[i][j] = set(0.0f);
  }
  for (int64_t d = 0; d < depth; ++d, ++a, b += b_step) {
    F columns[kVectors];
    for (int j = 0; j < kVectors; ++j) columns[j] = load(b + j * kLanes);
#pragma GCC unroll 24
    for (int i = 0; i < kRows; ++i) {
      const F row = set(a[i * kDepthWords]);
      for (int j = 0; j < kVectors; ++j) sums[i][j] = Math::dot(sums[i][j], columns[j], row);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      float* at = c + i * c_step + j * kLanes;
      store(at, first ? sums[i][j] : add(load(at), sums[i][j]));
    }
  }
}

// --- many rows of x: x @ w^T -----------------------------------------------------------------------------------------

template <class Math>
struct Many {
  static constexpr int kChunkWords = kChunk / Math::kPerWord;
  static constexpr int kTileLanes = kMostVectors * kLanes;

  static int64_t depth_words(const Product& p) { return chunks_of(p.columns) * kChunkWords; }
  static int64_t depth_parts(const Product& p) { return most(1, ceil_div(depth_words(p), kDepthWords)); }
  static int64_t lanes(const Product& p) { return ceil_div(p.x_rows, kLanes) * kLanes; }
  static int64_t tiles(const Product& p) { return ceil_div(p.x_rows, kTileLanes); }
  static int64_t tile_lanes(const Product& p, int64_t tile) { return least(kTileLanes, lanes(p) - tile * kTileLanes); }
  static int64_t packed_words(const Product& p) { return p.batches * lanes(p) * depth_words(p); }
  static int64_t tile_start(const Product& p, int64_t batch, int64_t tile) {
    return (batch * lanes(p) + tile * kTileLanes) * depth_words(p);
  }
  static int64_t pack_units(const Product& p) { return p.batches * tiles(p) * depth_parts(p); }

  // Words [word, word + kChunkWords) of rows [row, row + kLanes) of x to (kChunkWords, kLanes), in a chunk's
  // order.
  static unsigned pack_lanes(const Product& p, int64_t batch, int64_t row, int64_t word, float* out, int64_t step) {
    alignas(64) float words[kLanes][kChunkWords];
    const int64_t count = least(kLanes, p.x_rows - row);
    unsigned range = 0;
    for (int64_t i = 0; i < count; ++i) {
      range |= load_x(p, batch * p.x_rows + row + i, word * Math::kPerWord,
                      reinterpret_cast<typename Math::Value*>(words[i]));
    }
    if (count < kLanes) std::memset(words[count], 0, (kLanes - count) * sizeof words[0]);
    for (int first = 0; first < kChunkWords; first += kLanes) {
      F lines[kLanes];
      for (int i = 0; i < kLanes; ++i) lines[i] = load(words[i] + first);
      transpose(lines);
      for (int i = 0; i < kLanes; ++i) {
        const int at = (first + i) % Math::kVectors * kLanes + (first + i) / Math::kVectors;
        store(out + at * step, lines[i]);
      }
    }
    return range;
  }

  // A unit: a tile of rows of x, a part of the depth, as (depth, rows in lanes).
  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    unsigned range = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t part = unit % depth_parts(p), tile = unit / depth_parts(p) % tiles(p);
      const int64_t batch = unit / depth_parts(p) / tiles(p), lanes = tile_lanes(p, tile);
      const int64_t last = least((part + 1) * kDepthWords, depth_words(p));
      for (int64_t word = part * kDepthWords; word < last; word += kChunkWords) {
        float* out = packed + tile_start(p, batch, tile) + word * lanes;
        for (int64_t lane = 0; lane < lanes; lane += kLanes) {
          range |= pack_lanes(p, batch, tile * kTileLanes + lane, word, out + lane, lanes);
        }
      }
    }
    return range;
  }

  static int64_t panels(const Product& p) { return ceil_div(p.rows, kPanelRows); }
  static int64_t row_groups(const Product& p) { return ceil_div(p.x_rows, kMostTileRows); }
  static int64_t units(const Product& p) { return p.batches * row_groups(p) * panels(p); }

  // Words [first, first + depth) of rows of the weight to (kPanelRows, kDepthWords).
  static void decode(const WeightRow* rows, int64_t count, int64_t first, int64_t depth, float* out) {
    for (int64_t r = 0; r < count; ++r, out += kDepthWords) {
      const WeightRow weight = rows[r];
      for (int64_t word = 0; word < depth; word += kChunkWords) {
        // The next part of the depth, which lies far from this one: 1.3 ms of one thread without, 0.8 with (4096^2).
        const int64_t at = (first + word) / kChunkWords, next = at + kDepthWords / kChunkWords;
        __builtin_prefetch(weight.codes + next * kChunkBytes);
        if (r % 4 == 0) {
          __builtin_prefetch(weight.scales + next * 2 * kTileBytes);
          __builtin_prefetch(weight.scales + (next * 2 + 1) * kTileBytes);
        }
        const Chunk chunk = Chunk::of(weight, at);
        each<Math::kVectors>([&](auto u) { store(out + word + u * kLanes, Math::template numbers<u>(chunk)); });
      }
    }
  }

  template <int kVectors>
  static void multiply_panel(const float* panel, int64_t rows, const float* x, int64_t depth, float* sums, bool first) {
    constexpr int step = tile_rows(kVectors);
    static_assert(kPanelRows % step == 0);
    for (int64_t r = 0; r < rows; r += step) {
      multiply_tile<Math, step, kVectors>(panel + r * kDepthWords, x, kVectors * kLanes, depth,
                                          sums + r * kVectors * kLanes, kVectors * kLanes, first);
    }
  }

  template <int kVectors>
  static void multiply_panel(int64_t lanes, const float* panel, int64_t rows, const float* x, int64_t depth,
                             float* sums, bool first) {
    if (lanes == kVectors * kLanes) return multiply_panel<kVectors>(panel, rows, x, depth, sums, first);
    if constexpr (kVectors > 1) multiply_panel<kVectors - 1>(lanes, panel, rows, x, depth, sums, first);
  }

  // sums: (tiles of x's rows, kPanelRows, lanes of the tile).
  static void multiply_unit(const Product& p, const float* packed, int64_t batch, int64_t row, int64_t rows,
                            int64_t first_tile, int64_t last_tile, float* panel, float* sums) {
    WeightRow weights[kPanelRows];
    for (int64_t r = 0; r < rows; ++r) weights[r] = WeightRow(p, batch * p.rows + row + r);
    for (int64_t part = 0; part < depth_parts(p); ++part) {
      const int64_t word = part * kDepthWords, depth = least(kDepthWords, depth_words(p) - word);
      decode(weights, rows, word, depth, panel);
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const int64_t lanes = tile_lanes(p, tile);
        multiply_panel<kMostVectors>(lanes, panel, rows, packed + tile_start(p, batch, tile) + word * lanes, depth,
                                     sums + (tile - first_tile) * kPanelRows * kTileLanes, word == 0);
      }
    }
    for (int64_t tile = first_tile; tile < last_tile; ++tile, sums += kPanelRows * kTileLanes) {
      const int64_t lanes = tile_lanes(p, tile);
      for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        finish_lanes(p, batch, tile * kTileLanes + lane, row, rows, sums + lane, lanes);
      }
    }
  }

  // Sums (rows, kLanes) to columns [column, column + rows) of kLanes rows of y, from x_row on.
  static void finish_lanes(const Product& p, int64_t batch, int64_t x_row, int64_t column, int64_t rows,
                           const float* sums, int64_t step) {
    alignas(64) float lines[kLanes][(kPanelRows + 31) / 32 * 32];
    for (int64_t first = 0; first < rows; first += kLanes) {
      F block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) block[i] = load(sums + (first + i) * step);
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(lines[i] + first, block[i]);
    }
    const int64_t count = least(kLanes, p.x_rows - x_row);
    for (int64_t i = 0; i < count; ++i) finish(p, batch, x_row + i, column, rows, lines[i]);
  }

  static constexpr int64_t kPanelWords = kPanelRows * kDepthWords;
  static constexpr int64_t kScratchWords = kPanelWords + kPanelRows * kMostTileRows;

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    constexpr int64_t group_tiles = kMostTileRows / kTileLanes;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = unit % panels(p), group = unit / panels(p) % row_groups(p);
      const int64_t batch = unit / panels(p) / row_groups(p), row = panel * kPanelRows;
      multiply_unit(p, packed, batch, row, least(kPanelRows, p.rows - row), group * group_tiles,
                    least((group + 1) * group_tiles, tiles(p)), scratch, scratch + kPanelWords);
    }
  }

  static constexpr ProductKernel kernel() {
    return {Math::kRefusedByMany, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

// --- across the blocks: x @ w ----------------------------------------------------------------------------------------

template <class Math>
struct Across {
  static constexpr int kRowStep = tile_rows(kMostVectors);
  static constexpr int kGroupRows = 384;  // rows of x whose sums are kept at a time
  static_assert(kGroupRows % kRowStep == 0 && 8 % kMostVectors == 0);

  static int64_t depth_words(const Product& p) { return ceil_div(p.rows, Math::kPerWord); }
  static int64_t depth_parts(const Product& p) { return most(1, ceil_div(depth_words(p), kDepthWords)); }
  static int64_t padded_rows(const Product& p) { return ceil_div(p.x_rows, kRowStep) * kRowStep; }
  static int64_t packed_words(const Product& p) { return p.batches * depth_parts(p) * padded_rows(p) * kDepthWords; }
  static int64_t pack_units(const Product& p) { return p.batches * depth_parts(p); }

  // A unit: a part of the depth of all rows of x, (padded_rows, kDepthWords).
  static unsigned pack(const Product& p, float* packed, int64_t begin, int64_t end) {
    constexpr int chunk_words = kChunk / Math::kPerWord;
    unsigned range = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / depth_parts(p), first = unit % depth_parts(p) * kDepthWords;
      float* out = packed + unit * padded_rows(p) * kDepthWords;
      for (int64_t row = 0; row < padded_rows(p); ++row, out += kDepthWords) {
        if (row >= p.x_rows) {
          std::memset(out, 0, kDepthWords * sizeof *out);
          continue;
        }
        for (int word = 0; word < kDepthWords; word += chunk_words) {
          range |= load_x(p, batch * p.x_rows + row, (first + word) * Math::kPerWord,
                          reinterpret_cast<typename Math::Value*>(out + word));
        }
      }
    }
    return range;
  }

  static int64_t column_chunks(const Product& p) { return chunks_of(p.columns); }
  static int64_t row_groups(const Product& p) { return ceil_div(p.x_rows, kGroupRows); }
  static int64_t units(const Product& p) { return p.batches * row_groups(p) * column_chunks(p); }

  // Rows from `word` on of one chunk of columns, to (depth, kChunk) words.
  static void decode(const Product& p, int64_t batch, int64_t chunk, int64_t word, int64_t depth, float* out) {
    const F none = set(0.0f);
    for (int64_t d = 0; d < depth; ++d, out += kChunk) {
      const int64_t row = (word + d) * Math::kPerWord, flat = batch * p.rows + row;
      const Chunk low = Chunk::of(WeightRow(p, flat), chunk);
      if constexpr (Math::kPerWord == 1) {
        const F factor = set(p.summand_factors ? p.summand_factors[flat] : 1.0f);
        each<8>([&](auto v) { store(out + v * kLanes, mul(low.template values<v>(), factor)); });
      } else {
        const bool both = row + 1 < p.rows;
        const Chunk high = Chunk::of(WeightRow(p, both ? flat + 1 : flat), chunk);
        each<8>([&](auto v) {
          const F upper = both ? high.template values<v>() : none;
          store(out + v * kLanes, Math::pair(low.template values<v>(), upper));
        });
      }
    }
  }

  static void multiply_unit(const Product& p, const float* packed, int64_t batch, int64_t chunk, int64_t first,
                            int64_t last, float* block, float* sums) {
    for (int64_t part = 0; part < depth_parts(p); ++part) {
      const int64_t depth = least(kDepthWords, depth_words(p) - part * kDepthWords);
      decode(p, batch, chunk, part * kDepthWords, depth, block);
      const float* x = packed + (batch * depth_parts(p) + part) * padded_rows(p) * kDepthWords;
      for (int j = 0; j < kChunk; j += kMostVectors * kLanes) {
        for (int64_t row = first; row < last; row += kRowStep) {
          multiply_tile<Math, kRowStep, kMostVectors>(x + row * kDepthWords, block + j, kChunk, depth,
                                                      sums + (row - first) * kChunk + j, kChunk, part == 0);
        }
      }
    }
    const int64_t column = chunk * kChunk, count = least(kChunk, p.columns - column);
    for (int64_t row = first; row < last; ++row, sums += kChunk) {
      alignas(64) float line[kChunk];
      for (int v = 0; v < 8; ++v) {
        for (int i = 0; i < kLanes; ++i) line[8 * i + v] = sums[v * kLanes + i];
      }
      finish(p, batch, row, column, count, line);
    }
  }

  static constexpr int64_t kBlockWords = kDepthWords * kChunk;
  static constexpr int64_t kScratchWords = kBlockWords + kGroupRows * kChunk;

  static void multiply(const Product& p, const float* packed, float* scratch, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t chunk = unit % column_chunks(p), group = unit / column_chunks(p) % row_groups(p);
      multiply_unit(p, packed, unit / column_chunks(p) / row_groups(p), chunk, group * kGroupRows,
                    least((group + 1) * kGroupRows, p.x_rows), scratch, scratch + kBlockWords);
    }
  }

  static constexpr ProductKernel kernel() {
    return {Math::kRefusedByMany, kScratchWords, packed_words, pack_units, pack, units, multiply};
  }
};

template <class Math>
constexpr ProductKernels kProducts = {Math::kMostFewRows, Few<Math>::kernel(), Many<Math>::kernel(),
                                      Across<Math>::kernel()};

}  // namespace
}  // namespace nvfp4::NVFP4_ISA
