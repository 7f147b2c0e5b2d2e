// torch.ops.nvfp4.linears and norm_linears on CUDA: weights that share x, and what stands before and behind them.
#include <optional>
#include <tuple>
#include <vector>

#include "cuda/generation/ops.h"
#include "cuda/host/scratch.h"
#include "cuda/host/tensors.h"
#include "cuda/matmul/arguments.h"

namespace nvfp4 {
namespace {

struct Weights {
  const char* op;
  const std::vector<Tensor>&qdata, &scales, &per_tensor_scales, &biases;

  size_t count() const { return qdata.size(); }
  int64_t rows(size_t i) const { return qdata[i].size(0); }
  int64_t all_rows() const {
    int64_t all = 0;
    for (size_t i = 0; i < count(); ++i) all += rows(i);
    return all;
  }
  std::optional<Tensor> bias(size_t i) const {
    return biases.empty() || biases[i].numel() == 0 ? std::nullopt : std::optional<Tensor>(biases[i]);
  }
  void check() const {
    NVFP4_CHECK(count() > 0 && scales.size() == count() && per_tensor_scales.size() == count() &&
                    (biases.empty() || biases.size() == count()),
                op, " takes as many scales and per_tensor_scales as qdata, and as many biases or none");
    for (size_t i = 0; i < count(); ++i) {
      NVFP4_CHECK(qdata[i].dim() == 2, op, " takes qdata (N, K/2), not ", text_of(qdata[i]));
      NVFP4_CHECK(!bias(i) || bias(i)->numel() == rows(i), op, ": a bias must be ", rows(i), " elements or none, not ",
                  text_of(biases[i]));
    }
  }
};

// A weight's product with x, and the tensors that live as long as it.
struct OneProduct {
  Problem p = {};
  Tensor codes, scales, factor, bias;

  OneProduct(const Tensor& x, const Weights& w, size_t i) {
    const std::vector<int64_t> shape = with_last(x, w.rows(i));
    p = sized_problem(shape, x.size(x.dim() - 1), false);
    check_weight(p, x, w.qdata[i], w.scales[i], w.per_tensor_scales[i], p.K);
    codes = aligned_codes(w.qdata[i]), scales = aligned_scales(w.scales[i]);
    factor = contiguous_as(w.per_tensor_scales[i], ScalarType::Float);
    place_w_scale(p, factor);
    place_codes(p, codes, scales);
    if (w.bias(i)) bias = set_bias(p, *w.bias(i), x, shape);
    p.y_dtype = dtype_of(x.scalar_type(), "x");
    p.some_m = p.M;
  }
};

// Cycles that each further launch takes.
constexpr int kJoinCycles = 4000;

// Products that share x, into columns of one y: by Hopper's few-rows kernel or its many-rows kernel in one launch where
// that is faster, or one after another.
class Products {
 public:
  Products(const Tensor& given, const Weights& w, cudaStream_t stream) : op_(w.op), stream_(stream) {
    for (size_t i = 0; i < w.count(); ++i) {
      if (w.rows(i) == 0) continue;
      held_.emplace_back(given, w, i);
      Problem& p = held_.back().p;
      if (sets_.empty()) {
        x_ = place_x(p, given);
      } else {
        p.x = sets_[0].x, p.x_dtype = sets_[0].x_dtype, p.x_row = sets_[0].x_row;
      }
      sets_.push_back(p);
    }
    const int64_t rows = leading_rows(given);
    const ScalarType type = given.scalar_type();
    const bool is_half = type == ScalarType::BFloat16 || type == ScalarType::Half;
    if (sets_.size() < w.count() || rows < 1 || given.size(given.dim() - 1) == 0 || !is_half) return;
    const int64_t apart = choose_apart();
    if (way_ == Way::kApart) choose_many_rows(apart);
  }

  bool fits(const Fused& fused) const {
    return way_ == Way::kFewRows && fits_matmul_sets_sm90(sets_.data(), count(), fused);
  }

