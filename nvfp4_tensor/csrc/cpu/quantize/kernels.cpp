// The CPU kernels, written once on the vocabulary of a header of simd/ and compiled once for each instruction set.
#include "cpu/host/instruction_set.h"
// clang-format off
#include NVFP4_STRING(cpu/simd/NVFP4_ISA.h)
// clang-format on
#include "cpu/quantize/amax.h"
#include "cpu/quantize/decode.h"
#include "cpu/quantize/fp8.h"
#include "cpu/quantize/pair.h"

namespace nvfp4::NVFP4_ISA {

template <typename Function>
auto with_dtype(Dtype dtype, Function f) {
  switch (dtype) {
    case Dtype::kBf16: return f(Bf16{});
    case Dtype::kFp16: return f(Fp16{});
    default: return f(float{});
  }
}

extern const Kernels kKernels = {
    [](const Matrix& x, int sign, int64_t begin, int64_t end) {
      return with_dtype(x.dtype, [&](auto t) { return amax_groups<decltype(t)>(x, sign, begin, end); });
    },
    [](const Matrix& x, int sign, int64_t begin, int64_t end, uint32_t* row, uint32_t* column) {
      with_dtype(x.dtype, [&](auto t) { amax_pair<decltype(t)>(x, sign, begin, end, row, column); });
    },
    [](const Matrix& x, int sign, uint16_t* out, int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { hadamard_groups<decltype(t)>(x, sign, out, begin, end); });
    },
    [](const Matrix& x, const float* signs, int64_t begin, int64_t end) {
      return with_dtype(x.dtype, [&](auto t) { return amax_rotated<decltype(t)>(x, signs, begin, end); });
    },
    [](const Matrix& x, const float* signs, bool inverse, float* out, int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { rotate_groups<decltype(t)>(x, signs, inverse, out, begin, end); });
    },
    [](const Matrix& x, const Plan& plan, const Quantized& out, int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) {
        const auto run = plan.spec.is_eden() ? quantize_rotated<decltype(t)> : quantize<decltype(t)>;
        run(x, plan, out, begin, end);
      });
    },
    [](const Matrix& x, const Plan& plan, const Quantized& out, const Plan& plan_t, const Quantized& out_t,
       int64_t begin, int64_t end) {
      with_dtype(x.dtype, [&](auto t) { quantize_pair<decltype(t)>(x, plan, out, plan_t, out_t, begin, end); });
    },
    dequantize,
    [](const Fp8Codes& in, Dtype dtype, void* out, int64_t begin, int64_t end) {
      with_dtype(dtype, [&](auto t) { decode_fp8(in, static_cast<decltype(t)*>(out), begin, end); });
    },
    [](const Matrix& x, const Plan& plan, const float* factor, Dtype dtype, void* out, int64_t columns, int64_t begin,
       int64_t end) {
      with_dtype(x.dtype,
                 [&](auto t) { fake_quantize<decltype(t)>(x, plan, factor, dtype, out, columns, begin, end); });
    },
};

}  // namespace nvfp4::NVFP4_ISA
