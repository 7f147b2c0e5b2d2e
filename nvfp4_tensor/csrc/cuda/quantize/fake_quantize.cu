// fake_quantize, 1x16 blocks to the dtype of the input: quantized and decoded in registers, no codes written.
//
// One thread quantizes a block; for the stores, neighbouring lanes exchange halves of codes (8 bytes), so that each
// store of a warp fills whole sectors: first the even lane's block, half by either lane, then the odd lane's.
#include "cuda/block/block.cuh"
#include "cuda/block/decode.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {
namespace {

template <typename T>
__device__ __forceinline__ void store_half(T* to, uint32_t codes, float s_b, float factor) {
  float v[8];
  decode8(codes, s_b, v, factor);
  store8(to, v);
}

template <typename T, Fast mode>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    fake_quantize_rows(Matrix x, Quantization how, bool scaled, T* out) {
  griddepcontrol_wait();
  if (gridDim.x <= kFewBlocks) griddepcontrol_launch_dependents();
  Walk at(x.rows, x.blocks());
  auto block = block_at<T>(x, at);  // on its way while the table is made
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  const float* enc = encode_table(tensor);
  const float factor = scaled ? per_tensor_scale(tensor.amax, how.spec.scale_ceiling) : 1.0f;
  const bool odd = threadIdx.x % 2;
  // Whole warps turn together, for the exchange.
  while (__any_sync(0xFFFFFFFFu, at.inside())) {
    const bool inside = at.inside();
    const uint8_t s_bits = scale_from_bits<T>(block.amax_bits(), tensor.sixth, how.spec.scale_rounding);
    const uint64_t number = block_number(how.random, at.row, at.column);
    const uint2 codes = encode16<mode>(block, s_bits, enc[s_bits], source, number);
    const float s_b = e4m3_value(s_bits);
    const int64_t own = (static_cast<int64_t>(at.row) * at.width + at.column) * kBlock;
    at.step();
    block = block_at<T>(x, at);  // in flight during the rest

    // The output is contiguous, so a neighbour's block is the neighbouring block of the output, whatever its row.
    const uint32_t other_codes = __shfl_xor_sync(0xFFFFFFFFu, odd ? codes.x : codes.y, 1);
    const float other_s_b = __shfl_xor_sync(0xFFFFFFFFu, s_b, 1);
    const bool other_inside = __shfl_xor_sync(0xFFFFFFFFu, inside, 1);
    T* even_block = out + (odd ? own - kBlock : own) + (odd ? 8 : 0);
    const uint32_t my_codes = odd ? codes.y : codes.x;
    if (odd ? other_inside : inside) {
      store_half(even_block, odd ? other_codes : my_codes, odd ? other_s_b : s_b, factor);
    }
    if (odd ? inside : other_inside) {
      store_half(even_block + kBlock, odd ? my_codes : other_codes, odd ? s_b : other_s_b, factor);
    }
  }
}

}  // namespace

void launch_fake_quantize_rows(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream) {
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_mode(how.spec, [&](auto mode) {
      // before a product of few rows, launching takes as long as the kernel does
      launch_walk<fake_quantize_rows<T, mode.value>, 12, Begins::kBeforePreviousEnds>(
          x.rows * x.blocks(), stream, x, how, out.scaled, static_cast<T*>(out.data));
    });
  });
}

}  // namespace nvfp4
