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
