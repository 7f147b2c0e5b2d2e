// The arguments of nvfp4.decode_step as structures: the blocks of a language model, their weights and caches. The
// layout is that of ops/composite/decode_step.py.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "arguments.h"
#include "cpu/generation/row_kernels.h"
#include "cpu/matmul/products.h"

namespace nvfp4 {

// --- tensors ---------------------------------------------------------------------------------------------------------

inline const Bf16* row_of(const Tensor& t, const char* name, int64_t size) {
  NVFP4_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::BFloat16 && t.numel() == size && t.is_contiguous(), name,
              " must be ", size, " contiguous bfloat16 on the CPU, not ", text_of(t));
  return static_cast<const Bf16*>(t.const_data_ptr());
}

inline Bf16* cache_of(const Tensor& t, int64_t texts, int64_t heads, int64_t length, int64_t dim) {
  NVFP4_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::BFloat16 && t.dim() == 4 && t.size(0) == texts &&
                  t.is_contiguous() && t.size(1) == heads && t.size(2) == length && t.size(3) == dim,
              "keys and values of a block must be contiguous bfloat16 (", texts, ", ", heads, ", length, ", dim,
              ") on the CPU, all alike, not ", text_of(t));
  return static_cast<Bf16*>(t.mutable_data_ptr());
}

// All but x, its rows, y and the workers; of experts (E, rows, columns) the first. tensors: qdata, scale,
// per_tensor_scale.
inline Product weight_of(const Tensor* tensors, const char* name, int64_t rows, int64_t columns, int64_t experts = 0) {
  const Tensor &qdata = tensors[0], &scale = tensors[1], &factor = tensors[2];
  NVFP4_CHECK(qdata.is_cpu() && qdata.is_contiguous() && scale.is_contiguous() &&
                  (experts ? qdata.dim() == 3 && qdata.size(0) == experts : qdata.dim() == 2) &&
                  (rows < 0 || qdata.size(-2 + qdata.dim()) == rows),
              name, " must be a contiguous weight of (", experts ? "experts, " : "", rows, ", ", columns,
              ") on the CPU, not qdata ", text_of(qdata));
  Product p{};
  p.rows = qdata.size(qdata.dim() - 2);
  const int64_t factors = experts ? experts : p.rows;
  NVFP4_CHECK(factor.is_cpu() && factor.scalar_type() == ScalarType::Float && factor.is_contiguous() &&
                  (factor.numel() == 1 || factor.numel() == factors),
              name, " must have a per-tensor scale of float32, one or one a ", experts ? "expert" : "row", ", not ",
              text_of(factor));
  NVFP4_CHECK(!experts || p.rows % kTileRows == 0, name, " must have a multiple of ", kTileRows,
              " rows per expert, not ", p.rows);
  p.blocks = check_coded(qdata, scale, columns).blocks;
  p.qdata = static_cast<const uint8_t*>(qdata.const_data_ptr());
  p.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  p.factors = static_cast<const float*>(factor.const_data_ptr());
  p.factor_step = factor.numel() != 1;
  p.batches = 1, p.columns = columns, p.column_tiles = scale.size(1);
  p.x_dtype = p.out_dtype = Dtype::kBf16;
  return p;
}

// --- blocks ----------------------------------------------------------------------------------------------------------

enum Part : int {
  kNormBeforeAttention,
  kQ,
  kQBias,
  kK,
  kKBias,
  kV,
  kVBias,
  kQNorm,
  kKNorm,
  kSinks,
  kO,
  kOBias,
  kNormAfterAttention,
  kNormBeforeFeedForward,
  kRouter,
  kRouterBias,
  kGate,
  kGateBias,
  kUp,
  kUpBias,
  kDown,
  kDownBias,
  kNormAfterFeedForward,
  kParts,
};
enum Kind : int {
  kPartBits,
  kHeads,
  kKvHeads,
  kDim,
  kWindow,
  kRotary,
  kNormBits,
  kActivation,
  kTaken,
  kRoutingBits,
  kKinds
};
enum Number : int { kEps, kScaling, kSoftcap, kResidual, kAlpha, kLimit, kNumbers };