  // Gated, all into y.
  Tensor launch(const Tensor& like, int64_t columns, const Fused& fused) {
    const Tensor y = empty(with_last(like, columns), like.scalar_type(), like);
    if (y.numel() == 0) return y;
    NVFP4_CHECK(columns < INT32_MAX, op_, ": a size beyond 2^31");
    int64_t column = 0;
    for (Problem& p : sets_) {
      p.y = static_cast<uint8_t*>(y.mutable_data_ptr()) + (fused.gated ? 0 : column) * y.element_size();
      p.y_row = columns;
      column += p.N;
    }
    if (fits(fused)) {
      launch_matmul_sets_sm90(sets_.data(), count(), fused, stream_);
    } else if (way_ == Way::kManyRows) {
      RawScratch scratch;
      launch_matmul_sets_many_rows(sets_.data(), count(), many_rows_, std::ref(scratch), stream_);
    } else {
      for (int i = 0; i < count(); ++i) {
        if (way_ == Way::kFewRows) {
          launch_matmul_few_rows(sets_[i], stream_);
        } else {
          multiply(sets_[i], x_, held_[i].codes, held_[i].scales, std::nullopt, sets_[i].K, false, stream_);
        }
      }
    }
    check_launched(op_);
    return y;
  }

 private:
  enum class Way { kApart, kFewRows, kManyRows };
  static constexpr const char* kJoint = "weights that share x";

  int count() const { return static_cast<int>(sets_.size()); }
  Problem joint_problem() const {
    Problem joint = sets_[0];
    for (size_t i = 1; i < sets_.size(); ++i) joint.N += sets_[i].N;
    return joint;
  }

  // By few-rows kernels where that is each one's own choice, or where one launch of Hopper's is faster than what each
  // chooses, whose cycles it returns.
  int64_t choose_apart() {
    bool all_few = true;
    int64_t apart = kJoinCycles * (count() - 1);
    for (const Problem& p : sets_) {
      const Choice choice = choose_kernel(p);
      all_few = all_few && choice.family == KernelFamily::kFewRows;
      apart += choice.cost();
    }
    if (sets_[0].M > costs::kMostRowsOfFewRows) return apart;
    const Problem joint = joint_problem();
    if (all_few) {
      way_ = Way::kFewRows;
      for (const Problem& p : sets_) print_choice(choose_kernel(p), p);
    } else if (count() > 1 && fits_matmul_sets_sm90(sets_.data(), count(), Fused{}) &&
               few_rows_sm90::cost(size_of(joint), this_machine().multiprocessors) < apart) {
      way_ = Way::kFewRows;
      print_choice({KernelFamily::kFewRows, kJoint}, joint);
    }
    return apart;
  }

  void choose_many_rows(int64_t apart) {
    if (!fits_matmul_sets_many_rows(sets_.data(), count())) return;
    const Problem joint = joint_problem();
    Choice choice = choose_kernel(joint);
    if (choice.many_rows.kernel < 0 || choice.many_rows.plan.cost >= apart) return;
    way_ = Way::kManyRows, many_rows_ = choice.many_rows;
    choice.family = KernelFamily::kManyRows, choice.why = kJoint;
    print_choice(choice, joint);
  }

