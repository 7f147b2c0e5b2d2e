// Attention of new tokens to keys and values of which most are NVFP4 codes: a table of functions per instruction set.
//
// The context of a sequence is three stretches of tokens, one after the other: dense ones at the front, codes, and the
// latest ones dense, the last of which are the new tokens themselves.
#pragma once

#include <cstdint>

#include "cpu/host/kernels.h"
#include "numerics/cache.h"

namespace nvfp4 {

constexpr int64_t kTileTokens = 32;  // decoded at a time: with heads of 128, 16 KiB
constexpr int64_t kMostRows = 64;    // queries that share what is decoded
constexpr int kStretches = 3;

// Over how many elements keys are rotated: the largest power of two that divides the size of a head.
inline int64_t rotation_size(int64_t head) { return head & -head; }

inline int64_t padded_head(int64_t size) { return ceil_div(size, 32) * 32; }

// Keys or values of one head of one sequence.
struct Stretch {
  const void* dense = nullptr;  // null: codes
  int64_t stride = 0;           // elements from token to token of a dense one
  // Row by row: size / 2 bytes, a byte of e4m3 per block, a byte of e8m0.
  const uint8_t *codes = nullptr, *scales = nullptr, *factors = nullptr;
};

// Rows of queries of one head of keys, and a range of their context.
struct AttendUnit {
  Dtype dtype;        // of dense tokens and queries
  const void* q;      // (rows, key_size)
  int64_t rows;       // up to kMostRows
  int64_t first_row;  // among (query heads of this head of keys, new tokens)
  int64_t new_tokens;
  int64_t key_size, value_size;
  Stretch keys[kStretches], values[kStretches];
  int64_t begins[kStretches + 1];  // the positions at which the stretches begin, and the length of the context
  int64_t begin, end;              // positions of this unit
  int64_t first_seen;              // no query sees a position before it
  int64_t window;                  // how many positions a query sees, with its own; 0: all
  float scale, softcap;            // 0: no cap
  bool is_rotated;                 // codes are of rotated keys: queries are rotated for them
  // Of each row: sums of values times exponentials (padded_head(value_size)), the exponentials' largest exponent and
  // sum. `most` is -inf where nothing is seen.
  float *sums, *most, *total;

  // Positions [first, last] are seen by a row.
  int64_t last_of(int64_t row) const { return begins[kStretches] - new_tokens + (first_row + row) % new_tokens; }
  int64_t first_of(int64_t row) const {
    const int64_t by_window = window ? last_of(row) + 1 - window : 0;
    return by_window > first_seen ? by_window : first_seen;
  }
  int64_t row_size() const { return padded_head(value_size); }
};

// What attend() works in, in floats, for heads of up to so many elements.
inline int64_t attend_scratch(int64_t key_size, int64_t value_size) {
  const int64_t key = padded_head(key_size), value = padded_head(value_size);
  return kMostRows * key + kTileTokens * (key > value ? key : value) + kMostRows * kTileTokens + 4 * 16 * 16 +
         kMostRows * 17;
}

struct AttendKernels {
  void (*attend)(const AttendUnit&, float* scratch);
  // One row of the output from `count` parts of its context, in order; `step` floats from part to part.
  void (*finish)(const float* sums, const float* most, const float* total, int64_t count, int64_t sums_step,
                 int64_t row_step, int64_t size, bool sees_any, Dtype, void* out, float* scratch);
};

}  // namespace nvfp4
