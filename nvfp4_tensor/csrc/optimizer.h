// What the ops of an AdamW step on four-bit moments ask of their arguments, on any device (numerics contract,
// section 12).
#pragma once

#include "arguments.h"
#include "numerics/adamw.h"

namespace nvfp4::optimizer {

inline Dtype dtype_of_step(const Tensor& t, const char* name) {
  NVFP4_CHECK(t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Float, name,
              " must be bfloat16 or float32, not ", t.scalar_type());
  return t.scalar_type() == ScalarType::Float ? Dtype::kFloat : Dtype::kBf16;
}

inline Dtype weight_dtype(const Tensor& weight) {
  const Dtype dtype = dtype_of_step(weight, "weight");
  NVFP4_CHECK(weight.is_contiguous() && begins_on(weight, weight.element_size()),
              "weight must be contiguous, since it is updated in place");
  return dtype;
}

inline const float* numbers_of(const Tensor& hyper, const Tensor& grad) {
  check_beside(hyper, "hyper", grad, "grad");
  NVFP4_CHECK(hyper.scalar_type() == ScalarType::Float && hyper.dim() == 1 && hyper.size(0) == kAdamwNumbers &&
                  hyper.is_contiguous(),
              "hyper must be float32 (", kAdamwNumbers, ",), contiguous, not ", text_of(hyper));
  return static_cast<const float*>(hyper.const_data_ptr());
}

// Bytes that are updated in place.
inline uint8_t* bytes_in_place(const Tensor& t, const char* name, int64_t rows, int64_t width, int64_t alignment,
                               const Tensor& x) {
  check_beside(t, name, x, "grad");
  NVFP4_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == width && t.element_size() == 1, name,
              " must be bytes (", rows, ", ", width, "), not ", text_of(t));
  NVFP4_CHECK(t.is_contiguous() && begins_on(t, alignment), name, " must be contiguous, on ", alignment, " bytes");
  return static_cast<uint8_t*>(const_cast<void*>(t.const_data_ptr()));
}

// The arguments but the weight's; `grad` keeps alive what they point into.
struct Step {
  Tensor grad;
  AdamwStep arguments{};

  Step(const Tensor& shaped, const Tensor& given, const Tensor& r, const Tensor& r_scale, const Tensor& v,
       const Tensor& v_exponent, const Tensor& numbers, const Tensor& random, int64_t row0)
      : grad(given) {
    NVFP4_CHECK(
        shaped.dim() == 2 && given.dim() == 2 && given.size(0) == shaped.size(0) && given.size(1) == shaped.size(1),
        "weight and grad must be matrices of one shape, not ", text_of(shaped), " and ", text_of(given));
    check_beside(given, "grad", shaped, "weight");
    grad = in_order(given);
    AdamwStep& a = arguments;
    a.grad_dtype = dtype_of_step(given, "grad");
    a.grad = grad.const_data_ptr();
    a.rows = given.size(0), a.columns = given.size(1), a.blocks = ceil_div(a.columns, kBlock);
    a.r = bytes_in_place(r, "r", a.rows, a.blocks * 8, 8, given);
    a.r_scale = bytes_in_place(r_scale, "r_scale", a.rows, a.blocks, 1, given);
    a.v = bytes_in_place(v, "v", a.rows, a.blocks * 8, 8, given);
    a.v_exponent = bytes_in_place(v_exponent, "v_exponent", a.rows, a.blocks, 1, given);
    a.hyper = numbers_of(numbers, given);
    a.rng_state = rng_state_of(random, given);
    a.first_block = block_numbers(a.rows, a.columns, row0, 0, 0).first;
  }
};

// The arguments of a step with float32 moments.
struct VectorArguments {
  Tensor grad;
  VectorStep arguments{};

