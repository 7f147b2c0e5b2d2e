// quantize by EDEN: rotated, rounded to nearest, and the block scales rounded stochastically about what makes the whole
// unbiased. A lane has a block of 16, eight lanes a rotation, whose sums go by shuffles; nothing leaves the registers
// but codes and scales. About 35 instructions an element, three of them shuffles, of which a multiprocessor has a
// quarter.
#include "cuda/block/eden.cuh"

namespace nvfp4 {
namespace {

// The scales of four neighbouring blocks of a row are four neighbouring bytes.
__device__ __forceinline__ void store_scale(uint8_t* scale, uint32_t s_bits, const RotationWalk& walk) {
  uint32_t word = s_bits << (8 * (walk.part % kTileColumns));
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  word |= __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  if (!walk.at.inside() || walk.part % kTileColumns) return;
  const uint32_t column_tiles = walk.at.width * (kRotationBlocks / kTileColumns);
  *reinterpret_cast<uint32_t*>(scale + scale_offset(walk.at.row, walk.block(), column_tiles)) = word;
}

template <typename T, bool whole>
__global__ void __launch_bounds__(kThreads, 3) quantize_eden(Matrix x, Quantization how, Codes out) {
  write_per_tensor_scale(how);
  const TensorScale tensor = tensor_scale(how);
  const float* enc = encode_table(tensor);
  const EdenScale scale = EdenScale::of(tensor);
  const int64_t* state = how.random.rng_state;
  const RandomKey key = RandomKey::of(state[0], state[1], static_cast<int>(kScaleStream) + how.random.stream);
  RotationSigns signs({state, how.random.first_group});
  for (RotationWalk walk(x); walk.any(); walk.at.step()) {
    float y[1][kBlock];
    load_rotated<T, whole>(x, walk, signs, y);
    const auto rounded = round_lane<false>(walk, y, scale, enc, [&](int) {
      return bits_of_block(key.block_words(block_number(how.random, walk.at.row, walk.at.column)), walk.part);
    });
    store_scale(out.scale, rounded.s_bits[0], walk);
    if (walk.at.inside()) reinterpret_cast<uint2*>(out.qdata)[walk.number()] = rounded.codes[0];
  }
}

}  // namespace

void launch_quantize_eden(const Matrix& x, const Quantization& how, const Codes& out, cudaStream_t stream) {
  for_matrix(x, [&](auto type, auto whole) {
    launch_rotations<quantize_eden<decltype(type), whole.value>>(x, stream, how, out);
  });
}

}  // namespace nvfp4
