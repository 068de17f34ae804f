// The one main loop of all products: it computes tiles of A·B on Hopper's tensor cores and runs an epilogue on each.
//
// One producer thread keeps a ring of shared-memory stages full by tensor copies. The compute warpgroups, 64 rows each,
// multiply from the ring. The grid is persistent and the ring never drains between tiles: while an epilogue runs, the
// stages of the next tile are already in flight. K ascends in one unsplit chain of float32 accumulators.
//
// A kernel gives an `Op`, which has
//   Type, kColumns                the operands' type and the columns of a tile
//   kTransposeA, kTransposeB      whether K does not run along the rows of A, of B in memory
//   Arguments, Op(arguments)      the kernel's arguments, from which the op is made
//   blocks(tile)                  how many row blocks (one per cluster) and column blocks there are
//   kStretches                    the stretches of K, along each of which A lies in one matrix and B in one
//   steps(stretch, block)         the steps of 64 that the tiles of a column block take along a stretch
//   b_column(block)               where a column block begins in B
//   load(place)                   loads what the epilogue needs while the last products run, which hides its latency
//   kStartsFromSums               whether start(place, products) sets what the sums start from; else the first products do
//   finish(place, loaded, products, stores)  the epilogue
//   stored(arguments)             the matrix that finish stores 16-bit values into; its data may be null
#pragma once

#include <new>

#include "kernels.cuh"
#include "ptx.cuh"

namespace rlk {

constexpr int kStepBytes = 128;       // one row of a step: 64 values, as wide as the widest swizzle
constexpr int kBlockBytes = 64 * kStepBytes;  // a step of 64 rows or columns of an operand
constexpr int kStripBytes = 16 * kStepBytes;  // a strip of sixteen rows and 64 columns, which a warp stores together
constexpr int kWarpStaging = 2 * kStripBytes;
constexpr int kBarrierBytes = 8;

// The position of a warp's part of a tile. A thread holds the rows `row()` and `row() + 8`, and in every eight columns
// the two from `column()` on: products[4·i + 2·r + c] is the one at row() + 8·r, column() + 8·i + c.
struct Place {
  int first_row;  // the first of the warp's sixteen rows
  int column_block;

  __device__ __forceinline__ int row() const { return first_row + thread_index() % 32 / 4; }
  __device__ __forceinline__ int column() const { return thread_index() % 4 * 2; }
};

// A warp's two strips in shared memory: one is filled while the other is stored.
struct Stores {
  const CUtensorMap* map;
  uint32_t staging;

