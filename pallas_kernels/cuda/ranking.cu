// The kernels that look for the most probable tokens: one slice's products in memory, and the list of the largest.
#include "launch.cuh"
#include "logits.cuh"

namespace rlk {
namespace {

// Stores the products that the statistics are taken of.
template <typename T, bool kIsDv>
struct ProductsOp : ProductWithHead<T, kIsDv> {
  using Arguments = Products;
  using Base = ProductWithHead<T, kIsDv>;
  using Loaded = Columns;

  const Products& p;

  __device__ __forceinline__ explicit ProductsOp(const Arguments& p) : Base(p.logits), p(p) {}

  static Matrix stored(const Arguments&) { return {}; }

  __device__ __forceinline__ Columns load(const Place& place) const {
    return columns_of(p.logits.head.vocabulary, p.logits.where, this->chunk(place.column_block));
  }

  __device__ __forceinline__ void finish(const Place& place, const Columns& columns, float (&values)[kChunk / 2],
                                         const Stores&) const {
    add_bias(p.logits.bias, place, values);
    mask(place, columns.width, -INFINITY, values);
    only_allowed(p.logits, allowed_of(p.logits, place, this->chunk(place.column_block)), values);
    const float largest[2] = {largest_of_row(values, 0), largest_of_row(values, 1)};
    if (place.column() == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p.largest[static_cast<int64_t>(place.column_block) * p.rows + place.row() + 8 * r] = largest[r];
      }
    }
    const int64_t first_row = place.row(), stride = int64_t{p.chunks} * kChunk, rows = p.logits.hidden.rows;
    float* const here = p.values + first_row * stride + int64_t{place.column_block} * kChunk;
    for_pairs(place.column(), values, [&](int r, int column, float first, float second) {
      if (first_row + 8 * r >= rows) return;
      *reinterpret_cast<float2*>(here + 8 * r * stride + column) = make_float2(first, second);
    });
  }
};

constexpr int kWarp = 32;

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) x = max_nan(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

// Merges the list of earlier slices with the products of this one, a warp for each row. Each step takes the first of the
// list or, where that is smaller, the largest product that is left: it reads the products of that one's chunk alone, and
// finds the largest that is left there. Those that were taken stand before all that are left, by value and column, and so
// need no mark. A row with NaN gets anything.
__global__ void __launch_bounds__(kWarp) add_largest_kernel(const AddLargest a) {
  extern __shared__ float left[];  // the largest that is left of each chunk
  __shared__ float new_list[kList];
  __shared__ int new_columns[kList];
  const int row = blockIdx.x, lane = threadIdx.x, chunks = *a.where.chunks, first_chunk = *a.where.first_chunk;
  if (row >= *a.where.rows) return;
  const auto largest_left = [&] {
    float largest = -INFINITY;
    for (int i = lane; i < chunks; i += kWarp) largest = max_nan(largest, left[i]);
    return max_of_warp(largest);
  };
  for (int i = lane; i < chunks; i += kWarp) left[i] = a.largest[static_cast<int64_t>(i) * a.rows + row];
  const float* const values = a.values + static_cast<int64_t>(row) * a.chunks * kChunk;
  float* const list = a.list + static_cast<int64_t>(row) * kList;
  int* const list_columns = a.list_columns + static_cast<int64_t>(row) * kList;
  float first = largest_left(), last = INFINITY;  // the largest that is left, and what was taken last of the slice
  int last_column = -1, listed = 0;
  for (int taken = 0; taken < a.count; ++taken) {
    float value = list[listed];
    int column = list_columns[listed];
    if (value >= first) {
      ++listed;
    } else {
      int chunk = chunks - 1;  // a row with NaN has none
      for (int i = lane; i < chunks; i += kWarp) {
        if (left[i] == first) chunk = min(chunk, i);
      }
      chunk = __reduce_min_sync(0xffffffff, chunk);
      constexpr int kEach = kChunk / kWarp;
      float own[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) own[i] = values[chunk * kChunk + i * kWarp + lane];
      const int start = start_of(a.vocabulary, first_chunk + chunk).column;
      int place = kChunk;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int here = i * kWarp + lane;
        const bool is_left = first != last || start + here > last_column;
        if (own[i] == first && is_left) place = min(place, here);
      }
      place = __reduce_min_sync(0xffffffff, place);
      float rest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (own[i] < first || (own[i] == first && i * kWarp + lane > place)) rest = max_nan(rest, own[i]);
      }
      rest = max_of_warp(rest);
      __syncwarp();
      if (lane == 0) left[chunk] = rest;
      __syncwarp();
      value = last = first;
      column = last_column = start + place;
      first = largest_left();
    }
    if (lane == 0) {
      new_list[taken] = value;
      new_columns[taken] = column;
    }
  }
  __syncwarp();
  for (int i = lane; i < kList; i += kWarp) {
    list[i] = i < a.count ? new_list[i] : -INFINITY;
    list_columns[i] = i < a.count ? new_columns[i] : -1;
  }
}

}  // namespace

cudaError_t launch(cudaStream_t stream, const Products& p) {
  const Logits& logits = p.logits;
  const int64_t blocks = int64_t{p.chunks} * blocks_of(logits.hidden.rows, cluster_rows(logits.tile));
  return with_flags(
      [&](auto is_bfloat16, auto is_dv) {
        return launch_product<ProductsOp<Narrow<decltype(is_bfloat16)>, is_dv>>(
            stream, {{logits.hidden, logits.head.weight}, logits.low_rank}, logits.tile, blocks, p);
      },
      logits.type == Dtype::kBfloat16, logits.head.is_dv);
}

cudaError_t launch(cudaStream_t stream, const AddLargest& a) {
  constexpr int kListBytes = kList * (sizeof(float) + sizeof(int));
  const cudaError_t error = cudaFuncSetAttribute(
      add_largest_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes - kListBytes);
  if (error != cudaSuccess) return error;
  return launch_blocks(add_largest_kernel, a.value_rows, 1, stream, a, kWarp, a.chunks * sizeof(float));
}

}  // namespace rlk
