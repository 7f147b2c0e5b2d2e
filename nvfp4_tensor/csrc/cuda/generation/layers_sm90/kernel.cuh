// All layers of a Llama for one token, on Hopper, in one persistent kernel: bound by reading the weights.
//
// Between two products of a decode step lies little work, but each waits for all of the one before: as kernels of their
// own they take 3 to 4 us more than their bytes, the time to start, to load x, and for the first weights to arrive.
// Here every multiprocessor has one block that stays, and a ring of weights in shared memory (24 MB over an H200) that
// runs ahead across layers: while a barrier of the grid is waited for, the memory goes on.
//
// Roles, of 20 warps
//   multiplying  warps 0..15. Units of 16 rows and 256 columns of w are dealt to them in turn over a block's tiles;
//   each
//                has a TMA pipeline of its own, `depth` units ahead, and multiplies by mma.m16n8k16 as few_rows_sm90
//                does, x in shared memory as B fragments, the same in all eight columns. Before a product they wait for
//                x, normalize it, and put it there. They also attend.
//   adding       warps 16..19: add the sums of the 16 warps for each tile, in their order, and write what the layer
//                makes of them.
//
// A layer: norm, q, k, v | attention | o, residual | norm, gate, up, silu | down, residual. All blocks need all that
// was written before each |, and wait for it word by word (step.h): 1.5 us, where a barrier of the grid takes 4. No
// block can fall a product behind the others: they need its part of each. One that has none in a product skips it.
//
// mbarriers, with the arrivals that complete a phase
//   copied[warp][depth]  1, the elected lane's expect_tx, and TMA's bytes: a unit has arrived
//   loaded[warp]         32, once what was loaded of a unit has been used: TMA may fill its place again
//   full[kSlots]         16, a lane of each multiplying warp: a tile's sums are in the slot
//   empty[kSlots]        4, a lane of each adding warp: they have been read, or are another's. Every adding warp waits
//                        for every slot, since a parity tells only the phase before from the one after
#pragma once

#include "cuda/generation/layers_sm90/attention.cuh"

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

// The units of a warp in their order over all layers: what is to be copied next.
struct Cursor {
  int layer = 0, phase = 0, tile, end, unit;

  __device__ Cursor(const Step& s, int warp) : unit(warp) {
    const Tiles tiles(s, 0, blockIdx.x);
    tile = tiles.first, end = tiles.end;
    settle(s, warp);
  }
  __device__ __forceinline__ bool valid(const Step& s) const { return layer < s.layer_count; }
  __device__ __forceinline__ void settle(const Step& s, int warp) {
    while (layer < s.layer_count) {
      if (tile >= end) {
        if (++phase == kPhases) phase = 0, ++layer;
        const Tiles tiles(s, phase, blockIdx.x);
        tile = tiles.first, end = tiles.end, unit = warp;
      } else if (unit >= s.units[phase]) {
        unit -= s.units[phase], ++tile;
      } else {
        return;
      }
    }
  }
  __device__ __forceinline__ void advance(const Step& s, int warp) {
    unit += kWarps;
    settle(s, warp);
  }
};

template <int kDim>
__device__ __forceinline__ void copy_next(const Step& s, const Cursor& at, const Layout& in, int warp, int place) {
  const Where where(s, kDim, at.phase, at.tile);
  const int which = warp * s.depth + place;
  few_rows_sm90::copy_unit(s.layers[at.layer].maps[where.weight], where.tile, at.unit * kUnitElements,
                           in.codes + which * kUnitCodes, in.scales + which * kUnitScales, in.copied + 8 * which);
}

// Add a unit's product with x; call loaded() once all of the unit is in registers, and used.
template <typename Loaded>
__device__ __forceinline__ void multiply_unit(const few_rows_sm90::LaneOffsets& offsets, uint32_t codes_at,
                                              uint32_t scales_at, uint32_t x_at, float (&sum)[4], Loaded loaded) {
  using T = __nv_bfloat16;
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint4 codes[2] = {load_shared_16(codes_at + (offsets.codes ^ chunk * 64)),
                            load_shared_16(codes_at + (offsets.codes ^ (576 ^ chunk * 64)))};
    const uint2 scales = load_shared_8(scales_at + offsets.scales + chunk * 128);
    uint4 b[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) b[word] = load_shared_16(x_at + chunk * 256 + word * 64);
    uint32_t factors[4];
    scale_factors<T>(__byte_perm(scales.x, scales.y, offsets.selector), factors);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t w0[4], w1[4];
      decode_word<T>((&codes[0].x)[word], factors[word / 2], w0);
      decode_word<T>((&codes[1].x)[word], factors[2 + word / 2], w1);
      const uint32_t a0[4] = {w0[0], w1[0], w0[1], w1[1]}, a1[4] = {w0[2], w1[2], w0[3], w1[3]};
      mma(sum, a0, b[word].x, b[word].y, T{});
      mma(sum, a1, b[word].z, b[word].w, T{});
      if (chunk == 1 && word == 0) loaded();
    }
  }
}