  // The memory for a tile's strip, once it is free to be written.
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

// A block's shared memory: the stages of A, the stages of B, the warps' strips, and two barriers for each stage.
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

// A tile's steps along a stretch: how many there are, and where the first one begins in A and in B. Each of the others
// begins where the one before it ends.
struct Steps {
  int count;
  int a_depth = 0, b_depth = 0;
};

// How many steps the tiles of a column block take along all stretches.
template <class Op>
__device__ __forceinline__ int steps_of_tile(const Op& op, int column_block) {
  int steps = 0;
#pragma unroll
  for (int stretch = 0; stretch < Op::kStretches; ++stretch) steps += op.steps(stretch, column_block).count;
  return steps;
}

// The tensor maps of the operands along each stretch, and of what is stored, and the bytes that each step loads.
template <class Op>
struct Maps {
  CUtensorMap a[Op::kStretches], b[Op::kStretches], out;
  int step_bytes;
};

// How many blocks of size `width` hold `size` elements.
__host__ __device__ constexpr int blocks_of(int size, int width) { return (size + width - 1) / width; }

// The rows of all blocks of a cluster, which lie one below the other.
__host__ __device__ constexpr int cluster_rows(const Tile& tile) { return tile.rows * tile.cluster; }

// The bytes of shared memory of a block with this tile, which the launcher asks for.
template <class Op>
constexpr int shared_bytes(const Tile& tile) {
  return 1024 + tile.stages * (tile.rows + Op::kColumns) * kStepBytes + tile.rows / 16 * kWarpStaging +
         2 * tile.stages * kBarrierBytes;
}

// The order in which tiles are visited: row blocks form bands, whose rows stay in the L2 cache while all columns are
// visited, and every other band visits the columns backwards.
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

// The ring's next step: the stage it uses, and the parity of this round through the stages. One number holds both, to
// take one register.
struct Step {
  int number = 0;  // less than twice the number of stages
  __device__ __forceinline__ int stage(const Tile& tile) const {
    return number < tile.stages ? number : number - tile.stages;
  }
  __device__ __forceinline__ int parity(const Tile& tile) const { return number >= tile.stages; }
  __device__ __forceinline__ void next(const Tile& tile) { number = number + 1 == 2 * tile.stages ? 0 : number + 1; }
};

// The producer: loads the steps of all tiles of this block.
template <class Op>
__device__ __forceinline__ void produce(const Op& op, const Tile& tile, const SharedMemory<Op>& memory, const Order& order,
                                        const Maps<Op>& maps) {
  const int rank = cluster_rank();
  const uint16_t everyone = static_cast<uint16_t>((1 << tile.cluster) - 1);
  // Each block of a cluster loads a part of B for all blocks: some of its columns, or of the 64 rows of its only box.
  const int part = Op::kColumns / tile.cluster, first = rank * part;
  Step step;
  for (int index = blockIdx.x / tile.cluster; index < order.tiles(); index += gridDim.x / tile.cluster) {
    const int2 block = order.block(index, tile);
    const int row = (block.x * tile.cluster + rank) * tile.rows, column = op.b_column(block.y);
#pragma unroll
    for (int stretch = 0; stretch < Op::kStretches; ++stretch) {
      const CUtensorMap *a_map = &maps.a[stretch], *b_map = &maps.b[stretch];
      const Steps steps = op.steps(stretch, block.y);
      for (int k = 0; k < steps.count; ++k, step.next(tile)) {
        const int stage = step.stage(tile);
        const uint32_t full = memory.full(stage), a = memory.a(stage), b = memory.b(stage);
        barrier_wait(memory.empty(stage), step.parity(tile) ^ 1);
        barrier_expect(full, maps.step_bytes);
        const int a_depth = steps.a_depth + k * kDepth, b_depth = steps.b_depth + k * kDepth;
        if constexpr (Op::kTransposeA) {
          for (int i = 0; i < tile.rows / 64; ++i) load_box(a + i * kBlockBytes, a_map, row + 64 * i, a_depth, full);
        } else {
          load_box(a, a_map, a_depth, row, full);
        }
        auto load_b = [&](int offset, int inner, int outer) {
          if (tile.cluster > 1) {
            load_box(b + offset, b_map, inner, outer, full, everyone);
          } else {
            load_box(b + offset, b_map, inner, outer, full);
          }
        };
        if constexpr (!Op::kTransposeB) {
          load_b(first * kStepBytes, b_depth, column + first);
        } else if constexpr (Op::kColumns == 64) {
          load_b(first * kStepBytes, column, b_depth + first);
        } else {
          for (int i = first; i < first + part; i += 64) load_b(i * kStepBytes, column + i, b_depth);
        }
      }
    }
  }
}

// products += A·B over the steps of one tile: the products of one step are in flight while those of the next are
// issued. Calls meanwhile() while the last products run.
template <class Op, class Meanwhile>
__device__ __forceinline__ void multiply(const Tile& tile, const SharedMemory<Op>& memory, int warpgroup, int steps,
                                         Step& step, float (&products)[Op::kColumns / 2], Meanwhile meanwhile) {
  constexpr int kNextA = Op::kTransposeA ? 16 * kStepBytes : 32;  // bytes from one K to the 16th after it
  constexpr int kNextB = Op::kTransposeB ? 16 * kStepBytes : 32;
  // One thread arrives for each block of the cluster, since a warpgroup's products end together.
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

// A compute warpgroup: multiplies all tiles of this block and runs the epilogue on each.
template <class Op>
__device__ __forceinline__ void consume(const Op& op, const Tile& tile, const SharedMemory<Op>& memory, const Order& order,
                                        const CUtensorMap* out_map) {
  Step step;
  int index = blockIdx.x / tile.cluster;
  int2 block = order.block(index, tile);
  while (index < order.tiles()) {
    // Values that can be computed again are not kept over an epilogue, whose products leave few registers.
    const int warp = warp_index();
    const Place place = {(block.x * tile.cluster + cluster_rank()) * tile.rows + warp * 16, block.y};
    float products[Op::kColumns / 2];
    typename Op::Loaded loaded;
    if constexpr (Op::kStartsFromSums) op.start(place, products);
    multiply<Op>(tile, memory, warp / 4, steps_of_tile(op, place.column_block), step, products, [&] {
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
    product_kernel(const __grid_constant__ Maps<Op> maps, const Tile tile, const typename Op::Arguments arguments) {
  const SharedMemory<Op> memory(tile);
  const Op op(arguments);
  // The order is kept in shared memory, where it takes no registers from the products.
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
    if (threadIdx.x == warpgroups * 128) produce(op, tile, memory, order, maps);
  } else {
    more_registers<232>();
    consume(op, tile, memory, order, &maps.out);
  }
  // Blocks of a cluster write into each other's shared memory, and so they end together.
  cluster_sync();
}

// --- stores ----------------------------------------------------------------------------------------------------------

// Two values rounded to T, the first one in the lower half.
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

// The place in memory where a warp's sixteen rows of a tile are stored.
template <typename T>
struct Target {
  T* data;
  int64_t stride;
  int row, column;    // where the first value belongs
  int rows, columns;  // how many rows and columns exist from there on
  bool by_copy_engine;  // whether the copy engine stores, which stores all that lies inside the matrix
  bool aligned;         // whether rows start at multiples of 16 bytes
};

// Stores sixteen rows of 64 columns by way of shared memory, where the accumulators' pairs become whole lines.
// `pairs[2·i + r]` holds the thread's two columns from 8·i on in its row + 8·r.
template <typename T>
__device__ __forceinline__ void store_strip(const Target<T>& to, int strip, const uint32_t (&pairs)[16],
                                            const Stores& stores) {
  const int lane = threadIdx.x % 32;
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8;
  const uint32_t memory = stores.of_strip(strip);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int piece = (i + lane / 16) ^ (matrix_row & 7);  // the copy engine's swizzle: no bank gets two rows
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

// Rounds products of any width to T and stores them strip by strip.
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

// Calls visit(r, column, first, second) for all that a thread holds: the products of two columns from `column` on in
// its row r, 0 or 1.
template <int kCount, class Visit>
__device__ __forceinline__ void for_pairs(int column, float (&products)[kCount], Visit visit) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) visit(r, column + 8 * i, products[4 * i + 2 * r], products[4 * i + 2 * r + 1]);
  }
}

}  // namespace rlk
