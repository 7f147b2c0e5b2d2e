// nvfp4.decode_step on the CPU: all blocks of a language model for one token of each text, in one parallel section.
//
// A block is five stages of products or attention, with experts six. Workers claim the units of a stage as they go and
// wait for its end. What lies between two stages (residuals, norms, gates, routing, packing x) takes little of one
// row: each does it for itself, from results that are written once, and a worker that the system delays for some
// stages, or never runs, does no harm. Of several rows, which all share, it is claimed and waited for as well.
#include <cstring>
#include <optional>
#include <span>

#include "cpu/generation/routing.h"
#include "cpu/generation/step.h"
#include "cpu/host/instruction_set.h"

namespace nvfp4 {
namespace {

// One worker in all blocks.
class Worker {
 public:
  Worker(Step& step, const Inputs& rows, int64_t number)
      : step_(step), m_(step.model), rows_(rows), number_(number), memory_(allocate(spare_words() + scratch_words())) {
    spare_ = reinterpret_cast<Bf16*>(memory_.get()), scratch_ = memory_.get() + spare_words();
  }

  void run(Bf16* out) {
    for (size_t i = 0; i < m_.blocks.size() && !step_.refused; ++i) block(i);
    if (number_ && !step_.is_shared()) return;
    each(step_.is_shared() ? &step_.betweens.back() : nullptr, m_.rows,
         [&](int64_t row) { step_.rows.norm(sum(row), m_.norm, out + row * m_.hidden, m_.hidden); });
  }

 private:
  // A block's place in the model.
  struct Place {
    const Block& b;
    const Results& r;
    size_t index;
  };
  // A product, of which the x may be packed together with that of the one before.
  struct Task {
    Product p;
    const ProductKernel* kernel;
    float* packed;
    bool is_packed;

    int64_t pack_units() const { return is_packed ? 0 : kernel->pack_units(p); }
    int64_t units() const { return kernel->units(p); }
  };

  // An expert's gate and up beside their bias.
  int64_t spare_words() const {
    return padded(m_.most([](const Block& b) { return b.experts.count ? 2 * b.inner : 0; })) / kWordBf16;
  }
  int64_t scratch_words() const {
    return std::max({step_.kernel(1).scratch_words, step_.kernel(m_.rows).scratch_words,
                     m_.most([](const Block& b) { return b.attention.scratch_words(); })});
  }

  Bf16* sum(int64_t row) const { return rows_.sum + row * m_.hidden; }
  Claims& claims(const Place& at, Stage s) const { return step_.claims[at.index * kStages + s]; }
  Claims* between(const Place& at, Stage s, Between b) const {
    return step_.is_shared() ? &step_.betweens[(at.index * kStages + s) * kBetweens + b] : nullptr;
  }

  // f(begin, end) of units [0, count), which workers share; a claim may be of more than one unit, or of none.
  template <typename Function>
  void share(Claims& claims, int64_t count, Function f) {
    const int64_t shares = claims.count();
    claims.run(number_, [&](int64_t begin, int64_t end) { f(begin * count / shares, end * count / shares); });
  }
  // The same between stages, where without claims each worker does all.
  template <typename Function>
  void share(Claims* claims, int64_t count, Function f) {
    if (!claims) return f(0, count);
    share(*claims, count, f);
    claims->wait();
  }
  // f(row) of rows [0, count).
  template <typename Function>
  void each(Claims* claims, int64_t count, Function f) {
    share(claims, count, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) f(row);
    });
  }

  void block(size_t index) {
    const Place at{m_.blocks[index], step_.results[index], index};
    const Block& b = at.b;
    multiply(at, kQkvStage, b.qkv, at.r.qkv, [&] { return normed(at, kQkvStage, b.before_attention); });
    attend(at);
    const int64_t moving = step_.moving_heads(index);
    multiply(
        at, kOutputStage, {&b.o, 1}, at.r.o, [&] { return at.r.attended; }, moving, [&](int64_t i) { move(at, i); });
    each(between(at, kOutputStage, kAdd), m_.rows,
         [&](int64_t row) { add(row, at.r.o, b.after_attention, b.residual); });
    if (b.experts.count) return mixture(at);
    multiply(at, kGateUpStage, b.gate_up, at.r.gate_up,
             [&] { return normed(at, kGateUpStage, b.before_feed_forward); });
    multiply(at, kDownStage, {&b.down, 1}, at.r.down, [&] { return gated(at); });
    each(between(at, kDownStage, kAdd), m_.rows,
         [&](int64_t row) { add(row, at.r.down, b.after_feed_forward, b.residual); });
  }