__device__ __forceinline__ uint32_t tag_of(const Step& s, uint32_t launch, int layer) {
  return (launch * s.layer_count + layer + 1) & 0xFFFFu;
}

// Zeros from column `columns` up to a whole unit.
__device__ __forceinline__ void clear_rest(int columns, uint32_t to, int thread) {
  const int end = (columns + kUnitElements - 1) / kUnitElements * kUnitElements;
  for (int k = columns + thread * 8; k < end; k += kMultiplying * 8) {
    store_shared_16(to + 2 * fragment_index(k), make_uint4(0, 0, 0, 0));
  }
}

// x of the next product: round(weight * round(h / rms(h))), as B fragments. h is in words, or plain in the first layer.
__device__ __forceinline__ void normalize(const Step& s, const __nv_bfloat16* plain, const uint32_t* words,
                                          uint32_t tag, const __nv_bfloat16* weight, uint32_t to, uint32_t sums,
                                          int thread) {
  const int pieces = s.columns / 8;
  uint4 first_weights = make_uint4(0, 0, 0, 0);
  if (thread < pieces) first_weights = *(reinterpret_cast<const uint4*>(weight) + thread);
  multiplying_barrier();  // x of the product before has been used
  float squares = 0;
  for (int piece = thread; piece < pieces; piece += kMultiplying) {
    uint4 v;
    if (plain) {
      v = *(reinterpret_cast<const uint4*>(plain) + piece);
    } else {
      uint4 low, high;
      do {
        low = load_words(words + piece * 8);
        high = load_words(words + piece * 8 + 4);
      } while (!has(low, tag) || !has(high, tag));
      const uint2 a = values_of(low), b = values_of(high);
      v = make_uint4(a.x, a.y, b.x, b.y);
    }
    store_shared_16(to + 2 * fragment_index(piece * 8), v);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float low = low_float((&v.x)[word]), high = high_float((&v.x)[word]);
      squares += low * low + high * high;
    }
  }
  squares = add_lanes(squares);
  if (thread % 32 == 0) store_shared_float(sums + thread / 32 * 4, squares);
  multiplying_barrier();
  float total = 0;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) {
    const float4 some = load_shared_floats(sums + i * 16);
    total += some.x + some.y + some.z + some.w;
  }
  const float factor = rsqrtf(total / s.columns + s.eps);
  for (int piece = thread; piece < pieces; piece += kMultiplying) {
    const uint32_t at = to + 2 * fragment_index(piece * 8);
    const uint4 v = load_shared_16(at);
    const uint4 w = piece == thread ? first_weights : *(reinterpret_cast<const uint4*>(weight) + piece);
    uint4 normed;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t its = (&v.x)[word], weights = (&w.x)[word];
      (&normed.x)[word] = pair_of(low_float(weights) * round_bf16(low_float(its) * factor),
                                  high_float(weights) * round_bf16(high_float(its) * factor));
    }
    store_shared_16(at, to_fragment(normed));
  }
  clear_rest(s.columns, to, thread);
  multiplying_barrier();
}

// x of the next product from words that lie as B fragments already.
__device__ __forceinline__ void fetch(const uint32_t* words, uint32_t tag, int columns, uint32_t to, int thread) {
  constexpr int kAtOnce = 8;
  const int count = (columns + 127) / 128 * 32;  // of four words
  const auto is_column = [&](int four) { return (four / 32 * 16 + four % 8 / 2 * 4 + four % 32 / 8) * 8 < columns; };
  multiplying_barrier();  // x of the product before has been used
  for (int base = thread; base < count; base += kAtOnce * kMultiplying) {
    uint4 v[kAtOnce];
    // of many one first, so that waiting takes little of the L2 cache's bandwidth
    while (count > 2 * kMultiplying && is_column(base) && !has(load_words(words + base * 4), tag)) {
    }
    for (bool done = false; !done;) {
      done = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int four = base + i * kMultiplying;
        v[i] = make_uint4(0, 0, 0, 0);
        if (four < count && is_column(four)) v[i] = load_words(words + four * 4);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int four = base + i * kMultiplying;
        if (four < count && is_column(four)) done = done && has(v[i], tag);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int four = base + i * kMultiplying;
      if (four >= count) break;
      const uint2 values = values_of(v[i]);
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + four * 8), "r"(values.x), "r"(values.y) : "memory");
    }
  }
  clear_rest((columns + 127) / 128 * 128, to, thread);
  multiplying_barrier();
}

