// The one main loop: tiles of A·B on Hopper's tensor cores, and a kernel's own epilogue on each.
//
// One producer thread keeps a ring of shared-memory stages full by tensor copies; the compute warpgroups, 64 rows each,
// multiply from it. The grid is persistent and the ring never drains between tiles: while an epilogue runs, the stages
// of the next tile are already in flight. K ascends in one unsplit chain of float32 accumulators.
//
// An `Op` is what a kernel does with it:
//   Type, kColumns                the operands' type and the columns of a tile
//   kTransposeA, kTransposeB      K does not run along the memory rows of A, of B
//   Arguments, Op(arguments)      what the kernel is given, and its view of it
//   blocks(tile)                  row blocks (of a cluster) and column blocks
//   steps()                       of 64 along K, in every tile
//   a_depth(k), b_depth(k)        where step k stands in A and in B
//   b_column(block)               where a column block stands in B
//   load(place)                   what the epilogue needs, asked for while the last products run: its latency hides there
//   kStartsFromSums               whether start(place, products) says what the sums start from; else it is nothing
//   finish(place, loaded, products, stores)
//   stored(arguments)             what finish stores 16-bit values into; its data may be null
#pragma once

#include <new>

#include "kernels.cuh"
#include "ptx.cuh"

namespace rlk {

constexpr int kStepBytes = 128;       // of one row: 64 values, the widest swizzle
constexpr int kBlockBytes = 64 * kStepBytes;  // 64 rows or columns of an operand that is stored K by K
constexpr int kStripBytes = 16 * kStepBytes;  // of sixteen rows of 64 columns, which a warp stores together
constexpr int kWarpStaging = 2 * kStripBytes;
constexpr int kBarrierBytes = 8;

// Where a warp's part of a tile stands. A thread holds rows `row()` and `row() + 8`, and of every eight columns the two from
// `column()` on: products[4·i + 2·r + c] is row() + 8·r, column() + 8·i + c.
struct Place {
  int first_row;  // of the warp's sixteen
  int column_block;

  __device__ __forceinline__ int row() const { return first_row + thread_index() % 32 / 4; }
  __device__ __forceinline__ int column() const { return thread_index() % 4 * 2; }
};

// A warp's two strips in shared memory, one of which fills while the other is stored.
struct Stores {
  const CUtensorMap* map;
  uint32_t staging;

  // Memory of a tile's strip, free to write.
  __device__ __forceinline__ uint32_t of_strip(int strip) const {
    if (threadIdx.x % 32 == 0) {
      if (strip == 0) {
        stores_wait<0>();
      } else {
        stores_wait<1>();
      }
    }
    __syncwarp();
    return staging + strip % 2 * kStripBytes;
  }
};

// A block's shared memory: the stages of A, those of B, the warps' strips, two barriers for each stage.
template <class Op>
struct SharedMemory {
  const Tile& tile;
  uint32_t start;

  __device__ __forceinline__ explicit SharedMemory(const Tile& tile) : tile(tile) {
    extern __shared__ unsigned char raw[];
    // The swizzle is a function of the address: operands start at multiples of 1024 bytes.
    start = (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
  }
  __device__ __forceinline__ uint32_t a(int stage) const { return start + stage * tile.rows * kStepBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(tile.stages) + stage * Op::kColumns * kStepBytes; }
  __device__ __forceinline__ uint32_t staging(int warp) const { return b(tile.stages) + warp * kWarpStaging; }
  __device__ __forceinline__ uint32_t full(int stage) const { return staging(tile.rows / 16) + stage * kBarrierBytes; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(tile.stages + stage); }
};

// The steps of an `Op` whose K ascends from 0 in both operands.
struct AscendingK {
  __device__ __forceinline__ int a_depth(int k) const { return k * kDepth; }
  __device__ __forceinline__ int b_depth(int k) const { return k * kDepth; }
};

// How many blocks of `width` hold `size`.
__host__ __device__ constexpr int blocks_of(int size, int width) { return (size + width - 1) / width; }

// Rows of a cluster's blocks, one below the other.
__host__ __device__ constexpr int cluster_rows(const Tile& tile) { return tile.rows * tile.cluster; }

// Bytes of a block with this tile; the launcher asks for the same.
template <class Op>
constexpr int shared_bytes(const Tile& tile) {
  return 1024 + tile.stages * (tile.rows + Op::kColumns) * kStepBytes + tile.rows / 16 * kWarpStaging +
         2 * tile.stages * kBarrierBytes;
}

// The order of tiles: row blocks in bands, whose rows stay in the L2 cache while the columns pass; every other band goes
// backwards.
struct Order {
  int2 blocks;
  Divisor of_band, last_height;

  __device__ __forceinline__ Order(int2 blocks, const Tile& tile)
      : blocks(blocks),
        of_band(max(1, tile.band.by * blocks.y)),
        last_height(max(1, tile.band.divide(blocks.x).y)) {}

  __device__ __forceinline__ int tiles() const { return blocks.x * blocks.y; }