struct Experts {
  int64_t count = 0, chosen = 0, routing = 0;  // count: of them all, 0 where the block is dense
  const Bf16 *router = nullptr, *router_bias = nullptr;
  const Bf16 *gate_up_bias = nullptr, *down_bias = nullptr;  // (count, ..)
};

// Weight `expert` of a stack.
inline Product expert_of(const Product& first, int64_t expert) {
  Product p = first;
  p.qdata += expert * p.rows * p.blocks * (kBlock / 2);
  p.scale += expert * p.rows / kTileRows * p.column_tiles * kTileBytes;
  p.factors += expert * p.factor_step, p.factor_step = 0;
  return p;
}

struct Block {
  int64_t heads, kv_heads, dim, inner;
  float residual;
  Norm before_attention, after_attention, before_feed_forward, after_feed_forward;
  Norm q_norm, k_norm;
  bool q_norm_spans, k_norm_spans;    // all heads, not each
  std::vector<Product> qkv, gate_up;  // one or more with the rows of all
  Product o, down;
  Experts experts;
  Gate gate;
  Attention attention;  // of the first text, all but what the products give
  int64_t position;     // of the first token that is seen
  bool moves;           // the cache is full: it moves by one token

  int64_t query_size() const { return heads * dim; }
  int64_t kv_size() const { return kv_heads * dim; }
  int64_t qkv_size() const { return query_size() + 2 * kv_size(); }
  int64_t copies() const { return std::max<int64_t>(experts.chosen, 1); }  // of a row, in the feed-forward
};

// Reads the tensors of one block in the order of PARTS.
class BlockReader {
 public:
  BlockReader(const std::vector<Tensor>& tensors, size_t& at, const int64_t* kinds, const double* numbers,
              std::deque<std::vector<float>>& biases)
      : tensors_(tensors), at_(at), kinds_(kinds), numbers_(numbers), biases_(biases) {}

  bool has(Part part) const { return kinds_[kPartBits] >> part & 1; }
  const Tensor* next(int64_t count) {
    NVFP4_CHECK(at_ + count <= tensors_.size(), "weights has too few tensors for its kinds: ", tensors_.size());
    return &tensors_[(at_ += count) - count];
  }
  Norm norm(Part part, const char* name, int64_t size, int64_t other_size = 0) {
    if (!has(part)) return {};
    const Tensor& t = *next(1);
    const bool is_wide = t.scalar_type() == ScalarType::Float;
    NVFP4_CHECK(t.is_cpu() && (is_wide || t.scalar_type() == ScalarType::BFloat16) && t.is_contiguous() &&
                    (t.numel() == size || t.numel() == other_size),
                name, " must be ", size, other_size ? " (or those of all heads)" : "",
                " contiguous bfloat16 or float32 on the CPU, not ", text_of(t));
    return {t.const_data_ptr(), is_wide, int(kinds_[kNormBits]), float(numbers_[kEps])};
  }
  const Bf16* row(Part part, const char* name, int64_t size) {
    return has(part) ? row_of(*next(1), name, size) : nullptr;
  }
  // A linear and its bias. rows: -1 for any.
  Product linear(Part part, const char* name, int64_t rows, int64_t columns) {
    NVFP4_CHECK(has(part), "a block without ", name);
    Product p = weight_of(next(3), name, rows, columns);
    if (const Bf16* bias = row(Part(part + 1), "a bias", p.rows)) {
      auto& wide = biases_.emplace_back(p.rows);
      for (int64_t i = 0; i < p.rows; ++i) wide[i] = float_of(bias[i]);
      p.bias = wide.data(), p.bias_step = 1;
    }
    return p;
  }
  Product stack(Part part, const char* name, int64_t rows, int64_t columns, int64_t experts, const Bf16*& bias) {
    NVFP4_CHECK(has(part), "a block without ", name);
    Product p = weight_of(next(3), name, rows, columns, experts);
    bias = row(Part(part + 1), "the biases of experts", experts * p.rows);
    return p;
  }
  int64_t last_size() const { return tensors_[at_ - 1].numel(); }
  int64_t kind(Kind kind) const { return kinds_[kind]; }
  float number(Number number) const { return float(numbers_[number]); }

