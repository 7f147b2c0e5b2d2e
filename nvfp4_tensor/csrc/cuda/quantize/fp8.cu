// Operands of an FP8 product in one launch: rows of x and the codes of w to e4m3. A thread block has a row of x, or two
// of w: their largest magnitude decides the exponent before anything is rounded, so a thread keeps its part meanwhile.
//
// The kernel moves bytes: 3 per element of bfloat16 x, 1.6 per code of w. A block of codes is a lookup: the eight
// magnitudes that a code can have, times the block's scale, are eight bytes, and PRMT picks four of them by the
// magnitudes of four codes, the signs likewise: about 2 instructions per code.
#include <algorithm>

#include "cuda/block/block.cuh"
#include "numerics/fp8.h"
#include "numerics/layout.h"

namespace nvfp4 {
namespace {

constexpr int kHeld = 2;  // blocks of 16 that a thread keeps, of each row; further ones are read twice

// The largest v of the thread block, of whole warps, for all of its threads; or of each half of it. Called once.
template <bool halves>
__device__ __forceinline__ uint32_t max_for_all(uint32_t v) {
  __shared__ uint32_t of_warp[kThreads / 32];
  v = halves ? warp_max(v & 0xFFFFu) | warp_max(v >> 16) << 16 : warp_max(v);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp)
    v = halves ? __vmaxu2(v, of_warp[warp]) : max(v, of_warp[warp]);
  return v;
}

// Two float32 to e4m3, a in the low byte, to nearest even.
__device__ __forceinline__ uint32_t e4m3_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
#else
  const auto one = [](float v) { return e4m3_nearest(magnitude(v)) | (v == v ? float_bits(v) >> 31 << 7 : 0u); };
  return one(a) | one(b) << 8;
#endif
}

// --- rows of x -------------------------------------------------------------------------------------------------------

template <typename T, bool whole>
__device__ __forceinline__ Elements<T, kBlock> elements_at(const Matrix& x, uint32_t row, uint32_t block) {
  if constexpr (whole) {
    return Elements<T, kBlock>::load(element_at<T>(x, row, block * kBlock));
  } else {
    Elements<T, kBlock> e = Elements<T, kBlock>::zero();
    const T* from = element_at<T>(x, row, block * kBlock);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (block * kBlock + i >= x.columns) break;
      if constexpr (sizeof(T) == 4) {
        e.word[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
      } else {
        e.word[i / 2] |= static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(from) + i)) << (i % 2 * 16);
      }
    }
    return e;
  }
}

template <typename T>
__device__ __forceinline__ uint4 to_fp8(const Elements<T, kBlock>& e, float inverse) {
  uint32_t word[4];
  const bool finite = e.amax_bits() < kInfinity<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = mul(e.value(4 * i + j), inverse);
      if (!finite && !is_finite(v[j])) v[j] = bits_float(0x7FC00000u);
    }
    word[i] = e4m3_pair(v[0], v[1]) | e4m3_pair(v[2], v[3]) << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T, bool whole>
__device__ __forceinline__ void quantize_row(const Matrix& x, uint32_t row, uint8_t* values, float* scale) {
  const uint32_t blocks = static_cast<uint32_t>(x.blocks());
  Elements<T, kBlock> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t block = threadIdx.x + i * blockDim.x;
    held[i] = Elements<T, kBlock>::zero();
    if (block < blocks) held[i] = elements_at<T, whole>(x, row, block);
  }
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most = max(most, finite_amax_bits(held[i]));
  for (uint32_t block = threadIdx.x + kHeld * blockDim.x; block < blocks; block += blockDim.x) {
    most = max(most, finite_amax_bits(elements_at<T, whole>(x, row, block)));
  }
  const int exponent = fp8_exponent(Elements<T, kBlock>::magnitude_of(max_for_all<false>(most)));
  const float inverse = power_of_two(-exponent);
  if (threadIdx.x == 0) scale[row] = power_of_two(exponent);
  uint4* to = reinterpret_cast<uint4*>(values) + static_cast<int64_t>(row) * blocks;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t block = threadIdx.x + i * blockDim.x;
    if (block < blocks) to[block] = to_fp8<T>(held[i], inverse);
  }
  for (uint32_t block = threadIdx.x + kHeld * blockDim.x; block < blocks; block += blockDim.x) {
    to[block] = to_fp8<T>(elements_at<T, whole>(x, row, block), inverse);
  }
}

// --- the codes of a weight -------------------------------------------------------------------------------------------

constexpr int kRows = 2;  // of a thread block: an even row and the next have their scales 16 bytes apart

// The magnitudes that codes 0..7 have in a block, e4m3, in eight bytes. s: the block's scale times 2^-p.
__device__ __forceinline__ uint2 magnitudes_of_codes(float s) {
  const uint32_t low = e4m3_pair(mul(0.0f, s), mul(0.5f, s)), one = e4m3_pair(s, mul(1.5f, s));
  const uint32_t two = e4m3_pair(mul(2.0f, s), mul(3.0f, s)), four = e4m3_pair(mul(4.0f, s), mul(6.0f, s));
  return make_uint2(low | one << 16, two | four << 16);
}

