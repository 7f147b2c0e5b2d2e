// What the kernels for many rows of x on Hopper come in. Without CUDA headers.
#pragma once

namespace nvfp4 {
namespace many_rows {

constexpr int kStageK = 128;  // elements of K that a stage of the pipeline has: two column tiles of scales
constexpr int kBand = 128;    // rows of w that share a band of scales

// The order of K in which x comes to shared memory: as in memory, or as decoding w is cheapest (permute.cuh), brought
// to it by a kernel before or by the warps that copy.
enum class X { kAsItLies, kPermutedBefore, kPermutedInCopy };

// Tiles of y laid end to end and cut into equal runs (stream-K), or each shared by so many blocks (split-K).
enum class Tiles { kInRuns, kShared };

}  // namespace many_rows
}  // namespace nvfp4
