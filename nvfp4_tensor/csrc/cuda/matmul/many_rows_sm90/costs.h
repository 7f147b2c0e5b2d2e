// The kernels for many rows of x on Hopper, and what plans for them cost, in cycles (cuda/matmul/costs.h).
//
// Fitted to all plans of 240 products (20 weights of published models, 24 to 1024 rows of x, single and in chains),
// and, for tiles that blocks share, again to 168 of up to 256 rows: what is chosen by them takes 0.2 % longer than the
// best plan in the mean of these, 0.6 % in that of the 80 of more rows, 6 % at most. By these costs each kernel saves a
// weight of the 20 more than 3 % at some number of rows.
#pragma once

#include "cuda/matmul/costs.h"
#include "cuda/matmul/many_rows_sm90/shapes.h"

namespace nvfp4 {
namespace costs {

using many_rows::Tiles;
using many_rows::X;

// Tiles in runs (stream-K): a cut tile's sums are written once and read for each run.
inline constexpr int kWaitCycles = 5000;      // of a cut tile, for the blocks that have its other parts
inline constexpr double kSumsPerCycle = 5.5;  // that go through memory
inline constexpr double kWriteCycles = 7.7;   // a token of a whole tile: its epilogue, while no products run
// Where cut tiles read more of x than the cache keeps, it is read again for each offset in K that blocks are at
// concurrently: 576 x 7168 by 4096 rows, 80 tiles, takes 89 us in 132 runs and 63 in 120, 3584 x 18944 by 4096 882, in
// 128 795.
inline constexpr int64_t kCacheBytes = 28 << 20;
inline constexpr int kMissedPerCycle = 3800;  // bytes

// Tiles that blocks share (split-K). Of 256 rows of w half as many sums a cycle: those warps have fewer registers.
inline constexpr int kShareCycles = 3000;            // until the other blocks' sums are there
inline constexpr double kSharedSumsPerCycle = 1.85;  // of 128 rows of w

// The kernel before that permutes x.
inline constexpr int kPermuteCycles = 500;
inline constexpr int kPermutedPerCycle = 1000;  // elements of x

// A kernel, by its tile of y, and what a stage of 128 elements of K takes of it.
struct ManyRowsKernel {
  int rows, tokens;  // of w and of x
  int stages;        // in flight
  X x;
  Tiles tiles;
  int stage_cycles;
  bool for_groups;  // of rows too
};

// A stage takes what decoding does and 0.6 of what the tensor cores do, or all of the latter where that is more: 128
// rows by 64 tokens took 640 cycles without products, 600 without decoding and 946 (decoding 8 codes by 17
// instructions, now 15); by 256 tokens 2062 without decoding, and 2137. Copies alone are 518 and 1670; what two blocks
// copied together, by TMA multicast, took as long or longer.
//
// It is the multiprocessor: while wgmma runs, a scheduler issues but one other instruction in five cycles. Loops of
// nothing but wgmma of 64 columns, 512 cycles, and 320 LOP3 of each scheduler, 640, take 979, with 320 FFMA 820;
// likewise with A in shared memory, with one warpgroup or four, with each product between a few of them; 1126 where one
// warpgroup is kept from the one while another does the other. So what counts is instructions: 190 a warp and stage
// where x is permuted, 120 of them to decode, 310 where it lies as it is.
inline constexpr ManyRowsKernel kManyRowsKernels[] = {
    {256, 32, 7, X::kPermutedBefore, Tiles::kInRuns, 1260, true},
    {256, 64, 6, X::kPermutedBefore, Tiles::kInRuns, 1445, true},
    {128, 96, 6, X::kPermutedBefore, Tiles::kInRuns, 1110, false},
    {128, 128, 5, X::kPermutedBefore, Tiles::kInRuns, 1250, false},
    {128, 160, 4, X::kPermutedBefore, Tiles::kInRuns, 1400, false},
    {128, 192, 3, X::kAsItLies, Tiles::kInRuns, 1885, true},
    {128, 256, 3, X::kAsItLies, Tiles::kInRuns, 2090, true},
    {128, 16, 12, X::kPermutedInCopy, Tiles::kShared, 610, false},
    {256, 16, 8, X::kPermutedInCopy, Tiles::kShared, 1150, false},
    {128, 32, 12, X::kPermutedInCopy, Tiles::kShared, 760, false},
    {256, 32, 7, X::kPermutedBefore, Tiles::kShared, 1090, false},
    {128, 64, 8, X::kPermutedBefore, Tiles::kShared, 920, false},
    {256, 64, 6, X::kPermutedBefore, Tiles::kShared, 1375, false},
    {128, 96, 6, X::kPermutedBefore, Tiles::kShared, 1150, false},
    {128, 128, 5, X::kAsItLies, Tiles::kShared, 1515, false},
    {128, 128, 5, X::kPermutedBefore, Tiles::kShared, 1290, false},
    {128, 160, 4, X::kPermutedBefore, Tiles::kShared, 1490, false},
    {128, 192, 3, X::kAsItLies, Tiles::kShared, 1925, false},
    {128, 256, 3, X::kAsItLies, Tiles::kShared, 2270, false},
};
inline constexpr int kManyRowsKernelCount = sizeof kManyRowsKernels / sizeof kManyRowsKernels[0];

}  // namespace costs
}  // namespace nvfp4
