// EDEN's rotation by itself, forth and back, and the largest magnitude that it makes.
#include "cuda/block/rotation.cuh"

namespace nvfp4 {
namespace {

template <typename T, bool whole, bool inverse>
__global__ void __launch_bounds__(kThreads)
    rotate(Matrix x, const int64_t* rng_state, int64_t first_group, float* out) {
  RotationSigns signs(rng_state, first_group);
  for (RotationWalk walk(x.rows, ceil_div(x.columns, kRotation)); walk.any(); walk.at.step()) {
    float v[kBlock];
    if constexpr (inverse) {
      load_rotation<T, whole>(x, walk, v);
      butterflies(v, walk.block);
      signs.move_to(walk.at.column, walk.block);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] = mul(v[i], signs.factor[i]);
    } else {
      load_rotated<T, whole>(x, walk, signs, v);
    }
    if (!walk.at.inside()) continue;
    const int64_t group = static_cast<int64_t>(walk.at.row) * walk.at.width + walk.at.column;
    float4* to = reinterpret_cast<float4*>(out + (group * kRotationBlocks + walk.block) * kBlock);
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) to[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
}

// The rotation taken back and rounded to bfloat16, of whole rotations, cut to `columns`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotate_back(Matrix x, const int64_t* rng_state, int64_t first_group, uint32_t columns, __nv_bfloat16* out) {
  RotationSigns signs(rng_state, first_group);
  const bool whole_chunks = columns % 8 == 0;
  for (RotationWalk walk(x.rows, x.columns / kRotation); walk.any(); walk.at.step()) {
    float v[kBlock];
    load_rotation<T, true>(x, walk, v);
    butterflies(v, walk.block);
    signs.move_to(walk.at.column, walk.block);
    uint32_t word[2][4];
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      word[i / 8][i % 8 / 2] = to_bfloat16(mul(v[i], signs.factor[i])) |
                               static_cast<uint32_t>(to_bfloat16(mul(v[i + 1], signs.factor[i + 1]))) << 16;
    }
    // Two neighbouring lanes write 32 contiguous bytes at a time: both of the even lane's halves, then the odd one's.
    const bool odd = walk.block % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? word[0][i] : word[1][i], 1);
      if (odd) {
        word[0][i] = other;
      } else {
        word[1][i] = other;
      }
    }
    if (!walk.at.inside()) continue;
    __nv_bfloat16* row = out + static_cast<int64_t>(walk.at.row) * columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t block = walk.at.column * kRotationBlocks + (walk.block & ~1u) + half;
      const uint32_t column = block * kBlock + odd * 8;
      if (whole_chunks) {
        if (column < columns) {
          *reinterpret_cast<uint4*>(row + column) = make_uint4(word[half][0], word[half][1], word[half][2],
                                                               word[half][3]);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint16_t bits = static_cast<uint16_t>(word[half][i / 2] >> (i % 2 * 16));
        if (column + i < columns) memcpy(row + column + i, &bits, 2);
      }
    }
  }
}

template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads)
    amax_rotated(Matrix x, const int64_t* rng_state, int64_t first_group, float* out) {
  RotationSigns signs(rng_state, first_group);
  float most = 0.0f;
  for (RotationWalk walk(x.rows, ceil_div(x.columns, kRotation)); walk.any(); walk.at.step()) {
    float v[kBlock];
    load_rotated<T, whole>(x, walk, signs, v);
    const float here = magnitude_or_nan(v);
    if (!is_broken(here)) most = fmaxf(most, here);
  }
  raise(out, float_bits(most));
}

}  // namespace

void launch_rotate(const Matrix& x, const int64_t* rng_state, int64_t first_group, bool inverse, float* out,
                   cudaStream_t stream) {
  if (x.rows * x.columns == 0) return;
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto whole) {
      if (inverse) {
        launch_rotations<rotate<T, whole.value, true>>(x, stream, rng_state, first_group, out);
      } else {
        launch_rotations<rotate<T, whole.value, false>>(x, stream, rng_state, first_group, out);
      }
    };
    x.whole_blocks() ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

void launch_rotate_back(const Matrix& x, const int64_t* rng_state, int64_t first_group, int64_t columns, void* out,
                        cudaStream_t stream) {
  if (x.rows * columns == 0) return;
  for_dtype(x.dtype, [&](auto type) {
    launch_rotations<rotate_back<decltype(type)>>(x, stream, rng_state, first_group, static_cast<uint32_t>(columns),
                                                  static_cast<__nv_bfloat16*>(out));
  });
}

void launch_amax_rotated(const Matrix& x, const int64_t* rng_state, int64_t first_group, float* out,
                         cudaStream_t stream) {
  launch_clear(out, nullptr, stream);
  if (x.rows * x.columns == 0) return;
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    if (x.whole_blocks()) {
      launch_rotations<amax_rotated<T, true>>(x, stream, rng_state, first_group, out);
    } else {
      launch_rotations<amax_rotated<T, false>>(x, stream, rng_state, first_group, out);
    }
  });
}

}  // namespace nvfp4
