// nvfp4.decode_llama on the CPU: all decoder layers of a Llama for one token, in one parallel section. And
// nvfp4.linear_row, a dense output layer.
//
// A layer is four stages of products or attention. Workers claim the units of a stage as they go and wait for its end;
// what lies between two stages (residuals, norms, gates, packing x) each does for itself, from results that are
// written once: a worker that the system delays for some stages, or never runs, does no harm.
#include "cpu/generation/row_kernels.h"

#include <array>
#include <atomic>
#include <deque>
#include <vector>

#include "arguments.h"
#include "cpu/host/memory.h"
#include "cpu/host/work_stealing.h"
#include "cpu/matmul/choice.h"

namespace nvfp4 {
namespace {

// --- arguments -------------------------------------------------------------------------------------------------------

constexpr int64_t kLayerTensors = 23;  // two norms, and three of each of seven weights (LAYER_TENSORS in ops/composite)

struct Weight {
  Product p;  // all but x, y and the workers

  int64_t rows() const { return p.rows; }
  int64_t columns() const { return p.columns; }
};

struct Layer {
  const Bf16* input_norm;
  Weight q, k, v, o;
  const Bf16* inner_norm;
  Weight gate, up, down;
  Bf16 *keys, *values;
};

const Bf16* row_of(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::BFloat16 && t.numel() == size && t.is_contiguous(), name,
                  " must be ", size, " contiguous bfloat16 on the CPU, not ", text_of(t));
  return static_cast<const Bf16*>(t.const_data_ptr());
}

Bf16* cache_of(const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.scalar_type() == ScalarType::BFloat16 && t.dim() == 4 && t.size(0) == 1 && t.is_contiguous() &&
          t.size(1) == like.size(1) && t.size(2) == like.size(2) && t.size(3) == like.size(3),
      "keys and values must be contiguous bfloat16 (1, heads, length, dim) on the CPU, all alike, not ", text_of(t));
  return static_cast<Bf16*>(t.mutable_data_ptr());
}

// tensors: qdata, scale, per_tensor_scale.
Weight weight_of(const Tensor* tensors, const char* name, int64_t rows, int64_t columns) {
  const Tensor &qdata = tensors[0], &scale = tensors[1], &factor = tensors[2];
  STD_TORCH_CHECK(qdata.is_cpu() && qdata.dim() == 2 && qdata.is_contiguous() && scale.is_contiguous() &&
                      (rows < 0 || qdata.size(0) == rows),
                  name, " must be a contiguous weight of (", rows, ", ", columns, ") on the CPU, not qdata ",
                  text_of(qdata));
  STD_TORCH_CHECK(factor.is_cpu() && factor.scalar_type() == ScalarType::Float && factor.is_contiguous() &&
                      (factor.numel() == 1 || factor.numel() == qdata.size(0)),
                  name, " must have a per-tensor scale of float32, one or one a row, not ", text_of(factor));
  Product p{};
  p.blocks = check_coded(qdata, scale, columns).blocks;
  p.qdata = static_cast<const uint8_t*>(qdata.const_data_ptr());
  p.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  p.factors = static_cast<const float*>(factor.const_data_ptr());
  p.factor_step = factor.numel() != 1;
  p.batches = 1, p.rows = qdata.size(0), p.columns = columns, p.column_tiles = scale.size(1);
  p.x_dtype = p.out_dtype = Dtype::kBf16;
  p.x_rows = 1;
  return {p};
}

struct Model {
  int64_t hidden, inner, heads, kv_heads, dim, length;
  std::vector<Layer> layers;
  const Bf16 *x, *norm, *cos, *sin;
  int64_t position;
  float eps, scaling;

