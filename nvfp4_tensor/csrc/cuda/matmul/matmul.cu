// torch.ops.nvfp4.matmul on CUDA: arguments made a Problem, and the kernel chosen.
#include <optional>
#include <vector>

#include "cuda/host/scratch.h"
#include "cuda/host/tensors.h"
#include "cuda/matmul/arguments.h"
#include "cuda/matmul/dense.h"
#include "cuda/matmul/describe.h"
#include "cuda/matmul/problem.cuh"
#include "ops.h"
#include "plans_printed.h"

namespace nvfp4 {

namespace {

constexpr int kMostExperts = 65535;  // of a grid's last dimension

// (code * s_b) * per_tensor_scale.
Tensor decode(const Tensor& qdata, const Tensor& scale, const Tensor& per_tensor_scale, int64_t columns,
              ScalarType dtype) {
  using torch::stable::detail::from;
  return call("nvfp4::dequantize", "",
              {from(qdata), from(scale), from(std::optional<Tensor>(per_tensor_scale)), from(columns), from(dtype)});
}

// a @ b in float32: torch's own, which for bfloat16 and float16 operands adds in float32 too.
Tensor float_product(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  const char* op = a.dim() == 3 ? "aten::bmm" : "aten::mm";
  if (a.scalar_type() == ScalarType::Float) return call(op, "", {from(a), from(b)});
  return call(op, "dtype", {from(a), from(b), from(ScalarType::Float)});
}

// The shape of x (..., K) w^T.
std::vector<int64_t> product_shape(const Tensor& x, int64_t inner, int64_t outer) {
  NVFP4_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == inner, "nvfp4::matmul: x has ", x.size(x.dim() - 1),
              " columns where the weight has ", inner);
  return with_last(x, outer);
}

// Why none of the kernels that decode w as they go is asked; null where they are.
const char* why_decoded(const Problem& p, bool transposed) {
  return transposed                   ? "x w, across the rows of w"
         : p.x_dtype == Dtype::kFloat ? "x is float32"
         : p.K == 0                   ? "no columns"
         : p.experts > kMostExperts   ? "more experts than a grid has places"
                                      : nullptr;
}

void print_decoded(const Problem& p, const char* why) {
  Choice choice;
  choice.family = KernelFamily::kDecoded, choice.why = why;
  print_plan(describe(choice, size_of(p), Fits{}, name_of(p.x_dtype), this_machine()));
}

// The kernels that decode w as they go; false where decoding before is faster.
bool fused_product(Problem& p, const Tensor& qdata, const Tensor& scale, cudaStream_t stream) {
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale);
  place_codes(p, codes, scales);
  const Choice choice = choose_kernel(p);
  print_choice(choice, p);
  if (choice.family == KernelFamily::kDecoded) return false;
  if (choice.family == KernelFamily::kManyRows) {
    RawScratch scratch;
    launch_matmul_many_rows(p, choice.many_rows, std::ref(scratch), stream);
  } else {
    launch_matmul_few_rows(p, stream);
  }
  check_launched("nvfp4::matmul");
  return true;
}

// w in x's dtype without its per-tensor scale, and both operands' scales as one factor where each has a single one.
struct Decoded {
  Tensor w;
  std::optional<Tensor> alpha;  // then the only factor of p
};
Decoded decode_for(Problem& p, const Tensor& x, const Tensor& qdata, const Tensor& scale, int64_t columns,
                   cudaStream_t stream) {
  const Tensor codes = aligned_codes(qdata), scales = aligned_scales(scale);
  Decoded out{empty(with_last(qdata, columns), x.scalar_type(), x), std::nullopt};
  Alpha alpha{};
  const bool single = p.x_scale && p.w_scale && !p.x_scale_step && !p.w_scale_step && !p.w_scale_expert;
  if (single && codes.numel() > 0) {
    out.alpha = empty({}, ScalarType::Float, x);
    alpha = {p.w_scale, p.x_scale, static_cast<float*>(out.alpha->mutable_data_ptr())};
    p.w_scale = alpha.out, p.x_scale = nullptr;
  }
  const auto [rows, blocks] = check_coded(qdata, scale, columns);
  const Quantized in{static_cast<const uint8_t*>(codes.const_data_ptr()),
                     static_cast<const uint8_t*>(scales.const_data_ptr()),
                     nullptr,
                     false,
                     rows,
                     blocks};
  launch_dequantize(in, columns, p.x_dtype, out.w.mutable_data_ptr(), stream, alpha);
  return out;
}

// Decode and multiply: by cuBLASLt, or else float32 sums of torch's and then the same epilogue. `w_factor`, where
// given, goes inside the sums.
void decoded_product(Problem p, const Tensor& x, const Tensor& qdata, const Tensor& scale,
                     std::optional<Tensor> w_factor, int64_t columns, bool transposed, cudaStream_t stream) {
  const ScalarType type = w_factor ? ScalarType::Float : x.scalar_type();
  const auto [w, alpha] = w_factor ? Decoded{decode(qdata, scale, *w_factor, columns, type), std::nullopt}
                                   : decode_for(p, x, qdata, scale, columns, stream);
  const Sum sum = transposed ? Sum::kAcrossRowsOfW : Sum::kAlongRowsOfW;
  if (!w_factor && fits_matmul_dense(p, sum)) {
    RawScratch scratch;
    if (launch_matmul_dense(p, w.const_data_ptr(), sum, std::ref(scratch), stream)) {
      check_launched("nvfp4::matmul");
      return;
    }
  }
  Tensor a = qdata.dim() == 3 ? x : torch::stable::reshape(x, {p.M, p.K});
  if (a.scalar_type() != type) a = torch::stable::to(a, type);
  const int64_t last = w.dim() - 1;
  const Tensor sums = torch::stable::contiguous(
      float_product(a, transposed ? w : torch::stable::transpose(w, last - 1, last)));
  launch_matmul_finish(p, static_cast<const float*>(sums.const_data_ptr()), stream);
  check_launched("nvfp4::matmul");
}

