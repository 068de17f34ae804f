// The second half of linear_logp's backward: dH and dW from the gradients of one slice's logits.
#include "launch.cuh"
#include "logits.cuh"

namespace rlk {
namespace {

constexpr int kSteps = kChunk / kDepth;  // over the columns of a full chunk

// Adds dlogits·W over one slice to the sums of dH. Each element has a float32 chain for each group of the vocabulary,
// which goes on from where the slice before left it, so that slices change no bits. Where there is a `total`, the chain
// of a group that the slice ends is folded into it. Column blocks are those of the first group, then those of the next.
template <typename T, bool kIsDv>
struct HiddenGradientOp {
  using Type = T;
  using Arguments = HiddenGradient;
  static constexpr int kColumns = kChunk, kStretches = 1;
  static constexpr bool kTransposeA = false, kTransposeB = !kIsDv, kStartsFromSums = true;

  const HiddenGradient& h;
  const int first_chunk, end_chunk, first_group;

  __device__ __forceinline__ explicit HiddenGradientOp(const Arguments& h)
      : h(h),
        first_chunk(*h.where.first_chunk),
        end_chunk(first_chunk + *h.where.chunks),
        first_group(*h.groups.first) {}

  // The part of the slice that lies in one group: its chunks, counted from the group's first one.
  struct Piece {
    int group, first, end;
  };
  __device__ __forceinline__ Piece piece(int column_block) const {
    const int group = first_group + h.column_blocks.divide(column_block).x;
    const int chunks = h.head.vocabulary.group_chunks.by, before = group * chunks;
    return {group, max(first_chunk - before, 0), min(end_chunk - before, chunks)};
  }

  __device__ __forceinline__ int2 blocks(const Tile& tile) const {
    return {blocks_of(*h.where.rows, cluster_rows(tile)), h.column_blocks.by * *h.groups.count};
  }
  // A group's last step may be padded with zeros.
  __device__ __forceinline__ Steps steps(int, int column_block) const {
    const Vocabulary& vocabulary = h.head.vocabulary;
    const Piece piece = this->piece(column_block);
    const int end = min(piece.end * kSteps, blocks_of(vocabulary.group_width, kDepth));
    const int chunk = piece.group * vocabulary.group_chunks.by + piece.first - first_chunk;
    return {end - piece.first * kSteps, chunk * kChunk, head_row(h.head, first_chunk, chunk)};
  }
  __device__ __forceinline__ int b_column(int block) const { return h.column_blocks.divide(block).y * kChunk; }

  static Matrix stored(const Arguments& h) { return {h.rounded, h.rows, h.column_blocks.by * kChunk}; }

  struct Loaded {};
  __device__ __forceinline__ Loaded load(const Place&) const { return {}; }

  // Where a thread's row r, 0 or 1, of matrix number `index` of `sums` begins in this column block.
  __device__ __forceinline__ float* row_of(float* sums, int index, const Place& place, int r) const {
    const int64_t row = int64_t{index} * h.rows + place.row() + 8 * r;
    return sums + (row * h.column_blocks.by + h.column_blocks.divide(place.column_block).y) * kChunk;
  }
  __device__ __forceinline__ float* row_of_chain(int group, const Place& place, int r) const {
    return row_of(h.chains, h.total == nullptr ? group : 0, place, r);
  }

  __device__ __forceinline__ void start(const Place& place, float (&products)[kChunk / 2]) const {
    const Piece piece = this->piece(place.column_block);
    const bool goes_on = h.chains != nullptr && piece.first > 0;
    const float* const rows[2] = {row_of_chain(piece.group, place, 0), row_of_chain(piece.group, place, 1)};
    for_pairs(place.column(), products, [&](int r, int column, float& first, float& second) {
      const float2 so_far = goes_on ? *reinterpret_cast<const float2*>(rows[r] + column) : make_float2(0, 0);
      first = so_far.x;
      second = so_far.y;
    });
  }

  __device__ __forceinline__ void finish(const Place& place, Loaded, float (&products)[kChunk / 2],
                                         const Stores& stores) const {
    const Piece piece = this->piece(place.column_block);
    if (h.total == nullptr || piece.end < h.head.vocabulary.group_chunks.by) {
      store({row_of_chain(piece.group, place, 0), row_of_chain(piece.group, place, 1)}, place, products);
      return;
    }
    float* const rows[2] = {row_of(h.total, 0, place, 0), row_of(h.total, 0, place, 1)};
    if (piece.group > 0) {
      for_pairs(place.column(), products, [&](int r, int column, float& first, float& second) {
        const float2 so_far = *reinterpret_cast<const float2*>(rows[r] + column);
        first = __fadd_rn(so_far.x, first);
        second = __fadd_rn(so_far.y, second);
      });
    }
    const bool is_last = piece.group == h.head.vocabulary.groups - 1;
    if (is_last && h.unscale != nullptr) {
      const float unscale[2] = {h.unscale[place.row()], h.unscale[place.row() + 8]};
      for_pairs(place.column(), products, [&](int r, int, float& first, float& second) {
        first = __fmul_rn(first, unscale[r]);
        second = __fmul_rn(second, unscale[r]);
      });
    }
    if (is_last && h.rounded != nullptr) {
      const int column = b_column(place.column_block);
      store_rounded(Target<T>{nullptr, 0, place.first_row, column, 16, kChunk, true, true}, products, stores);
    } else {
      store(rows, place, products);
    }
  }

