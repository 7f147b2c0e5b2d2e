// What the workers of nvfp4.decode_step share: results of blocks, units of work to claim, and rows of x.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/generation/blocks.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"

namespace nvfp4 {

enum Stage { kQkvStage, kAttentionStage, kOutputStage, kRouterStage, kGateUpStage, kDownStage, kStages };
enum Between { kPrepare, kPack, kAdd, kBetweens };  // what precedes a stage, and what follows it

constexpr int64_t kRouterRows = 16;  // of a router, a unit of work
constexpr int64_t kWordBf16 = 2;     // numbers in a word of memory
constexpr int64_t kLineWords = 16;

inline int64_t padded(int64_t size) { return ceil_div(size, 32) * 32; }  // to cache lines

// Hands out memory from base + at on. base: null to measure.
struct Arena {
  Bf16* base = nullptr;
  int64_t at = 0;

  Bf16* next(int64_t size) {
    at += padded(size);
    return base ? base + at - padded(size) : nullptr;
  }
};

// What a block leaves, each written once, of all rows. The results of products are matrices, one behind the other.
// gate_up and down: of every chosen expert. logits outlive the others, which are of one block where workers share rows:
// each worker routes for itself.
struct Results {
  Bf16 *logits, *qkv, *attended, *o, *gate_up, *down, *later;

  Results(const Block& b, int64_t rows, int64_t hidden, Arena& kept, Arena& others) {
    const int64_t slots = rows * b.copies();
    logits = kept.next(rows * b.experts.count);
    qkv = others.next(rows * b.qkv_size()), attended = others.next(rows * b.query_size());
    o = others.next(rows * hidden), gate_up = others.next(slots * 2 * b.inner), down = others.next(slots * hidden);
    later = others.next(b.moves ? 2 * rows * b.kv_size() : 0);
  }
};

// How a token is decoded: the kernels of its products, and what all workers share.
struct Step {
  Model& model;
  const ProductKernels& products;
  const int64_t most_few_rows;
  const RowKernels& rows;
  const int64_t workers;
  std::vector<Results> results;
  std::deque<Claims> claims;    // kStages a block
  std::deque<Claims> betweens;  // kBetweens a stage, and the last norm; none where each worker has its own row
  std::vector<bool> moved;      // blocks whose full cache a refused attempt has moved: the new token replaces the last
  std::atomic<bool> refused{false};
  AlignedFloats memory;

  Step(Model& m, const ProductKernels& products, int64_t most_few_rows, const RowKernels& rows, int64_t workers)
      : model(m), products(products), most_few_rows(most_few_rows), rows(rows), workers(workers) {
    Arena kept, others;
    int64_t most = 0;
    const auto place = [&](const Block& b) {
      if (is_shared()) others.at = 0;
      const Results at(b, m.rows, m.hidden, kept, others);
      most = std::max(most, others.at);
      return at;
    };
    for (const Block& b : m.blocks) place(b);
    memory = allocate((kept.at + most) / kWordBf16);
    kept.base = reinterpret_cast<Bf16*>(memory.get()), others.base = kept.base + kept.at;
    kept.at = others.at = 0;
    for (size_t i = 0; i < m.blocks.size(); ++i) {
      results.push_back(place(m.blocks[i]));
      moved.push_back(m.moved[i]);
      add_claims(i);
    }
    if (is_shared()) betweens.emplace_back(m.rows, workers);
  }

  // Whether workers share rows of x.
  bool is_shared() const { return model.rows > 1; }

  void add_claims(size_t index) {
    const Block& b = model.blocks[index];
    const int64_t slots = model.rows * b.copies(), experts = std::min(slots, b.experts.count);
    claims.emplace_back(units(b.qkv, model.rows), workers);
    claims.emplace_back(model.rows * b.heads, workers);
    claims.emplace_back(units(b.o, model.rows) + moving_heads(index), workers);
    claims.emplace_back(ceil_div(b.experts.count, kRouterRows), workers);
    // Of experts these are shares of the units of those that will be chosen, not more than so many where they differ.
    claims.emplace_back(experts ? experts * units(b.gate_up, 1) : units(b.gate_up, model.rows), workers);
    claims.emplace_back(experts ? experts * units(b.down, 1) : units(b.down, model.rows), workers);
    for (int64_t i = 0; is_shared() && i < int64_t{kStages} * kBetweens; ++i) {
      betweens.emplace_back(i / kBetweens < kGateUpStage ? model.rows : slots, workers);
    }
  }

  const ProductKernel& kernel(int64_t x_rows) const { return x_rows <= most_few_rows ? products.few : products.many; }
  Product product(const Product& weight, const Bf16* x, int64_t x_rows, Bf16* y) const {
    Product p = weight;
    p.x = x, p.x_rows = x_rows, p.out = y, p.workers = workers;
    return p;
  }
  int64_t units(const Product& weight, int64_t x_rows) const {
    return kernel(x_rows).units(product(weight, nullptr, x_rows, nullptr));
  }
  int64_t units(const std::vector<Product>& weights, int64_t x_rows) const {
    int64_t sum = 0;
    for (const Product& each : weights) sum += units(each, x_rows);
    return sum;
  }
  // How many heads of a block's caches move.
  int64_t moving_heads(size_t index) const {
    const Block& b = model.blocks[index];
    return b.moves && !moved[index] ? model.rows * b.kv_heads : 0;
  }
  // The most words that the x of products of `slots` rows of these columns, in all, are packed to.
  int64_t packed_words(int64_t columns, int64_t slots) const {
    int64_t of_row = 0;
    for (int64_t x_rows = 1; x_rows <= model.rows; ++x_rows) {
      Product p{};
      p.batches = p.rows = 1, p.x_rows = x_rows, p.workers = workers;
      p.columns = columns, p.blocks = ceil_div(columns, kBlock);
      of_row = std::max(of_row, ceil_div(kernel(x_rows).packed_words(p), x_rows));
    }
    return (of_row + kLineWords) * slots;
  }
};

// The residual stream `sum` (rows, hidden), the x of a stage, and that as products read it: of one worker, or of all.
struct Inputs {
  AlignedFloats memory;
  Bf16 *sum, *x;
  float* packed;

  explicit Inputs(const Step& step) {
    const Model& m = step.model;
    const int64_t hidden = padded(m.rows * m.hidden);
    const int64_t size = padded(m.rows * m.most([&](const Block& b) {
      return std::max({b.query_size() + b.kv_size(), b.copies() * m.hidden, b.copies() * b.inner});
    }));
    const int64_t words = m.most([&](const Block& b) {
      return std::max(step.packed_words(std::max(m.hidden, b.query_size()), m.rows),
                      step.packed_words(std::max(m.hidden, b.inner), m.rows * b.copies()));
    });
    memory = allocate((hidden + size) / kWordBf16 + words);
    sum = reinterpret_cast<Bf16*>(memory.get()), x = sum + hidden;
    packed = memory.get() + (hidden + size) / kWordBf16;
    std::memcpy(sum, m.x, m.rows * m.hidden * sizeof *sum);
  }
};

}  // namespace nvfp4