  VectorArguments(const Tensor& weight, const Tensor& given, const Tensor& m, const Tensor& v, const Tensor& numbers,
                  const Tensor& random, int64_t element0)
      : grad(given) {
    NVFP4_CHECK(weight.dim() == 1 && given.dim() == 1 && given.size(0) == weight.size(0),
                "weight and grad must be vectors of one size, not ", text_of(weight), " and ", text_of(given));
    check_beside(given, "grad", weight, "weight");
    grad = in_order(given);
    VectorStep& a = arguments;
    a.weight_dtype = weight_dtype(weight);
    a.weight = const_cast<void*>(weight.const_data_ptr());
    a.grad_dtype = dtype_of_step(given, "grad");
    a.grad = grad.const_data_ptr();
    a.count = given.size(0);
    a.m = moment(m, "exp_avg", given), a.v = moment(v, "exp_avg_sq", given);
    a.hyper = numbers_of(numbers, given);
    a.rng_state = rng_state_of(random, given);
    a.first_block = block_numbers(a.count, 1, element0, 0, 0).first;
  }

 private:
  static float* moment(const Tensor& t, const char* name, const Tensor& grad) {
    check_beside(t, name, grad, "grad");
    NVFP4_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 1 && t.size(0) == grad.size(0) &&
                    t.is_contiguous() && begins_on(t, 4),
                name, " must be float32 (", grad.size(0), ",), contiguous, not ", text_of(t));
    return static_cast<float*>(const_cast<void*>(t.const_data_ptr()));
  }
};

struct CodedWeight {
  uint8_t *qdata, *scale;
  const float* per_tensor_scale;

  CodedWeight(const Tensor& codes, const Tensor& scales, const Tensor& factor, int64_t columns, const Tensor& grad) {
    const CodedShape shape = check_coded(codes, scales, columns);
    NVFP4_CHECK(codes.dim() == 2 && shape.rows == grad.size(0), "qdata must have the rows of grad, ", grad.size(0),
                ", not ", text_of(codes));
    check_beside(codes, "qdata", grad, "grad");
    NVFP4_CHECK(codes.is_contiguous() && scales.is_contiguous() && begins_on(codes, 8),
                "qdata and scale must be contiguous, since they are updated in place");
    check_beside(factor, "per_tensor_scale", grad, "grad");
    NVFP4_CHECK(factor.numel() == 1 && factor.scalar_type() == ScalarType::Float,
                "per_tensor_scale must be one float32, not ", text_of(factor));
    qdata = static_cast<uint8_t*>(const_cast<void*>(codes.const_data_ptr()));
    scale = static_cast<uint8_t*>(const_cast<void*>(scales.const_data_ptr()));
    per_tensor_scale = static_cast<const float*>(factor.const_data_ptr());
  }
};

// The ops. Each library has its own of these two, which run a step on the device of `weight`.
void run(const AdamwStep& step, const Tensor& weight);
void run(const VectorStep& step, const Tensor& weight);

inline void adamw_step(const Tensor& weight, const Tensor& grad, const Tensor& r, const Tensor& r_scale,
                       const Tensor& v, const Tensor& v_exponent, const Tensor& hyper, const Tensor& rng_state,
                       int64_t row0) {
  Step step(weight, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  step.arguments.weight_dtype = weight_dtype(weight);
  step.arguments.weight = const_cast<void*>(weight.const_data_ptr());
  run(step.arguments, weight);
}

inline void adamw_step_codes(const Tensor& qdata, const Tensor& scale, const Tensor& per_tensor_scale,
                             const Tensor& grad, const Tensor& r, const Tensor& r_scale, const Tensor& v,
                             const Tensor& v_exponent, const Tensor& hyper, const Tensor& rng_state, int64_t row0) {
  Step step(grad, grad, r, r_scale, v, v_exponent, hyper, rng_state, row0);
  AdamwStep& a = step.arguments;
  const CodedWeight w(qdata, scale, per_tensor_scale, a.columns, grad);
  a.weight = w.qdata, a.scale = w.scale, a.per_tensor_scale = w.per_tensor_scale;
  run(a, qdata);
}

inline void adamw_step_vector(const Tensor& weight, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                              const Tensor& hyper, const Tensor& rng_state, int64_t element0) {
  run(VectorArguments(weight, grad, exp_avg, exp_avg_sq, hyper, rng_state, element0).arguments, weight);
}

}  // namespace nvfp4::optimizer
