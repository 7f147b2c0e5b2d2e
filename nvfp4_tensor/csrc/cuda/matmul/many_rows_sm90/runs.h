// Which block computes what: tiles of y, whole or in parts along K, so that all blocks have equally much to do.
//
// Stream-K: tiles that fill all blocks evenly are computed whole, in waves. The others are laid end to end, K
// innermost, and cut into as many equal runs as there are blocks, or fewer where these would be short. A block begins
// with the end of a tile, whose sums it leaves to others, and ends with the beginning of the next one, which it
// finishes. Where whole runs lie within a tile, their blocks come to the end when that one does, and each finishes a
// part (share.cuh), unless the tile is so wide that registers do not suffice. Sums are added in an order of their own,
// so the result is the same from run to run.
//
// Split-K: few tiles are cut otherwise, each into as many equal parts of K, so that all its blocks finish it together.
//
// Blocks that finish a tile together wait also for such as were started after them: for their neighbours, at most
// kMostSharers in all. Blocks are started in their order, so those before them end and make room: slots for
// kMostSharers at a time are enough. (Half-started kernels that all hold fewer, 19 of them on 132 multiprocessors,
// would wait for ever; but a GPU starts one kernel after another, of each of its few priorities, and where it has fewer
// multiprocessors fewer blocks finish a tile together: kPlacesOfSharer.)
//
// No CUDA headers here: a test compiles this for the host, and looks at all segments of many divisions.
#pragma once

#include <cstdint>

namespace nvfp4 {
namespace many_rows {

constexpr int kFewestSteps = 4;  // stages of a run
constexpr int kMostSharers = 8;
constexpr int kPlacesOfSharer = 16;  // multiprocessors for each: half-started kernels must not fill a part of a GPU

constexpr int most_sharers(int multiprocessors) {
  const int sharers = multiprocessors / kPlacesOfSharer;
  return sharers < 1 ? 1 : sharers < kMostSharers ? sharers : kMostSharers;
}

// Whether blocks whose runs end within a tile finish it together, or its first one alone. H200, us in a chain, alone
// and together: 28672 x 8192 with 64 rows of x 65.6 and 63.4; but 18944 x 3584 with 256 and 512, in tiles of 256
// tokens, whose sums leave no registers, 57.4 and 59.9, 108.3 and 112.1.
constexpr bool finish_together(int tokens) { return tokens <= 160; }

// n / value for 0 <= n < 2^31, without dividing: a division takes 150 cycles and more, and a kernel's start needs
// eight. By Granlund and Montgomery, "Division by invariant integers using multiplication" (1994), theorem 4.2.
struct Divisor {
  uint32_t factor;
  int shift;

  // By the host: of groups of rows only the device knows how many tiles there are, and divides.
  static Divisor of(int value) {
    int bits = 0;
    while ((int64_t{1} << bits) < value) ++bits;
    const uint64_t power = uint64_t{1} << (31 + bits);
    return {static_cast<uint32_t>((power + value - 1) / value), 31 + bits};
  }
  __device__ int quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }
};

struct Work {
  int row_tiles, token_tiles;  // of an expert
  int token_group;             // tiles of so many tokens run together, so that both operands stay in L2
  int steps;                   // stages along K
  int whole_tiles;             // computed by a block each, in waves
  int cut_tiles;               // the others
  int cut_cost;                // stages that take as long as cutting does: by this groups of rows decide on the device
  int slots;                   // of sums: one for each block, or two
  float4* sums;                // (slots, tokens / 8, consumers): what a block has of a tile that another one finishes
  uint64_t* ready;             // (slots, kMostSharers, warpgroups of consumers): `launch` where sums are, then 0 again
  uint64_t launch;             // a number that no memory holds by chance, another one for each launch
  int sharers;                 // blocks of a tile, of the shapes that divide all tiles alike
  int most_finishers;          // blocks that finish a tile together
  int runs;                    // that the cut tiles are divided into; fewer than blocks only of groups of rows
  // What is divided by where a tile lies and which a block has.
  struct {
    Divisor tiles_of_expert, tiles_of_group, group, last_group, steps, runs, sharers;
  } by;

  void prepare() {
    by.tiles_of_expert = Divisor::of(row_tiles * token_tiles), by.tiles_of_group = Divisor::of(row_tiles * token_group);
    by.group = Divisor::of(token_group), by.last_group = Divisor::of((token_tiles - 1) % token_group + 1);
    by.steps = Divisor::of(steps), by.runs = Divisor::of(runs), by.sharers = Divisor::of(sharers);
  }
};

// By what the host knows, or of groups of rows by what it does not.
template <bool kGrouped>
__device__ inline int quotient(int n, int value, const Divisor& by) {
  return kGrouped ? n / value : by.quotient(n);
}

struct Tile {
  int expert, token_tile, row_tile;
};

// The order of tiles, which nothing else knows: down the rows of w, token_group tiles of tokens wide.
template <bool kGrouped>
__device__ inline Tile tile_at(const Work& work, int tile) {
  const int of_expert = work.row_tiles * work.token_tiles;
  const int expert = quotient<kGrouped>(tile, of_expert, work.by.tiles_of_expert);
  tile -= expert * of_expert;
  const int in_group = work.row_tiles * work.token_group;
  const int group = quotient<kGrouped>(tile, in_group, work.by.tiles_of_group);
  tile -= group * in_group;
  const int first = group * work.token_group, width = min(work.token_group, work.token_tiles - first);
  const int down = quotient<kGrouped>(tile, width, width == work.token_group ? work.by.group : work.by.last_group);
  return {expert, first + tile - down * width, down};
}

// What a number of tiles is best divided into, where the number of blocks is given: of groups of rows, whose tiles only
// the device counts.
struct Division {
  int whole_tiles, cut_tiles, runs;

