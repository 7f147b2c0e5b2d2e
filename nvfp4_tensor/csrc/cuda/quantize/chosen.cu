// quantize with a choice among block scales: of seven neighbours, the one of least squared error (a search), or of the
// two that map a block's largest element to 6 and to 4, the one with the smaller error (four-over-six). A lane has a
// row of a block, its elements in registers.
#include "cuda/block/choose_scale.cuh"
#include "cuda/block/row_lanes.cuh"

namespace nvfp4 {
namespace {

// What an element is rounded to comes from two fused multiply-adds, without a code: six instructions an element and
// scale (seven where values beyond 6 saturate, as under the smallest scale), 43 for seven scales.
struct Search {
  static constexpr int blocks_per_sm(int bytes) { return bytes == 4 ? 3 : 4; }
  static constexpr bool kGivesNearest = false;

  struct Shared {
    SearchTable table;

    __device__ __forceinline__ void fill(const TensorScale& tensor) { table.fill(tensor); }
    __device__ __forceinline__ float enc(uint8_t s_bits) const { return table.enc(s_bits); }
  };

  template <typename T>
  __device__ __forceinline__ static uint8_t choose(const Elements<T, kBlock>& x, float amax, const TensorScale& tensor,
                                                   const QuantizeSpec& spec, const Shared& shared, bool tile, uint2&) {
    float v[kBlock];
    separate_values(x, v);
    return search_scale(v, amax, tensor.block_scale(amax, spec.scale_rounding), spec.scale_rounding, shared.table,
                        [=](float sum) { return tile_sum(sum, tile); });
  }
};

// Its error is that of decoded values. What a code decodes to, ((code * s_b) * amax) / (6 * ceiling), depends on the
// scale and the code alone: 127 x 8 values in shared memory, so that an element costs no division but a load. That
// leaves 12 instructions an element and scale, seven of them to find the code.
struct FourOrSix {
  static constexpr int blocks_per_sm(int) { return 3; }
  static constexpr bool kGivesNearest = true;  // codes to nearest, with the scale
  static constexpr int kCodes = 8;             // without the sign

  struct Shared {
    float encode[128];
    float decoded[128 * kCodes];  // of scale s and code c, at s * kCodes + c

    __device__ __forceinline__ void fill(const TensorScale& tensor) {
      fill_encode_table(tensor, encode);
      for (uint32_t i = threadIdx.x; i < kE4M3Nan * kCodes; i += kThreads) {
        const float value = mul(e2m1_value(i % kCodes), e4m3_value(static_cast<uint8_t>(i / kCodes)));
        decoded[i] = div(mul(value, tensor.amax), tensor.range);
      }
    }
    __device__ __forceinline__ float enc(uint8_t s_bits) const { return encode[s_bits]; }
  };

  // A scale of a row's 16 elements, its error (the differences, or their squares, added in order), the codes to
  // nearest.
  struct Candidate {
    uint8_t s_bits;
    float error;
    uint2 codes;  // without signs
  };

  template <bool squared, typename T>
  __device__ __forceinline__ static Candidate candidate(const Elements<T, kBlock>& x, uint8_t s_bits,
                                                        const Shared& shared) {
    // The bits of 2^23 + c, times four, are the place of code c but for a constant.
    const uint32_t coord = static_cast<uint32_t>(__cvta_generic_to_shared(shared.decoded)) + s_bits * kCodes * 4u -
                           float_bits(8388608.0f) * 4u;
    const float enc = shared.enc(s_bits);
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

  // The better of the two scales for a block whose largest magnitude is amax; where it is NaN or Inf both are NaN.
  template <typename T>
  __device__ __forceinline__ static uint8_t choose(const Elements<T, kBlock>& x, float amax, const TensorScale& tensor,
                                                   const QuantizeSpec& spec, const Shared& shared, bool tile,
                                                   uint2& codes) {
    const float base = mul(div(amax, kE2M1Max), tensor.encode);
    const auto better = [&](auto squared) {
      const auto with = [&](float scale) {
        const uint8_t s_bits = is_finite(amax) ? to_e4m3(scale, spec.scale_rounding, amax) : kE4M3Nan;
        Candidate c = candidate<squared.value>(x, s_bits, shared);
        c.error = tile_sum(c.error, tile);
        return c;
      };
      const Candidate six = with(base), four = with(mul(base, 1.5f));
      return four.error < six.error ? four : six;
    };
    const Candidate best = spec.four_over_six == FourOverSix::kSquared ? better(std::true_type{})
                                                                       : better(std::false_type{});
    codes = make_uint2(best.codes.x | x.signs(0), best.codes.y | x.signs(8));
    if (best.s_bits == kE4M3Nan) codes = make_uint2(0u, 0u);
    return best.s_bits;
  }
};

template <typename T, Fast mode, bool tile, typename By>
__global__ void __launch_bounds__(kThreads, By::blocks_per_sm(sizeof(T)))
    quantize_chosen(Matrix x, Quantization how, Codes out) {
  __shared__ typename By::Shared shared;
  const auto load = [&](const RowCoord& coord) {
    if (!coord.inside) return Elements<T, kBlock>::zero();
    return Elements<T, kBlock>::load(element_at<T>(x, coord.row, coord.column * kBlock));
  };
  RowLanes lanes(x, tile, true);
  RowCoord coord = lanes.coord(x);
  auto block = load(coord);  // on its way while the tables are made
  const TensorScale tensor = tensor_scale_by_maxima(how);
  shared.fill(tensor);
  __syncthreads();
  const DrawSource source = draw_source(how, mode != Fast::kNearestEven);
  const uint32_t blocks = static_cast<uint32_t>(x.blocks()), column_tiles = static_cast<uint32_t>(x.column_tiles());
  while (lanes.any()) {
    const RowCoord here = coord;
    const bool has_scale = lanes.at.inside();
    const Elements<T, kBlock> now = block;
    lanes.at.step();
    coord = lanes.coord(x);
    block = load(coord);  // in flight during the rest
    uint32_t most = now.amax_bits();
    if constexpr (tile) {
#pragma unroll
      for (int half = 8; half; half /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, half));
    }
    uint2 codes;
    const uint8_t s_bits = By::choose(now, Elements<T, kBlock>::magnitude_of(most), tensor, how.spec, shared, tile,
                                      codes);
    if (has_scale) out.scale[scale_offset(here.row, here.column, column_tiles)] = here.inside ? s_bits : 0;
    if (!here.inside) continue;
    if constexpr (!By::kGivesNearest || mode != Fast::kNearestEven) {
      codes = encode16<mode>(now, s_bits, shared.enc(s_bits), source, block_number(how.random, here.row, here.column));
    }
    reinterpret_cast<uint2*>(out.qdata)[static_cast<int64_t>(here.row) * blocks + here.column] = codes;
  }
}

template <typename By>
void launch(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  for_dtype(x.dtype, [&](auto type) {
    for_mode(how.spec, [&](auto mode) {
      for_flag(how.spec.block_rows != 1, [&](auto tile) {
        launch_walk<quantize_chosen<decltype(type), mode.value, tile.value, By>, 4>(
            RowLanes::threads(x, how.spec, true), stream, x, how, out);
      });
    });
  });
}

}  // namespace

void launch_quantize_chosen(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  (how.spec.scale_search != ScaleSearch::kNone ? launch<Search> : launch<FourOrSix>)(x, how, out, stream);
}

}  // namespace nvfp4
