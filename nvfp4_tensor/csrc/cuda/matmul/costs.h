// From where on another kernel is faster, on the GPUs named; what each kernel costs is in its folder's costs.h. Every
// figure here and there was measured on an H200 unless it says so, in microseconds: "single" is one product that finds
// its weight in memory, "in a chain" one of many in a CUDA graph (benchmarks/matmul.py).
//
// Costs are in cycles of a multiprocessor. They serve to compare plans of one product, so a common factor, such as a
// clock that falls under load, does not matter.
#pragma once

#include <cstdint>

namespace nvfp4 {
namespace costs {

// Rows of x up to which the few-rows kernel, by mma, is faster than the one of many rows, by wgmma, on Hopper: it has 8
// columns of x in an mma for each 16 by 16 of w. With 8 rows of 4096 x 4096 6.0 and 6.6 us in a chain.
inline constexpr int kMostRowsByMma = 8;
// Up to so many rows the costs decide between the two. In a chain, by mma and by wgmma, 16 rows of 4096 x 4096 7.6 and
// 6.7, 4096 x 14336 18.2 and 14.4, 14336 x 8192 26.2 and 25.4, 1024 x 8192 6.5 and 6.8. Beyond, the few-rows kernel
// reads w once for each 16.
inline constexpr int kMostRowsOfFewRows = 16;
// Where the few-rows kernel is not Hopper's own but that of all GPUs, it is slower beyond kMostRowsByMma where w has at
// most so many elements. Single and in a chain, by mma and by wgmma (in tiles of 32 rows of x): 4000 x 4096, 8 rows
// 13.0, 8.8 and 13.7, 8.4; 12 rows 14.4, 10.2 and 13.7, 8.4; 576 x 7168, 8 rows 12.2, 7.6 and 12.5, 7.4; 12 rows 13.0,
// 8.7 and 12.7, 7.5.
inline constexpr int64_t kLargestUneven = 1 << 24;
// Without wgmma: beyond so many rows of x decoding w once and a dense product are faster than the few-rows kernel once
// for each 16. By arithmetic, from an H200's 31 us for 16 rows, 76 to decode and 65 for the product; not measured.
inline constexpr int kMostFewRows = 64;
// From so many rows of x on, and up to so many elements of w, decoding first is considered. Of bfloat16's speed in
// chains, decoded first and not: 512 x 3584 with 1024, 2048 and 4096 rows 0.77 and 0.74, 0.83 and 0.82, 0.86 and 0.77,
// 1024 x 4096 with 512, 1024 and 2048 0.72 and 0.78, 0.75 and 0.78, 0.84 and 0.81. Larger weights are slower so: 1024 x
// 8192 with 1024 rows 36.1 and 30.8 us.
inline constexpr int kFewestRowsDecoded = 512;
inline constexpr int64_t kLargestDecoded = 1 << 22;
// Groups of rows: up to so many an expert, on average, the few-rows kernel is faster. Few or many rows: 8 experts of
// 14336 x 4096 with 2 rows each 86 or 110 us, with 8 105 or 112; 64 of 2048 x 7168 with 4 194 or 204, with 8 229 or
// 205, and 133 or 63 where eight of them have all of these rows.
inline constexpr int kFewRowsOfExpert = 4;

// What decoding w and then cuBLASLt take. Of 8 products of weights of 1.8 to 4.2 million elements and 512 to 8192 rows,
// in chains, 6 are faster so, by 1 to 23 %; these costs choose them, and one that takes 4 % longer so.
inline constexpr int kDecodeCycles = 7000;            // another launch, and w written and read again
inline constexpr int kDecodedPerKilocycle = 940'000;  // elements of w
// cuBLASLt's tiles, each with what its size makes it slower than the tensor cores, which for one more row of w by one
// of x take K / 2048 cycles.
struct DenseTile {
  int rows, tokens;
  double factor;
};
inline constexpr DenseTile kDenseTiles[] = {{128, 256, 1.0},  {256, 128, 1.0}, {128, 192, 1.0}, {192, 128, 1.0},
                                            {128, 128, 1.03}, {128, 64, 1.1},  {64, 128, 1.1},  {64, 64, 1.3}};

}  // namespace costs
}  // namespace nvfp4
