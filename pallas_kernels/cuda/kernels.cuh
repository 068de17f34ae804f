// The arguments that kernels are launched with: plain structs of pointers and sizes. Nothing here depends on XLA, so
// that another host can launch the kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace rlk {

constexpr int kChunk = 256;  // columns of a softmax chunk, and places for it in slices of logits and copied heads
constexpr int kDepth = 64;   // K of one step

enum class Dtype { kBfloat16, kFloat16, kFloat32 };

// Divides numbers from 0 to 2³¹ − 1 by a fixed one. A GPU has no instruction for integer division, and the instructions
// that stand in for it would take too long in an epilogue.
struct Divisor {
  int by;
  unsigned inverse;

  __host__ __device__ Divisor() : Divisor(1) {}
  __host__ __device__ explicit Divisor(int by) : by(by), inverse(0xffffffffu / static_cast<unsigned>(by)) {}
#ifdef __CUDACC__
  __device__ __forceinline__ int2 divide(int n) const {  // quotient and remainder
    const int below = static_cast<int>(__umulhi(static_cast<unsigned>(n), inverse)), rest = n - below * by;
    return rest >= by ? int2{below + 1, rest - by} : int2{below, rest};  // the rounded inverse may give one too few
  }
#endif
};

// One block's part of a product. pallas_kernels/hopper/tiles.py chooses it, and no choice changes a bit.
struct Tile {
  int rows;     // 64 or 128
  int stages;   // pipeline steps in flight
  int cluster;  // blocks of a cluster, one below the other, which load each tile of columns once for all
  Divisor band;  // clusters of rows that are visited before the next columns
  int processors;  // multiprocessors that the grid spreads over
};

// A row-major matrix of 16-bit values.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t columns;
};

// The operands of a product along one stretch of its K. They have no data where the stretch has no steps.
struct Operands {
  Matrix a, b;
};

// How the softmax's fixed tree cuts the columns: into groups, and each group into chunks of 256.
struct Vocabulary {
  int size;  // columns of the true vocabulary, unless the slice's `columns` gives them
  int groups;
  int group_width;
  Divisor group_chunks;
};

// int32 numbers on the device: how many rows count, the first chunk of a slice and how many chunks it has, and the size
// of the true vocabulary where only the device knows it, else null.
struct VocabSlice {
  const int* rows;
  const int* first_chunk;
  const int* chunks;
  const int* columns;
};

// The head's weight: [V, D], or [D, V] with `is_dv`, or a copied slice [chunks · 256, D].
struct Head {
  Vocabulary vocabulary;
  bool is_dv;
  bool is_copied;
  Matrix weight;
};

// One slice's product hidden·Wᵀ, which goes on over a low-rank term, and how it becomes logits.
struct Logits {
  Head head;
  VocabSlice where;
  Matrix hidden;
  const float* bias;  // [slice's chunks · 256], or null
  float softcap;      // 0 for none
  float inverse_softcap;
  Dtype type;
  Tile tile;
  const int* allowed;  // [rows, all chunks · 8], pallas_kernels/hopper/allowed.py's bits of columns; null for all columns
  Operands low_rank;  // further columns of hidden, and what multiplies them, stored as the weight is; or without data
};

struct Statistics {
  Logits logits;
  const int* target_ids;     // [rows]
  const int* holds_target;   // [rows / 64, chunks], or null
  const float* temperature;  // [rows]
  int rows;                  // rows of the results
  int chunks;                // chunks of the whole vocabulary
  float* shift;              // [chunks, rows] each; gap and logit_sum may be null, and one of them is
  float* total;
  float* target;
  float* gap;
  float* target_derivative;  // null without a softcap
  float* logit_sum;
  void* kept;                // [rows of hidden, kept_chunks · 256] in hidden's type, or null
  int kept_chunks;
};

// The statistics of products that are in memory already, with their bias where `bias` is null.
struct StatisticsOfProducts {
  Statistics statistics;  // without hidden and a weight; the head says where in a row of products a chunk begins
  const float* products;  // [product_rows, product_columns]
  int64_t product_rows, product_columns;
};

// One slice's products with their bias, −∞ where a place holds no column or one that the row is not allowed.
struct Products {
  Logits logits;
  float* values;   // [rows of hidden, chunks · 256]
  float* largest;  // [chunks, rows]: the largest of each chunk
  int chunks, rows;
};

constexpr int kList = 128;  // products that a list of the largest ones holds

// Adds one slice's products to the list of the `count` largest of each row.
struct AddLargest {
  VocabSlice where;
  Vocabulary vocabulary;
  const float* values;   // [value_rows, chunks · 256]
  const float* largest;  // [chunks, rows]
  int value_rows, chunks, rows;
  float* list;        // [rows, kList], in descending order
  int* list_columns;  // their columns; those of equal products ascend
  int count;
};

// [rows] each; gap is null where no entropy is asked for, target_derivative without a softcap, and logit_sum where
// targets are not smoothed.
struct Partials {
  const float* shift;
  const float* total;
  const float* target;
  const float* gap;
  const float* target_derivative;
  const float* logit_sum;
};

