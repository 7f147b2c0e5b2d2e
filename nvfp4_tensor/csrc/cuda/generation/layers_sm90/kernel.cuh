// All layers of a Llama for one token, on Hopper, in one persistent kernel.
//
// Between two products of a decode step lies little work, but each waits for all of the one before: as kernels of their
// own they take 3 to 4 us more than their bytes, the time to start, to load x, and for the first weights to arrive.
// Here every multiprocessor has one block that stays, and a ring of weights in shared memory (24 MB over an H200) that
// runs ahead across layers: while the results of other blocks are waited for, the memory goes on.
//
// Roles, of 20 warps
//   multiplying  warps 0..15. A stage of the ring has 16 units of 16 rows and 256 columns of w, in the order of tiles,
//                one for each of them, which multiplies it by mma.m16n8k16 (multiply_unit), x in shared memory as B
//                fragments. Before a product they wait for x, normalize it, and put it there. They also attend.
//   adding       warps 16..18: add the sums of the 16 warps for each tile, in their order, and write what the layer
//                makes of them.
//   copying      warp 19: fills the stages by TMA, up to 16 units by one copy.
//
// A layer: norm, q, k, v | attention | o, residual | norm, gate, up, silu | down, residual. All blocks need all that
// was written before each |, and wait for it word by word (step.h). No block can fall a product behind the others: they
// need its part of each. One that has none in a product skips it.
//
// mbarriers, with the arrivals that complete a phase
//   copied[depth]   1, expect_tx, and TMA's bytes: a stage has arrived
//   used[depth]     16, a lane of each multiplying warp, once its unit has been used: TMA may fill the stage again
//   full[kSlots]    16, a lane of each multiplying warp: a tile's sums are in the slot
//   empty[kSlots]   3, a lane of each adding warp: they have been read, or are another's. Every adding warp waits for
//                   every slot, since a parity tells only the phase before from the one after
#pragma once

#include "cuda/generation/layers_sm90/attention.cuh"
#include "cuda/generation/layers_sm90/coded_attention.cuh"
#include "cuda/generation/layers_sm90/product.cuh"

namespace nvfp4 {
namespace layers_sm90 {

#if NVFP4_LARGE_SHARED_MEMORY

__device__ __forceinline__ uint32_t tag_of(const Step& s, uint32_t launch, int layer) {
  return launch * s.layer_count + layer + 1;
}

// Zeros from column `columns` up to a whole unit.
__device__ __forceinline__ void clear_rest(int columns, uint32_t to, int thread) {
  const int end = (columns + kUnitElements - 1) / kUnitElements * kUnitElements;
  for (int k = columns + thread * 8; k < end; k += kMultiplying * 8) {
    store_shared_16(to + 2 * fragment_index(k), make_uint4(0, 0, 0, 0));
  }
}

// Whether a warp multiplies the same 256 columns of x in all tiles of a product, and so needs no others.
__device__ __forceinline__ bool has_own_columns(const Step& s, int phase) {
  return s.inner[phase] == kWarps * kUnitElements;
}

struct Use {
  bool waits;   // for the other warps, which may still multiply x of the product before
  bool own;     // each warp reads its own columns alone
  bool scaled;  // for multiply_unit
};

// x of the next product: round(weight * round(h / rms(h))), as B fragments. h is in words, or plain in the first layer.
__device__ __forceinline__ void normalize(const Step& s, const __nv_bfloat16* plain, const uint32_t* words,
                                          uint32_t tag, const __nv_bfloat16* weight, uint32_t to, uint32_t sums,
                                          int thread, Use use) {
  const int pieces = s.columns / 8;
  uint4 first_weights = make_uint4(0, 0, 0, 0);
  if (thread < pieces) first_weights = *(reinterpret_cast<const uint4*>(weight) + thread);
  if (use.waits) multiplying_barrier();
  if (!plain && thread / 32 * 32 < pieces) {  // one word for each warp first: words that many ask for come late
    while (!has(load_word(words + thread / 32 * 32 * 8), tag)) {
    }
  }
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
  squares = sum_of_lanes(squares);
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
      (&normed.x)[word] = packed_pair<__nv_bfloat16>(low_float(weights) * round_bf16(low_float(its) * factor),
                                                     high_float(weights) * round_bf16(high_float(its) * factor));
      if (use.scaled) (&normed.x)[word] = scale_x((&normed.x)[word]);
    }
    store_shared_16(at, to_fragment(normed));
  }
  if (use.own) {
    __syncwarp();
  } else {
    clear_rest(s.columns, to, thread);
    multiplying_barrier();
  }
}