  __device__ __forceinline__ void store(float* const (&rows)[2], const Place& place,
                                        float (&products)[kChunk / 2]) const {
    for_pairs(place.column(), products, [&](int r, int column, float first, float second) {
      *reinterpret_cast<float2*>(rows[r] + column) = make_float2(first, second);
    });
  }
};

// Writes one slice's rows of dW = dlogitsᵀ·H, or columns of Hᵀ·dlogits for a head [D, V]: complete sums, rounded once.
template <typename T, bool kIsDv>
struct WeightGradientOp {
  using Type = T;
  using Arguments = WeightGradient;
  static constexpr int kColumns = kChunk, kStretches = 1;
  static constexpr bool kTransposeA = true, kTransposeB = true, kStartsFromSums = true;

  const WeightGradient& w;
  const int first_chunk;

  __device__ __forceinline__ explicit WeightGradientOp(const Arguments& w) : w(w), first_chunk(*w.where.first_chunk) {}

  __device__ __forceinline__ int2 blocks(const Tile& tile) const {
    const int dim = static_cast<int>(w.hidden.columns), chunks = *w.where.chunks;
    const int rows = kIsDv ? dim : chunks * kChunk, columns = kIsDv ? chunks : blocks_of(dim, kChunk);
    return {blocks_of(rows, cluster_rows(tile)), columns};
  }
  __device__ __forceinline__ Steps steps(int, int) const { return {blocks_of(*w.where.rows, kDepth)}; }
  __device__ __forceinline__ int b_column(int block) const { return block * kChunk; }

  static Matrix stored(const Arguments& w) { return {w.out, w.head.weight.rows, w.head.weight.columns}; }

  struct Loaded {};
  __device__ __forceinline__ Loaded load(const Place&) const { return {}; }

  __device__ __forceinline__ void start(const Place&, float (&products)[kChunk / 2]) const {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) products[i] = 0;
  }

  __device__ __forceinline__ void finish(const Place& place, Loaded, float (&products)[kChunk / 2],
                                         const Stores& stores) const {
    if (w.unscale != nullptr) {
      const float unscale = *w.unscale;
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) products[i] = __fmul_rn(products[i], unscale);
    }
    const int chunk = kIsDv ? place.column_block : place.first_row / kChunk, inside = place.first_row % kChunk;
    // Only places that hold columns of the chunk are written: the next ones belong to another group.
    const int width = w.head.is_copied ? kChunk : columns_of(w.head.vocabulary, w.where, first_chunk + chunk).width;
    const int there = head_row(w.head, first_chunk, chunk);
    const Matrix& weight = w.head.weight;
    Target<T> to = {static_cast<T*>(w.out), weight.columns};
    to.aligned = true;
    if constexpr (kIsDv) {
      to.row = place.first_row;
      to.column = there;
      to.rows = static_cast<int>(weight.rows) - to.row;
      to.columns = width;
      to.by_copy_engine = width == kChunk;
    } else {
      to.row = there + inside;
      to.column = place.column_block * kChunk;
      to.rows = width - inside;
      to.columns = static_cast<int>(weight.columns) - to.column;
      to.by_copy_engine = to.rows >= 16;
    }
    store_rounded(to, products, stores);
  }
};

}  // namespace

cudaError_t launch(cudaStream_t stream, const HiddenGradient& h) {
  const int64_t groups = h.total == nullptr ? h.head.vocabulary.groups : 1;
  const int64_t blocks = groups * h.column_blocks.by * blocks_of(h.rows, cluster_rows(h.tile));
  return with_flags(
      [&](auto is_bfloat16, auto is_dv) {
        return launch_product<HiddenGradientOp<Narrow<decltype(is_bfloat16)>, is_dv>>(
            stream, {{h.dlogits, h.head.weight}}, h.tile, blocks, h);
      },
      h.type == Dtype::kBfloat16, h.head.is_dv);
}

cudaError_t launch(cudaStream_t stream, const WeightGradient& w) {
  const Matrix &a = w.head.is_dv ? w.hidden : w.dlogits, &b = w.head.is_dv ? w.dlogits : w.hidden;
  const int64_t blocks = int64_t{blocks_of(b.columns, kChunk)} * blocks_of(a.columns, cluster_rows(w.tile));
  return with_flags(
      [&](auto is_bfloat16, auto is_dv) {
        return launch_product<WeightGradientOp<Narrow<decltype(is_bfloat16)>, is_dv>>(stream, {{a, b}}, w.tile, blocks,
                                                                                      w);
      },
      w.type == Dtype::kBfloat16, w.head.is_dv);
}

}  // namespace rlk