template <int kDim>
__device__ void multiply(const Step& s, const Layout& in, uint32_t sums, uint32_t launch, int warp, int lane) {
  const few_rows_sm90::LaneOffsets offsets(lane);
  const uint32_t loaded = in.loaded + 8 * warp, copied = in.copied + 8 * warp * s.depth;
  const uint32_t codes = in.codes + warp * s.depth * kUnitCodes, scales = in.scales + warp * s.depth * kUnitScales;
  const uint32_t x = in.x + lane % 4 * 16;
  Cursor next(s, warp);
  for (int place = 0; place < s.depth && next.valid(s); ++place) {
    if (elect_one()) copy_next<kDim>(s, next, in, warp, place);
    next.advance(s, warp);
  }
  uint32_t at = 0, parity = 0, loaded_parity = 0, slot = 0, slot_parity = 0;
#pragma unroll 1
  for (int layer = 0; layer < s.layer_count; ++layer) {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      const Layer& its = s.layers[layer];
      if (phase == kOut) attend<kDim>(s, its, tag_of(s, launch, layer), in.x, warp, lane);
      const Tiles tiles(s, phase, blockIdx.x);
      if (tiles.first == tiles.end) continue;
      if (phase == kOut || phase == kDown) {
        fetch(phase == kOut ? s.attended : s.act, tag_of(s, launch, layer), s.inner[phase], in.x, threadIdx.x);
      } else if (phase == kGateUp) {
        normalize(s, nullptr, s.hidden[1], tag_of(s, launch, layer), its.norms[1], in.x, sums, threadIdx.x);
      } else {
        normalize(s, layer == 0 ? s.x : nullptr, s.hidden[0], tag_of(s, launch, layer - 1), its.norms[0], in.x, sums,
                  threadIdx.x);
      }
      const int units = s.units[phase];
      int unit = warp;
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        float sum[4] = {};
#pragma unroll 1
        for (; unit < units; unit += kWarps) {
          mbarrier_wait(copied + 8 * at, parity);
          multiply_unit(offsets, codes + at * kUnitCodes, scales + at * kUnitScales, x + unit * kUnitElements * 2, sum,
                        [&] {
                          if (!next.valid(s)) return;
                          mbarrier_arrive(loaded);
                          if (elect_one()) {
                            mbarrier_wait(loaded, loaded_parity);
                            copy_next<kDim>(s, next, in, warp, at);
                          }
                          loaded_parity ^= 1;
                          next.advance(s, warp);
                        });
          if (++at == s.depth) at = 0, parity ^= 1;
        }
        unit -= units;
        mbarrier_wait(in.empty + 8 * slot, slot_parity ^ 1);
        if (lane % 4 == 0) {
          const uint32_t to = in.slots + ((slot * kWarps + warp) * kTileRows + lane / 4) * 4;
          store_shared_float(to, sum[0]);
          store_shared_float(to + 32, sum[2]);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(in.full + 8 * slot);
        if (++slot == kSlots) slot = 0, slot_parity ^= 1;
      }
    }
  }
  if (blockIdx.x != 0) return;
  // the last norm
  normalize(s, nullptr, s.hidden[0], tag_of(s, launch, s.layer_count - 1), s.last_norm, in.x, sums, threadIdx.x);
  for (int piece = threadIdx.x; piece < s.columns / 8; piece += kMultiplying) {
    const uint4 v = load_shared_16(in.x + 2 * fragment_index(piece * 8));
    *(reinterpret_cast<uint4*>(s.y) + piece) =  // back from the order 0 4 1 5 2 6 3 7
        make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                   __byte_perm(v.z, v.w, 0x7632));
  }
  if (threadIdx.x == 0) *s.launches = launch + 1;  // every block that writes has read it
}

// --- what the adding warps do ---------------------------------------------------------------------------------------

// The first of a lane's two rows of a tile in w; lanes r and r + 16 have the same, r >= 8 the second of lane r - 8's.
__device__ __forceinline__ int row_of(int tile, int lane) {
  const int row = few_rows_sm90::row_in_band(tile, lane % 8 * 4);
  return tile / 8 * 128 + (lane % 16 < 8 ? row : row ^ 32);
}

// The sum of a tile's row: lanes r and r + 16 both have it.
__device__ __forceinline__ float take_slot(const Layout& in, uint32_t slot, uint32_t parity, int lane) {
  constexpr float kToOne = 1.0f / Decoder<__nv_bfloat16>::kUnit;
  mbarrier_wait(in.full + 8 * slot, parity);
  const uint32_t from = in.slots + ((slot * kWarps + lane / 16 * (kWarps / 2)) * kTileRows + lane % 16) * 4;
  float v[kWarps / 2];
#pragma unroll
  for (int i = 0; i < kWarps / 2; ++i) v[i] = load_shared_float(from + i * kTileRows * 4);
  float sum = v[0];
#pragma unroll
  for (int i = 1; i < kWarps / 2; ++i) sum += v[i];
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
  if (lane == 0) mbarrier_arrive(in.empty + 8 * slot);
  return sum * kToOne;
}