struct FoldChunks {
  const int* active;   // [1]: how many rows count
  Partials of_chunks;  // [chunks, rows]
  int chunks, groups, rows;
  float *shift, *total, *target, *gap, *target_derivative, *logit_sum;  // [groups, rows]
};

struct FoldGroups {
  const int* active;   // [1]: how many rows count
  Partials of_groups;  // [groups, rows]
  int groups, rows;
  float *logp, *lse, *entropy, *shift, *total, *gap, *target_derivative, *logit_sum;  // [rows]
};

// The facts about each row that its gradients depend on; [rows], those not asked for are null.
struct RowFacts {
  const float *temperature, *logp, *total, *gap, *target_derivative, *g_logp, *g_lse, *g_entropy, *scale, *g_uniform,
      *g_spread;
};

struct CoefficientsArguments {
  RowFacts rows;
  int count;
  float *constant, *slope, *at_target, *uniform;  // [rows]; slope and uniform may be null
};

// What the gradients of a row's logits are computed from: 2^(y − shift)·(constant + slope·(y − shift)) + uniform, and
// at_target for the target; [rows], slope and uniform may be null.
struct Coefficients {
  const int* target_ids;
  const float *temperature, *shift, *constant, *slope, *at_target, *uniform;
};

struct Dlogits {
  Logits logits;
  Coefficients rows;
  void* out;  // [rows of hidden, slice's chunks · 256]
  int chunks;  // the most chunks that the slice can have
};

struct DlogitsFromKept {
  VocabSlice where;
  Vocabulary vocabulary;
  Coefficients rows;
  const void* exponentials;  // [rows, kept chunks · 256] in `type`; `out` itself where gradients take their place
  const float* shift;        // [kept chunks, shift_rows]
  const int* row_map;        // [rows]: the kept row of each row, not below its own number
  const int* moved;          // [1]: whether any kept row has another number; null where nothing is replaced
  int kept_chunks, shift_rows;
  void* out;  // [rows, chunks · 256] in `type`
  int rows_out, chunks, rows_at_once;
  Dtype type;
};

// The groups of the vocabulary that one call sums up, as int32 numbers on the device.
struct GroupRange {
  const int* first;
  const int* count;
};

// Each group's sums are a chain. `total` is the fold of the groups so far; where it is null, the caller folds them.
struct HiddenGradient {
  Head head;
  VocabSlice where;
  GroupRange groups;
  Matrix dlogits;
  const float* unscale;   // [rows], which multiplies the fold of all groups, or null
  float* chains;          // [groups, rows, columns] without a total, else [1, rows, columns], or null
  float* total;           // [rows, columns], or null
  void* rounded;          // [rows, columns] in `type`, what the fold of all groups is rounded to, or null
  int rows;
  Divisor column_blocks;  // of 256 columns
  Dtype type;
  Tile tile;
};

struct WeightGradient {
  Head head;  // only the sizes of its weight matter, which are those of `out`
  VocabSlice where;
  Matrix dlogits;
  Matrix hidden;
  const float* unscale;  // [1], or null
  void* out;
  Dtype type;
  Tile tile;
};

struct ColumnSums {
  const int* rows;  // how many rows count; on the device
  Matrix dlogits;
  const float* row_unscale;  // [rows], or null
  float* out;
  Dtype type;
};

struct Gemm {
  Matrix a;  // along the rows of a tile: [·, K], or [K, ·] with a_transposed
  Matrix b;  // along its columns: [·, K], or [K, ·] with b_transposed
  bool a_transposed, b_transposed;
  int64_t depth;
  const float* start;  // what the sums start from, in the shape of `out`, or null
  void* out;           // [rows, columns], or [columns, rows] with swapped
  int rows, columns;
  bool swapped;
  Dtype type, out_type;
  Tile tile;
  int tile_columns;
};

cudaError_t launch(cudaStream_t, const Statistics&);
cudaError_t launch_softcapped(cudaStream_t, const Statistics&);
cudaError_t launch(cudaStream_t, const StatisticsOfProducts&);
cudaError_t launch_softcapped(cudaStream_t, const StatisticsOfProducts&);
cudaError_t launch(cudaStream_t, const Products&);
cudaError_t launch(cudaStream_t, const AddLargest&);
cudaError_t launch(cudaStream_t, const FoldChunks&);
cudaError_t launch(cudaStream_t, const FoldGroups&);
cudaError_t launch(cudaStream_t, const CoefficientsArguments&);
cudaError_t launch(cudaStream_t, const Dlogits&);
cudaError_t launch_softcapped(cudaStream_t, const Dlogits&);
cudaError_t launch(cudaStream_t, const DlogitsFromKept&);
cudaError_t launch(cudaStream_t, const HiddenGradient&);
cudaError_t launch(cudaStream_t, const WeightGradient&);
cudaError_t launch(cudaStream_t, const ColumnSums&);
cudaError_t launch(cudaStream_t, const Gemm&);

}  // namespace rlk
