// The shapes and forms of Hopper's few-rows kernel, and how its blocks divide the work.
#pragma once

#include <cuda.h>

#include "cuda/host/launch.h"
#include "cuda/matmul/few_rows_sm90/plan.h"
#include "cuda/matmul/problem.cuh"

namespace nvfp4 {
namespace few_rows_sm90 {

constexpr int kAdders = 4;  // warps that add
constexpr int kThreads = (kWarps + kAdders) * 32;
// Of a thread. It has 96 at first, since 5 warps share the 512 of a quarter of the multiprocessor.
constexpr int kMultiplyingRegisters = 104, kAddingRegisters = 5 * 96 - 4 * kMultiplyingRegisters;
constexpr int kTilesPerBand = 128 / kTileRows;

// A unit is what one copy brings: 256 elements of a tile's 16 rows.
constexpr int kUnitElements = 256;
constexpr int kUnitCodes = kTileRows * kUnitElements / 2, kUnitScales = kTileRows * kUnitElements / 16;  // bytes

// kColumns: 8-column tiles of x (M <= 8 * kColumns). kUnits: in a warp's slice of K. kDepth: units in flight.
template <int kColumns_, int kUnits_, int kDepth_, int kSlots_>
struct Shape {
  static constexpr int kColumns = kColumns_, kUnits = kUnits_, kDepth = kDepth_, kSlots = kSlots_;
  static_assert(kDepth % kUnits == 0, "the ring holds whole tiles, so that a tile's units lie one behind the other");
  static constexpr int kSlice = kUnits * kUnitElements;
  static constexpr int kTileSums = kTileRows * 8 * kColumns;  // floats
  static constexpr int kScalesAt = kWarps * kDepth * kUnitCodes;
  static constexpr int kSlotsAt = kScalesAt + kWarps * kDepth * kUnitScales;
  static constexpr int kInboxAt = kSlotsAt + kSlots * kWarps * kTileSums * 4;
  static constexpr int kBarriersAt = kInboxAt + kAdders * (kMostBlocksInCluster - 1) * kTileSums * 4;
  static constexpr int kLoadedAt = kBarriersAt + 8 * (kWarps * kDepth + 2 * kSlots + 2 * kAdders);
  static constexpr int kSharedBytes = kLoadedAt + 8 * kWarps + 1024;
  static_assert(kSlots * kTileSums * 4 >= 2048, "x passes through a warp's part of the slots, 2 KB at a time");
};

// How a grid of (cluster, clusters, experts) blocks divides the work.
struct Work {
  int cluster;            // blocks that share rows and split K
  int warps_in_k;         // of a block's warps, how many split K
  uint32_t share;         // 2^16 / warps_in_k, rounded up
  int row_groups;         // and how many tiles are thus multiplied at a time
  int tiles, more_tiles;  // every cluster takes so many tiles (or pairs), and the first ones another
};

struct Maps {
  CUtensorMap codes;   // (bands, 4, 32, bytes): i, r
  CUtensorMap scales;  // (bands, groups of 64 columns, 512)
};

// What x is multiplied as, and what becomes of the products.
enum class Input { kPlain, kNormed };  // kNormed: the RMS norm of x and a residual
enum class Output { kPlain, kGated };  // kGated: activation(first set) * second set
template <int kSets_, Input kInput_, Output kOutput_>
struct Form {
  static constexpr int kSets = kSets_;
  static constexpr Input kInput = kInput_;
  static constexpr Output kOutput = kOutput_;
  static_assert(kOutput == Output::kPlain || kSets == 2);
};

// Weights that share x, several of one expert each: their tiles one behind the other, or, gated, in turns.
template <typename F>
struct Sets {
  Problem problems[F::kSets];  // all but the first for what is theirs alone: scale, bias, y, N
  Maps maps[F::kSets];
  uint32_t first[F::kSets];  // tile
  Fused fused;

  struct Tile {
    int set;
    uint32_t index;  // in it
  };
  __device__ __forceinline__ Tile find(uint32_t tile) const {
    if constexpr (F::kOutput == Output::kGated) return {static_cast<int>(tile % 2), tile / 2};
    int set = 0;
#pragma unroll
    for (int i = 1; i < F::kSets; ++i) set += tile >= first[i];
    return {set, tile - first[set]};
  }
  // The first tile from this one on that is an adding warp's, counted in a block: every fourth, or every fourth pair.
  static __device__ __forceinline__ int next_of(int adder, int tile) {
    if constexpr (F::kOutput == Output::kPlain) return tile + static_cast<uint32_t>(adder - tile) % kAdders;
    const int pair = tile / (2 * kAdders) * (2 * kAdders) + 2 * adder;
    return tile <= pair ? pair : tile == pair + 1 ? tile : pair + 2 * kAdders;
  }
};

}  // namespace few_rows_sm90
}  // namespace nvfp4