  __device__ Division(int tiles, int steps, int blocks, int cut_cost) {
    const int64_t stages = static_cast<int64_t>(tiles) * steps, most = stages / kFewestSteps;
    // No run is empty: the block that finishes a tile waits for all runs in it, and an empty one leaves no sums.
    runs = most >= blocks ? blocks : most > 0 ? static_cast<int>(most) : 1;
    const int waves = (tiles + blocks - 1) / blocks;
    const bool whole = waves * steps <= stages / runs + cut_cost || stages * blocks >= INT32_MAX;
    whole_tiles = whole ? tiles : max(tiles / blocks - 1, 0) * blocks;
    cut_tiles = tiles - whole_tiles;
  }
};

struct Segment {
  int tile, begin, end;  // stages begin .. end - 1
};

// The blocks that have parts of a tile, in the order of their stages: the first `finishers` finish a part of it each,
// the others leave their sums to them.
struct Meeting {
  int rank;  // of this block
  int finishers, all;
  int first_slot, second_slot, slot_stride;  // where sums of rank 0 are, and of 1, 2, ...

  __device__ int slot(int rank) const { return rank == 0 ? first_slot : second_slot + (rank - 1) * slot_stride; }
};

// The segments of a block, in order.
template <bool kGrouped>
class Runs {
 public:
  __device__ explicit Runs(const Work& work)
      : work_(work), whole_(blockIdx.x), number_(number_of(blockIdx.x)), at_(cut(number_)), end_(cut(number_ + 1)) {}

  __device__ bool next(Segment& s) {
    if (whole_ < work_.whole_tiles) {
      s = {whole_, 0, work_.steps};
      whole_ += gridDim.x;
      return true;
    }
    if (at_ >= end_) return false;
    const int tile = quotient<kGrouped>(at_, work_.steps, work_.by.steps), begin = at_ - tile * work_.steps;
    const int end = min(work_.steps, begin + (end_ - at_));
    s = {work_.whole_tiles + tile, begin, end};
    at_ += end - begin;
    return true;
  }
  // Of a part of a tile. (The last block goes on to the next tile, or ends with this one, and leaves its sums anyhow.)
  __device__ Meeting meeting(const Segment& s) const {
    const int begin = (s.tile - work_.whole_tiles) * work_.steps, end = begin + work_.steps;
    int first = number_, last = number_;
    while (cut(first) > begin) --first;
    while (cut(last + 1) < end) ++last;
    const int block = number_of(first), finishers = min(last - first, work_.most_finishers), blocks = gridDim.x;
    // The first of several finishers may have left the sums of another tile in the slot of its number.
    return {number_ - first, finishers, last - first + 1, block + (finishers > 1 ? blocks : 0), block - 1, -1};
  }

 private:
  // Runs are numbered from the last block: a block waits for those that were started before it, and only where it is
  // not the first to finish a tile for the few that have stages before its own.
  __device__ int number_of(int block) const { return gridDim.x - 1 - block; }
  // Below 2^31 (Plan sees to it): 64-bit divisions would take a microsecond of the start.
  __device__ int cut(int number) const {
    const int stages = work_.cut_tiles * work_.steps;
    if constexpr (kGrouped) return stages * min(number, work_.runs) / work_.runs;
    return work_.by.runs.quotient(stages * number);
  }

  const Work& work_;
  int whole_, number_, at_, end_;
};

// The segment of a block where so many share each tile.
class Part {
 public:
  __device__ explicit Part(const Work& work) : work_(work) {
    const int tile = work.by.sharers.quotient(blockIdx.x), rank = blockIdx.x - tile * work.sharers;
    part_ = {tile, work.by.sharers.quotient(work.steps * rank), work.by.sharers.quotient(work.steps * (rank + 1))};
  }

  __device__ bool next(Segment& s) {
    s = part_;
    const bool is_first = !done_;
    done_ = true;
    return is_first;
  }
  __device__ Meeting meeting() const {
    const int first = part_.tile * work_.sharers;
    return {static_cast<int>(blockIdx.x) - first, work_.most_finishers, work_.sharers, first, first + 1, 1};
  }

 private:
  const Work& work_;
  Segment part_;
  bool done_ = false;
};

}  // namespace many_rows
}  // namespace nvfp4
