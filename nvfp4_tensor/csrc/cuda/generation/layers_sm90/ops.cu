// torch.ops.nvfp4.decode_layers on CUDA, and its plan: descriptors of the weights and scratch, made once for a model.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "attention.h"
#include "cuda/attention/append.cuh"
#include "cuda/generation/layers_sm90/kernel.cuh"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tensors.h"

namespace nvfp4 {
namespace {

using namespace layers_sm90;
using Tensors = std::vector<Tensor>;

constexpr int kCodesOfLayer = 6;  // codes, block scales and factors of keys, and of values
constexpr int kAppendThreads = 128;
// Of codes, for four queries of a head: with more room the kernels of a cache of codes are faster than one for all
// layers (docs/design/generation.md).
constexpr int64_t kMostCodedTokens = 98304;
constexpr int64_t kMostDenseTokens = 256;  // beside codes: one block of a head attends to all of them

struct Sizes {
  int64_t layers, columns, inner, heads, kv_heads, dim, length;
  int64_t capacity, front;  // of a cache of codes, which has a capacity
  bool has_codes() const { return capacity > 0; }
  int64_t inner_of(int phase) const { return phase == kOut ? heads * dim : phase == kDown ? inner : columns; }
  int64_t units(int phase) const { return ceil_div(inner_of(phase), static_cast<int64_t>(kUnitElements)); }
  int64_t items(int phase) const {
    const int64_t rows = phase == kQkv ? (heads + 2 * kv_heads) * dim : phase == kGateUp ? inner : columns;
    return rows / layers_sm90::kTileRows;
  }
};

// Where each part of a plan begins, in bytes.
struct Parts {
  int64_t hidden[2], qkv, attended, act, partials, launches, end;

  Parts(const Sizes& z, int64_t splits) {
    int64_t at = z.layers * static_cast<int64_t>(sizeof(Layer));
    const auto take = [&](int64_t bytes) {
      const int64_t begin = at;
      at += ceil_div(bytes, int64_t{256}) * 256;
      return begin;
    };
    hidden[0] = take(z.columns * 4), hidden[1] = take(z.columns * 4);
    qkv = take((z.heads + 2 * z.kv_heads) * z.dim * 4);
    attended = take(z.units(kOut) * kUnitElements * 4);
    act = take(z.units(kDown) * kUnitElements * 4);
    partials = take(splits * z.heads * (z.dim / 2 + 1) * 16);
    launches = take(4);
    end = at;
  }
};

struct Grid {
  int blocks, splits, depth, x_bytes, shared_bytes;