  // The residual stream (rows, hidden) as the products of a stage read it.
  const Bf16* normed(const Place& at, Stage s, const Norm& norm) {
    if (!norm.weight) return rows_.sum;
    each(between(at, s, kPrepare), m_.rows,
         [&](int64_t row) { step_.rows.norm(sum(row), norm, rows_.x + row * m_.hidden, m_.hidden); });
    return rows_.x;
  }
  // A row of y (rows, hidden) to the residual stream.
  void add(int64_t row, const Bf16* y, const Norm& norm, float factor) {
    Bf16* x = rows_.x + row * m_.hidden;
    y += row * m_.hidden;
    if (norm.weight) step_.rows.norm(y, norm, x, m_.hidden), y = x;
    step_.rows.add(sum(row), y, factor, m_.hidden);
  }
  // act(gate) * up (rows, inner).
  const Bf16* gated(const Place& at) {
    const int64_t size = at.b.inner;
    const bool is_one = at.b.gate_up.size() == 1;
    each(between(at, kDownStage, kPrepare), m_.rows, [&](int64_t row) {
      const Bf16* gate = at.r.gate_up + row * (is_one ? 2 * size : size);
      const Bf16* up = gate + (is_one ? size : m_.rows * size);
      step_.rows.gate(gate, up, at.b.gate, rows_.x + row * size, size);
    });
    return rows_.x;
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // A task of the next stage. The x of a stage are one, or lie one behind the other.
  void add_task(const Product& weight, const Bf16* x, int64_t x_rows, Bf16* y) {
    Task task{step_.product(weight, x, x_rows, y), &step_.kernel(x_rows), rows_.packed, false};
    if (!tasks_.empty()) {
      const Task& last = tasks_.back();
      task.is_packed = x == last.p.x;
      task.packed = last.packed;
      if (!task.is_packed) task.packed += ceil_div(last.kernel->packed_words(last.p), kLineWords) * kLineWords;
    }
    tasks_.push_back(task);
  }

  // f(task, begin, end) of units [begin, end) of all tasks, which have size(task).
  template <typename Size, typename Function>
  void each_task(int64_t begin, int64_t end, Size size, Function f) {
    for (const Task& task : tasks_) {
      const int64_t units = size(task);
      if (begin < units && end > 0) f(task, std::max<int64_t>(begin, 0), std::min(end, units));
      begin -= units, end -= units;
    }
  }
  template <typename Size>
  int64_t sum_of(Size size) const {
    int64_t sum = 0;
    for (const Task& task : tasks_) sum += size(task);
    return sum;
  }

  // Packs the x of the tasks and multiplies them. `others` units, which `other` does, come first: they run even where
  // the products are refused.
  template <typename Other>
  void run_tasks(const Place& at, Stage s, int64_t others, Other other) {
    const auto packs = [](const Task& task) { return task.pack_units(); };
    share(between(at, s, kPack), sum_of(packs), [&](int64_t begin, int64_t end) {
      each_task(begin, end, packs, [&](const Task& task, int64_t begin, int64_t end) {
        if (task.kernel->pack(task.p, task.packed, begin, end) & task.kernel->refuses) step_.refused = true;
      });
    });
    const auto units = [](const Task& task) { return task.units(); };
    share(claims(at, s), others + sum_of(units), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < std::min(end, others); ++i) other(i);
      each_task(begin - others, end - others, units, [&](const Task& task, int64_t begin, int64_t end) {
        if (!step_.refused) task.kernel->multiply(task.p, task.packed, scratch_, begin, end);
      });
    });
  }

  // A stage of products of one x, which `prepare` makes.
  template <typename Prepare, typename Other>
  void multiply(const Place& at, Stage s, std::span<const Product> weights, Bf16* y, Prepare prepare, int64_t others,
                Other other) {
    if (!claims(at, s).is_done()) {
      const Bf16* x = prepare();
      tasks_.clear();
      for (const Product& weight : weights) add_task(weight, x, m_.rows, y), y += m_.rows * weight.rows;
      run_tasks(at, s, others, other);
    }
    claims(at, s).wait();
  }
  template <typename Prepare>
  void multiply(const Place& at, Stage s, std::span<const Product> weights, Bf16* y, Prepare prepare) {
    multiply(at, s, weights, y, prepare, 0, [](int64_t) {});
  }

  // --- attention -----------------------------------------------------------------------------------------------------

  void attend(const Place& at) {
    if (!claims(at, kAttentionStage).is_done()) {
      const Block& b = at.b;
      if (b.q_norm_spans || b.k_norm_spans) {
        each(between(at, kAttentionStage, kPrepare), m_.rows, [&](int64_t row) { norm_heads(at, row); });
      }
      share(claims(at, kAttentionStage), m_.rows * b.heads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) step_.rows.attend(attention_of(at, i / b.heads), i % b.heads, scratch_);
      });
    }
    claims(at, kAttentionStage).wait();
  }

  // q, k and v of a text: rows of one matrix, or of three.
  struct Heads {
    const Bf16 *q, *k, *v;

    Heads(const Place& at, int64_t rows, int64_t row) {
      const Block& b = at.b;
      const bool is_one = b.qkv.size() == 1;
      q = at.r.qkv + row * (is_one ? b.qkv_size() : b.query_size());
      k = is_one ? q + b.query_size() : at.r.qkv + rows * b.query_size() + row * b.kv_size();
      v = k + (is_one ? 1 : rows) * b.kv_size();
    }
  };
  // Where norms over all heads leave q, and k behind it.
  Bf16* normed_heads(const Block& b, int64_t row) { return rows_.x + row * (b.query_size() + b.kv_size()); }
  void norm_heads(const Place& at, int64_t row) {
    const Block& b = at.b;
    const Heads heads(at, m_.rows, row);
    Bf16* out = normed_heads(b, row);
    if (b.q_norm_spans) step_.rows.norm(heads.q, b.q_norm, out, b.query_size());
    if (b.k_norm_spans) step_.rows.norm(heads.k, b.k_norm, out + b.query_size(), b.kv_size());
  }

  Attention attention_of(const Place& at, int64_t row) {
    const Block& b = at.b;
    const Heads heads(at, m_.rows, row);
    Attention a = b.attention;
    a.q = b.q_norm_spans ? normed_heads(b, row) : heads.q;
    a.k = b.k_norm_spans ? normed_heads(b, row) + b.query_size() : heads.k;
    a.v = heads.v, a.out = at.r.attended + row * b.query_size();
    a.rotation.cos += row * a.rotation.step, a.rotation.sin += row * a.rotation.step;
    a.keys += row * b.kv_size() * a.length, a.values += row * b.kv_size() * a.length;
    a.later = step_.moving_heads(at.index) ? at.r.later + row * 2 * b.kv_size() : nullptr;
    if (step_.moved[at.index]) a.first = 0;
    const int64_t padding = m_.starts ? std::max<int64_t>(m_.starts[row] - b.position, 0) : 0;
    a.first += padding, a.count -= padding;
    return a;
  }

  // Head `head` of all texts' full caches moves by one token, after all have read it.
  void move(const Place& at, int64_t head) {
    const Attention& a = at.b.attention;
    const Bf16* from = at.r.later + head * 2 * a.dim;
    for (Bf16* cache : {a.keys, a.values}) {
      Bf16* to = cache + head * a.length * a.dim;
      std::memmove(to, to + a.dim, (a.length - 1) * a.dim * sizeof *to);
      std::memcpy(to + (a.length - 1) * a.dim, from, a.dim * sizeof *to);
      from += a.dim;
    }
    m_.moved[at.index] = true;
  }

  // --- experts -------------------------------------------------------------------------------------------------------

  // Three stages: the router, gate and up, down.
  void mixture(const Place& at) {
    const Block& b = at.b;
    const Experts& e = b.experts;
    Claims& routing = claims(at, kRouterStage);
    if (!routing.is_done()) {
      const DenseProduct p{normed(at, kRouterStage, b.before_feed_forward),
                           e.router,
                           e.router_bias,
                           m_.rows,
                           e.count,
                           m_.hidden,
                           at.r.logits};
      share(routing, routing.count(), [&](int64_t begin, int64_t end) {
        step_.rows.multiply(p, begin * kRouterRows, std::min(e.count, end * kRouterRows));
      });
    }
    routing.wait();
    const Routes routes(at.r.logits, m_.rows, e.count, e.chosen, e.routing);
    const Norm& norm = b.before_feed_forward;
    multiply_experts(at, kGateUpStage, b.gate_up[0], routes, at.r.gate_up, [&](int64_t slot) {
      const Bf16* x = sum(routes.slots[slot].row);
      Bf16* y = rows_.x + slot * m_.hidden;
      norm.weight ? step_.rows.norm(x, norm, y, m_.hidden) : void(std::memcpy(y, x, m_.hidden * sizeof *y));
    });
    multiply_experts(at, kDownStage, b.down, routes, at.r.down, [&](int64_t slot) { gate_expert(at, routes, slot); });
    each(between(at, kDownStage, kAdd), m_.rows, [&](int64_t row) {
      sum_experts(at, routes, row);
      add(row, rows_.x, b.after_feed_forward, b.residual);
    });
  }

  // A stage of one product per expert that was chosen; prepare(slot) makes a row of its x. The experts of one row share
  // the x of gate and up.
  template <typename Prepare>
  void multiply_experts(const Place& at, Stage s, const Product& weight, const Routes& routes, Bf16* y,
                        Prepare prepare) {
    if (!claims(at, s).is_done()) {
      const int64_t slots = int64_t(routes.slots.size());
      const bool is_one = m_.rows == 1 && s == kGateUpStage;
      each(between(at, s, kPrepare), is_one ? 1 : slots, prepare);
      tasks_.clear();
      for (int64_t first = 0, end; first < slots; first = end) {
        const int64_t expert = routes.slots[first].expert;
        for (end = first + 1; end < slots && routes.slots[end].expert == expert;) ++end;
        const Bf16* x = rows_.x + (is_one ? 0 : first) * weight.columns;
        add_task(expert_of(weight, expert), x, end - first, y + first * weight.rows);
      }
      run_tasks(at, s, 0, [](int64_t) {});
    }
    claims(at, s).wait();
  }

  // A slot's input of its expert's second product.
  void gate_expert(const Place& at, const Routes& routes, int64_t slot) {
    const Block& b = at.b;
    const int64_t size = 2 * b.inner;
    const Bf16* gate_up = at.r.gate_up + slot * size;
    if (b.experts.gate_up_bias) {
      std::memcpy(spare_, gate_up, size * sizeof *spare_);
      step_.rows.add(spare_, b.experts.gate_up_bias + routes.slots[slot].expert * size, 1.0f, size);
      gate_up = spare_;
    }
    step_.rows.gate(gate_up, gate_up + b.inner, b.gate, rows_.x + slot * b.inner, b.inner);
  }

  // The sum of a row's experts, to x.
  void sum_experts(const Place& at, const Routes& routes, int64_t row) {
    const Experts& e = at.b.experts;
    const Chosen& chosen = routes.rows[row];
    const int64_t* slots = &routes.slot_of[row * e.chosen];
    Bf16* out = rows_.x + row * m_.hidden;
    for (int64_t j = 0; j < m_.hidden; ++j) {
      float sum = 0.0f;
      for (int64_t i = 0; i < e.chosen; ++i) {
        float y = float_of(at.r.down[slots[i] * m_.hidden + j]);
        if (e.down_bias) y = float_of(bf16_of(y + float_of(e.down_bias[chosen.experts[i] * m_.hidden + j])));
        y *= chosen.weights[i];
        sum += e.routing & kRounded ? float_of(bf16_of(y)) : y;
      }
      out[j] = bf16_of(sum);
    }
  }

  Step& step_;
  Model& m_;
  const Inputs& rows_;
  const int64_t number_;
  AlignedFloats memory_;
  Bf16* spare_;
  float* scratch_;
  std::vector<Task> tasks_;
};

