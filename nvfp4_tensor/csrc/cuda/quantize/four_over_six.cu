// quantize with four-over-six: of the two scales that map a block's largest element to 6 and to 4, the one with the
// smaller error. A lane has a row of a block, its elements in registers.
//
// What a code decodes to, ((code * s_b) * amax) / (6 * ceiling), depends on the scale and the code alone: 127 x 8
// values in shared memory, so that an element costs no division but a load. That leaves 12 instructions an element and
// scale, seven of them to find the code.
#include "cuda/block/row_lanes.cuh"

namespace nvfp4 {
namespace {

constexpr int kCodes = 8;  // without the sign

struct Decoded {
  float of[128 * kCodes];  // of scale s and code c, at s * kCodes + c
};

// All threads of the thread block must come here together.
__device__ __forceinline__ void fill(Decoded& values, const TensorScale& tensor) {
  for (uint32_t i = threadIdx.x; i < kE4M3Nan * kCodes; i += kThreads) {
    const float value = mul(e2m1_value(i % kCodes), e4m3_value(static_cast<uint8_t>(i / kCodes)));
    values.of[i] = div(mul(value, tensor.amax), tensor.range);
  }
  __syncthreads();
}

// A scale of a row's 16 elements, its error (the differences, or their squares, added in order), the codes to nearest.
struct Candidate {
  uint8_t s_bits;
  float error;
  uint2 codes;  // without signs
};

template <bool squared, typename T>
__device__ __forceinline__ Candidate candidate(const Elements<T, kBlock>& x, uint8_t s_bits, float enc,
                                               const Decoded& values) {
  // The bits of 2^23 + c, times four, are the place of code c but for a constant.
  const uint32_t coord = static_cast<uint32_t>(__cvta_generic_to_shared(values.of)) + s_bits * kCodes * 4u -
                         float_bits(8388608.0f) * 4u;
  Candidate out{s_bits, 0.0f, {}};
  uint32_t packed[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float v = fabsf(x.value(8 * half + i));
      float decoded;
      bits[i] = nearest_even_bits(mul(v, enc));
      asm("ld.shared.f32 %0, [%1];" : "=f"(decoded) : "r"(bits[i] * 4u + coord));
      const float difference = sub(decoded, v);
      out.error = add(out.error, squared ? mul(difference, difference) : fabsf(difference));
    }
    packed[half] = pack_codes<Fast::kNearestEven>(bits);
  }
  out.codes = make_uint2(packed[0], packed[1]);
  return out;
}

template <typename T>
__device__ __forceinline__ Elements<T, kBlock> load(const Matrix& x, const RowCoord& coord) {
  if (!coord.inside) return Elements<T, kBlock>::zero();
  return Elements<T, kBlock>::load(element_at<T>(x, coord.row, coord.column * kBlock));
}

// The better of the two scales for a block whose largest magnitude is amax; where it is NaN or Inf both are NaN.
template <bool squared, typename T>
__device__ __forceinline__ Candidate choose(const Elements<T, kBlock>& x, float amax, const TensorScale& tensor,
                                            ScaleRounding rounding, const float* enc, const Decoded& values,
                                            bool tile) {
  const float base = mul(div(amax, kE2M1Max), tensor.encode);
  const auto with = [&](float scale) {
    const uint8_t s_bits = is_finite(amax) ? to_e4m3(scale, rounding, amax) : kE4M3Nan;
    Candidate c = candidate<squared>(x, s_bits, enc[s_bits], values);
    c.error = tile_sum(c.error, tile);
    return c;
  };
  const Candidate six = with(base), four = with(mul(base, 1.5f));
  return four.error < six.error ? four : six;
}

template <typename T, Fast mode, bool tile>
__global__ void __launch_bounds__(kThreads, 3) quantize_four_over_six(Matrix x, Quantization how, Codes out) {
  __shared__ Decoded values;
  RowLanes lanes(x, tile);
  RowCoord coord = lanes.coord(x);
  auto block = load<T>(x, coord);  // on its way while the tables are made
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  const float* enc = encode_table(tensor);
  fill(values, tensor);
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const bool squared = how.spec.four_over_six == FourOverSix::kSquared;
  const uint32_t blocks = static_cast<uint32_t>(x.blocks()), column_tiles = static_cast<uint32_t>(x.column_tiles());
  while (lanes.any()) {
    const RowCoord here = coord;
    const Elements<T, kBlock> now = block;
    lanes.at.step();
    coord = lanes.coord(x);
    block = load<T>(x, coord);  // in flight during the rest
    uint32_t most = now.amax_bits();
    if constexpr (tile) {
#pragma unroll
      for (int half = 8; half; half /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, half));
    }
    const float amax = Elements<T, kBlock>::magnitude_of(most);
    const Candidate best = squared ? choose<true>(now, amax, tensor, how.spec.scale_rounding, enc, values, tile)
                                   : choose<false>(now, amax, tensor, how.spec.scale_rounding, enc, values, tile);
    if (!here.inside) continue;
    uint2 codes = make_uint2(best.codes.x | now.signs(0), best.codes.y | now.signs(8));
    if constexpr (mode != Fast::kNearestEven) {
      const uint64_t number = block_number(how.random, here.row, here.column);
      codes = encode16<mode>(now, best.s_bits, enc[best.s_bits], source, number);
    }
    if (best.s_bits == kE4M3Nan) codes = make_uint2(0u, 0u);
    reinterpret_cast<uint2*>(out.qdata)[static_cast<int64_t>(here.row) * blocks + here.column] = codes;
    out.scale[scale_offset(here.row, here.column, column_tiles)] = best.s_bits;
  }
}

}  // namespace

void launch_quantize_four_over_six(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  const int64_t threads = RowLanes::threads(x, how.spec);
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      if (how.spec.block_rows == 1) {
        launch_walk<quantize_four_over_six<decltype(type), mode.value, false>, 4>(threads, stream, x, how, out);
      } else {
        launch_walk<quantize_four_over_six<decltype(type), mode.value, true>, 4>(threads, stream, x, how, out);
      }
    });
  });
}

}  // namespace nvfp4