 private:
  const std::vector<Tensor>& tensors_;
  size_t& at_;
  const int64_t* kinds_;
  const double* numbers_;
  std::deque<std::vector<float>>& biases_;
};

inline void read_attention(BlockReader& read, int64_t hidden, Block& b) {
  b.heads = read.kind(kHeads), b.kv_heads = read.kind(kKvHeads), b.dim = read.kind(kDim);
  NVFP4_CHECK(b.heads > 0 && b.kv_heads > 0 && b.heads % b.kv_heads == 0 && b.dim > 0 && b.dim % kRowStep == 0 &&
                  b.dim <= kMostHeadDim,
              "the size of a head must be a multiple of ", kRowStep, " up to ", kMostHeadDim,
              ", heads one of those of keys, not ", b.dim, ", ", b.heads, " and ", b.kv_heads);
  b.before_attention = read.norm(kNormBeforeAttention, "a norm", hidden);
  if (read.has(kK)) {
    b.qkv = {read.linear(kQ, "q", b.query_size(), hidden)};
    b.qkv.push_back(read.linear(kK, "k", b.kv_size(), hidden));
    b.qkv.push_back(read.linear(kV, "v", b.kv_size(), hidden));
  } else {
    b.qkv = {read.linear(kQ, "qkv", b.qkv_size(), hidden)};
  }
  b.q_norm = read.norm(kQNorm, "q_norm", b.dim, b.query_size());
  b.q_norm_spans = b.q_norm.weight && read.last_size() != b.dim;
  b.k_norm = read.norm(kKNorm, "k_norm", b.dim, b.kv_size());
  b.k_norm_spans = b.k_norm.weight && read.last_size() != b.dim;
  b.attention.sinks = read.row(kSinks, "sinks", b.heads);
  b.o = read.linear(kO, "o", hidden, b.query_size());
  b.after_attention = read.norm(kNormAfterAttention, "a norm", hidden);
}

inline void read_experts(BlockReader& read, int64_t hidden, Block& b) {
  Experts& e = b.experts;
  NVFP4_CHECK(hidden % kDenseStep == 0, "a router needs a hidden size that is a multiple of ", kDenseStep, ", not ",
              hidden);
  const Tensor& router = *read.next(1);
  e.count = router.dim() == 2 ? router.size(0) : 0;
  e.chosen = read.kind(kTaken), e.routing = read.kind(kRoutingBits);
  NVFP4_CHECK(e.chosen > 0 && e.chosen <= e.count, "a token must go to 1 to ", e.count, " experts, not ", e.chosen);
  e.router = row_of(router, "the router", e.count * hidden);
  e.router_bias = read.row(kRouterBias, "the bias of the router", e.count);
  b.gate_up = {read.stack(kGate, "gate and up", -1, hidden, e.count, e.gate_up_bias)};
  b.inner = b.gate_up[0].rows / 2;
  b.down = read.stack(kDown, "down", hidden, b.inner, e.count, e.down_bias);
}

