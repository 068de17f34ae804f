// The kernel of det_gemm: start + A·B, with each operand stored either way round and the accumulators rounded once.
#include "launch.cuh"

namespace rlk {
namespace {

template <typename T, bool kTransposedA, bool kTransposedB, int kTileColumns, bool kSwapped>
struct GemmOp {
  using Type = T;
  using Arguments = Gemm;
  static constexpr int kColumns = kTileColumns, kStretches = 1;
  static constexpr bool kTransposeA = kTransposedA, kTransposeB = kTransposedB, kStartsFromSums = true;

  const Gemm& g;

  __device__ __forceinline__ explicit GemmOp(const Arguments& g) : g(g) {}

  __device__ __forceinline__ int2 blocks(const Tile& tile) const {
    return {blocks_of(g.rows, cluster_rows(tile)), blocks_of(g.columns, kColumns)};
  }
  __device__ __forceinline__ Steps steps(int, int) const { return {blocks_of(static_cast<int>(g.depth), kDepth)}; }
  __device__ __forceinline__ int b_column(int block) const { return block * kColumns; }

  // Whether the copy engine can write C; if not, the threads store it.
  static bool by_copy_engine(const Arguments& g) {
    return !kSwapped && g.out_type != Dtype::kFloat32 && g.columns % 8 == 0;
  }
  static Matrix stored(const Arguments& g) { return {by_copy_engine(g) ? g.out : nullptr, g.rows, g.columns}; }

  struct Loaded {};
  __device__ __forceinline__ Loaded load(const Place&) const { return {}; }

  // Calls visit(whether the element exists, its offset in C, its product) for every element that a thread holds.
  template <class Visit>
  __device__ __forceinline__ void for_each(const Place& place, float (&products)[kColumns / 2], Visit visit) const {
    const int first_row = place.row();
    for_pairs(place.column_block * kColumns + place.column(), products,
              [&](int r, int column, float& first, float& second) {
                const int row = first_row + 8 * r;
                const auto there = [&](int column) {
                  return kSwapped ? static_cast<int64_t>(column) * g.rows + row
                                  : static_cast<int64_t>(row) * g.columns + column;
                };
                visit(row < g.rows && column < g.columns, there(column), first);
                visit(row < g.rows && column + 1 < g.columns, there(column + 1), second);
              });
  }

  __device__ __forceinline__ void start(const Place& place, float (&products)[kColumns / 2]) const {
    const bool accumulates = g.start != nullptr;
    for_each(place, products, [&](bool exists, int64_t there, float& product) {
      product = load_or_zero(g.start + there, exists && accumulates);
    });
  }

  __device__ __forceinline__ void finish(const Place& place, Loaded, float (&products)[kColumns / 2],
                                         const Stores& stores) const {
    if (g.out_type == Dtype::kFloat32) {
      store(place, products, static_cast<float*>(g.out), [](float x) { return x; });
    } else if (g.out_type == Dtype::kBfloat16) {
      store_narrow(place, products, static_cast<__nv_bfloat16*>(g.out), stores,
                   [](float x) { return __float2bfloat16_rn(x); });
    } else {
      store_narrow(place, products, static_cast<__half*>(g.out), stores, [](float x) { return __float2half_rn(x); });
    }
  }

  template <typename Out, class Round>
  __device__ __forceinline__ void store(const Place& place, float (&products)[kColumns / 2], Out* out,
                                        Round round) const {
    for_each(place, products, [&](bool exists, int64_t there, float product) {
      if (exists) out[there] = round(product);
    });
  }

  template <typename Out, class Round>
  __device__ __forceinline__ void store_narrow(const Place& place, float (&products)[kColumns / 2], Out* out,
                                               const Stores& stores, Round round) const {
    if constexpr (kSwapped) {
      store(place, products, out, round);
    } else {
      const int column = place.column_block * kColumns;
      const bool aligned = g.columns % 8 == 0;
      store_rounded(Target<Out>{out, g.columns, place.first_row, column, g.rows - place.first_row, g.columns - column,
                                aligned, aligned},
                    products, stores);
    }
  }
};

template <typename T, bool kTransposedA, bool kTransposedB, int kTileColumns, bool kSwapped>
cudaError_t launch_op(cudaStream_t stream, const Gemm& g) {
  const int64_t blocks = int64_t{blocks_of(g.columns, kTileColumns)} * blocks_of(g.rows, cluster_rows(g.tile));
  return launch_product<GemmOp<T, kTransposedA, kTransposedB, kTileColumns, kSwapped>>(stream, {{g.a, g.b}}, g.tile,
                                                                                      blocks, g);
}

template <typename T, bool kTransposedA, bool kTransposedB>
cudaError_t launch_wide(cudaStream_t stream, const Gemm& g) {
  switch (g.tile_columns) {
    case 64: return launch_op<T, kTransposedA, kTransposedB, 64, false>(stream, g);
    case 128: return launch_op<T, kTransposedA, kTransposedB, 128, false>(stream, g);
    case 256: return launch_op<T, kTransposedA, kTransposedB, 256, false>(stream, g);
    default: return cudaErrorInvalidValue;
  }
}

// For a C of few rows, which run along the columns of tiles of Cᵀ: the other operand is only streamed past them.
template <typename T, bool kTransposedA>
cudaError_t launch_swapped(cudaStream_t stream, const Gemm& g) {
  switch (g.tile_columns) {
    case 8: return launch_op<T, kTransposedA, false, 8, true>(stream, g);
    case 16: return launch_op<T, kTransposedA, false, 16, true>(stream, g);
    case 32: return launch_op<T, kTransposedA, false, 32, true>(stream, g);
    case 64: return launch_op<T, kTransposedA, false, 64, true>(stream, g);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch(cudaStream_t stream, const Gemm& g) {
  const bool is_bfloat16 = g.type == Dtype::kBfloat16;
  if (!g.swapped) {
    return with_flags(
        [&](auto is_bfloat16, auto a_transposed, auto b_transposed) {
          return launch_wide<Narrow<decltype(is_bfloat16)>, a_transposed, b_transposed>(stream, g);
        },
        is_bfloat16, g.a_transposed, g.b_transposed);
  }
  if (g.b_transposed) return cudaErrorInvalidValue;
  return with_flags(
      [&](auto is_bfloat16, auto a_transposed) {
        return launch_swapped<Narrow<decltype(is_bfloat16)>, a_transposed>(stream, g);
      },
      is_bfloat16, g.a_transposed);
}

}  // namespace rlk
