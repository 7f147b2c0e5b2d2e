// Runs attention to codes of the kernel of all layers on a CPU and compares it with float64. SOURCES is the text of its
// headers, of which test_lanes.py takes out what stand_ins.h has. Prints a line per case, and exits with the failures.
#include <random>

#include "stand_ins.h"
#include SOURCES

namespace {

using namespace nvfp4;
using namespace nvfp4::layers_sm90;
using Vector = std::vector<double>;
using Dense = std::vector<__nv_bfloat16>;

constexpr uint32_t kTag = 7;
double wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__nv_bfloat16 narrow(double v) { return __float2bfloat16_rn(static_cast<float>(v)); }

struct Sizes {
  int kv_heads, group, splits, ring, front, count, capacity;
};

// Random codes; what lies behind `count` tokens is NaN and infinite.
struct Codes {
  std::vector<uint8_t> codes, scales, factors;

  Codes(const Sizes& z, int dim, int least_factor, std::mt19937& random)
      : codes(z.kv_heads * z.capacity * dim / 2),
        scales(z.kv_heads * z.capacity * dim / kBlock),
        factors(z.kv_heads * z.capacity) {
    for (auto& each : codes) each = random();
    for (size_t i = 0; i < factors.size(); ++i) {
      const bool is_free = static_cast<int>(i % z.capacity) >= z.count;
      factors[i] = is_free ? 255 : least_factor + random() % 5;
      for (int j = 0; j < dim / kBlock; ++j) scales[i * (dim / kBlock) + j] = is_free ? 0x7F : 40 + random() % 24;
    }
  }
  attention::CodedRows rows() { return {codes.data(), scales.data(), factors.data()}; }
  double value(int row, int d, int dim) const {
    const double scale = std::ldexp(e4m3(scales[row * (dim / kBlock) + d / kBlock]), factors[row] - 127);
    return e2m1(codes[row * (dim / 2) + d / 2] >> 4 * (d % 2) & 15) * scale;
  }
};

template <int kDim>
struct Case {
  const Sizes z;
  const bool rotated, normed;
  std::mt19937 random;
  Dense cos, sin, q_norm, k_norm, ring[2], front[2];
  Codes keys, values;
  std::vector<uint32_t> qkv, attended;
  std::vector<uint4> partials;
  int64_t position;
  Layer layer = {};
  Step s = {};

  Case(const Sizes& sizes, bool rotates, bool norms, unsigned seed)
      : z(sizes),
        rotated(rotates),
        normed(norms),
        random(seed),
        keys(z, kDim, rotated ? 117 : 121, random),
        values(z, kDim, 124, random),
        qkv(z.kv_heads * (z.group + 2) * kDim),
        attended(z.kv_heads * z.group * kDim),
        partials(z.kv_heads * z.splits * z.group * (kDim / 2 + 1)),
        position(z.count + z.ring - 1) {
    std::normal_distribution<double> normal;
    const auto fill = [&](Dense& to, int size, double mean, double deviation) {
      to.resize(size);
      for (auto& each : to) each = narrow(mean + deviation * normal(random));
    };
    fill(cos, kDim, 0, 0), fill(sin, kDim, 0, 0);
    for (int i = 0; i < kDim / 2; ++i) {
      const double angle = normal(random);
      cos[i] = cos[i + kDim / 2] = narrow(std::cos(angle)), sin[i] = sin[i + kDim / 2] = narrow(std::sin(angle));
    }
    fill(q_norm, kDim, 1, 0.3), fill(k_norm, kDim, 1, 0.3);
    for (auto& each : ring) fill(each, z.kv_heads * z.ring * kDim, 0, 1);
    for (auto& each : front) fill(each, z.kv_heads * z.front * kDim, 0, 1);
    for (auto& word : qkv) word = word_of(narrow(1.5 * normal(random)), kTag);
    layer = {{normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr},
             ring[0].data(),
             ring[1].data(),
             {keys.rows(), values.rows()},
             {front[0].data(), front[1].data()}};
    s.cos = cos.data(), s.sin = sin.data(), s.position = &position, s.qkv = qkv.data();
    s.attended = attended.data(), s.partials = partials.data();
    s.eps = 1e-5f, s.scaling = 1 / std::sqrt(static_cast<float>(kDim));
    s.heads = z.kv_heads * z.group, s.kv_heads = z.kv_heads, s.length = z.ring, s.splits = z.splits;
    s.capacity = z.capacity, s.front = z.front, s.is_rotated = rotated;
  }

  // One block after another, so that what they merge waits for all of them.
  void run() {
    for (const bool merges : {false, true}) {
      for (int block = 0; block < z.kv_heads * z.splits; ++block) {
        const int head = block / z.splits, split = block % z.splits;
        const CodedStretch part(s, split);
        if (split >= part.active || (merges && part.active == 1)) continue;
        run_block(block, [&] {
          if (merges) return merge_stretches<kDim>(s, head, split, part.active, kTag, threadIdx.x);
          attend_stretch<kDim>(s, layer, part, head, split, kTag, 1024, threadIdx.x / 32, threadIdx.x % 32);
        });
      }
    }
  }