inline void read_feed_forward(BlockReader& read, int64_t hidden, Block& b) {
  b.gate = {Activation(read.kind(kActivation)), read.number(kAlpha), read.number(kLimit)};
  NVFP4_CHECK(read.kind(kActivation) >= 0 && read.kind(kActivation) <= int64_t(Activation::kClampedGlu),
              "an activation is 0 to 3, not ", read.kind(kActivation));
  b.before_feed_forward = read.norm(kNormBeforeFeedForward, "a norm", hidden);
  if (read.has(kRouter)) {
    read_experts(read, hidden, b);
  } else {
    b.gate_up = {read.linear(kGate, "gate", -1, hidden)};
    b.inner = b.gate_up[0].rows;
    if (read.has(kUp)) {
      b.gate_up.push_back(read.linear(kUp, "up", b.inner, hidden));
    } else {
      NVFP4_CHECK(b.inner % 2 == 0, "gate and up in one weight must have an even number of rows, not ", b.inner);
      b.inner /= 2;
    }
    b.down = read.linear(kDown, "down", hidden, b.inner);
  }
  b.after_feed_forward = read.norm(kNormAfterFeedForward, "a norm", hidden);
}

// --- a model ---------------------------------------------------------------------------------------------------------

struct Model {
  int64_t rows, hidden;  // of x, a row per text
  std::vector<Block> blocks;
  const Bf16* x;
  const int64_t* starts;  // of texts; null: all start at 0
  Norm norm;
  std::deque<Rotation> rotations;
  std::deque<std::vector<float>> numbers;      // biases, cos and sin
  std::unique_ptr<std::atomic<bool>[]> moved;  // of blocks whose cache moves: it has

  Model(const Tensor& x, const std::vector<Tensor>& weights, const Tensor& kinds, const Tensor& floats,
        const std::vector<Tensor>& keys, const std::vector<Tensor>& values, const std::vector<Tensor>& cos,
        const std::vector<Tensor>& sin, int64_t position, const std::optional<Tensor>& starts) {
    const size_t count = keys.size();
    NVFP4_CHECK(count && values.size() == count, "keys and values must be one a block, not ", count, " and ",
                values.size());
    const auto is_table = [&](const Tensor& t, ScalarType type, int64_t columns) {
      return t.is_cpu() && t.scalar_type() == type && t.dim() == 2 && t.is_contiguous() &&
             t.size(0) == int64_t(count) + 1 && t.size(1) == columns;
    };
    NVFP4_CHECK(is_table(kinds, ScalarType::Long, kKinds) && is_table(floats, ScalarType::Double, kNumbers),
                "kinds and numbers must be int64 (", count + 1, ", ", int(kKinds), ") and float64 (", count + 1, ", ",
                int(kNumbers), ") on the CPU, not ", text_of(kinds), " and ", text_of(floats));
    NVFP4_CHECK(x.dim() == 2 && x.numel(), "x must be (B, hidden), not ", text_of(x));
    rows = x.size(0), hidden = x.size(1);
    NVFP4_CHECK(hidden % kRowStep == 0, "the hidden size must be a multiple of ", kRowStep, ", not ", hidden);
    this->x = row_of(x, "x", rows * hidden);
    this->starts = starts.has_value() ? starts_of(*starts, position) : nullptr;
    NVFP4_CHECK(cos.size() == sin.size(), "cos and sin must be as many, not ", cos.size(), " and ", sin.size());
    for (size_t i = 0; i < cos.size(); ++i) add_rotation(cos[i], sin[i]);
    const auto* kind = static_cast<const int64_t*>(kinds.const_data_ptr());
    const auto* number = static_cast<const double*>(floats.const_data_ptr());
    moved.reset(new std::atomic<bool>[count]());
    blocks.reserve(count);
    size_t at = 0;
    for (size_t i = 0; i < count; ++i, kind += kKinds, number += kNumbers) {
      BlockReader read(weights, at, kind, number, numbers);
      add_block(read, keys[i], values[i], position);
    }
    norm = BlockReader(weights, at, kind, number, numbers).norm(kNormBeforeAttention, "the last norm", hidden);
    NVFP4_CHECK(norm.weight && at == weights.size(), "weights must end with the last norm: ", at,
                " tensors by their kinds, not ", weights.size());
  }

