// A matrix and its transpose in one pass.
#pragma once

#include "cpu/quantize/amax.h"
#include "cpu/quantize/eden.h"
#include "cpu/quantize/quantize.h"
#include "cpu/simd/transpose.h"

namespace nvfp4::NVFP4_ISA {

// A unit is kPairRows rows by kPairColumns columns: read once from memory, its rows first, then, from the cache, its
// columns, kStrip at a time through a transposed copy in which each column is one group.
constexpr int64_t kStrip = 32;

template <typename T>
struct Strip {
  alignas(64) T columns[kStrip][kPairRows];

  void fill(const Matrix& x, int64_t row0, int64_t rows, int64_t column0, int64_t count) {
    const T* data = static_cast<const T*>(x.data) + row0 * x.row_stride + column0;
    if (rows < kPairRows) std::memset(columns, 0, sizeof columns);
    transpose(data, x.row_stride, rows, count, &columns[0][0], kPairRows);
  }
};

// For each unit in [begin, end) calls rows(first row, count of rows, first column, one past the last) and then, for
// each strip of its columns, columns(strip, first row, count of rows, first column, count of columns).
template <typename T, typename Rows, typename Columns>
void for_each_strip(const Matrix& x, int64_t begin, int64_t end, Rows rows, Columns columns) {
  Strip<T> strip;
  const int64_t across = ceil_div(x.columns, kPairColumns);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row0 = unit / across * kPairRows, row_count = std::min<int64_t>(kPairRows, x.rows - row0);
    const int64_t first = unit % across * kPairColumns, last = std::min(first + kPairColumns, x.columns);
    rows(row0, row_count, first, last);
    for (int64_t column = first; column < last; column += kStrip) {
      const int64_t count = std::min(kStrip, last - column);
      strip.fill(x, row0, row_count, column, count);
      columns(strip, row0, row_count, column, count);
    }
  }
}

template <typename T>
void amax_pair(const Matrix& x, int sign, int64_t begin, int64_t end, uint32_t* row, uint32_t* column) {
  const HadamardSigns signs(sign);
  Bf16 transformed[kGroupElements];
  uint32_t row_most = 0, column_most = 0;
  for_each_strip<T>(
      x, begin, end,
      [&](int64_t row0, int64_t rows, int64_t first, int64_t last) {
        for (int64_t r = row0; r < row0 + rows; ++r) {
          const T* data = static_cast<const T*>(x.data) + r * x.row_stride + first;
          row_most = std::max(row_most, finite_max_bits(data, last - first));
        }
      },
      [&](const Strip<T>& strip, int64_t, int64_t, int64_t, int64_t count) {
        for (int64_t c = 0; c < count; ++c) {
          hadamard_group(strip.columns[c], signs.even, signs.odd, transformed);
          column_most = std::max(column_most, finite_max_bits(transformed, kGroupElements));
        }
      });
  *row = row_most;
  *column = column_most;
}

template <typename T>
void quantize_pair(const Matrix& x, const Plan& plan, const Quantized& out, const Plan& plan_t, const Quantized& out_t,
                   int64_t begin, int64_t end) {
  Batch<T> batch;
  RotatedBatch<T> rotated;
  const int64_t filled = filled_blocks(x.columns), filled_t = filled_blocks(x.rows);
  const HadamardSigns signs(plan.spec.hadamard_sign), signs_t(plan_t.spec.hadamard_sign);
  ToMemory sink{out, x.blocks()}, sink_t{out_t, ceil_div(x.rows, kBlock)};
  for_each_strip<T>(
      x, begin, end,
      [&](int64_t row0, int64_t rows, int64_t first, int64_t last) {
        if (plan.spec.is_eden()) {
          for (int64_t row = row0; row < row0 + rows; ++row) {
            for (int64_t column = first; column < last; column += kGroupElements) {
              const Group group{row, column / kBlock, int(filled_blocks(std::min(kPairRows, last - column)))};
              rotated.add(group, fetch_filled(x, group, filled, rotated.buffer()), plan, out, filled);
            }
          }
          return rotated.finish(plan, out, filled);
        }
        for (int64_t band = row0; band < row0 + rows; band += kBlock) {
          for (int64_t column = first; column < last; column += kGroupElements) {
            const int count = int(ceil_div(std::min<int64_t>(kGroupElements, last - column), kBlock));
            for (int64_t r = band; r < std::min<int64_t>(band + kBlock, row0 + rows); ++r) {
              batch.add({r, column / kBlock, count});
            }
            quantize_batch(x, batch, plan, signs, sink);
          }
        }
      },
      [&](const Strip<T>& strip, int64_t row0, int64_t rows, int64_t column0, int64_t columns) {
        if (plan_t.spec.is_eden()) {
          for (int64_t c = 0; c < columns; ++c) {
            const Group group{column0 + c, row0 / kBlock, int(filled_blocks(rows))};
            rotated.add(group, strip.columns[c], plan_t, out_t, filled_t);
          }
          return rotated.finish(plan_t, out_t, filled_t);
        }
        // The strip is a matrix of `columns` rows of x^T, one group each, that stand further down and right in x^T.
        const Matrix x_t{strip.columns, columns, kPairRows, kPairRows, x.dtype};
        Plan shifted_plan = plan_t;
        shifted_plan.first_block += column0 * plan_t.row_blocks + row0 / kBlock;
        const auto shifted = [&](Group group, const BlockScales& scales, auto encode) {
          group.row += column0;
          group.block += row0 / kBlock;
          sink_t(group, scales, encode);
        };
        for (int64_t c = 0; c < columns; c += kBlock) {
          for (int64_t i = c; i < std::min<int64_t>(c + kBlock, columns); ++i) {
            batch.add({i, 0, int(ceil_div(rows, kBlock))});
          }
          quantize_batch(x_t, batch, shifted_plan, signs_t, shifted);
        }
      });
}

}  // namespace nvfp4::NVFP4_ISA
