// One token through the layers of a Llama: what the persistent kernel reads. Sizes are in elements.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/attention/attend.h"
#include "cuda/matmul/few_rows_sm90/kernel.cuh"

namespace nvfp4 {
namespace layers_sm90 {

// The products of a layer, in order. Attention is between the first two.
enum Phase { kQkv, kOut, kGateUp, kDown, kPhases };

enum Weight { kQ, kK, kV, kO, kGate, kUp, kDownWeight, kWeights };

// In global memory, written by the host once.
struct alignas(128) Layer {
  few_rows_sm90::Maps maps[kWeights];
  const float* factors[kWeights];      // per-tensor scales
  const __nv_bfloat16* biases[3];      // of q, k and v; null where there is none
  const __nv_bfloat16* norms[2];       // before attention, before the feed-forward
  const __nv_bfloat16* head_norms[2];  // of q and of k; null where there is none
  __nv_bfloat16 *keys, *values;        // (kv_heads, length, dim)
  // Of a cache of codes, whose latest tokens are the above: keys and values (kv_heads, capacity, ...), and the dense
  // tokens before them (kv_heads, front, dim).
  attention::CodedRows coded[2];
  const __nv_bfloat16* front[2];
};

// Tiles of 16 rows of w, or pairs of them (gate and up): block c of the grid has base + (c < extra) of them.
struct Share {
  int base, extra;
};

// Blocks tell one another by the data itself: a word is a value in bfloat16, and below it a tag, the count of layers
// that this scratch has served. A reader asks for a word until it has the tag (NCCL's LL protocol), so that no barrier
// of the grid, and no fence, is between a result and its use.
struct Step {
  const Layer* layers;
  const __nv_bfloat16 *x, *last_norm, *cos, *sin;
  const int64_t* position;  // of a cache of codes, behind the front
  __nv_bfloat16* y;
  // Scratch, in words. attended and act are in the order of B fragments (fragment_index).
  uint32_t *hidden[2], *qkv, *attended, *act;
  uint4* partials;  // (kv_heads, splits, group): {maximum, tag, sum, tag}, then dim times {value, tag}
  uint32_t* launches;
  float eps, scaling;
  int layer_count, columns, heads, kv_heads, length, splits, depth;
  int inner[kPhases];  // columns of w
  int units[kPhases];  // they in units of 256, rounded up
  int boxes[kPhases];  // units that one copy brings; 0: one, of a weight whose rows are no multiple of units
  Share shares[kPhases];
  int x_bytes;          // of shared memory for x, or for attention
  int capacity, front;  // of a cache of codes
  bool is_rotated;
};

}  // namespace layers_sm90
}  // namespace nvfp4