// Eight codes to eight e4m3 bytes.
__device__ __forceinline__ uint2 lookup(uint2 table, uint32_t codes) {
  const uint32_t magnitudes = codes & 0x77777777u, signs = codes >> 3 & 0x11111111u;
  return make_uint2(__byte_perm(table.x, table.y, magnitudes) | __byte_perm(0x00008000u, 0, signs),
                    __byte_perm(table.x, table.y, magnitudes >> 16) | __byte_perm(0x00008000u, 0, signs >> 16));
}

__device__ __forceinline__ void decode_rows(const Quantized& w, uint32_t row, uint8_t* values, float* factor) {
  const uint32_t blocks = static_cast<uint32_t>(w.blocks), last = static_cast<uint32_t>(w.rows) - 1;
  const uint32_t tiles = (blocks + kTileColumns - 1) / kTileColumns;
  const uint8_t* scales = w.scale + scale_offset(row, 0, tiles);
  const auto scale_of = [&](int i, uint32_t block) {
    return uint32_t{__ldg(scales + i * kTileBytes / 32 + block / kTileColumns * kTileBytes + block % kTileColumns)};
  };
  const auto codes_of = [&](int i, uint32_t block) {
    // The last row again where there is no second: under a condition its loads would wait for the first row's store.
    return __ldg(reinterpret_cast<const uint2*>(w.qdata) + (static_cast<int64_t>(min(row + i, last)) * blocks + block));
  };
  uint2 codes[kHeld][kRows];
  uint32_t s[kHeld][kRows], most = 0;  // of both rows, in halves
  const auto compare = [&](int i, uint32_t scale) {
    if (scale < kE4M3Nan) most = __vmaxu2(most, scale << (16 * i));
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const uint32_t block = threadIdx.x + j * blockDim.x;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      codes[j][i] = make_uint2(0, 0), s[j][i] = 0;
      if (block < blocks) codes[j][i] = codes_of(i, block), s[j][i] = scale_of(i, block);
    }
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) compare(0, s[j][0]), compare(1, s[j][1]);
  for (uint32_t block = threadIdx.x + kHeld * blockDim.x; block < blocks; block += blockDim.x) {
    compare(0, scale_of(0, block)), compare(1, scale_of(1, block));
  }
  most = max_for_all<true>(most);
  float inverse[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int exponent = fp8_weight_exponent(static_cast<uint8_t>(most >> (16 * i)));
    inverse[i] = power_of_two(-exponent);
    if (threadIdx.x == 0 && row + i <= last) {
      factor[row + i] = mul(w.per_tensor_scale[w.per_row ? row + i : 0], power_of_two(exponent));
    }
  }
  const auto decode = [&](int i, uint32_t block, uint2 of_block, uint32_t scale) {
    // From 0x80 on, which no kernel of ours writes, a byte means NaN, where the conversion would see a sign.
    const float s_b = e4m3_value(static_cast<uint8_t>(min(scale, uint32_t{kE4M3Nan})));
    const uint2 table = magnitudes_of_codes(mul(s_b, inverse[i]));
    const uint2 a = lookup(table, of_block.x), b = lookup(table, of_block.y);
    if (row + i > last) return;
    reinterpret_cast<uint4*>(values)[static_cast<int64_t>(row + i) * blocks + block] = make_uint4(a.x, a.y, b.x, b.y);
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const uint32_t block = threadIdx.x + j * blockDim.x;
    if (block < blocks) decode(0, block, codes[j][0], s[j][0]), decode(1, block, codes[j][1], s[j][1]);
  }
  for (uint32_t block = threadIdx.x + kHeld * blockDim.x; block < blocks; block += blockDim.x) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) decode(i, block, codes_of(i, block), scale_of(i, block));
  }
}

// --- both ------------------------------------------------------------------------------------------------------------

// Rows of x come first: 54.0 us where pairs of rows of w first took 57.0 (14336 x 8192, 1024 rows, H200).
template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads)
    fp8_operands(const Matrix x, const Quantized w, const Fp8 to_x, const Fp8 to_w) {
  const uint32_t x_rows = static_cast<uint32_t>(x.rows);
  if (blockIdx.x < x_rows) {
    quantize_row<T, whole>(x, blockIdx.x, to_x.values, to_x.factor);
  } else {
    decode_rows(w, (blockIdx.x - x_rows) * kRows, to_w.values, to_w.factor);
  }
}

}  // namespace

void launch_fp8_operands(const Matrix& x, const Quantized& w, const Fp8& to_x, const Fp8& to_w, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(ceil_div(w.rows, kRows) + x.rows);
  if (grid == 0) return;
  const int64_t blocks = std::max(x.blocks(), w.blocks);
  const unsigned threads = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(blocks, 32) * 32, 32, kThreads));
  for_matrix(x, [&](auto type, auto whole) {
    fp8_operands<decltype(type), whole.value><<<grid, threads, 0, stream>>>(x, w, to_x, to_w);
  });
}

}  // namespace nvfp4
