// The products of the persistent kernel: which tiles a block has, how they come to it, and how a warp multiplies.
#pragma once

#include "cuda/generation/layers_sm90/shared.cuh"

namespace nvfp4 {
namespace layers_sm90 {

#if NVFP4_LARGE_SHARED_MEMORY

__device__ __forceinline__ int first_of(const Share& share, int block) {
  return block * share.base + min(block, share.extra);
}
__device__ __forceinline__ int count_of(const Share& share, int block) { return share.base + (block < share.extra); }

// The tiles of a block in a product. Tiles of gate and up alternate.
struct Tiles {
  int first, end;
  __device__ Tiles(const Step& s, int phase, int block) {
    const int scale = phase == kGateUp ? 2 : 1;
    first = first_of(s.shares[phase], block) * scale;
    end = first + count_of(s.shares[phase], block) * scale;
  }
};

// A tile of a product: which weight, and which of its tiles.
struct Where {
  int weight, tile;
  __device__ Where(const Step& s, int dim, int phase, int at) {
    weight = phase == kQkv ? kQ : phase == kOut ? kO : phase == kGateUp ? kGate + at % 2 : kDownWeight;
    tile = phase == kGateUp ? at / 2 : at;
    if (phase == kQkv) {
      const int q = s.heads * dim / kTileRows, k = s.kv_heads * dim / kTileRows;
      if (at >= q) weight = at < q + k ? kK : kV, tile = at - q - (at < q + k ? 0 : k);
    }
  }
};

// As those of ptx/shared_sm90.cuh.
__device__ __forceinline__ void tma_load_5d(uint32_t to, const CUtensorMap* map, int a, int b, int c, int d, int e,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier), "l"(policy)
      : "memory");
}

// What the copying warp does: stages of 16 units, one for each multiplying warp, in the order of tiles over all layers.
template <int kDim>
__device__ void copy(const Step& s, const Layout& in, int lane) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint32_t place = 0, parity = 1;
#pragma unroll 1
  for (int layer = 0; layer < s.layer_count; ++layer) {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      const Tiles tiles(s, phase, blockIdx.x);
      const int units = s.units[phase], total = (tiles.end - tiles.first) * units;
      const int box = max(s.boxes[phase], 1);
      const bool whole = s.boxes[phase] != 0;
#pragma unroll 1
      for (int base = 0; base < total; base += kWarps) {
        const int count = min(total - base, kWarps), its = lane * box;
        const int tile = tiles.first + (base + its) / units, unit = (base + its) % units;
        const Where where(s, kDim, phase, tile);
        mbarrier_wait(in.used + 8 * place, parity);
        const uint32_t copied = in.copied + 8 * place;
        if (lane == 0) mbarrier_arrive_expect_tx(copied, count * (kUnitCodes + kUnitScales));
        __syncwarp();
        if (its < count) {
          const few_rows_sm90::Maps& maps = s.layers[layer].maps[where.weight];
          const int band = where.tile / few_rows_sm90::kTilesPerBand,
                    row = where.tile % few_rows_sm90::kTilesPerBand * 4;
          tma_load_5d(in.codes + place * kStageCodes + its * kUnitCodes, &maps.codes,
                      whole ? 0 : unit * kUnitElements / 2, row, 0, whole ? unit : 0, band, copied, policy);
          tma_load_3d(in.scales + place * kStageScales + its * kUnitScales, &maps.scales, row * 16,
                      unit * (kUnitElements / 64), band, copied, policy);
        }
        if (++place == s.depth) place = 0, parity ^= 1;
      }
    }
  }
}

// x is multiplied as x * 2^64 by codes as they stand, E2M1 * 2^-126 in bfloat16; a tile's sum takes the rest.
constexpr uint32_t k2To64 = 0x5F805F80;
constexpr float kToOne = 0x1p62f;
__device__ __forceinline__ uint32_t scale_x(uint32_t pair) { return Decoder<__nv_bfloat16>::multiply(pair, k2To64); }

// The first product of a sum.
__device__ __forceinline__ void begin_sum(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Four e4m3 to float32.
__device__ __forceinline__ void floats_of_scales(uint32_t bytes, float (&out)[4]) {
  uint32_t halves[2];
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(signed_to_nan(bytes)));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(out[2 * i]), "=f"(out[2 * i + 1])
        : "r"(halves[i]));
  }
}

// Add a unit's product with x to the sums of the lane's two rows and its blocks, a quarter of all; call used() once all
// of the unit is in registers, and used.
//
// The blocks of 16 elements have columns of their own: of eight blocks of 128 elements, block 2 t is column 2 t and
// lane t of four has all of its codes, so that its x stands in one lane and all others have zeros. Then the sums of
// lane t are those of its own blocks, and the scales multiply them, not the codes.
//
// even_x, odd_x: where the lane's x is, of words 0 and 1, and of words 2 and 3.
//
// In machine code used()'s arrival stands behind the loads of the unit, but before the last of them is waited for. The
// pipeline of shared memory takes both in this order, and a copy follows only after 16 warps have arrived.
template <typename Used>
__device__ __forceinline__ void multiply_unit(const few_rows_sm90::LaneOffsets& offsets, uint32_t codes_at,
                                              uint32_t scales_at, uint32_t even_x, uint32_t odd_x, float (&sum)[2],
                                              Used used) {
  uint4 codes[2][2];
  uint2 scales[2];
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    codes[chunk][0] = load_shared_16(codes_at + (offsets.codes ^ chunk * 64));
    codes[chunk][1] = load_shared_16(codes_at + (offsets.codes ^ (576 ^ chunk * 64)));
    scales[chunk] = load_shared_8(scales_at + offsets.scales + chunk * 128);
  }
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    float block[2][4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint4 b = load_shared_16((word < 2 ? even_x : odd_x) + chunk * 256 + word * 64);
      uint32_t w0[4], w1[4];
      Decoder<__nv_bfloat16>::spread((&codes[chunk][0].x)[word], w0);
      Decoder<__nv_bfloat16>::spread((&codes[chunk][1].x)[word], w1);
      const uint32_t a0[4] = {w0[0], w1[0], w0[1], w1[1]}, a1[4] = {w0[2], w1[2], w0[3], w1[3]};
      float (&its)[4] = block[word / 2];
      word % 2 ? mma(its, a0, b.x, b.y, __nv_bfloat16{}) : begin_sum(its, a0, b.x, b.y);
      mma(its, a1, b.z, b.w, __nv_bfloat16{});
      if (chunk == 1 && word == 0) used();
    }
    float s[4];
    floats_of_scales(__byte_perm(scales[chunk].x, scales[chunk].y, offsets.selector), s);
    sum[0] = __fmaf_rn(block[1][1], s[1], __fmaf_rn(block[0][0], s[0], sum[0]));
    sum[1] = __fmaf_rn(block[1][3], s[3], __fmaf_rn(block[0][2], s[2], sum[1]));
  }
}

// Sums of four lanes, added: lanes t and t + 2 of them have v[t % 2].
__device__ __forceinline__ float fold_lanes(const float (&v)[2], int lane) {
  const bool odd = lane & 1;
  const float sum = (odd ? v[1] : v[0]) + __shfl_xor_sync(0xFFFFFFFFu, odd ? v[0] : v[1], 1);
  return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
}

// A place of a ring, and the parity of the turn that it is in.
struct Place {
  uint32_t at = 0, parity = 0;
  __device__ __forceinline__ void step(uint32_t size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

#endif

}  // namespace layers_sm90
}  // namespace nvfp4