  // A head of q or k, normed and rotated as by torch's operators.
  Vector head(int at, const Dense& norm) const {
    float v[kDim], squares = 0;
    for (int d = 0; d < kDim; ++d) v[d] = value_of(qkv[at * kDim + d]), squares += v[d] * v[d];
    const float factor = 1 / std::sqrt(squares / kDim + s.eps);
    for (int d = 0; d < kDim && normed; ++d) v[d] = round_bf16(wide(norm[d]) * round_bf16(v[d] * factor));
    Vector out(kDim);
    for (int d = 0; d < kDim; ++d) {
      const float other = d < kDim / 2 ? -v[d + kDim / 2] : v[d - kDim / 2];
      out[d] = round_bf16(round_bf16(v[d] * wide(cos[d])) + round_bf16(other * wide(sin[d])));
    }
    return out;
  }

  int failures() const {
    int bad = 0;
    const int slot = position % z.ring;
    for (int h = 0; h < z.kv_heads; ++h) {
      const Vector key = head(s.heads + h, k_norm);
      for (int d = 0; d < kDim; ++d) {
        bad += wide(ring[0][(h * z.ring + slot) * kDim + d]) != key[d];
        bad += wide(ring[1][(h * z.ring + slot) * kDim + d]) != value_of(qkv[(s.heads + z.kv_heads + h) * kDim + d]);
      }
      for (int i = 0; i < z.group; ++i) bad += wrong_elements(h, h * z.group + i);
    }
    return bad;
  }

  int wrong_elements(int h, int q_head) const {
    const Vector q = head(q_head, q_norm);
    Vector transformed = q, sums(kDim), scores;
    for (int step = 1; step < kDim && rotated; step *= 2) {
      for (int d = 0; d < kDim; ++d) {
        if (d & step) continue;
        const double a = transformed[d], b = transformed[d + step];
        transformed[d] = a + b, transformed[d + step] = a - b;
      }
    }
    const int dense = z.front + z.ring;
    const auto element = [&](int which, int token, int d) {
      if (token < z.front) return wide(front[which][(h * z.front + token) * kDim + d]);
      if (token < dense) return wide(ring[which][(h * z.ring + token - z.front) * kDim + d]);
      return (which ? values : keys).value(h * z.capacity + token - dense, d, kDim);
    };
    double most = -INFINITY, total = 0, largest = 0;
    for (int token = 0; token < dense + z.count; ++token) {
      double score = 0;
      for (int d = 0; d < kDim; ++d) score += (token < dense ? q : transformed)[d] * element(0, token, d);
      scores.push_back(score * s.scaling), most = std::max(most, scores.back());
    }
    for (int token = 0; token < dense + z.count; ++token) {
      const double weight = std::exp(scores[token] - most);
      total += weight;
      for (int d = 0; d < kDim; ++d) sums[d] += weight * element(1, token, d);
    }
    for (double& each : sums) each /= total, largest = std::max(largest, std::fabs(each));
    int bad = 0;
    for (int d = 0; d < kDim; ++d) {  // 2e-5 of the largest, and half of bfloat16's last bit, of 8
      const uint32_t word = attended[q_head * kDim + d];
      const bool close = std::fabs(value_of(word) - sums[d]) <= 2e-5 * largest + std::fabs(sums[d]) / 256;
      bad += !has(word, kTag) || !close;
    }
    return bad;
  }
};

template <int kDim>
int check(const Sizes& z) {
  int failed = 0;
  for (const bool rotated : {false, true}) {
    Case<kDim> its(z, rotated, rotated != (z.group == 4), z.count);
    its.run();
    const int bad = its.failures();
    std::printf("heads of %d: %d x %d, %d shares, %d at the front, %d in codes, %d in the ring%s: %d wrong\n", kDim,
                z.kv_heads, z.group, z.splits, z.front, z.count, z.ring, rotated ? ", rotated" : "", bad);
    failed += bad != 0;
  }
  return failed;
}

}  // namespace

int main() {
  int failed = 0;
  for (const int count : {0, 1, 15, 16, 17, 127}) failed += check<128>({1, 4, 5, 65, 0, count, 128});
  for (const int count : {40, 600}) failed += check<128>({2, 4, 16, 65, 4, count, 640});
  for (const int count : {3, 200}) failed += check<64>({2, 7, 3, 2, 1, count, 256});
  failed += check<64>({1, 8, 4, 33, 4, 300, 384});
  failed += check<128>({1, 1, 2, 9, 0, 700, 768});  // the first share has codes, too
  failed += check<128>({1, 3, 2, 65, 4, 1500, 1536});
  failed += check<64>({1, 4, 1, 17, 0, 1100, 1152});  // one share
  return failed;
}