// A warp's own 256 columns of x.
__device__ __forceinline__ void fetch_own(const uint32_t* words, uint32_t tag, uint32_t to, int warp, int lane) {
  const int first = warp * (kUnitElements / 4) + lane;
  uint4 v[2];
  do {
    v[0] = load_words(words + first * 4), v[1] = load_words(words + (first + 32) * 4);
  } while (!has(v[0], tag) || !has(v[1], tag));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 values = values_of(v[i]);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + (first + 32 * i) * 8), "r"(scale_x(values.x)),
                 "r"(scale_x(values.y))
                 : "memory");
  }
  __syncwarp();
}

// x of the next product from words that lie as B fragments already.
__device__ __forceinline__ void fetch(const uint32_t* words, uint32_t tag, int columns, uint32_t to, int thread) {
  constexpr int kAtOnce = 8;
  const int count = (columns + 127) / 128 * 32;  // of four words
  const auto is_column = [&](int four) { return (four / 32 * 16 + four % 8 / 2 * 4 + four % 32 / 8) * 8 < columns; };
  multiplying_barrier();  // x of the product before has been used
  for (int base = thread; base < count; base += kAtOnce * kMultiplying) {
    uint4 v[kAtOnce];
    const int first = base / 32 * 32;  // one word for each warp first
    while (is_column(first) && !has(load_word(words + first * 4), tag)) {
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
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + four * 8), "r"(scale_x(values.x)),
                   "r"(scale_x(values.y))
                   : "memory");
    }
  }
  clear_rest((columns + 127) / 128 * 128, to, thread);
  multiplying_barrier();
}

// A block's part of attention; Part: Stretch, of a dense cache, or CodedStretch.
template <int kDim, typename Part>
__device__ void attend(const Step& s, const Layer& layer, uint32_t tag, uint32_t scratch, int warp, int lane) {
  const int head = blockIdx.x / s.splits, split = blockIdx.x % s.splits;
  const Part part(s, split);
  if (head >= s.kv_heads || split >= part.active) return;
  multiplying_barrier();  // x of the product before has been used
  attend_stretch<kDim>(s, layer, part, head, split, tag, scratch, warp, lane);
  if (part.active > 1) merge_stretches<kDim>(s, head, split, part.active, tag, threadIdx.x);
}