  __device__ __forceinline__ int2 block(int index, const Tile& tile) const {
    const int2 place = of_band.divide(index);
    const bool is_whole = (place.x + 1) * tile.band.by <= blocks.x;
    const int2 inside = is_whole ? tile.band.divide(place.y) : last_height.divide(place.y);
    return {place.x * tile.band.by + inside.y, place.x & 1 ? blocks.y - 1 - inside.x : inside.x};
  }
};

// The ring's next step: which stage it takes, and the parity of this round through them. One number, one register.
struct Step {
  int number = 0;  // below twice the stages
  __device__ __forceinline__ int stage(const Tile& tile) const {
    return number < tile.stages ? number : number - tile.stages;
  }
  __device__ __forceinline__ int parity(const Tile& tile) const { return number >= tile.stages; }
  __device__ __forceinline__ void next(const Tile& tile) { number = number + 1 == 2 * tile.stages ? 0 : number + 1; }
};

template <class Op>
__device__ __forceinline__ void produce(const Op& op, const Tile& tile, const SharedMemory<Op>& memory, const Order& order,
                                        const CUtensorMap* a_map, const CUtensorMap* b_map) {
  const int rank = cluster_rank(), steps = op.steps();
  const int stage_bytes = (tile.rows + Op::kColumns) * kStepBytes;
  const uint16_t everyone = static_cast<uint16_t>((1 << tile.cluster) - 1);
  Step step;
  for (int index = blockIdx.x / tile.cluster; index < order.tiles(); index += gridDim.x / tile.cluster) {
    const int2 block = order.block(index, tile);
    const int row = (block.x * tile.cluster + rank) * tile.rows, column = op.b_column(block.y);
    for (int k = 0; k < steps; ++k, step.next(tile)) {
      const int stage = step.stage(tile);
      const uint32_t full = memory.full(stage), a = memory.a(stage), b = memory.b(stage);
      barrier_wait(memory.empty(stage), step.parity(tile) ^ 1);
      barrier_expect(full, stage_bytes);
      const int a_depth = op.a_depth(k), b_depth = op.b_depth(k);
      if constexpr (Op::kTransposeA) {
        for (int i = 0; i < tile.rows / 64; ++i) load_box(a + i * kBlockBytes, a_map, row + 64 * i, a_depth, full);
      } else {
        load_box(a, a_map, a_depth, row, full);
      }
      // Each block of a cluster loads its share of B for all of them.
      auto load_b = [&](int offset, int inner, int outer) {
        if (tile.cluster > 1) {
          load_box(b + offset, b_map, inner, outer, full, everyone);
        } else {
          load_box(b + offset, b_map, inner, outer, full);
        }
      };
      if constexpr (Op::kTransposeB) {
        constexpr int kBoxes = Op::kColumns / 64;
        if constexpr (kBoxes == 1) {
          const int share = rank * (64 / tile.cluster);
          load_b(share * kStepBytes, column, b_depth + share);
        } else {
          const int each = kBoxes / tile.cluster;
          for (int i = rank * each; i < (rank + 1) * each; ++i) load_b(i * kBlockBytes, column + 64 * i, b_depth);
        }
      } else {
        const int share = rank * (Op::kColumns / tile.cluster);
        load_b(share * kStepBytes, b_depth, column + share);
      }
    }
  }
}

// products += A·B over the steps of one tile, one step's products in flight while the next one's are issued. Calls
// meanwhile() while the last ones run.
template <class Op, class Meanwhile>
__device__ __forceinline__ void multiply(const Tile& tile, const SharedMemory<Op>& memory, int warpgroup, int steps,
                                         Step& step, float (&products)[Op::kColumns / 2], Meanwhile meanwhile) {
  constexpr int kNextA = Op::kTransposeA ? 16 * kStepBytes : 32;  // bytes of 16 along K
  constexpr int kNextB = Op::kTransposeB ? 16 * kStepBytes : 32;
  // One thread for each block of the cluster: a warpgroup's products end together.
  const int thread = threadIdx.x % 128;
  auto release = [&](int stage) {
    if (thread < tile.cluster) barrier_arrive(memory.empty(stage), thread);
  };
  changed(products);
  int before = 0;
  for (int k = 0; k < steps; ++k) {
    const int stage = step.stage(tile);
    barrier_wait(memory.full(stage), step.parity(tile));
    const uint64_t a = operand(memory.a(stage) + warpgroup * kBlockBytes, kBlockBytes);
    const uint64_t b = operand(memory.b(stage), kBlockBytes);
    products_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_add<Op::kTransposeA, Op::kTransposeB>(products, typename Op::Type{}, a + (i * kNextA >> 4),
                                                     b + (i * kNextB >> 4), Op::kStartsFromSums || i > 0 || k > 0);
    }
    products_commit();
    products_wait<1>();
    if (k > 0) release(before);
    before = stage;
    step.next(tile);
  }
  meanwhile();
  products_wait<0>();
  changed(products);
  if (steps > 0) release(before);
}

template <class Op>
__device__ __forceinline__ void consume(const Op& op, const Tile& tile, const SharedMemory<Op>& memory, const Order& order,
                                        const CUtensorMap* out_map) {
  Step step;
  int index = blockIdx.x / tile.cluster;
  int2 block = order.block(index, tile);
  while (index < order.tiles()) {
    // What can be found again is not kept over an epilogue, whose products leave few registers.
    const int warp = warp_index();
    const Place place = {(block.x * tile.cluster + cluster_rank()) * tile.rows + warp * 16, block.y};
    float products[Op::kColumns / 2];
    typename Op::Loaded loaded;
    if constexpr (Op::kStartsFromSums) op.start(place, products);
    multiply<Op>(tile, memory, warp / 4, op.steps(), step, products, [&] {
      loaded = op.load(place);
      index += gridDim.x / tile.cluster;
      block = order.block(index, tile);
    });
    op.finish(place, loaded, products, Stores{out_map, memory.staging(warp_index())});
  }
  if (threadIdx.x % 32 == 0) stores_wait<0>();
}

constexpr int kMostThreads = 384;

template <class Op>
__global__ void __launch_bounds__(kMostThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ CUtensorMap out_map, const Tile tile,
                   const typename Op::Arguments arguments) {
  const SharedMemory<Op> memory(tile);
  const Op op(arguments);
  // In memory, where it takes no registers from the products.
  __shared__ alignas(Order) unsigned char order_memory[sizeof(Order)];
  const Order& order = *reinterpret_cast<const Order*>(order_memory);
  const int warpgroups = tile.rows / 64, warpgroup = warp_index() / 4;
  if (threadIdx.x == 0) {
    new (order_memory) Order(op.blocks(tile), tile);
    for (int i = 0; i < tile.stages; ++i) {
      barrier_init(memory.full(i), 1);
      barrier_init(memory.empty(i), warpgroups * tile.cluster);
    }
    barrier_init_fence();
  }
  cluster_sync();
  if (warpgroup == warpgroups) {
    fewer_registers<40>();
    if (threadIdx.x == warpgroups * 128) produce(op, tile, memory, order, &a_map, &b_map);
  } else {
    more_registers<232>();
    consume(op, tile, memory, order, &out_map);
  }
  // Blocks of a cluster write into each other's memory: they end together.
  cluster_sync();
}

// --- stores ----------------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float first, float second);
template <>
__device__ __forceinline__ uint32_t pair_of<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pair_of<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Where a warp's sixteen rows of a tile are stored.
template <typename T>
struct Target {
  T* data;
  int64_t stride;
  int row, column;    // of the first value
  int rows, columns;  // that exist from there on
  bool by_copy_engine;  // which stores all that lies inside the matrix
  bool aligned;         // rows start at multiples of 16 bytes
};

// Sixteen rows of 64 columns through shared memory, where the accumulators' pairs become whole lines. `pairs[2·i + r]` are
// columns 8·i … of row + 8·r.
template <typename T>
__device__ __forceinline__ void store_strip(const Target<T>& to, int strip, const uint32_t (&pairs)[16],
                                            const Stores& stores) {
  const int lane = threadIdx.x % 32;
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8;
  const uint32_t memory = stores.of_strip(strip);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int piece = (i + lane / 16) ^ (matrix_row & 7);  // the copy engine's swizzle: no two rows in the same banks
    store_matrices(memory + matrix_row * kStepBytes + piece * 16, pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 2],
                   pairs[2 * i + 3]);
  }
  const int first_column = to.column + strip * 64, columns = to.columns - strip * 64;
  if (to.by_copy_engine) {
    stores_fence();
    __syncwarp();
    if (lane == 0) store_box(stores.map, memory, first_column, to.row);
    return;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, piece = lane % 8;
    const uint4 values = load_shared(memory + row * kStepBytes + (piece ^ (row & 7)) * 16);
    if (row >= to.rows || piece * 8 >= columns) continue;
    T* there = to.data + (to.row + row) * to.stride + first_column + piece * 8;
    if (to.aligned && piece * 8 + 8 <= columns) {
      *reinterpret_cast<uint4*>(there) = values;
    } else {
      const T* each = reinterpret_cast<const T*>(&values);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (piece * 8 + j < columns) there[j] = each[j];
      }
    }
  }
}

// The same for products of any width, rounded.
template <typename T, int kCount>
__device__ __forceinline__ void store_rounded(const Target<T>& to, const float (&products)[kCount], const Stores& stores) {
#pragma unroll
  for (int strip = 0; strip < kCount / 32; ++strip) {
    uint32_t pairs[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = pair_of<T>(products[strip * 32 + 2 * i], products[strip * 32 + 2 * i + 1]);
    store_strip(to, strip, pairs, stores);
  }
}

// Calls visit(row 0 or 1, column, the two products there) for everything a thread holds.
template <int kCount, class Visit>
__device__ __forceinline__ void for_pairs(int column, float (&products)[kCount], Visit visit) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) visit(r, column + 8 * i, products[4 * i + 2 * r], products[4 * i + 2 * r + 1]);
  }
}

}  // namespace rlk