  Model(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& keys,
        const std::vector<Tensor>& values, const Tensor& cos, const Tensor& sin, int64_t position, double eps,
        double scaling)
      : position(position), eps(float(eps)), scaling(float(scaling)) {
    const size_t count = keys.size();
    STD_TORCH_CHECK(count && values.size() == count && weights.size() == count * kLayerTensors + 1, "weights must be ",
                    kLayerTensors, " tensors a layer and a norm, keys and values one a layer, not ", weights.size(),
                    ", ", count, " and ", values.size());
    hidden = x.numel();
    STD_TORCH_CHECK(keys[0].dim() == 4, "keys must be (1, heads, length, dim), not ", text_of(keys[0]));
    kv_heads = keys[0].size(1), length = keys[0].size(2), dim = keys[0].size(3);
    heads = weights[1].size(0) / dim, inner = weights[14].size(0);
    STD_TORCH_CHECK(hidden % kRowStep == 0 && dim % kRowStep == 0 && heads % kv_heads == 0,
                    "the hidden size and that of a head must be multiples of ", kRowStep,
                    ", heads one of those of keys, not ", hidden, ", ", dim, ", ", heads, " and ", kv_heads);
    STD_TORCH_CHECK(position >= 0 && position < length, "position ", position, " is outside of a cache of ", length);
    this->x = row_of(x, "x", hidden);
    this->cos = row_of(cos, "cos", dim), this->sin = row_of(sin, "sin", dim);
    norm = row_of(weights.back(), "the last norm", hidden);
    layers.reserve(count);
    for (size_t i = 0; i < count; ++i) add_layer(&weights[i * kLayerTensors], keys[i], values[i], keys[0]);
  }

  void add_layer(const Tensor* t, const Tensor& keys, const Tensor& values, const Tensor& like) {
    const int64_t all = heads * dim, kv = kv_heads * dim;
    layers.push_back({row_of(t[0], "a norm", hidden), weight_of(t + 1, "q", all, hidden),
                      weight_of(t + 4, "k", kv, hidden), weight_of(t + 7, "v", kv, hidden),
                      weight_of(t + 10, "o", hidden, all), row_of(t[13], "a norm", hidden),
                      weight_of(t + 14, "gate", inner, hidden), weight_of(t + 17, "up", inner, hidden),
                      weight_of(t + 20, "down", hidden, inner), cache_of(keys, like), cache_of(values, like)});
  }
  int64_t widest() const { return std::max({hidden, inner, heads * dim}); }
};

// --- stages ----------------------------------------------------------------------------------------------------------

// What a layer leaves, each written once.
struct Results {
  Bf16 *q, *k, *v, *attended, *o, *gate, *up, *down;

  static int64_t size(const Model& m) { return 2 * (m.heads + m.kv_heads) * m.dim + 2 * m.hidden + 2 * m.inner; }
  Results(const Model& m, Bf16* at) {
    const auto next = [&](int64_t size) { return at += size, at - size; };
    q = next(m.heads * m.dim), k = next(m.kv_heads * m.dim), v = next(m.kv_heads * m.dim);
    attended = next(m.heads * m.dim), o = next(m.hidden);
    gate = next(m.inner), up = next(m.inner), down = next(m.hidden);
  }
};

// A product of a stage: y = w x.
struct Part {
  const Weight* weight;
  Bf16* y;
};

// How one token is decoded: the kernel of its products, and what all workers share.
struct Step {
  const Model& model;
  const ProductKernel& kernel;
  const RowKernels& rows;
  const int64_t workers;
  std::vector<Results> results;
  std::deque<Claims> claims;  // four a layer
  std::atomic<bool> refused{false};
  AlignedFloats memory;

  Step(const Model& m, const ProductKernel& kernel, const RowKernels& rows, int64_t workers)
      : model(m), kernel(kernel), rows(rows), workers(workers) {
    const int64_t size = Results::size(m), layers = int64_t(m.layers.size());
    memory = allocate(layers * size / 2);
    for (int64_t i = 0; i < layers; ++i) {
      results.emplace_back(m, reinterpret_cast<Bf16*>(memory.get()) + i * size);
      const Layer& l = m.layers[i];
      claims.emplace_back(units(l.q) + units(l.k) + units(l.v), workers);
      claims.emplace_back(m.heads, workers);
      claims.emplace_back(units(l.o), workers);
      claims.emplace_back(units(l.gate) + units(l.up), workers);
      claims.emplace_back(units(l.down), workers);
    }
  }
  static constexpr int64_t kStages = 5;