template <int kDim, typename Part>
__device__ void multiply(const Step& s, const Layout& in, uint32_t sums, uint32_t launch, int warp, int thread_lane) {
  Place stage, slot;
#pragma unroll 1
  for (int layer = 0; layer < s.layer_count; ++layer) {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      const Layer& its = s.layers[layer];
      if (phase == kOut) attend<kDim, Part>(s, its, tag_of(s, launch, layer), in.x, warp, thread_lane);
      const Tiles tiles(s, phase, blockIdx.x);
      if (tiles.first == tiles.end) continue;
      int lane = thread_lane;
      if constexpr (Part::kKeepsLane) keep(lane);  // attention needs the registers of what follows from it
      const few_rows_sm90::LaneOffsets offsets(lane);
      const uint32_t codes = in.codes + warp * kUnitCodes, scales = in.scales + warp * kUnitScales;
      // Where the lane's x is, for its two blocks of 128 elements, and how far from one unit to the next.
      const bool has_even = lane / 4 == lane % 4 * 2, has_odd = lane / 4 == lane % 4 * 2 + 1;
      const uint32_t even_x = has_even ? in.x + lane % 4 * 16 : in.zeros, even_step = has_even ? kUnitElements * 2 : 0;
      const uint32_t odd_x = has_odd ? in.x + lane % 4 * 16 : in.zeros, odd_step = has_odd ? kUnitElements * 2 : 0;
      const auto leave = [&](const Place& its, float sum, bool mine) {
        mbarrier_wait(in.empty + 8 * its.at, its.parity ^ 1);
        if (mine) {
          store_shared_float(in.slots + ((its.at * kWarps + warp) * kTileRows + lane / 4 + lane % 2 * 8) * 4, sum);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(in.full + 8 * its.at);
      };
      const auto release = [&](const Place& its) {
        if (lane == 0) mbarrier_arrive(in.used + 8 * its.at);
      };
      const bool own = has_own_columns(s, phase);
      if (phase == kOut && own) {
        if (!has_own_columns(s, kQkv)) multiplying_barrier();  // other warps may still multiply this one's columns
        fetch_own(s.attended, tag_of(s, launch, layer), in.x, warp, lane);
      } else if (phase == kOut || phase == kDown) {
        fetch(phase == kOut ? s.attended : s.act, tag_of(s, launch, layer), s.inner[phase], in.x, threadIdx.x);
      } else if (phase == kGateUp) {
        const bool waits = !own || !has_own_columns(s, kOut);
        normalize(s, nullptr, s.hidden[1], tag_of(s, launch, layer), its.norms[1], in.x, sums + kWarps * 4, threadIdx.x,
                  {waits, own, true});
      } else {
        normalize(s, layer == 0 ? s.x : nullptr, s.hidden[0], tag_of(s, launch, layer - 1), its.norms[0], in.x, sums,
                  threadIdx.x, {true, own, true});
      }
      const int units = s.units[phase];
      int unit = warp;
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        float sum[2] = {};
#pragma unroll 1
        for (; unit < units; unit += kWarps) {
          mbarrier_wait(in.copied + 8 * stage.at, stage.parity);
          multiply_unit(offsets, codes + stage.at * kStageCodes, scales + stage.at * kStageScales,
                        even_x + unit * even_step, odd_x + unit * odd_step, sum, [&] {
                          __syncwarp();
                          release(stage);
                        });
          stage.step(s.depth);
        }
        unit -= units;
        leave(slot, fold_lanes(sum, lane), lane % 4 < 2);
        slot.step(kSlots);
      }
      const int rest = (tiles.end - tiles.first) * units % kWarps;
      // The last stage has no unit for this warp. Its arrival must not count for another's of the turn before.
      if (rest != 0 && warp >= rest) {
        mbarrier_wait(in.used + 8 * stage.at, stage.parity ^ 1);
        release(stage);
        stage.step(s.depth);
      }
    }
  }
  if (blockIdx.x != 0) return;
  // the last norm
  normalize(s, nullptr, s.hidden[0], tag_of(s, launch, s.layer_count - 1), s.last_norm, in.x, sums, threadIdx.x,
            {true, false, false});
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

// What an adding warp needs of a tile, or of a pair, besides its sums.
template <int kDim>
struct Rest {
  int row, at;          // in w, and in q, k and v together
  float factor, other;  // the per-tensor scale, and that of up, or what is added: the bias, the residual

  __device__ __forceinline__ void load(const Step& s, const Layer& layer, int phase, int tile, int lane, int index,
                                       uint32_t launch) {
    const Where where(s, kDim, phase, tile);
    row = row_of(where.tile, lane);
    at = (tile - where.tile) * kTileRows + row;
    factor = *layer.factors[where.weight];
    if (phase == kGateUp) {
      other = *layer.factors[kUp];
    } else if (phase == kQkv) {
      const __nv_bfloat16* bias = layer.biases[where.weight];
      other = bias ? __bfloat162float(bias[row]) : 0.0f;
    } else if (phase == kOut && index == 0) {
      other = __bfloat162float(s.x[row]);
    } else {
      other = await_value(s.hidden[phase == kDown] + row, tag_of(s, launch, phase == kDown ? index : index - 1));
    }
  }
};