// The slots in the order in which tiles come, over all layers.
struct Slots {
  uint32_t slot = 0, parity = 0;

  __device__ __forceinline__ void step() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ float take(const Layout& in, int lane) {
    const float sum = take_slot(in, slot, parity, lane);
    step();
    return sum;
  }
  __device__ __forceinline__ void leave(const Layout& in, int count, int lane) {
    for (; count > 0; --count) {
      mbarrier_wait(in.full + 8 * slot, parity);
      if (lane == 0) mbarrier_arrive(in.empty + 8 * slot);
      step();
    }
  }
};

// What the layer makes of the sums; an adding warp takes every fourth tile, or pair.
template <int kDim>
__device__ __forceinline__ void finish(const Step& s, const Layer& layer, const Layout& in, int phase, Slots& slots,
                                       int adder, int lane, int index, uint32_t launch) {
  const Tiles mine(s, phase, blockIdx.x);
  const uint32_t tag = tag_of(s, launch, index);
  const int tiles = phase == kGateUp ? 2 : 1;  // that belong together
  for (int at = mine.first, turn = 0; at < mine.end; at += tiles, ++turn) {
    if (turn % kAdders != adder) {
      slots.leave(in, tiles, lane);
      continue;
    }
    const Where where(s, kDim, phase, at);
    const int row = row_of(where.tile, lane);
    const float factor = *layer.factors[where.weight];
    if (phase == kGateUp) {
      const float up_factor = *layer.factors[kUp];
      const float gate = round_bf16(slots.take(in, lane) * factor);
      const float up = round_bf16(slots.take(in, lane) * up_factor);
      const float activated = round_bf16(gate / (1.0f + __expf(-gate)));
      if (lane < 16) store_word(s.act + fragment_index(row), word_of(__float2bfloat16_rn(activated * up), tag));
    } else if (phase == kQkv) {
      const __nv_bfloat16* bias = layer.biases[where.weight];
      const float added = bias ? __bfloat162float(bias[row]) : 0.0f;
      const float v = __fadd_rn(slots.take(in, lane) * factor, added);
      if (lane < 16) {
        store_word(s.qkv + (at - where.tile) * kTileRows + row, word_of(__float2bfloat16_rn(v), tag));
      }
    } else {
      const float before = phase == kDown ? await_value(s.hidden[1] + row, tag)
                           : index == 0   ? __bfloat162float(s.x[row])
                                          : await_value(s.hidden[0] + row, tag_of(s, launch, index - 1));
      const float v = round_bf16(slots.take(in, lane) * factor);
      if (lane < 16) store_word(s.hidden[phase == kOut] + row, word_of(__float2bfloat16_rn(before + v), tag));
    }
  }
}

template <int kDim>
__device__ void add(const Step& s, const Layout& in, uint32_t launch, int adder, int lane) {
  Slots slots;
#pragma unroll 1
  for (int layer = 0; layer < s.layer_count; ++layer) {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      finish<kDim>(s, s.layers[layer], in, phase, slots, adder, lane, layer, launch);
    }
  }
}

#endif

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Step s) {
#if NVFP4_LARGE_SHARED_MEMORY
  extern __shared__ uint8_t memory[];
  __shared__ alignas(16) float sums[kWarps];
  const uint32_t base = (address_of(memory) + 1023) / 1024 * 1024;
  const Layout in(base, s.depth, s.x_bytes);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    if (elect_one()) {
      for (int place = 0; place < s.depth; ++place) mbarrier_init(in.copied + 8 * (warp * s.depth + place), 1);
      mbarrier_init(in.loaded + 8 * warp, 32);
      fence_proxy_async_shared();
    }
  } else if (warp == kWarps && elect_one()) {
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(in.full + 8 * slot, kWarps);
      mbarrier_init(in.empty + 8 * slot, kAdders);
    }
    fence_proxy_async_shared();
  }
  const uint32_t launch = load_word(s.launches);
  __syncthreads();
  if (warp < kWarps) {
    setmaxnreg_inc<kMultiplyingRegisters>();
    multiply<kDim>(s, in, address_of(sums), launch, warp, lane);
  } else {
    setmaxnreg_dec<kAddingRegisters>();
    add<kDim>(s, in, launch, warp - kWarps, lane);
  }
#endif
}

}  // namespace layers_sm90
}  // namespace nvfp4