  Product product(const Weight& w, const Bf16* x, Bf16* y) const {
    Product p = w.p;
    p.x = x, p.out = y, p.workers = workers;
    return p;
  }
  int64_t units(const Weight& w) const { return kernel.units(product(w, nullptr, nullptr)); }
};

// One worker in all layers. `sum` is the residual stream.
class Worker {
 public:
  Worker(Step& step, const Model& m, int64_t number)
      : step_(step),
        m_(m),
        number_(number),
        memory_(allocate(words(step, m))),
        sum_(reinterpret_cast<Bf16*>(memory_.get())),
        x_(sum_ + m.hidden),
        packed_(memory_.get() + row_words(m)),
        scratch_(packed_ + packed_words(step, m)) {}

  const Bf16* run() {
    std::memcpy(sum_, m_.x, m_.hidden * sizeof *sum_);
    for (size_t i = 0; i < m_.layers.size() && !step_.refused; ++i) layer(m_.layers[i], step_.results[i], i);
    step_.rows.norm(sum_, m_.norm, m_.eps, x_, m_.hidden);
    return x_;
  }

 private:
  static int64_t row_words(const Model& m) { return ceil_div((m.hidden + m.widest()) / 2, 16) * 16; }
  static int64_t packed_words(const Step& step, const Model& m) {
    Product p{};
    p.batches = p.x_rows = p.rows = 1, p.workers = step.workers;
    p.columns = m.widest(), p.blocks = ceil_div(p.columns, kBlock);
    return ceil_div(step.kernel.packed_words(p), 16) * 16;
  }
  static int64_t words(const Step& step, const Model& m) {
    Attention a{};
    a.dim = m.dim, a.position = m.position;
    return row_words(m) + packed_words(step, m) + std::max(step.kernel.scratch_words, a.scratch_words());
  }

  void layer(const Layer& l, const Results& r, size_t index) {
    Claims* stages[Step::kStages];
    for (int64_t s = 0; s < Step::kStages; ++s) stages[s] = &step_.claims[index * Step::kStages + s];
    const auto normed = [&](const Bf16* weight) {
      return [this, weight] { return step_.rows.norm(sum_, weight, m_.eps, x_, m_.hidden), x_; };
    };
    multiply<3>(*stages[0], {{{&l.q, r.q}, {&l.k, r.k}, {&l.v, r.v}}}, normed(l.input_norm));
    attend(*stages[1], l, r);
    multiply<1>(*stages[2], {{{&l.o, r.o}}}, [&] { return r.attended; });
    step_.rows.add(sum_, r.o, m_.hidden);
    multiply<2>(*stages[3], {{{&l.gate, r.gate}, {&l.up, r.up}}}, normed(l.inner_norm));
    multiply<1>(*stages[4], {{{&l.down, r.down}}}, [&] { return step_.rows.gate(r.gate, r.up, x_, m_.inner), x_; });
    step_.rows.add(sum_, r.down, m_.hidden);
  }

  // Products of one x, which `prepare` makes.
  template <size_t count, typename Prepare>
  void multiply(Claims& claims, const std::array<Part, count>& parts, Prepare prepare) {
    if (!claims.is_done()) {
      const Bf16* x = prepare();
      std::array<Product, count> products;
      for (size_t i = 0; i < count; ++i) products[i] = step_.product(*parts[i].weight, x, parts[i].y);
      if (step_.kernel.pack(products[0], packed_, 0, step_.kernel.pack_units(products[0])) & step_.kernel.refuses) {
        step_.refused = true;
      }
      claims.run(number_, [&](int64_t begin, int64_t end) {
        if (step_.refused) return;
        for (const Product& p : products) {
          const int64_t units = step_.kernel.units(p);
          if (begin < units && end > 0) {
            step_.kernel.multiply(p, packed_, scratch_, std::max<int64_t>(begin, 0), std::min(end, units));
          }
          begin -= units, end -= units;
        }
      });
    }
    claims.wait();
  }

