// The kernel of a matrix and its transpose, quantized in one pass: what it does with either side are policies.
//
// A thread block copies a tile of 128 x 128 bfloat16 to shared memory, 16 bytes a copy, and reads it twice: by rows and
// by columns. The next tile is copied meanwhile. A tile makes two whole tiles of block scales on a side that leaves as
// codes; they are gathered in shared memory and written, padding included, as 1024 contiguous bytes each. A side that
// leaves as values is stored from shared memory too, 16 bytes per thread and 256 contiguous ones: the values of the
// rows overwrite x there, those of the transpose have a buffer of their own. So there are two or three barriers a tile,
// for columns have read x before the rows overwrite it.
#pragma once

#include <atomic>

#include "cuda/block/block.cuh"
#include "cuda/block/columns.cuh"
#include "cuda/ptx/shared.cuh"

namespace nvfp4 {

using Bf16 = __nv_bfloat16;

constexpr int kTile = 128;
constexpr int kChunks = kTile * 2 / 16;      // 16-byte chunks of a row
constexpr int kTileBlocks = kTile / kBlock;  // of a row
constexpr int kScaleBytes = kTile * kTileBlocks;

using Chunks = uint4[kChunks];

// The order of chunks in a tile: chunk c of row r lies at chunk c ^ swizzle(r). With this one eight groups of 16 rows
// by four words fall into 32 different banks, and so do four even chunks of a row and of the row 16 below it.
struct BlockOrder {
  __device__ __forceinline__ static uint32_t swizzle(uint32_t row) { return row / kBlock; }
};

// Rows of `rows` from `first` on.
__device__ __forceinline__ uint32_t rows_left(uint32_t rows, uint32_t first) { return rows - min(rows, first); }

// A thread's chunks of a tile, as it loads and stores them: of eight neighbouring rows, so that their addresses are one
// register and constants.
struct TileChunks {
  static constexpr int kRows = kTile * kChunks / kThreads;
  uint32_t chunk, first, column, inside;  // of the tile and of the matrix; rows inside it

  __device__ __forceinline__ TileChunks(uint32_t rows, uint32_t columns, uint32_t row0, uint32_t column0)
      : chunk(threadIdx.x % kChunks), first(threadIdx.x / kChunks * kRows), column(column0 + chunk * 8) {
    inside = column < columns ? rows_left(rows, row0 + first) : 0;
  }
};

// Starts the copy of the tile at (row0, column0); one commit group, empty past the last tile.
template <typename Order>
__device__ __forceinline__ void load_tile(const Matrix& x, uint32_t row0, uint32_t column0, Chunks* to) {
  const TileChunks at(static_cast<uint32_t>(x.rows), static_cast<uint32_t>(x.columns), row0, column0);
  const Bf16* from = element_at<Bf16>(x, row0 + at.first, at.column);
#pragma unroll
  for (int i = 0; i < TileChunks::kRows; ++i, from += x.row_stride) {
    cp_async_16(address_of(&to[at.first + i][at.chunk ^ Order::swizzle(at.first + i)]),
                reinterpret_cast<const uint8_t*>(from), i < at.inside ? 16 : 0);
  }
}

// The tiles of a matrix, those of one thread block, and the copies of them under way.
template <typename Order>
struct TileWalk {
  const Matrix& x;
  Chunks (*stages)[kTile];
  Walk at;

  __device__ __forceinline__ TileWalk(const Matrix& matrix, Chunks (*to)[kTile])
      : x(matrix), stages(to), at(ceil_div(x.rows, kTile), ceil_div(x.columns, kTile), blockIdx.x, gridDim.x) {
    load(0);
    cp_async_commit();
  }

  __device__ __forceinline__ void load(uint32_t stage) const {
    load_tile<Order>(x, at.row * kTile, at.column * kTile, stages[stage]);
  }
  __device__ __forceinline__ void load_next(uint32_t stage) const {
    if (at.inside()) load(stage);
    cp_async_commit();
  }
};

inline int64_t tiles_of(const Matrix& x) { return ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile); }

// --- sides -----------------------------------------------------------------------------------------------------------

// How a side is scaled is `By`: what all its blocks need, made of a table in shared memory, which threads meet before
// they read. What a tile's blocks need, the table draws (kDraws).

// A side that leaves as codes.
template <typename By_>
struct CodeSide {
  using By = By_;
  static constexpr bool kValues = false;
  struct Shared {
    alignas(16) uint8_t scale[kScaleBytes];
    typename By::Table table;
  };
  Quantization how;
  Codes out;
  uint32_t rows, blocks;  // blocks in a row of codes

  // Where block (row, block) has its codes.
  __device__ __forceinline__ uint2* codes_at(uint32_t row, uint32_t block) const {
    return reinterpret_cast<uint2*>(out.qdata) + (static_cast<int64_t>(row) * blocks + block);
  }

  // The tile's scales, 1024 bytes in place order, to where the two tiles of scales lie; the second may not exist.
  __device__ __forceinline__ void store(const Chunks*, const Shared& shared, uint32_t row0, uint32_t column0) const {
    const uint32_t block0 = column0 / kBlock, column_tiles = (blocks + kTileColumns - 1) / kTileColumns;
    const uint32_t bytes = min(2u, column_tiles - block0 / kTileColumns) * kTileBytes, at = threadIdx.x * 16;
    if (at >= bytes) return;
    uint8_t* to = out.scale + scale_offset(row0, block0, column_tiles);
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(shared.scale + at);
  }
};

