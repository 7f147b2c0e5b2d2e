// nvfp4.append_codes on the CPU: new keys and values to codes, each row with a power of two of its own.
#include "cpu/attention/codes.h"
#include "cpu/host/instruction_set.h"
#include "cpu/host/memory.h"
#include "numerics/e4m3.h"

namespace nvfp4 {
namespace {

constexpr int64_t kChunkTokens = 64;  // of one head, quantized at a time
constexpr int64_t kElementsPerThread = 1 << 14;
constexpr int kBias = 127;  // of e8m0

float float_of(const void* x, int64_t i, Dtype dtype) {
  if (dtype == Dtype::kFloat) return static_cast<const float*>(x)[i];
  if (dtype == Dtype::kBf16) return nvfp4::float_of(static_cast<const Bf16*>(x)[i]);
  return nvfp4::float_of(static_cast<const Fp16*>(x)[i]);
}

// The exponent of a row's factor, which moves the largest finite magnitude into the binade below the top of what one
// tensor's scales reach.
int exponent_of(const float* x, int64_t size, int top) {
  uint32_t most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7FFFFFFF;
    if (magnitude < 0x7F800000 && magnitude > most) most = magnitude;
  }
  int exponent = int(most >> 23) - 127;
  if (most < 0x00800000) exponent = most ? 31 - __builtin_clz(most) - 149 : -1;  // frexp of 0 is 0
  return std::clamp(exponent - top, -126, 126);
}

// Tokens of one head, in pieces.
struct Appended {
  const char* x;
  int64_t stride;  // bytes from token to token
  Dtype dtype;
  int64_t size, blocks;
  Stretch to;  // at the first new token
  bool is_rotated;
};

// A row of a head times H / n, for each n = rotation_size() elements: butterflies over distances 1, 2, 4, ...
void rotate(float* row, int64_t size) {
  const int64_t count = rotation_size(size);
  for (int64_t i = 0; i < size; ++i) row[i] *= 1.0f / float(count);
  for (int64_t distance = 1; distance < count; distance *= 2) {
    for (int64_t block = 0; block < size; block += 2 * distance) {
      for (float* low = row + block; low < row + block + distance; ++low) {
        const float x = low[0], y = low[distance];
        low[0] = x + y, low[distance] = x - y;
      }
    }
  }
}

struct Quantizer {
  Plan plan{};
  int top;

  explicit Quantizer(int64_t bits) {
    plan.spec = spec_of(bits);
    const float largest = mul(kE2M1Max, plan.spec.scale_ceiling);
    plan.tensor = TensorScale::of(largest, plan.spec.scale_ceiling);  // whose per-tensor scale is 1
    top = int(float_bits(largest) >> 23) - 127 - 1;
  }

  // Tokens [first, first + count) of a head. memory: kChunkTokens * size floats.
  void run(const Appended& a, int64_t first, int64_t count, float* memory) const {
    uint8_t* factors = const_cast<uint8_t*>(a.to.factors) + first;
    for (int64_t t = 0; t < count; ++t) {
      const char* from = a.x + (first + t) * a.stride;
      float* row = memory + t * a.size;
      for (int64_t i = 0; i < a.size; ++i) row[i] = float_of(from, i, a.dtype);
      if (a.is_rotated) rotate(row, a.size);
      const int exponent = exponent_of(row, a.size, top);
      const float power = bits_float(uint32_t(kBias - exponent) << 23);
      for (int64_t i = 0; i < a.size; ++i) row[i] *= power;
      factors[t] = uint8_t(exponent + kBias);
    }
    const Matrix m{memory, count, a.size, a.size, Dtype::kFloat};
    Plan own = plan;
    own.row_blocks = m.blocks();
    std::vector<uint8_t> scales(ceil_div(count, kTileRows) * m.column_tiles() * kTileRows * kTileColumns);
    uint8_t* codes = const_cast<uint8_t*>(a.to.codes) + first * a.blocks * 8;
    kernels().quantize(m, own, {codes, scales.data(), m.column_tiles()}, 0, ceil_div(count * a.blocks, kGroupBlocks));
    uint8_t* linear = const_cast<uint8_t*>(a.to.scales) + first * a.blocks;
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t b = 0; b < a.blocks; ++b) {
        linear[t * a.blocks + b] = scales[scale_offset(t, b, m.column_tiles())];
      }
    }
  }
};

std::vector<Appended> heads_of(const Tensor& x, const CodedHeads& out, const int64_t* starts, bool is_rotated) {
  std::vector<Appended> all;
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t head = 0; head < x.size(1); ++head) {
      const int64_t element = x.element_size();
      Stretch to = stretch_of(out, b * out.heads + head);
      to.codes += starts[b] * out.blocks * 8, to.scales += starts[b] * out.blocks, to.factors += starts[b];
      all.push_back({static_cast<const char*>(x.const_data_ptr()) + (b * x.stride(0) + head * x.stride(1)) * element,
                     x.stride(2) * element, dtype_of(x.scalar_type(), "x"), x.size(3), out.blocks, to, is_rotated});
    }
  }
  return all;
}

void append_codes(const Tensor& keys, const Tensor& values, int64_t spec, const Tensor& key_codes,
                  const Tensor& key_scale, const Tensor& key_factor, const Tensor& value_codes,
                  const Tensor& value_scale, const Tensor& value_factor, const Tensor& starts, bool rotate) {
  const AppendArguments a(keys, values, spec, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor,
                          starts, rotate);
  const Quantizer quantizer(spec);
  const int64_t* first = static_cast<const int64_t*>(a.starts.const_data_ptr());
  for (int64_t b = 0; b < a.key_out.batch; ++b) {
    NVFP4_CHECK(first[b] >= 0 && first[b] <= a.key_out.capacity - a.tokens, a.tokens, " tokens from ", first[b],
                " on do not fit into a capacity of ", a.key_out.capacity);
  }
  std::vector<Appended> heads = heads_of(a.keys, a.key_out, first, rotate),
                        more = heads_of(a.values, a.value_out, first, false);
  heads.insert(heads.end(), more.begin(), more.end());
  const int64_t chunks = ceil_div(a.tokens, kChunkTokens), most = std::max(keys.size(3), values.size(3));
  const auto work = [&](int64_t begin, int64_t end) {
    const AlignedFloats memory = allocate(kChunkTokens * most);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t token = unit % chunks * kChunkTokens;
      quantizer.run(heads[unit / chunks], token, std::min(kChunkTokens, a.tokens - token), memory.get());
    }
  };
  const int64_t units = chunks * int64_t(heads.size());
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (std::min(kChunkTokens, a.tokens + 1) * most));
  parallel(units, grain, work);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CPU, m) { m.impl("append_codes", TORCH_BOX(&append_codes)); }

}  // namespace nvfp4