  explicit Grid(const Sizes& z) {
    const Machine& machine = this_machine();
    blocks = machine.multiprocessors;
    splits = static_cast<int>(std::clamp<int64_t>(blocks / std::max<int64_t>(z.kv_heads, 1), 1, kMostSplits));
    const int dim = static_cast<int>(z.dim);
    int64_t most = z.has_codes() ? coded_attention_bytes(dim) : attention_bytes(dim);
    for (int phase = 0; phase < kPhases; ++phase) most = std::max(most, z.units(phase) * kUnitElements * 2);
    x_bytes = static_cast<int>(ceil_div(most, int64_t{128}) * 128);
    const auto bytes = [&](int count) { return static_cast<int>(Layout(0, count, x_bytes).end()) + 1024; };
    depth = 6;
    while (depth > 0 && bytes(depth) + kStaticBytes > machine.shared_bytes) --depth;
    shared_bytes = bytes(depth);
  }
};

bool is_aligned(const Tensor& t, size_t bytes) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0; }

bool is_bf16(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 && t.is_cuda() && t.is_contiguous() && is_aligned(t, 16);
}

// What the layers consist of, and their cache.
struct Given {
  const Tensors &norms, &qdata, &scales, &factors, &biases, &head_norms, &keys, &values, &codes, &front;
};

// Whether a cache of codes is one, beside keys and values that are its ring; its sizes to z.
bool takes_codes(const Given& in, size_t layers, Sizes& z) {
  const Tensors &codes = in.codes, &front = in.front;
  if (codes.empty()) return front.empty();
  if (codes.size() != kCodesOfLayer * layers || (!front.empty() && front.size() != 2 * layers) || z.length < 2) {
    return false;
  }
  z.capacity = codes[0].dim() == 4 ? codes[0].size(2) : 0;
  z.front = front.empty() || front[0].dim() != 4 ? 0 : front[0].size(2);
  if (z.capacity == 0 || z.capacity % attention::kCodeTile != 0 || z.front + z.length > kMostDenseTokens) return false;
  for (size_t i = 0; i < codes.size(); ++i) {
    const Tensor& t = codes[i];
    const int64_t bytes = i % 3 == 0 ? z.dim / 2 : i % 3 == 1 ? z.dim / kBlock : 1;
    const bool is_shaped = t.dim() == (i % 3 == 2 ? 3 : 4) && t.size(0) == 1 && t.size(1) == z.kv_heads &&
                           t.size(2) == z.capacity && t.numel() == z.kv_heads * z.capacity * bytes;
    if (!is_shaped || t.scalar_type() != ScalarType::Byte || !t.is_cuda() || !t.is_contiguous() || !is_aligned(t, 16)) {
      return false;
    }
  }
  return std::all_of(front.begin(), front.end(), [&](const Tensor& t) {
    return is_bf16(t) && t.dim() == 4 && t.size(0) == 1 && t.size(1) == z.kv_heads && t.size(2) == z.front &&
           t.size(3) == z.dim;
  });
}

// Sizes of the model, or a layer count of 0 where the kernel does not take it.
Sizes sizes_of(const Given& in) {
  const auto& [norms, qdata, scales, factors, biases, head_norms, keys, values, codes, front] = in;
  Sizes z = {};
  const size_t layers = keys.size();
  if (layers == 0 || values.size() != layers || norms.size() != 2 * layers + 1 || qdata.size() != kWeights * layers ||
      scales.size() != qdata.size() || factors.size() != qdata.size() ||
      (!biases.empty() && biases.size() != 3 * layers) || (!head_norms.empty() && head_norms.size() != 2 * layers)) {
    return z;
  }
  const auto all = [](const Tensors& list, const auto& holds) { return std::all_of(list.begin(), list.end(), holds); };
  const Tensor& key = keys[0];
  if (key.dim() != 4 || key.size(0) != 1 || !all(norms, is_bf16) || !all(biases, is_bf16) ||
      !all(head_norms, is_bf16)) {
    return z;
  }
  const auto like_key = [&](const Tensor& t) {
    return is_bf16(t) && t.dim() == 4 && t.size(0) == 1 && t.size(1) == key.size(1) && t.size(2) == key.size(2) &&
           t.size(3) == key.size(3);
  };
  const auto is_factor = [](const Tensor& t) { return t.numel() == 1 && t.scalar_type() == ScalarType::Float; };
  const auto fits_tma = [](const Tensor& t) { return t.is_cuda() && t.is_contiguous() && is_aligned(t, 16); };
  if (!all(keys, like_key) || !all(values, like_key) || !all(factors, is_factor) || !all(qdata, fits_tma) ||
      !all(scales, fits_tma) || key.size(2) == 0) {
    return z;
  }
  z.columns = norms[0].numel(), z.kv_heads = key.size(1), z.length = key.size(2), z.dim = key.size(3);
  if ((z.dim != 64 && z.dim != 128) || z.kv_heads == 0 || z.columns == 0 || !takes_codes(in, layers, z)) return z;
  z.heads = qdata[kQ].size(0) / z.dim, z.inner = qdata[kGate].size(0);
  const int64_t rows[kWeights] = {z.heads * z.dim, z.kv_heads * z.dim, z.kv_heads * z.dim, z.columns, z.inner,
                                  z.inner,         z.columns};
  const int64_t columns[kWeights] = {z.columns, z.columns, z.columns, z.heads * z.dim, z.columns, z.columns, z.inner};
  for (size_t i = 0; i < qdata.size(); ++i) {
    const int64_t n = rows[i % kWeights], k = columns[i % kWeights];
    if (qdata[i].dim() != 2 || qdata[i].size(0) != n || qdata[i].size(1) * 2 != k || n % 128 || k % 64 ||
        scales[i].numel() != n * (k / 16)) {
      return z;
    }
  }
  const bool same = all(norms, [&](const Tensor& t) { return t.numel() == z.columns; }) &&
                    all(head_norms, [&](const Tensor& t) { return t.numel() == z.dim; });
  const int64_t group = z.heads / z.kv_heads;
  const Machine& machine = this_machine();
  if (group == 0 || z.capacity > kMostCodedTokens / ceil_div(group, int64_t{kHeadsAtOnce})) return z;
  if (!same || z.heads % z.kv_heads || group > kMostGroup || z.kv_heads > machine.multiprocessors ||
      machine.capability < 90 || tensor_map_encoder() == nullptr || Grid(z).depth < 3) {
    return z;
  }
  for (size_t i = 0; i < biases.size(); ++i) {
    if (biases[i].numel() != rows[i % 3]) return z;
  }
  z.layers = static_cast<int64_t>(layers);
  return z;
}

// Units of 256 columns that one copy brings: a power of two, at most a stage; 0 where K is no multiple of units.
int box_of(int64_t columns) {
  if (columns % kUnitElements != 0) return 0;
  return static_cast<int>(std::gcd(columns / kUnitElements, int64_t{kWarps}));
}

// The maps of a weight (N, K): a box has 16 rows, r + 32 i, of one unit or of several, one unit behind the other.
few_rows_sm90::Maps maps_of(const Tensor& qdata, const Tensor& scale) {
  using u64 = cuuint64_t;
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  constexpr u64 kUnit = kUnitElements / 2;
  const u64 row = qdata.size(1), bands = qdata.size(0) / 128, groups = row / 32;
  const cuuint32_t box = box_of(row * 2), units = std::max(box, 1u);
  return {tensor_map<5>(qdata.const_data_ptr(), kBytes, {box ? kUnit : row, 32, 4, box ? row / kUnit : 1, bands},
                        {row, row * 32, kUnit, row * 128}, {kUnit, 4, 4, units, 1}, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
          tensor_map<3>(scale.const_data_ptr(), kBytes, {512, groups, bands}, {512, groups * 512},
                        {64, units * (kUnitElements / 64), 1}, CU_TENSOR_MAP_SWIZZLE_NONE,
                        CU_TENSOR_MAP_L2_PROMOTION_NONE)};
}

Tensor decode_layers_plan(const Tensor& x, const Tensors& norms, const Tensors& qdata, const Tensors& scales,
                          const Tensors& per_tensor_scales, const Tensors& biases, const Tensors& head_norms,
                          const Tensors& keys, const Tensors& values, const Tensors& codes, const Tensors& front) {
  const OnDeviceOf device(x);
  const Sizes z = sizes_of({norms, qdata, scales, per_tensor_scales, biases, head_norms, keys, values, codes, front});
  if (z.layers == 0) return empty({0}, ScalarType::Byte, x);
  std::vector<Layer> layers(z.layers);
  const auto bf16 = [](const Tensor& t) { return static_cast<const __nv_bfloat16*>(t.const_data_ptr()); };
  for (int64_t i = 0; i < z.layers; ++i) {
    Layer& its = layers[i];
    std::memset(&its, 0, sizeof(Layer));
    for (int w = 0; w < kWeights; ++w) {
      its.maps[w] = maps_of(qdata[i * kWeights + w], scales[i * kWeights + w]);
      its.factors[w] = static_cast<const float*>(per_tensor_scales[i * kWeights + w].const_data_ptr());
    }
    for (int j = 0; j < 3 && !biases.empty(); ++j) its.biases[j] = bf16(biases[i * 3 + j]);
    for (int j = 0; j < 2; ++j) its.norms[j] = bf16(norms[i * 2 + j]);
    for (int j = 0; j < 2 && !head_norms.empty(); ++j) its.head_norms[j] = bf16(head_norms[i * 2 + j]);
    its.keys = static_cast<__nv_bfloat16*>(keys[i].mutable_data_ptr());
    its.values = static_cast<__nv_bfloat16*>(values[i].mutable_data_ptr());
    for (int j = 0; j < 2 && z.has_codes(); ++j) {
      const auto bytes = [&](int part) {
        return static_cast<uint8_t*>(codes[i * kCodesOfLayer + 3 * j + part].mutable_data_ptr());
      };
      its.coded[j] = {bytes(0), bytes(1), bytes(2)};
      if (!front.empty()) its.front[j] = bf16(front[2 * i + j]);
    }
  }
  const Parts parts(z, Grid(z).splits);
  const cudaStream_t stream = current_stream(x);
  Tensor plan = empty({parts.end}, ScalarType::Byte, x);
  cudaMemsetAsync(plan.mutable_data_ptr(), 0, parts.end, stream);
  cudaMemcpyAsync(plan.mutable_data_ptr(), layers.data(), layers.size() * sizeof(Layer), cudaMemcpyHostToDevice,
                  stream);
  cudaStreamSynchronize(stream);
  check_launched("nvfp4::decode_layers_plan");
  return plan;
}

// The oldest token of each layer's ring to codes: what the layers write and read of both is elsewhere. Grid (blocks
// that append keys, as many that append values; layers).
__global__ void __launch_bounds__(kAppendThreads)
    append_oldest_kernel(const __grid_constant__ attention::AppendCodes of_layer, const Layer* layers) {
#if NVFP4_LARGE_SHARED_MEMORY
  __shared__ attention::AppendShared shared;
  shared.fill(of_layer.spec);
  const int blocks = gridDim.x / 2, which = blockIdx.x / blocks;
  const Layer& layer = layers[blockIdx.y];
  attention::AppendCodes p = of_layer;
  const int64_t start = *p.position - (p.ring - 1);
  p.starts = &start;
  p.x[which].data = which ? layer.values : layer.keys;
  p.out[which] = layer.coded[which];
  attention::append_codes<__nv_bfloat16>(p, which, blockIdx.x % blocks * kAppendThreads + threadIdx.x, shared);
#endif
}

void launch_append(const Step& s, const Sizes& z, const QuantizeSpec& spec, cudaStream_t stream) {
  attention::AppendCodes p = {};
  p.dtype = Dtype::kBf16, p.spec = spec, p.rotates = s.is_rotated;
  p.batch = 1, p.kv_heads = s.kv_heads, p.tokens = 1, p.capacity = s.capacity;
  p.ring = s.length, p.position = s.position;
  for (int i = 0; i < 2; ++i) {
    p.x[i] = {nullptr, 0, z.length * z.dim, z.dim};
    p.size[i] = static_cast<int>(z.dim), p.is_wide[i] = true;
  }
  const int blocks = static_cast<int>(ceil_div(attention::append_threads(p), int64_t{kAppendThreads}));
  const Launch launch(dim3(2 * blocks, s.layer_count), 1, kAppendThreads, 0, stream, Begins::kAfterPrevious);
  cudaLaunchKernelEx(&launch.config, append_oldest_kernel, p, s.layers);
}

template <int kDim, typename Part>
void launch(const Step& s, const Grid& grid, cudaStream_t stream) {
  constexpr auto kKernel = kernel<kDim, Part>;
  allow_shared_bytes(reinterpret_cast<const void*>(kKernel), grid.shared_bytes);
  Launch launch(dim3(grid.blocks), 1, layers_sm90::kThreads, grid.shared_bytes, stream, Begins::kAfterPrevious);
  cudaLaunchAttribute& attribute = launch.attributes[launch.config.numAttrs++];
  attribute.id = cudaLaunchAttributeCooperative;  // every block runs at once, or none does
  attribute.val.cooperative = 1;
  cudaLaunchKernelEx(&launch.config, kKernel, s);
}

Tensor decode_layers(const Tensor& x, const Tensor& plan, const Tensors& norms, const Tensors& qdata,
                     const Tensors& scales, const Tensors& per_tensor_scales, const Tensors& biases,
                     const Tensors& head_norms, const Tensors& keys, const Tensors& values, const Tensors& codes,
                     const Tensors& front, const Tensor& cos, const Tensor& sin, const Tensor& position, double eps,
                     double scaling, int64_t spec, bool rotated) {
  const OnDeviceOf device(x);
  const Sizes z = sizes_of({norms, qdata, scales, per_tensor_scales, biases, head_norms, keys, values, codes, front});
  NVFP4_CHECK(z.layers > 0, "nvfp4::decode_layers: the kernel does not take this model");
  const Grid grid(z);
  const Parts parts(z, grid.splits);
  NVFP4_CHECK(plan.numel() == parts.end && plan.scalar_type() == ScalarType::Byte,
              "nvfp4::decode_layers: plan is not decode_layers_plan's for these tensors");
  NVFP4_CHECK(is_bf16(x) && x.numel() == z.columns, "nvfp4::decode_layers takes x (1, ", z.columns, ") in bfloat16");
  NVFP4_CHECK(is_bf16(cos) && is_bf16(sin) && cos.numel() == z.dim && sin.numel() == z.dim,
              "nvfp4::decode_layers takes cos and sin (", z.dim, ",) in bfloat16");
  NVFP4_CHECK(position.is_cuda() && position.scalar_type() == ScalarType::Long && position.numel() == 1,
              "nvfp4::decode_layers takes position (1,) in int64 on the GPU");
  Tensor y = empty({1, z.columns}, ScalarType::BFloat16, x);
  const auto bf16 = [](const Tensor& t) { return static_cast<const __nv_bfloat16*>(t.const_data_ptr()); };
  uint8_t* const scratch = static_cast<uint8_t*>(plan.mutable_data_ptr());
  const auto part = [&](int64_t at) { return reinterpret_cast<uint32_t*>(scratch + at); };
  Step s = {};
  s.layers = reinterpret_cast<const Layer*>(scratch);
  s.x = bf16(x), s.last_norm = bf16(norms.back()), s.cos = bf16(cos), s.sin = bf16(sin);
  s.position = static_cast<const int64_t*>(position.const_data_ptr());
  s.y = static_cast<__nv_bfloat16*>(y.mutable_data_ptr());
  s.hidden[0] = part(parts.hidden[0]), s.hidden[1] = part(parts.hidden[1]), s.qkv = part(parts.qkv);
  s.attended = part(parts.attended), s.act = part(parts.act);
  s.partials = reinterpret_cast<uint4*>(scratch + parts.partials);
  s.launches = part(parts.launches);
  s.eps = static_cast<float>(eps), s.scaling = static_cast<float>(scaling);
  s.layer_count = static_cast<int>(z.layers), s.columns = static_cast<int>(z.columns);
  s.heads = static_cast<int>(z.heads), s.kv_heads = static_cast<int>(z.kv_heads), s.length = static_cast<int>(z.length);
  s.splits = grid.splits, s.depth = grid.depth, s.x_bytes = grid.x_bytes;
  for (int phase = 0; phase < kPhases; ++phase) {
    s.inner[phase] = static_cast<int>(z.inner_of(phase));
    s.units[phase] = static_cast<int>(z.units(phase));
    s.boxes[phase] = box_of(z.inner_of(phase));
    s.shares[phase] = {static_cast<int>(z.items(phase) / grid.blocks), static_cast<int>(z.items(phase) % grid.blocks)};
  }
  const cudaStream_t stream = current_stream(x);
  if (z.has_codes()) {
    s.capacity = static_cast<int>(z.capacity), s.front = static_cast<int>(z.front), s.is_rotated = rotated;
    launch_append(s, z, cache_spec(spec), stream);
    z.dim == 128 ? launch<128, CodedStretch>(s, grid, stream) : launch<64, CodedStretch>(s, grid, stream);
  } else {
    z.dim == 128 ? launch<128, Stretch>(s, grid, stream) : launch<64, Stretch>(s, grid, stream);
  }
  check_launched("nvfp4::decode_layers");
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(NVFP4_OPS, CUDA, m) {
  m.impl("decode_layers_plan", TORCH_BOX(&decode_layers_plan));
  m.impl("decode_layers", TORCH_BOX(&decode_layers));
}

}  // namespace nvfp4