  const char* const op_;
  const cudaStream_t stream_;
  std::vector<OneProduct> held_;
  std::vector<Problem> sets_;
  Tensor x_;  // as the kernels take it
  Way way_ = Way::kApart;
  many_rows::PlannedKernel many_rows_{{}, -1};
};

Tensor linears(const Tensor& x, std::vector<Tensor> qdata, std::vector<Tensor> scales,
               std::vector<Tensor> per_tensor_scales, std::vector<Tensor> biases) {
  const Weights w = {"nvfp4::linears", qdata, scales, per_tensor_scales, biases};
  w.check();
  NVFP4_CHECK(x.dim() >= 1, "nvfp4::linears: x must have at least one dimension");
  const OnDeviceOf device(x);
  return Products(x, w, current_stream(x)).launch(x, w.all_rows(), Fused{});
}

// Rows of x up to which a norm is part of the products that follow it: each block norms all of x again, two rows at a
// time. H200, a step of an 8B model with 8 rows: 3.25 ms with the norms in it, 2.60 with 4 here.
constexpr int kMostRowsNormed = 4;

std::tuple<Tensor, Tensor> norm_linears(const Tensor& x, std::optional<Tensor> residual, std::optional<Tensor> norm,
                                        double eps, double offset, bool round_before_weight, double multiplier,
                                        std::optional<Tensor> first_norm, std::vector<Tensor> qdata,
                                        std::vector<Tensor> scales, std::vector<Tensor> per_tensor_scales,
                                        std::vector<Tensor> biases, int64_t activation, double limit, double alpha) {
  const Weights w = {"nvfp4::norm_linears", qdata, scales, per_tensor_scales, biases};
  w.check();
  NVFP4_CHECK(x.dim() >= 1, w.op, ": x must have at least one dimension");
  NVFP4_CHECK(norm || (!residual && !first_norm && multiplier == 1.0), w.op,
              ": residual, first_norm and multiplier need a norm; nvfp4::rms_norm adds without one");
  const bool gated = activation >= 0;
  NVFP4_CHECK(activation < static_cast<int64_t>(step::Activation::kCount), w.op, ": activation must be below ",
              static_cast<int64_t>(step::Activation::kCount), ", or -1 for none, not ", activation);
  NVFP4_CHECK(!gated || (w.count() == 2 && w.rows(0) == w.rows(1)), w.op,
              ": an activation needs two weights, gate and up, of one shape");
  const OnDeviceOf device(x);
  const cudaStream_t stream = current_stream(x);
  Tensor y = x, sum = empty({0}, x.scalar_type(), x), residual_rows, norm_weight;

  Fused fused;
  fused.gated = gated;
  fused.activation = static_cast<step::Activation>(activation);
  fused.limit = static_cast<float>(limit), fused.alpha = static_cast<float>(alpha);
  if (norm) {
    step::check_norm(x, residual, *norm, w.op);
    residual_rows = residual ? in_order(*residual) : Tensor(), norm_weight = in_order(*norm);
    fused.normed = true;
    fused.residual = residual ? residual_rows.const_data_ptr() : nullptr, fused.norm = norm_weight.const_data_ptr();
    fused.eps = static_cast<float>(eps), fused.offset = static_cast<float>(offset);
    fused.multiplier = static_cast<float>(multiplier), fused.round_before_weight = round_before_weight;
    const bool is_plain = !first_norm && norm->scalar_type() == x.scalar_type() && leading_rows(x) <= kMostRowsNormed;
    if (is_plain) {
      Products products(x, w, stream);
      if (products.fits(fused)) {
        if (residual || multiplier != 1.0) {
          sum = empty(with_last(x, x.size(x.dim() - 1)), x.scalar_type(), x);
          fused.sum = sum.mutable_data_ptr();
        }
        return {products.launch(x, gated ? w.rows(0) : w.all_rows(), fused), sum};
      }
    }
    std::tie(y, sum) = step::rms_norm(x, residual, norm, eps, offset, round_before_weight, multiplier, first_norm);
    fused.normed = false;
  }
  Products products(y, w, stream);
  if (gated && products.fits(fused)) return {products.launch(y, w.rows(0), fused), sum};
  y = products.launch(y, w.all_rows(), Fused{});
  return {gated ? step::gated(y, activation, limit, alpha, false) : y, sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("linears", TORCH_BOX(&linears));
  m.impl("norm_linears", TORCH_BOX(&norm_linears));
}

}  // namespace nvfp4