// What the layer makes of the sums; an adding warp takes every third tile, or pair. What it needs besides the sums is
// loaded before it waits for the tiles of the others.
template <int kDim>
__device__ __forceinline__ void finish(const Step& s, const Layer& layer, const Layout& in, int phase, Slots& slots,
                                       int adder, int lane, int index, uint32_t launch) {
  const Tiles mine(s, phase, blockIdx.x);
  const uint32_t tag = tag_of(s, launch, index);
  const int tiles = phase == kGateUp ? 2 : 1;  // that belong together
  const int turns = (mine.end - mine.first) / tiles;
  Rest<kDim> its;
  if (adder < turns) its.load(s, layer, phase, mine.first + adder * tiles, lane, index, launch);
  for (int turn = 0, next = adder; turn < turns; ++turn) {
    if (turn != next) {
      slots.leave(in, tiles, lane);
      continue;
    }
    if (phase == kGateUp) {
      const float gate = round_bf16(slots.take(in, lane) * its.factor);
      const float up = round_bf16(slots.take(in, lane) * its.other);
      const float activated = round_bf16(gate / (1.0f + __expf(-gate)));
      if (lane < 16) store_word(s.act + fragment_index(its.row), word_of(__float2bfloat16_rn(activated * up), tag));
    } else if (phase == kQkv) {
      const float v = __fadd_rn(slots.take(in, lane) * its.factor, its.other);
      if (lane < 16) store_word(s.qkv + its.at, word_of(__float2bfloat16_rn(v), tag));
    } else {
      const float v = round_bf16(slots.take(in, lane) * its.factor);
      if (lane < 16) store_word(s.hidden[phase == kOut] + its.row, word_of(__float2bfloat16_rn(its.other + v), tag));
    }
    next += kAdders;
    if (next < turns) its.load(s, layer, phase, mine.first + next * tiles, lane, index, launch);
  }
}

// What the next layer reads besides its weights, to the L2 cache: pointers, norms, and what the block attends to.
template <int kDim, typename Part>
__device__ __forceinline__ void prefetch_layer(const Step& s, const Layer& next, int lane) {
  constexpr int kLine = 128;
  for (int line = lane; line * kLine < static_cast<int>(sizeof(Layer)); line += 32) {
    prefetch(reinterpret_cast<const uint8_t*>(&next) + line * kLine);
  }
  const int lines = s.columns * 2 / kLine;
  for (int line = blockIdx.x + gridDim.x * lane; line < 2 * lines; line += gridDim.x * 32) {
    prefetch(reinterpret_cast<const uint8_t*>(next.norms[line / lines]) + line % lines * kLine);
  }
  const int head = blockIdx.x / s.splits, split = blockIdx.x % s.splits;
  const Part part(s, split);
  if (lane == 0 && head < s.kv_heads && split < part.active) prefetch_stretch<kDim>(s, next, part, head);
}

template <int kDim, typename Part>
__device__ void add(const Step& s, const Layout& in, uint32_t launch, int adder, int lane) {
  Slots slots;
#pragma unroll 1
  for (int layer = 0; layer < s.layer_count; ++layer) {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      if (phase == kGateUp && adder == kAdders - 1 && layer + 1 < s.layer_count) {
        prefetch_layer<kDim, Part>(s, s.layers[layer + 1], lane);
      }
      finish<kDim>(s, s.layers[layer], in, phase, slots, adder, lane, layer, launch);
    }
  }
}

#endif

template <int kDim, typename Part>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Step s) {
#if NVFP4_LARGE_SHARED_MEMORY
  extern __shared__ uint8_t memory[];
  __shared__ alignas(16) float sums[2 * kWarps];
  const uint32_t base = (address_of(memory) + 1023) / 1024 * 1024;
  const Layout in(base, s.depth, s.x_bytes);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  if (warp == 0) {
    store_shared_16(in.zeros + lane * 16, make_uint4(0, 0, 0, 0));
  } else if (warp == kWarps && elect_one()) {
    for (int place = 0; place < s.depth; ++place) {
      mbarrier_init(in.copied + 8 * place, 1);
      mbarrier_init(in.used + 8 * place, kWarps);
    }
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
    multiply<kDim, Part>(s, in, address_of(sums), launch, warp, lane);
  } else {
    setmaxnreg_dec<kAddingRegisters>();
    if (warp < kWarps + kAdders) {
      add<kDim, Part>(s, in, launch, warp - kWarps, lane);
    } else {
      copy<kDim>(s, in, lane);
    }
  }
#endif
}

}  // namespace layers_sm90
}  // namespace nvfp4