// Returns false where some x has numbers that the kernels do not support. The caller decodes the token again, which
// overwrites what this call has written to the cache.
bool decode(Model& model, const ProductKernels& products, int64_t most_few_rows, const RowKernels& rows, Bf16* out) {
  const int64_t workers = torch::stable::get_num_threads();
  Step step(model, products, most_few_rows, rows, workers);
  std::optional<Inputs> shared;
  if (step.is_shared()) shared.emplace(step);
  const auto work = [&](int64_t first, int64_t) {
    std::optional<Inputs> own;
    Worker(step, shared ? *shared : own.emplace(step), first).run(out);
  };
  parallel(workers, 1, work);
  return !step.refused;
}

Tensor decode_step(const Tensor& x, const std::vector<Tensor>& weights, const Tensor& kinds, const Tensor& numbers,
                   const std::vector<Tensor>& keys, const std::vector<Tensor>& values, const std::vector<Tensor>& cos,
                   const std::vector<Tensor>& sin, int64_t position, std::optional<Tensor> starts) {
  Model model(x, weights, kinds, numbers, keys, values, cos, sin, position, starts);
  const InstructionSet& set = instruction_set();
  const RowKernels& rows = set.compiled.rows;
  Tensor y = empty({model.rows, model.hidden}, ScalarType::BFloat16);
  Bf16* out = static_cast<Bf16*>(y.mutable_data_ptr());
  if (set.bf16 && decode(model, *set.bf16, set.bf16->most_few_rows, rows, out)) return y;
  const ProductKernels& products = set.compiled.products;
  if (!decode(model, products, products.most_few_rows, rows, out)) decode(model, products, 0, rows, out);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("decode_step", TORCH_BOX(&decode_step)); }

}  // namespace nvfp4
