// quantize by EDEN: rotated, rounded to nearest, and the block scales rounded stochastically about what makes the whole
// unbiased. A lane has a block of 16, eight lanes a rotation, whose sums go by shuffles; nothing leaves the registers
// but codes and scales. About 35 instructions an element, three of them shuffles, of which a multiprocessor has a
// quarter.
#include "cuda/block/eden.cuh"
#include "cuda/block/rotation.cuh"

namespace nvfp4 {
namespace {

// The scales of four neighbouring blocks of a row are four neighbouring bytes.
__device__ __forceinline__ void store_scale(uint8_t* scale, uint32_t s_bits, const RotationWalk& walk) {
  uint32_t word = s_bits << (8 * (walk.block % kTileColumns));
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  if (!walk.at.inside() || walk.block % kTileColumns) return;
  const uint32_t column = walk.at.column * kRotationBlocks + walk.block;
  const uint32_t column_tiles = walk.at.width * (kRotationBlocks / kTileColumns);
  *reinterpret_cast<uint32_t*>(scale + scale_offset(walk.at.row, column, column_tiles)) = word;
}

template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_eden(Matrix x, Quantization how, int64_t first_group, Codes out) {
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  const float* enc = encode_table(tensor);
  const EdenScale scale = EdenScale::of(tensor);
  const int64_t* state = how.random.rng_state;
  const RandomKey key = RandomKey::of(state[0], state[1], static_cast<int>(kScaleStream) + how.random.stream);
  RotationSigns signs(state, first_group);
  for (RotationWalk walk(x.rows, ceil_div(x.columns, kRotation)); walk.any(); walk.at.step()) {
    float y[kBlock];
    load_rotated<T, whole>(x, walk, signs, y);
    const float most = magnitude_or_nan(y);
    const bool broken = is_broken(most) || scale.no_amax;
    const uint8_t first_bits = e4m3_nearest(mul(most, scale.onto_grid));
    const float s1 = e4m3_value(first_bits);
    EdenSums sums;
    const uint2 codes = eden_codes(y, s1, enc[first_bits], scale.encode, sums);
    const float t = corrected_scale(s1, rotation_sum(sums.a), rotation_sum(sums.b));
    const uint64_t number = block_number(how.random, walk.at.row, walk.at.column);
    const uint32_t draw = bits_of_block(key.block_words(number), walk.block);
    store_scale(out.scale, broken ? kE4M3Nan : round_scale(t, draw), walk);
    if (!walk.at.inside()) continue;
    const int64_t group = static_cast<int64_t>(walk.at.row) * walk.at.width + walk.at.column;
    reinterpret_cast<uint2*>(out.qdata)[group * kRotationBlocks + walk.block] = broken ? make_uint2(0u, 0u) : codes;
  }
}

}  // namespace

void launch_quantize_eden(const Matrix& x, const Quantization& how, int64_t first_group, const Codes& out,
                          cudaStream_t stream) {
  for_dtype(x.dtype, [&](auto type) {
    using T = decltype(type);
    if (x.whole_blocks()) {
      launch_rotations<quantize_eden<T, true>>(x, stream, how, first_group, out);
    } else {
      launch_rotations<quantize_eden<T, false>>(x, stream, how, first_group, out);
    }
  });
}

}  // namespace nvfp4