  const int64_t* starts_of(const Tensor& starts, int64_t position) const {
    NVFP4_CHECK(
        starts.is_cpu() && starts.scalar_type() == ScalarType::Long && starts.numel() == rows && starts.is_contiguous(),
        "starts must be ", rows, " contiguous int64 on the CPU, not ", text_of(starts));
    const auto* at = static_cast<const int64_t*>(starts.const_data_ptr());
    for (int64_t row = 0; row < rows; ++row) {
      NVFP4_CHECK(at[row] >= 0 && at[row] <= position, "a text must start at 0 to ", position, ", not ", at[row]);
    }
    return at;
  }

  void add_rotation(const Tensor& cos, const Tensor& sin) {
    const int64_t size = cos.numel(), row = cos.dim() ? cos.size(cos.dim() - 1) : 1;
    const bool is_wide = cos.scalar_type() == ScalarType::Float;
    Rotation r{nullptr, nullptr, row, size == row ? 0 : row, is_wide};
    NVFP4_CHECK(row % 2 == 0, "cos and sin must have an even number of elements, not ", row);
    NVFP4_CHECK(size == row || size == rows * row, "cos and sin must be (1 or ", rows, ", ", row, "), not ",
                text_of(cos));
    for (const Tensor* t : {&cos, &sin}) {
      NVFP4_CHECK(t->is_cpu() && t->numel() == size && t->is_contiguous() && t->scalar_type() == cos.scalar_type() &&
                      (is_wide || cos.scalar_type() == ScalarType::BFloat16),
                  "cos and sin must be contiguous bfloat16 or float32 on the CPU, as many, not ", text_of(*t));
      auto& wide = numbers.emplace_back(size);
      for (int64_t i = 0; i < size; ++i) {
        wide[i] = is_wide ? static_cast<const float*>(t->const_data_ptr())[i]
                          : float_of(static_cast<const Bf16*>(t->const_data_ptr())[i]);
      }
      (t == &cos ? r.cos : r.sin) = wide.data();
    }
    rotations.push_back(r);
  }

  void add_block(BlockReader& read, const Tensor& keys, const Tensor& values, int64_t position) {
    Block& b = blocks.emplace_back();
    read_attention(read, hidden, b);
    read_feed_forward(read, hidden, b);
    b.residual = read.number(kResidual);
    Attention& a = b.attention;
    a.heads = b.heads, a.kv_heads = b.kv_heads, a.dim = b.dim;
    a.q_norm = b.q_norm_spans ? Norm{} : b.q_norm, a.k_norm = b.k_norm_spans ? Norm{} : b.k_norm;
    a.scaling = read.number(kScaling), a.softcap = read.number(kSoftcap);
    const int64_t rotary = read.kind(kRotary), window = read.kind(kWindow);
    NVFP4_CHECK(rotary < int64_t(rotations.size()), "rotation ", rotary, " of ", rotations.size());
    a.rotation = rotary < 0 ? Rotation{} : rotations[rotary];
    NVFP4_CHECK(a.rotation.size <= b.dim, "a rotation of ", a.rotation.size, " elements of a head of ", b.dim);
    NVFP4_CHECK(keys.dim() == 4, "keys must be (", rows, ", heads, length, dim), not ", text_of(keys));
    a.length = keys.size(2);
    a.keys = cache_of(keys, rows, b.kv_heads, a.length, b.dim);
    a.values = cache_of(values, rows, b.kv_heads, a.length, b.dim);
    b.moves = position >= a.length;
    NVFP4_CHECK(position >= 0 && a.length && (!b.moves || window == a.length), "position ", position,
                " is outside of a cache of ", a.length);
    b.position = window ? std::max<int64_t>(position + 1 - window, 0) : 0;
    a.first = b.moves ? 1 : b.position;
    a.count = position - b.position;
  }

  // The largest of what `size` says of a block.
  template <typename Size>
  int64_t most(Size size) const {
    int64_t most = 0;
    for (const Block& b : blocks) most = std::max<int64_t>(most, size(b));
    return most;
  }
};

}  // namespace nvfp4
