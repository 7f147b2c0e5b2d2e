// nvfp4.decode_fp8 on the CPU: rows of weights in FP8 as floating-point numbers.
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"

namespace nvfp4 {
namespace {

constexpr int64_t kElementsPerThread = 1 << 16;  // some 20 us

void decode_fp8(const Tensor& codes, const Tensor& scale, int64_t height, int64_t width, int64_t first, Tensor out) {
  const bool bytes = codes.scalar_type() == ScalarType::Byte;
  NVFP4_CHECK((codes.scalar_type() == ScalarType::Float8_e4m3fn || bytes) && codes.dim() >= 2,
              "codes must be float8_e4m3fn (..., rows, K), or its bytes in uint8, not ", text_of(codes));
  NVFP4_CHECK(height >= 0 && width >= 0 && first >= 0, "height, width and first must not be negative");
  const int64_t columns = codes.size(codes.dim() - 1), rows = codes.size(codes.dim() - 2);
  const Dtype dtype = dtype_of(out.scalar_type(), "out");
  check_beside(out, "out", codes, "codes");
  NVFP4_CHECK(out.numel() == codes.numel() && out.is_contiguous() && begins_on(out, out.element_size()),
              "out must be contiguous and of the shape of codes, ", text_of(codes), ", not ", text_of(out));
  if (codes.numel() == 0) return;
  const int64_t matrices = codes.numel() / (rows * columns);
  Fp8Codes in{nullptr, nullptr, rows, columns, first, height ? height : first + rows, width ? width : columns, 0, 0};
  in.scale_columns = ceil_div(columns, in.width);
  in.scale_rows = scale.numel() / (matrices * in.scale_columns);
  check_beside(scale, "scale", codes, "codes");
  NVFP4_CHECK(scale.numel() == matrices * in.scale_rows * in.scale_columns &&
                  in.scale_rows >= ceil_div(first + rows, in.height),
              "scale must have a number for every ", height, " x ", width, " of codes ", text_of(codes), " from row ",
              first, " on, not ", text_of(scale));
  const Tensor held = in_order(codes), scales = contiguous_as(scale, ScalarType::Float);
  in.codes = static_cast<const uint8_t*>(held.const_data_ptr());
  in.scale = static_cast<const float*>(scales.const_data_ptr());
  void* data = out.mutable_data_ptr();
  parallel(matrices * rows, std::max<int64_t>(1, kElementsPerThread / columns),
           [&](int64_t begin, int64_t end) { kernels().decode_fp8(in, dtype, data, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("decode_fp8", TORCH_BOX(&decode_fp8)); }

}  // namespace nvfp4