  void attend(Claims& claims, const Layer& l, const Results& r) {
    const Attention a{r.q,        r.k,      r.v,         m_.cos, m_.sin,    l.keys,      l.values,
                      r.attended, m_.heads, m_.kv_heads, m_.dim, m_.length, m_.position, m_.scaling};
    claims.run(number_, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) step_.rows.attend(a, head, scratch_);
    });
    claims.wait();
  }

  Step& step_;
  const Model& m_;
  const int64_t number_;
  AlignedFloats memory_;
  Bf16 *sum_, *x_;
  float *packed_, *scratch_;
};

// Returns false where some x has numbers that this kernel does not support. The caller decodes the token again, which
// overwrites what this call has written to the cache.
bool decode(const Model& model, const ProductKernel& kernel, const RowKernels& rows, Bf16* out) {
  const int64_t workers = torch::stable::get_num_threads();
  Step step(model, kernel, rows, workers);
  const auto work = [&](int64_t first, int64_t) {
    Worker worker(step, model, first);
    const Bf16* y = worker.run();
    if (first == 0) std::memcpy(out, y, model.hidden * sizeof *out);
  };
  if (workers == 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, workers, 1, work);
  }
  return !step.refused;
}

const RowKernels& row_kernels(const Choice& choice) {
  const std::string_view name = choice.wide_name;
  const RowKernels* found = name == "avx512" ? avx512_row_kernels() : name == "avx2" ? avx2_row_kernels() : nullptr;
  return found ? *found : portable_row_kernels();
}

Tensor decode_llama(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& keys,
                    const std::vector<Tensor>& values, const Tensor& cos, const Tensor& sin, int64_t position,
                    double eps, double scaling) {
  const Model model(x, weights, keys, values, cos, sin, position, eps, scaling);
  const Choice choice = Choice::current();
  const RowKernels& rows = row_kernels(choice);
  Tensor y = empty({1, model.hidden}, ScalarType::BFloat16);
  Bf16* out = static_cast<Bf16*>(y.mutable_data_ptr());
  if (choice.bf16 && decode(model, choice.bf16->few, rows, out)) return y;
  if (!decode(model, choice.wide->few, rows, out)) decode(model, choice.wide->many, rows, out);
  return y;
}

constexpr int64_t kHeadRows = 64;  // of a dense output layer, a unit of work

Tensor linear_row(const Tensor& x, const Tensor& w) {
  STD_TORCH_CHECK(w.dim() == 2 && w.size(1) % kRowStep == 0, "w must be (N, K), K a multiple of ", kRowStep, ", not ",
                  text_of(w));
  const int64_t rows = w.size(0), size = w.size(1);
  const Bf16 *from = row_of(x, "x", size), *weight = row_of(w, "w", rows * size);
  Tensor y = empty({1, rows}, ScalarType::BFloat16);
  Bf16* out = static_cast<Bf16*>(y.mutable_data_ptr());
  const RowKernels& kernels = row_kernels(Choice::current());
  const int64_t workers = torch::stable::get_num_threads();
  Claims claims(ceil_div(rows, kHeadRows), workers);
  const auto work = [&](int64_t worker, int64_t) {
    claims.run(worker, [&](int64_t begin, int64_t end) {
      kernels.multiply(from, weight, size, out, begin * kHeadRows, std::min(rows, end * kHeadRows));
    });
  };
  if (workers == 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, workers, 1, work);
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nvfp4, CPU, m) {
  m.impl("decode_llama", TORCH_BOX(&decode_llama));
  m.impl("linear_row", TORCH_BOX(&linear_row));
}

}  // namespace nvfp4
