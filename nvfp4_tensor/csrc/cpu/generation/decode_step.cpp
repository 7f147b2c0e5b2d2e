// nvfp4.decode_step on the CPU: all blocks of a language model for one token, in one parallel section.
//
// A block is five stages of products or attention, with experts six. Workers claim the units of a stage as they go and
// wait for its end; what lies between two stages (residuals, norms, gates, routing, packing x) each does for itself,
// from results that are written once: a worker that the system delays for some stages, or never runs, does no harm.
#include <array>
#include <cstring>

#include "cpu/generation/blocks.h"
#include "cpu/generation/routing.h"
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"

namespace nvfp4 {
namespace {

constexpr int64_t kStages = 6;
constexpr int64_t kRouterRows = 16;  // of a router, a unit of work
constexpr int64_t kWordBf16 = 2;     // numbers in a word of memory

int64_t padded(int64_t size) { return ceil_div(size, 32) * 32; }  // to cache lines

// What a block leaves, each written once. gate_up and down: of every chosen expert.
struct Results {
  Bf16 *qkv, *attended, *o, *logits, *gate_up, *down, *later;

  // From base + at on, which it moves behind itself. base: null to measure.
  Results(const Block& b, int64_t hidden, Bf16* base, int64_t& at) {
    const int64_t copies = std::max<int64_t>(b.experts.chosen, 1);
    const auto next = [&](int64_t size) {
      at += padded(size);
      return base ? base + at - padded(size) : nullptr;
    };
    qkv = next(b.qkv_size()), attended = next(b.query_size()), o = next(hidden), logits = next(b.experts.count);
    gate_up = next(copies * 2 * b.inner), down = next(copies * hidden), later = next(b.moves ? 2 * b.kv_size() : 0);
  }
};

// How one token is decoded: the kernel of its products, and what all workers share.
struct Step {
  Model& model;
  const ProductKernel& kernel;
  const RowKernels& rows;
  const int64_t workers;
  std::vector<Results> results;
  std::deque<Claims> claims;  // kStages a block
  std::vector<bool> moved;    // blocks whose full cache a refused attempt has moved: the new token replaces the last
  std::atomic<bool> refused{false};
  AlignedFloats memory;

  Step(Model& m, const ProductKernel& kernel, const RowKernels& rows, int64_t workers)
      : model(m), kernel(kernel), rows(rows), workers(workers) {
    int64_t size = 0, at = 0;
    for (const Block& b : m.blocks) Results(b, m.hidden, nullptr, size);
    memory = allocate(size / kWordBf16);
    results.reserve(m.blocks.size());
    for (size_t i = 0; i < m.blocks.size(); ++i) {
      results.emplace_back(m.blocks[i], m.hidden, reinterpret_cast<Bf16*>(memory.get()), at);
      moved.push_back(m.moved[i]);
      add_claims(i);
    }
  }

  void add_claims(size_t index) {
    const Block& b = model.blocks[index];
    const int64_t copies = std::max<int64_t>(b.experts.chosen, 1);
    claims.emplace_back(units(b.qkv), workers);
    claims.emplace_back(b.heads, workers);
    claims.emplace_back(units(b.o) + moving_heads(index), workers);
    claims.emplace_back(ceil_div(b.experts.count, kRouterRows), workers);
    claims.emplace_back(copies * units(b.gate_up), workers);
    claims.emplace_back(copies * units(b.down), workers);
  }

  Product product(const Product& weight, const Bf16* x, Bf16* y) const {
    Product p = weight;
    p.x = x, p.out = y, p.workers = workers;
    return p;
  }
  int64_t units(const Product& weight) const { return kernel.units(product(weight, nullptr, nullptr)); }
  int64_t units(const std::vector<Product>& weights) const {
    int64_t sum = 0;
    for (const Product& each : weights) sum += units(each);
    return sum;
  }
  // How many heads of a block's cache move.
  int64_t moving_heads(size_t index) const {
    const Block& b = model.blocks[index];
    return b.moves && !moved[index] ? b.kv_heads : 0;
  }
};

// One worker in all blocks. `sum` is the residual stream.
class Worker {
 public:
  Worker(Step& step, Model& m, int64_t number)
      : step_(step),
        m_(m),
        number_(number),
        packed_words_(packed_words(step, m)),
        memory_(allocate(words(step, m))),
        sum_(reinterpret_cast<Bf16*>(memory_.get())),
        x_(sum_ + padded(m.hidden)),
        packed_(memory_.get() + row_words(m)),
        scratch_(packed_ + packed_words_ * most_inputs(m)) {}

