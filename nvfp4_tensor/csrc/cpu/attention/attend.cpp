// nvfp4.attend_codes on the CPU: attention of new tokens to a cache of codes, split over the context.
//
// A unit of work is up to kMostRows queries of one head of keys and kSplitTokens positions of its context. Units are
// the same for any number of threads, and so are the bits: the parts of a query are added in the order of the context.
#include <vector>

#include "cpu/attention/codes.h"
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"

namespace nvfp4 {

namespace {

constexpr int64_t kSplitTokens = 512;
constexpr int64_t kMostSplitQueries = 16;  // more new tokens give enough units without splits

// The tensors of a call, and what it asks of its units.
struct Context : AttendArguments {
  using AttendArguments::AttendArguments;

  int64_t rows() const { return heads / kv_heads() * tokens; }
  int64_t length(int64_t b) const { return front + static_cast<const int64_t*>(lengths.const_data_ptr())[b] + latest; }
  int64_t first_seen(int64_t b) const { return has_first ? static_cast<const int64_t*>(first.const_data_ptr())[b] : 0; }

  static const char* row_of(const Tensor& t, int64_t b, int64_t head) {
    return static_cast<const char*>(t.const_data_ptr()) + (b * t.stride(0) + head * t.stride(1)) * t.element_size();
  }

  // All but the results and the range.
  AttendUnit unit(int64_t b, int64_t head, int64_t row) const {
    AttendUnit u{};
    u.dtype = dtype;
    u.q = static_cast<const char*>(q.const_data_ptr()) +
          ((b * kv_heads() + head) * rows() + row) * key_size * q.element_size();
    u.first_row = row, u.rows = std::min(kMostRows, rows() - row), u.new_tokens = tokens;
    u.key_size = key_size, u.value_size = value_size;
    if (has_front) {
      u.keys[0] = {row_of(front_keys, b, head), front_keys.stride(2)};
      u.values[0] = {row_of(front_values, b, head), front_values.stride(2)};
    }
    u.keys[1] = stretch_of(keys, b * kv_heads() + head), u.values[1] = stretch_of(values, b * kv_heads() + head);
    u.keys[2] = {row_of(latest_keys, b, head), latest_keys.stride(2)};
    u.values[2] = {row_of(latest_values, b, head), latest_values.stride(2)};
    u.begins[1] = front, u.begins[2] = length(b) - latest, u.begins[3] = length(b);
    u.first_seen = first_seen(b), u.window = window;
    u.scale = scale, u.softcap = softcap, u.is_rotated = is_rotated;
    return u;
  }
};

// Rows of one head of keys that share what is decoded, and where their parts lie.
struct RowBlock {
  AttendUnit unit;
  int64_t batch_row;  // the first row among all of the output
  int64_t splits, first_unit, first_float;

  int64_t part_size() const { return unit.rows * (unit.row_size() + 2); }
};

std::vector<RowBlock> row_blocks(const Context& c) {
  std::vector<RowBlock> out;
  int64_t units = 0, floats = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t length = c.length(b);
    const int64_t splits = c.tokens > kMostSplitQueries ? 1 : ceil_div(length, kSplitTokens);
    for (int64_t head = 0; head < c.kv_heads(); ++head) {
      for (int64_t row = 0; row < c.rows(); row += kMostRows) {
        const RowBlock block = {c.unit(b, head, row), (b * c.kv_heads() + head) * c.rows() + row, splits, units,
                                floats};
        out.push_back(block);
        units += splits, floats += splits * block.part_size();
      }
    }
  }
  return out;
}

Tensor run(const Context& c) {
  const AttendKernels& kernels = instruction_set().compiled.attend;
  Tensor y = empty({c.batch, c.heads, c.tokens, c.value_size}, c.q.scalar_type());
  const std::vector<RowBlock> blocks = row_blocks(c);
  if (blocks.empty() || !y.numel()) return y;
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const RowBlock& last = blocks.back();
  const int64_t units = last.first_unit + last.splits;
  const AlignedFloats parts = allocate(last.first_float + last.splits * last.part_size());
  std::vector<const RowBlock*> block_of(units);
  for (const RowBlock& block : blocks) {
    for (int64_t i = 0; i < block.splits; ++i) block_of[block.first_unit + i] = &block;
  }
  const auto attend = [&](int64_t number, float* scratch) {
    const RowBlock& block = *block_of[number];
    const int64_t split = number - block.first_unit, length = block.unit.begins[kStretches];
    AttendUnit u = block.unit;
    u.begin = block.splits == 1 ? 0 : split * kSplitTokens;
    u.end = block.splits == 1 ? length : std::min(length, u.begin + kSplitTokens);
    u.sums = parts.get() + block.first_float + split * block.part_size();
    u.most = u.sums + u.rows * u.row_size(), u.total = u.most + u.rows;
    kernels.attend(u, scratch);
  };
  const auto finish = [&](const RowBlock& block, float* scratch) {
    const AttendUnit& u = block.unit;
    const float* sums = parts.get() + block.first_float;
    const int64_t row_bytes = c.value_size * y.element_size();
    for (int64_t r = 0; r < u.rows; ++r) {
      const float* most = sums + u.rows * u.row_size() + r;
      kernels.finish(sums + r * u.row_size(), most, most + u.rows, block.splits, block.part_size(), block.part_size(),
                     c.value_size, u.first_of(r) <= u.last_of(r), u.dtype, out + (block.batch_row + r) * row_bytes,
                     scratch);
    }
  };
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), units);
  Claims attending(units, workers), finishing(int64_t(blocks.size()), workers);
  const auto work = [&](int64_t worker, int64_t) {
    const AlignedFloats scratch = allocate(attend_scratch(c.key_size, c.value_size));
    attending.run(worker, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) attend(i, scratch.get());
    });
    attending.wait();
    finishing.run(worker, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) finish(blocks[i], scratch.get());
    });
  };
  parallel(workers, 1, work);
  return y;
}

Tensor attend_codes(const Tensor& q, const Tensor& key_codes, const Tensor& key_scale, const Tensor& key_factor,
                    const Tensor& value_codes, const Tensor& value_scale, const Tensor& value_factor,
                    const Tensor& lengths, std::optional<Tensor> first, std::optional<Tensor> front_keys,
                    std::optional<Tensor> front_values, const Tensor& latest_keys, const Tensor& latest_values,
                    double scale, double softcap, int64_t window, bool rotated, bool) {
  const Context c(q, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor, lengths, first,
                  front_keys, front_values, latest_keys, latest_values, scale, softcap, window, rotated);
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t length = static_cast<const int64_t*>(c.lengths.const_data_ptr())[b];
    NVFP4_CHECK(length >= 0 && length <= c.keys.capacity, "lengths must be from 0 to the capacity, ", c.keys.capacity,
                ", not ", length);
    NVFP4_CHECK(c.length(b) >= c.tokens, "a context of ", c.length(b), " tokens does not hold the ", c.tokens,
                " new ones");
    NVFP4_CHECK(c.first_seen(b) >= 0, "first must not be negative, not ", c.first_seen(b));
  }
  return run(c);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("attend_codes", TORCH_BOX(&attend_codes)); }

}  // namespace nvfp4