__global__ void finish_kernel(const __grid_constant__ Problem p, const float* sums) {
  const int64_t all = static_cast<int64_t>(p.experts) * p.M * p.N;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int n = static_cast<int>(i % p.N);
    const int64_t row = i / p.N;
    const float sum = finish(p, static_cast<int>(row / p.M), static_cast<int>(row % p.M), n, sums[i]);
    store_rounded(p.y, p.y_dtype, row * p.y_row + n, sum);
  }
}

}  // namespace

void launch_matmul_finish(const Problem& p, const float* sums, cudaStream_t stream) {
  const int64_t all = static_cast<int64_t>(p.experts) * p.M * p.N;
  finish_kernel<<<grid_of(8, (all + 255) / 256), 256, 0, stream>>>(p, sums);
}

Choice choose_kernel(const Problem& p) {
  struct Known {
    int experts = -1, M, N, K, multiprocessors;
    bool many_rows, few_rows;
    Choice choice;  // where cuBLASLt serves
  };
  constexpr unsigned kKnown = 64;
  const int multiprocessors = this_machine().multiprocessors;
  const Fits fits = {fits_matmul_many_rows(p), fits_matmul_few_rows_sm90(p)};
  thread_local Known known[kKnown];
  Known& here = known[(p.M * 31u + p.N * 7u + p.K) / 8 % kKnown];
  if (here.experts != p.experts || here.M != p.M || here.N != p.N || here.K != p.K ||
      here.multiprocessors != multiprocessors || here.many_rows != fits.many_rows ||
      here.few_rows != fits.few_rows_sm90) {
    here = {p.experts,
            p.M,
            p.N,
            p.K,
            multiprocessors,
            fits.many_rows,
            fits.few_rows_sm90,
            choose(size_of(p), fits, multiprocessors, [] { return true; })};
  }
  if (here.choice.decoded_cost >= 0 && !fits_matmul_dense(p, Sum::kAlongRowsOfW)) {
    return choose(size_of(p), fits, multiprocessors, [] { return false; });
  }
  return here.choice;
}

void multiply(Problem& p, const Tensor& x, const Tensor& qdata, const Tensor& scale,
              const std::optional<Tensor>& w_factor, int64_t columns, bool transposed, cudaStream_t stream) {
  const char* const why = why_decoded(p, transposed);
  if (why && are_plans_printed()) print_decoded(p, why);
  if (why || !fused_product(p, qdata, scale, stream)) {
    decoded_product(p, x, qdata, scale, w_factor, columns, transposed, stream);
  }
}

namespace ops {

Tensor matmul(const Tensor& x_given, OptionalTensor x_scale, const Tensor& qdata, const Tensor& scale,
              const Tensor& per_tensor_scale, OptionalTensor bias, int64_t columns, bool transposed,
              ScalarType out_dtype) {
  NVFP4_CHECK(qdata.dim() == 2 || qdata.dim() == 3, "nvfp4::matmul takes qdata (N, K/2) or (E, N, K/2)");
  const bool batched = qdata.dim() == 3;
  NVFP4_CHECK(!batched || x_given.dim() == 3, "nvfp4::matmul takes x (E, M, K) for a batch of weights");
  const OnDeviceOf device(x_given);
  const cudaStream_t stream = current_stream(x_given);
  const int64_t weight_rows = qdata.size(qdata.dim() - 2);
  const int64_t inner = transposed ? weight_rows : columns, outer = transposed ? columns : weight_rows;
  const std::vector<int64_t> shape = product_shape(x_given, inner, outer);
  Problem p = sized_problem(shape, inner, batched);
  NVFP4_CHECK(!batched || shape[0] == qdata.size(0), "nvfp4::matmul: ", shape[0], " matrices of x for ", qdata.size(0),
              " weights");
  check_weight(p, x_given, qdata, scale, per_tensor_scale, columns);
  Tensor x_factor, placed_bias;  // live as long as p
  if (bias) placed_bias = set_bias(p, *bias, x_given, shape);
  Tensor y = empty(shape, out_dtype, x_given);
  if (y.numel() == 0) return y;
  p.y = y.mutable_data_ptr();
  p.y_dtype = dtype_of(out_dtype, "out_dtype");
  const Tensor x = place_x(p, x_given), w_factor = contiguous_as(per_tensor_scale, ScalarType::Float);
  if (x_scale) x_factor = place_x_scale(p, x, *x_scale);
  const bool scale_inside = transposed && one_a_row(p, w_factor);  // a factor of each summand
  if (!scale_inside) place_w_scale(p, w_factor);
  const std::optional<Tensor> inside = scale_inside ? std::optional<Tensor>(w_factor) : std::nullopt;
  multiply(p, x, qdata, scale, inside, columns, transposed, stream);
  return y;
}

}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) { m.impl("matmul", TORCH_BOX(&ops::matmul)); }

}  // namespace nvfp4