  const Bf16* run() {
    std::memcpy(sum_, m_.x, m_.hidden * sizeof *sum_);
    for (size_t i = 0; i < m_.blocks.size() && !step_.refused; ++i) block(m_.blocks[i], step_.results[i], i);
    step_.rows.norm(sum_, m_.norm, x_, m_.hidden);
    return x_;
  }

 private:
  static int64_t row_words(const Model& m) { return (padded(m.hidden) + padded(m.row_size())) / kWordBf16; }
  static int64_t packed_words(const Step& step, const Model& m) {
    Product p{};
    p.batches = p.x_rows = p.rows = 1, p.workers = step.workers;
    p.columns = m.widest(), p.blocks = ceil_div(p.columns, kBlock);
    return ceil_div(step.kernel.packed_words(p), 16) * 16;
  }
  // Of the products of a stage: each chosen expert has its own.
  static int64_t most_inputs(const Model& m) {
    int64_t most = 1;
    for (const Block& b : m.blocks) most = std::max(most, b.experts.chosen);
    return most;
  }
  int64_t words(const Step& step, const Model& m) const {
    int64_t scratch = step.kernel.scratch_words;
    for (const Block& b : m.blocks) scratch = std::max(scratch, b.attention.scratch_words());
    return row_words(m) + packed_words_ * most_inputs(m) + scratch;
  }

  void block(const Block& b, const Results& r, size_t index) {
    Claims* stages[kStages];
    for (int64_t s = 0; s < kStages; ++s) stages[s] = &step_.claims[index * kStages + s];
    multiply(*stages[0], b.qkv, r.qkv, [&] { return normed(sum_, b.before_attention); });
    attend(*stages[1], b, r, index);
    multiply(
        *stages[2], b.o, r.o, [&] { return r.attended; }, step_.moving_heads(index),
        [&](int64_t head) { move(b, r, index, head); });
    add(r.o, b.after_attention, b.residual);
    if (b.experts.count) {
      add(mixture(b, r, stages + 3), b.after_feed_forward, b.residual);
      return;
    }
    multiply(*stages[4], b.gate_up, r.gate_up, [&] { return normed(sum_, b.before_feed_forward); });
    multiply(*stages[5], b.down, r.down, [&] { return step_.rows.gate(r.gate_up, b.gate, x_, b.inner), x_; });
    add(r.down, b.after_feed_forward, b.residual);
  }

  const Bf16* normed(const Bf16* x, const Norm& norm) {
    if (!norm.weight) return x;
    step_.rows.norm(x, norm, x_, m_.hidden);
    return x_;
  }
  void add(const Bf16* y, const Norm& norm, float factor) { step_.rows.add(sum_, normed(y, norm), factor, m_.hidden); }

  // Returns where x, packed, lies.
  const float* pack(const Product& p, int64_t slot = 0) {
    float* at = packed_ + slot * packed_words_;
    if (step_.kernel.pack(p, at, 0, step_.kernel.pack_units(p)) & step_.kernel.refuses) step_.refused = true;
    return at;
  }
  // Units [begin, end) of p, as far as it has them.
  void multiply_units(const Product& p, const float* packed, int64_t begin, int64_t end) {
    begin = std::max<int64_t>(begin, 0), end = std::min(end, step_.kernel.units(p));
    if (begin < end && !step_.refused) step_.kernel.multiply(p, packed, scratch_, begin, end);
  }

  static constexpr size_t kMostParts = 3;

