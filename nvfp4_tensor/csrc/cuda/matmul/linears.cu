// torch.ops.nvfp4.linears and norm_linears on CUDA: weights that share x, and what stands before and behind them.
#include <optional>
#include <tuple>
#include <vector>

#include "cuda/generation/ops.h"
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

// Cycles that the launch takes which puts separate products one behind the other.
constexpr int kJoinCycles = 4000;

// All products, where each one's own choice is a few-rows kernel, or one launch of Hopper's is faster than theirs.
struct FewRows {
  std::vector<OneProduct> held;
  std::vector<Problem> sets;
  Tensor x;  // as the kernels take it
  bool serves = false;

  FewRows(const Tensor& given, const Weights& w) {
    const int64_t inner = given.size(given.dim() - 1), rows = leading_rows(given);
    const ScalarType type = given.scalar_type();
    const bool is_half = type == ScalarType::BFloat16 || type == ScalarType::Half;
    if (rows < 1 || rows > costs::kMostRowsOfFewRows || inner == 0 || !is_half) return;
    bool all_few = true;
    int64_t apart = kJoinCycles;
    for (size_t i = 0; i < w.count(); ++i) {
      if (w.rows(i) == 0) return;
      held.emplace_back(given, w, i);
      Problem& p = held.back().p;
      if (i == 0) {
        x = place_x(p, given);
      } else {
        p.x = sets[0].x, p.x_dtype = sets[0].x_dtype, p.x_row = sets[0].x_row;
      }
      const Choice choice = choose_kernel(p);
      const bool few = choice.family == KernelFamily::kFewRows;
      all_few = all_few && few;
      apart += few ? choice.few_rows_cost : choice.many_rows.plan.cost;
      sets.push_back(p);
    }
    serves = all_few || (count() > 1 && fits_matmul_sets_sm90(sets.data(), count(), Fused{}) && joint_cost() < apart);
  }
  int64_t joint_cost() const {
    ProductSize size = size_of(sets[0]);
    for (size_t i = 1; i < sets.size(); ++i) size.N += sets[i].N;
    return few_rows_sm90::cost(size, this_machine().multiprocessors);
  }
  int count() const { return static_cast<int>(sets.size()); }
  bool fits(const Fused& fused) const { return serves && fits_matmul_sets_sm90(sets.data(), count(), fused); }

  // Into columns of y one behind the other, or, gated, all into y.
  Tensor launch(const Tensor& like, int64_t columns, const Fused& fused, const char* op, cudaStream_t stream) {
    const Tensor y = empty(with_last(like, columns), like.scalar_type(), like);
    int64_t column = 0;
    for (Problem& p : sets) {
      p.y = static_cast<uint16_t*>(y.mutable_data_ptr()) + (fused.gated ? 0 : column);
      p.y_row = columns;
      column += p.N;
    }
    if (fits(fused)) {
      launch_matmul_sets_sm90(sets.data(), count(), fused, stream);
    } else {
      for (const Problem& p : sets) launch_matmul_few_rows(p, stream);
    }
    check_launched(op);
    return y;
  }
};

Tensor all_products(const Tensor& x, const Weights& w) {
  const cudaStream_t stream = current_stream(x);
  FewRows few(x, w);
  if (few.serves) return few.launch(x, w.all_rows(), Fused{}, w.op, stream);
  using torch::stable::detail::from;
  std::vector<Tensor> products;
  for (size_t i = 0; i < w.count(); ++i) {
    products.push_back(
        call("nvfp4::matmul", "",
             {from(x), from(std::optional<Tensor>()), from(w.qdata[i]), from(w.scales[i]), from(w.per_tensor_scales[i]),
              from(w.bias(i)), from(x.size(x.dim() - 1)), from(false), from(x.scalar_type())}));
  }
  return w.count() == 1 ? products[0] : call("aten::cat", "", {from(products), from(x.dim() - 1)});
}

Tensor linears(const Tensor& x, std::vector<Tensor> qdata, std::vector<Tensor> scales,
               std::vector<Tensor> per_tensor_scales, std::vector<Tensor> biases) {
  const Weights w = {"nvfp4::linears", qdata, scales, per_tensor_scales, biases};
  w.check();
  NVFP4_CHECK(x.dim() >= 1, "nvfp4::linears: x must have at least one dimension");
  const OnDeviceOf device(x);
  return all_products(x, w);
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
      FewRows few(x, w);
      if (few.fits(fused)) {
        if (residual || multiplier != 1.0) {
          sum = empty(with_last(x, x.size(x.dim() - 1)), x.scalar_type(), x);
          fused.sum = sum.mutable_data_ptr();
        }
        return {few.launch(x, gated ? w.rows(0) : w.all_rows(), fused, w.op, stream), sum};
      }
    }
    std::tie(y, sum) = step::rms_norm(x, residual, norm, eps, offset, round_before_weight, multiplier, first_norm);
    fused.normed = false;
  }
  if (gated) {
    FewRows few(y, w);
    if (few.fits(fused)) return {few.launch(y, w.rows(0), fused, w.op, stream), sum};
  }
  y = all_products(y, w);
  return {gated ? step::gated(y, activation, limit, alpha, false) : y, sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("linears", TORCH_BOX(&linears));
  m.impl("norm_linears", TORCH_BOX(&norm_linears));
}

}  // namespace nvfp4
