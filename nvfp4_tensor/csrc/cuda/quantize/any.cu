// quantize and fake_quantize for every spec and every shape, straight from numerics/*.h: what the fast kernels leave.
#include "cuda/block/choose_scale.cuh"

namespace nvfp4 {
namespace {

// One row of a block: its values (transformed), scale and codes.
struct Encoded {
  uint8_t s_bits;
  uint32_t code[kBlock];
};

template <typename T>
__device__ __forceinline__ Encoded encode(const Matrix& x, const Quantization& how, const TensorScale& tensor,
                                          const DrawSource& source, const RowCoord& coord, bool tile) {
  const QuantizeSpec& spec = how.spec;
  float v[kBlock] = {};
  if (coord.inside) load_block<T>(x, coord.row, coord.column, v);
  if (spec.hadamard_sign >= 0 && coord.inside) hadamard_block(v, spec.hadamard_sign);
  Encoded out;
  out.s_bits = choose_scale(v, tensor, spec, tile);
  const float enc = tensor.block_encode(e4m3_value(out.s_bits));
  Words4 words{};
  if (spec.is_stochastic()) words = source.key.block_words(block_number(how.random, coord.row, coord.column));
  const uint32_t mask = spec.random_bits == 8 ? 0xFF00u : 0xFFFFu;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t code = round_e2m1(mul(v[i], enc), spec.round_mode, random16(words, i) & mask);
    out.code[i] = out.s_bits == kE4M3Nan ? 0u : code;
  }
  return out;
}

__device__ __forceinline__ void store_value(const Values& out, int64_t index, float v) {
  switch (out.dtype) {
    case Dtype::kBf16: static_cast<__nv_bfloat16*>(out.data)[index] = __float2bfloat16_rn(v); break;
    case Dtype::kFp16: static_cast<__half*>(out.data)[index] = __float2half_rn(v); break;
    case Dtype::kFloat: static_cast<float*>(out.data)[index] = v; break;
  }
}

__device__ __forceinline__ void store(const Codes& out, const Matrix& x, const RowCoord& coord, const Encoded& encoded,
                                      float) {
  uint2 codes = make_uint2(0u, 0u);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes.x |= encoded.code[i] << (4 * i);
    codes.y |= encoded.code[8 + i] << (4 * i);
  }
  reinterpret_cast<uint2*>(out.qdata)[static_cast<int64_t>(coord.row) * x.blocks() + coord.column] = codes;
  out.scale[scale_offset(coord.row, coord.column, static_cast<uint32_t>(x.column_tiles()))] = encoded.s_bits;
}

__device__ __forceinline__ void store(const Values& out, const Matrix&, const RowCoord& coord, const Encoded& encoded,
                                      float factor) {
  const float s_b = e4m3_value(encoded.s_bits);
  const uint32_t first = coord.column * kBlock;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (first + i >= out.columns) continue;
    store_value(out, coord.row * out.columns + first + i, decode_element(encoded.code[i], s_b, factor));
  }
}

__device__ __forceinline__ bool is_scaled(const Codes&) { return false; }
__device__ __forceinline__ bool is_scaled(const Values& out) { return out.scaled; }

// Out: Codes, or Values of what has one amax.
template <typename T, bool per_row, typename Out>
__global__ void __launch_bounds__(kThreads) quantize_any(Matrix x, Quantization how, Out out) {
  TensorScale tensor{};
  if constexpr (!per_row) {
    write_per_tensor_scale(how);
    tensor = tensor_scale(how);
  }
  const DrawSource source = draw_source(how, how.spec.is_stochastic());
  const float factor = is_scaled(out) ? per_tensor_scale(tensor.amax, how.spec.scale_ceiling) : 1.0f;
  const bool tile = how.spec.block_rows == kBlock;
  for (RowLanes lanes(x, tile); lanes.any(); lanes.at.step()) {
    const RowCoord coord = lanes.coord(x);
    if constexpr (per_row) {
      if (coord.inside) tensor = TensorScale::of(how.amax[coord.row], how.spec.scale_ceiling);
    }
    const Encoded encoded = encode<T>(x, how, tensor, source, coord, tile);
    if (coord.inside) store(out, x, coord, encoded, factor);
  }
}

template <bool per_row, typename Out>
void launch(const Matrix& x, const Quantization& how, const Out& out, cudaStream_t stream) {
  for_dtype(x.dtype, [&](auto type) {
    launch_walk<quantize_any<decltype(type), per_row, Out>>(RowLanes::threads(x, how.spec), stream, x, how, out);
  });
}

}  // namespace

void launch_quantize_any(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  how.per_row ? launch<true>(x, how, out, stream) : launch<false>(x, how, out, stream);
}

void launch_fake_quantize_any(const Matrix& x, const Quantization& how, const Values& out, cudaStream_t stream) {
  launch<false>(x, how, out, stream);
}

}  // namespace nvfp4