  // A stage of products of one x, which `prepare` makes; their y lie one behind the other. `others` units, which
  // `other` does, come first: they run even where the products are refused.
  template <typename Prepare, typename Other>
  void multiply(Claims& claims, const Product* weights, size_t count, Bf16* y, Prepare prepare, int64_t others,
                Other other) {
    if (!claims.is_done()) {
      const Bf16* x = prepare();
      std::array<Product, kMostParts> products;
      for (size_t i = 0; i < count; y += weights[i++].rows) products[i] = step_.product(weights[i], x, y);
      const float* packed = pack(products[0]);
      claims.run(number_, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < std::min(end, others); ++i) other(i);
        begin -= others, end -= others;
        for (size_t i = 0; i < count; ++i) {
          multiply_units(products[i], packed, begin, end);
          const int64_t units = step_.kernel.units(products[i]);
          begin -= units, end -= units;
        }
      });
    }
    claims.wait();
  }
  template <typename Prepare>
  void multiply(Claims& claims, const std::vector<Product>& weights, Bf16* y, Prepare prepare) {
    multiply(claims, weights.data(), weights.size(), y, prepare, 0, [](int64_t) {});
  }
  template <typename Prepare, typename Other>
  void multiply(Claims& claims, const Product& weight, Bf16* y, Prepare prepare, int64_t others, Other other) {
    multiply(claims, &weight, 1, y, prepare, others, other);
  }
  template <typename Prepare>
  void multiply(Claims& claims, const Product& weight, Bf16* y, Prepare prepare) {
    multiply(claims, &weight, 1, y, prepare, 0, [](int64_t) {});
  }

  // --- attention -----------------------------------------------------------------------------------------------------

  void attend(Claims& claims, const Block& b, const Results& r, size_t index) {
    if (!claims.is_done()) {
      Attention a = b.attention;
      a.q = r.qkv, a.k = a.q + b.query_size(), a.v = a.k + b.kv_size(), a.out = r.attended;
      a.later = step_.moving_heads(index) ? r.later : nullptr;
      if (step_.moved[index]) a.first = 0;
      if (b.q_norm_spans) step_.rows.norm(a.q, b.q_norm, x_, b.query_size()), a.q = x_;
      if (b.k_norm_spans) {
        Bf16* k = x_ + b.query_size();
        step_.rows.norm(a.k, b.k_norm, k, b.kv_size()), a.k = k;
      }
      claims.run(number_, [&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) step_.rows.attend(a, head, scratch_);
      });
    }
    claims.wait();
  }

  // A full cache moves by one token, after all have read it.
  void move(const Block& b, const Results& r, size_t index, int64_t head) {
    const Attention& a = b.attention;
    const Bf16* from = r.later + head * 2 * a.dim;
    for (Bf16* cache : {a.keys, a.values}) {
      Bf16* at = cache + head * a.length * a.dim;
      std::memmove(at, at + a.dim, (a.length - 1) * a.dim * sizeof *at);
      std::memcpy(at + (a.length - 1) * a.dim, from, a.dim * sizeof *at);
      from += a.dim;
    }
    m_.moved[index] = true;
  }

  // --- experts -------------------------------------------------------------------------------------------------------

  // Three stages: the router, gate and up, down. Returns the sum of the chosen experts.
  const Bf16* mixture(const Block& b, const Results& r, Claims** stages) {
    const Experts& e = b.experts;
    if (!stages[0]->is_done()) {
      const Bf16* x = normed(sum_, b.before_feed_forward);
      stages[0]->run(number_, [&](int64_t begin, int64_t end) {
        step_.rows.multiply(x, e.router, e.router_bias, m_.hidden, r.logits, begin * kRouterRows,
                            std::min(e.count, end * kRouterRows));
      });
    }
    stages[0]->wait();
    const Chosen chosen = route(r.logits, e.count, e.chosen, e.routing);
    multiply_experts(
        *stages[1], b.gate_up[0], chosen, r.gate_up, [&](int64_t) { return normed(sum_, b.before_feed_forward); },
        true);
    multiply_experts(*stages[2], b.down, chosen, r.down, [&](int64_t i) { return gated(b, r, chosen, i); }, false);
    return sum_of_experts(b, r, chosen);
  }

  // A stage of one product per chosen expert; prepare(i) makes the x of the i-th, which all share where is_shared.
  template <typename Prepare>
  void multiply_experts(Claims& claims, const Product& weight, const Chosen& chosen, Bf16* y, Prepare prepare,
                        bool is_shared) {
    if (!claims.is_done()) {
      const int64_t units = step_.units(weight), count = int64_t(chosen.experts.size());
      std::vector<Product> products;
      std::vector<const float*> packed;
      for (int64_t i = 0; i < count; ++i) {
        const bool is_packed = is_shared && i;
        const Bf16* x = is_packed ? nullptr : prepare(i);
        products.push_back(step_.product(expert_of(weight, chosen.experts[i]), x, y + i * weight.rows));
        packed.push_back(is_packed ? packed[0] : pack(products[i], i));
      }
      claims.run(number_, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin / units; i * units < end; ++i) {
          multiply_units(products[i], packed[i], begin - i * units, end - i * units);
        }
      });
    }
    claims.wait();
  }

  // The input of the i-th chosen expert's second product.
  const Bf16* gated(const Block& b, const Results& r, const Chosen& chosen, int64_t i) {
    const int64_t size = 2 * b.inner;
    const Bf16* gate_up = r.gate_up + i * size;
    if (b.experts.gate_up_bias) {
      Bf16* sum = x_ + padded(b.inner);
      std::memcpy(sum, gate_up, size * sizeof *sum);
      step_.rows.add(sum, b.experts.gate_up_bias + chosen.experts[i] * size, 1.0f, size);
      gate_up = sum;
    }
    step_.rows.gate(gate_up, b.gate, x_, b.inner);
    return x_;
  }

  const Bf16* sum_of_experts(const Block& b, const Results& r, const Chosen& chosen) {
    const bool is_rounded = b.experts.routing & kRounded;
    for (int64_t j = 0; j < m_.hidden; ++j) {
      float sum = 0.0f;
      for (size_t i = 0; i < chosen.experts.size(); ++i) {
        float y = float_of(r.down[i * m_.hidden + j]);
        if (b.experts.down_bias) {
          y = float_of(bf16_of(y + float_of(b.experts.down_bias[chosen.experts[i] * m_.hidden + j])));
        }
        y *= chosen.weights[i];
        sum += is_rounded ? float_of(bf16_of(y)) : y;
      }
      x_[j] = bf16_of(sum);
    }
    return x_;
  }

  Step& step_;
  Model& m_;
  const int64_t number_, packed_words_;
  AlignedFloats memory_;
  Bf16 *sum_, *x_;
  float *packed_, *scratch_;
};

