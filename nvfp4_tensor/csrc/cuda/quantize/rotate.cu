// EDEN's rotation by itself, forth and back, and the largest magnitude that it makes.
#include "cuda/block/rotation.cuh"

namespace nvfp4 {
namespace {

// What becomes of a lane's rotated elements: all lanes of the warp come to operator() together, all threads to end().
struct ToFloats {
  float* out;

  __device__ __forceinline__ void operator()(const RotationWalk& walk, const float (&v)[kBlock]) {
    if (!walk.at.inside()) return;
    float4* to = reinterpret_cast<float4*>(out + walk.number() * kBlock);
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) to[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  __device__ __forceinline__ void end() {}
};

// Rounded to bfloat16 and cut to `columns`.
struct ToBfloat16 {
  __nv_bfloat16* out;
  uint32_t columns;

  __device__ __forceinline__ void operator()(const RotationWalk& walk, const float (&v)[kBlock]) {
    uint32_t word[2][4];
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      word[i / 8][i % 8 / 2] = to_bfloat16(v[i]) | static_cast<uint32_t>(to_bfloat16(v[i + 1])) << 16;
    }
    // Two neighbouring lanes write 32 contiguous bytes at a time: both of the even lane's halves, then the odd one's.
    const bool odd = walk.part % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? word[0][i] : word[1][i], 1);
      if (odd) {
        word[0][i] = other;
      } else {
        word[1][i] = other;
      }
    }
    if (!walk.at.inside()) return;
    __nv_bfloat16* row = out + static_cast<int64_t>(walk.at.row) * columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t column = ((walk.block() & ~1u) + half) * kBlock + odd * 8;
      if (columns % 8 == 0) {
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
  __device__ __forceinline__ void end() {}
};

struct ToAmax {
  float* out;
  float most = 0.0f;

  __device__ __forceinline__ void operator()(const RotationWalk& walk, const float (&v)[kBlock]) {
    const float here = magnitude_or_nan(v);
    if (!walk.is_broken(is_finite(here))) most = fmaxf(most, here);
  }
  __device__ __forceinline__ void end() { raise(out, float_bits(most)); }
};

template <typename T, bool whole, bool inverse, typename To>
__global__ void __launch_bounds__(kThreads) rotate(Matrix x, Rotation rotation, To to) {
  RotationSigns signs(rotation);
  for (RotationWalk walk(x); walk.any(); walk.at.step()) {
    float v[1][kBlock];
    if constexpr (inverse) {
      load_rotation<T, whole>(x, walk, v[0]);
      walk.butterflies(v);
      signs.apply(walk, v[0]);
    } else {
      load_rotated<T, whole>(x, walk, signs, v);
    }
    to(walk, v[0]);
  }
  to.end();
}

}  // namespace

void launch_rotate(const Matrix& x, const Rotation& rotation, bool inverse, float* out, cudaStream_t stream) {
  if (x.rows * x.columns == 0) return;
  for_matrix(x, [&](auto type, auto whole) {
    for_flag(inverse, [&](auto back) {
      launch_rotations<rotate<decltype(type), whole.value, back.value, ToFloats>>(x, stream, rotation, ToFloats{out});
    });
  });
}

void launch_rotate_back(const Matrix& x, const Rotation& rotation, int64_t columns, void* out, cudaStream_t stream) {
  if (x.rows * columns == 0) return;
  const ToBfloat16 to{static_cast<__nv_bfloat16*>(out), static_cast<uint32_t>(columns)};
  for_dtype(x.dtype, [&](auto type) {
    launch_rotations<rotate<decltype(type), true, true, ToBfloat16>>(x, stream, rotation, to);
  });
}

void launch_amax_rotated(const Matrix& x, const Rotation& rotation, float* out, cudaStream_t stream) {
  launch_clear(out, nullptr, stream);
  if (x.rows * x.columns == 0) return;
  for_matrix(x, [&](auto type, auto whole) {
    launch_rotations<rotate<decltype(type), whole.value, false, ToAmax>>(x, stream, rotation, ToAmax{out});
  });
}

}  // namespace nvfp4