// A side that leaves as values, so many rows of so many columns.
template <typename By_>
struct ValueSide {
  using By = By_;
  static constexpr bool kValues = true;
  Quantization how;
  Bf16* out;
  uint32_t rows, columns;

  // A tile of values to its place. Each thread reads the chunks that load_tile will have it overwrite. place(row,
  // chunk): where in its row of the tile a chunk lies.
  template <typename Place>
  __device__ __forceinline__ void store_tile(const Chunks* from, uint32_t row0, uint32_t column0, Place place) const {
    const TileChunks at(rows, columns, row0, column0);
    Bf16* to = out + (static_cast<int64_t>(row0 + at.first) * columns + at.column);
#pragma unroll
    for (int i = 0; i < TileChunks::kRows; ++i, to += columns) {
      const uint4 v = from[at.first + i][place(at.first + i, at.chunk)];
      if (i < at.inside) *reinterpret_cast<uint4*>(to) = v;
    }
    asm volatile("" ::: "memory");
  }
};

// Rows, in place of x.
template <typename By, typename Order>
struct ValueRowsOf : ValueSide<By> {
  struct Shared {
    typename By::Table table;
  };

  __device__ __forceinline__ void store(const Chunks* x, const Shared&, uint32_t row0, uint32_t column0) const {
    this->store_tile(x, row0, column0, [](uint32_t row, uint32_t chunk) { return chunk ^ Order::swizzle(row); });
  }
};

// The transpose, in a tile of its own.
template <typename By, typename Place>
struct ValueColumnsOf : ValueSide<By> {
  struct Shared {
    Chunks x[kTile];
    typename By::Table table;
  };

  __device__ __forceinline__ void store(const Chunks*, const Shared& shared, uint32_t row0, uint32_t column0) const {
    this->store_tile(shared.x, row0, column0, Place::of);
  }
};

__device__ __forceinline__ void store_chunks(const Elements<Bf16, kBlock>& v, uint4* low, uint4* high) {
  *low = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
  *high = make_uint4(v.word[4], v.word[5], v.word[6], v.word[7]);
}

// --- the kernel ------------------------------------------------------------------------------------------------------

template <typename Rows, typename Columns>
struct PairShared {
  Chunks x[2][kTile];  // the tile at work and the next
  typename Columns::Shared columns;
  typename Rows::Shared rows;
};

// Thread blocks a multiprocessor. Of codes two, with 128 registers a thread: 2 % ahead of three with 80. Where only the
// transpose leaves as codes three find room, and take 3 to 5 % less time on an H200 than two: 8192 x 4096 51 to 52 us,
// not 55, 8192 x 14336 165, not 172.
template <typename Rows, typename Columns>
constexpr int kPairBlocksPerSm = Rows::kValues && !Columns::kValues ? 3 : 2;
constexpr int kPairWaves = 4;  // a static share each leaves some warps to end alone

// A side's quantize(by, elements, shared, row0, column0) rounds a tile, its first row and column given as those of that
// side's matrix; store(...) takes the result to its place.
template <typename Rows, typename Columns>
__global__ void __launch_bounds__(kThreads, (kPairBlocksPerSm<Rows, Columns>))
    quantize_pair(Matrix x, Rows rows, Columns columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<PairShared<Rows, Columns>*>(memory);
  TileWalk<typename Columns::Order> tile(x, shared.x);
  const typename Rows::By by_rows(rows.how, shared.rows.table);
  const typename Columns::By by_columns(columns.how, shared.columns.table);
  for (uint32_t stage = 0; tile.at.inside(); stage ^= 1) {
    const uint32_t row0 = tile.at.row * kTile, column0 = tile.at.column * kTile;
    tile.at.step();
    tile.load_next(stage ^ 1);
    if constexpr (Columns::By::kDraws) {
      if (threadIdx.x < kTile) {
        shared.columns.table.draw(columns.how.random, column0, row0, threadIdx.x);
      } else if constexpr (Rows::By::kDraws) {
        shared.rows.table.draw(rows.how.random, row0, column0, threadIdx.x - kTile);
      }
    }
    cp_async_wait<1>();
    __syncthreads();
    Chunks* elements = shared.x[stage];
    columns.quantize(by_columns, elements, shared.columns, column0, row0);
    if constexpr (Rows::kValues) __syncthreads();
    rows.quantize(by_rows, elements, shared.rows, row0, column0);
    __syncthreads();
    rows.store(elements, shared.rows, row0, column0);
    columns.store(elements, shared.columns, column0, row0);
  }
}

// Once a kernel and device: the call takes as long as an allocation.
template <auto kernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << device % 64;
  if (device < 64 && allowed & bit) return;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
  allowed |= bit;
}

template <typename Rows, typename Columns>
void launch_pair(const Matrix& x, const Rows& rows, const Columns& columns, cudaStream_t stream) {
  constexpr auto kernel = quantize_pair<Rows, Columns>;
  constexpr int kBytes = sizeof(PairShared<Rows, Columns>);
  allow_shared_memory<kernel>(kBytes);
  const unsigned grid = grid_of(kPairWaves * kPairBlocksPerSm<Rows, Columns>, tiles_of(x));
  kernel<<<grid, kThreads, kBytes, stream>>>(x, rows, columns);
}

// What a thread block of them needs, that of tensor_scale_by_maxima too.
template <typename Rows, typename Columns>
constexpr int kPairBytes = sizeof(PairShared<Rows, Columns>) + 32 * sizeof(float);

}  // namespace nvfp4