// Returns false where some x has numbers that this kernel does not support. The caller decodes the token again, which
// overwrites what this call has written to the cache.
bool decode(Model& model, const ProductKernel& kernel, const RowKernels& rows, Bf16* out) {
  const int64_t workers = torch::stable::get_num_threads();
  Step step(model, kernel, rows, workers);
  const auto work = [&](int64_t first, int64_t) {
    Worker worker(step, model, first);
    const Bf16* y = worker.run();
    if (first == 0) std::memcpy(out, y, model.hidden * sizeof *out);
  };
  parallel(workers, 1, work);
  return !step.refused;
}

Tensor decode_step(const Tensor& x, const std::vector<Tensor>& weights, const Tensor& kinds, const Tensor& numbers,
                   const std::vector<Tensor>& keys, const std::vector<Tensor>& values, const std::vector<Tensor>& cos,
                   const std::vector<Tensor>& sin, int64_t position) {
  Model model(x, weights, kinds, numbers, keys, values, cos, sin, position);
  const InstructionSet& set = instruction_set();
  const RowKernels& rows = set.compiled.rows;
  Tensor y = empty({1, model.hidden}, ScalarType::BFloat16);
  Bf16* out = static_cast<Bf16*>(y.mutable_data_ptr());
  if (set.bf16 && decode(model, set.bf16->few, rows, out)) return y;
  const ProductKernels& products = set.compiled.products;
  if (!decode(model, products.few, rows, out)) decode(model, products.many, rows, out);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }

}  // namespace nvfp4
