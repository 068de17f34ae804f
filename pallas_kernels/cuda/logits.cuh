// What the two products with the head share: the columns of the softmax's tree, and how a product becomes a logit.
//
// Every sum, and every product that is added to something, is written out (__fadd_rn, fmaf, __fmul_rn), because bits
// depend on which of them are fused and no compiler may choose that. The choice is that of pallas_kernels/mosaic.
#pragma once

#include <type_traits>

#include "main_loop.cuh"

namespace rlk {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargeSoftcap = 64.0f;

// --- columns ---------------------------------------------------------------------------------------------------------

// The group of a chunk, and the chunk's first column.
struct Start {
  int group, column;
};

__device__ __forceinline__ Start start_of(const Vocabulary& v, int chunk) {
  const int2 place = v.group_chunks.divide(chunk);
  return {place.x, place.x * v.group_width + place.y * kChunk};
}

// The first column of a chunk, and how many columns it has, 0 … 256.
struct Columns {
  int start, width;
};

__device__ __forceinline__ Columns columns_of(const Vocabulary& v, const VocabSlice& where, int chunk) {
  const Start start = start_of(v, chunk);
  const int end = min((start.group + 1) * v.group_width, where.columns == nullptr ? v.size : *where.columns);
  return {start.column, max(0, min(kChunk, end - start.column))};
}

// The first row (column for a head [D, V]) in the weight of chunk number `chunk` of a slice.
__device__ __forceinline__ int head_row(const Head& head, int first_chunk, int chunk) {
  return head.is_copied ? chunk * kChunk : start_of(head.vocabulary, first_chunk + chunk).column;
}

// The place of a target in a chunk, negative where it is not there.
__device__ __forceinline__ int target_place(int target, const Columns& columns) {
  const int place = target - columns.start;
  return place < columns.width ? place : -1;
}

// --- hidden·Wᵀ over one slice of chunks ------------------------------------------------------------------------------

template <typename T, bool kIsDv>
struct ProductWithHead {
  using Type = T;
  static constexpr int kColumns = kChunk, kStretches = 2;
  // The sums do not start from 0, so that a sum of nothing but −0 is −0, which is the same logit.
  static constexpr bool kTransposeA = false, kTransposeB = kIsDv, kStartsFromSums = false;

  const Logits& logits;

  __device__ __forceinline__ explicit ProductWithHead(const Logits& logits) : logits(logits) {}

  // The chunk of a column block. It is read anew each time, which keeps a register free during epilogues.
  __device__ __forceinline__ int chunk(int column_block) const { return *logits.where.first_chunk + column_block; }

  __device__ __forceinline__ int2 blocks(const Tile& tile) const {
    return {blocks_of(*logits.where.rows, cluster_rows(tile)), *logits.where.chunks};
  }
  __device__ __forceinline__ Steps steps(int stretch, int) const {
    const Matrix& hidden = stretch == 0 ? logits.hidden : logits.low_rank.a;
    return {blocks_of(static_cast<int>(hidden.columns), kDepth)};
  }
  __device__ __forceinline__ int b_column(int block) const { return head_row(logits.head, *logits.where.first_chunk, block); }
};

// --- from products to logits -----------------------------------------------------------------------------------------

// softcap·tanh(x / softcap), and its derivative.
struct Softcapped {
  float value;
  float derivative;
};

// With e = exp(−2x/c) and q = (1 + e)^(−1/2), tanh(x/c) is (1 − e)·q² and the derivative is 4·e·q⁴. The hardware's own
// tanh is not accurate enough. With a large softcap 1 − e loses digits of small logits, which a series computes
// instead.
__device__ __forceinline__ Softcapped softcapped(float x, const Logits& logits) {
  const float softcap = logits.softcap, share = __fmul_rn(x, logits.inverse_softcap);
  const float e = exp2_approx(min_nan(__fmul_rn(share, -2 * kLog2E), 60.0f));
  const float root = rsqrt_approx(__fadd_rn(e, 1.0f)), inverse = __fmul_rn(root, root);
  float capped = __fmul_rn(__fsub_rn(1.0f, e), __fmul_rn(inverse, softcap));
  if (softcap > kLargeSoftcap) {
    const float square = __fmul_rn(share, share);
    float series = fmaf(square, static_cast<float>(-17.0 / 315), static_cast<float>(2.0 / 15));
    series = fmaf(square, fmaf(square, series, static_cast<float>(-1.0 / 3)), 1.0f);
    if (fabsf(share) < 0.2f) capped = __fmul_rn(x, series);
  }
  return {capped, __fmul_rn(__fmul_rn(e, inverse), __fmul_rn(4.0f, inverse))};
}

// Adds the bias to the products, in place.
template <int kCount>
__device__ __forceinline__ void add_bias(const float* bias, const Place& place, float (&products)[kCount]) {
  if (bias == nullptr) return;
  const float* here = bias + static_cast<int64_t>(place.column_block) * kChunk + place.column();
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 both = *reinterpret_cast<const float2*>(here + 8 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      products[4 * i + 2 * r] = __fadd_rn(products[4 * i + 2 * r], both.x);
      products[4 * i + 2 * r + 1] = __fadd_rn(products[4 * i + 2 * r + 1], both.y);
    }
  }
}

// Puts `other` into the columns from `width` on.
template <int kCount>
__device__ __forceinline__ void mask(const Place& place, int width, float other, float (&values)[kCount]) {
  if (width >= kChunk) return;
  for_pairs(place.column(), values, [&](int, int column, float& first, float& second) {
    if (column >= width) first = other;
    if (column + 1 >= width) second = other;
  });
}

// Which columns of a chunk a thread's two rows are allowed: bit i of words[r][c] is for column 8·i + c from its first one.
struct Allowed {
  unsigned words[2][2];

  __device__ __forceinline__ bool has(int eight, int r, int c) const { return words[r][c] >> eight & 1; }
};

__device__ __forceinline__ Allowed allowed_of(const Logits& logits, const Place& place, int chunk) {
  if (logits.allowed == nullptr) return {{{~0u, ~0u}, {~0u, ~0u}}};
  const Vocabulary& v = logits.head.vocabulary;
  const int64_t row_words = int64_t{v.groups} * v.group_chunks.by * 8;
  const int* here = logits.allowed + place.row() * row_words + chunk * 8 + place.column();
  Allowed allowed;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint2 both = *reinterpret_cast<const uint2*>(here + 8 * r * row_words);
    allowed.words[r][0] = both.x;
    allowed.words[r][1] = both.y;
  }
  return allowed;
}

// Puts −∞ into the columns that are not allowed.
template <int kCount>
__device__ __forceinline__ void only_allowed(const Logits& logits, const Allowed& allowed, float (&values)[kCount]) {
  if (logits.allowed == nullptr) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!allowed.has(i / 4, i / 2 % 2, i % 2)) values[i] = -INFINITY;
  }
}

// How the values of one row of a chunk become exponents y − shift; the largest exponential 2^(y − shift) lies between
// √½ and √2.
struct ExponentScaling {
  float largest, scale, shift, rest;

  // y − shift, computed from the distance to the largest value: value·scale − shift would be far from 0 at the largest
  // value where y is too large to have fractional digits.
  __device__ __forceinline__ float exponent(float value) const {
    return fmaf(scale, __fsub_rn(value, largest), rest);
  }
};

__device__ __forceinline__ ExponentScaling exponent_scaling(float largest, float scale) {
  const float finite = largest == -INFINITY ? 0.0f : largest;
  const float y = __fmul_rn(scale, finite), shift = rintf(y);
  return {finite, scale, shift, __fsub_rn(y, shift)};
}

// The scaling of a row whose largest product, with its bias, is `largest`: a softcap is monotonic.
template <bool kSoftcap>
__device__ __forceinline__ ExponentScaling logit_scaling(const Logits& logits, float largest, float scale) {
  if constexpr (kSoftcap) largest = softcapped(largest, logits).value;
  return exponent_scaling(largest, scale);
}

// y − shift of a product that holds its bias, and the derivative of the softcap.
struct LogitExponent {
  float y, derivative;
};

template <bool kSoftcap>
__device__ __forceinline__ LogitExponent logit_exponent(const Logits& logits, const ExponentScaling& scaling, float product) {
  if constexpr (!kSoftcap) return {scaling.exponent(product), 1};
  const Softcapped bounded = softcapped(product, logits);
  // The softcap is monotonic but for its rounding.
  return {scaling.exponent(min_nan(bounded.value, scaling.largest)), bounded.derivative};
}

// The power of two that exponentials are multiplied by before they are rounded to T: float16 has digits for small ones
// where the largest, √2, is at the top of its range.
template <typename T>
constexpr float kExponentialScale = std::is_same_v<T, __half> ? 32768.0f : 1.0f;

// --- over a row ------------------------------------------------------------------------------------------------------

// The sum over the four threads that hold a row, in the order (0 + 1) + (2 + 3).
__device__ __forceinline__ float sum_of_row(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float max_of_row(float x) {
  x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
  return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The largest value of a row, the `r`-th of a thread's two.
template <int kCount>
__device__ __forceinline__ float largest_of_row(const float (&values)[kCount], int r) {
  float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float& slot = largest[i % 4];
    slot = max_nan(slot, max_nan(values[4 * i + 2 * r], values[4 * i + 2 * r + 1]));
  }
  return max_of_row(max_nan(max_nan(largest[0], largest[1]), max_nan(largest[2], largest[3])));
}

// The sum of a row in the one order that the softmax's tree prescribes: even and odd eights of columns are summed
// apart, and so are the first and the second column of each pair.
struct RowSum {
  float part[2][2] = {};
  __device__ __forceinline__ void add(int eight, int column, float x) {
    part[eight & 1][column] = __fadd_rn(part[eight & 1][column], x);
  }
  __device__ __forceinline__ void add_product(int eight, int column, float x, float y) {
    part[eight & 1][column] = fmaf(x, y, part[eight & 1][column]);
  }
  __device__ __forceinline__ float total() const {
    return sum_of_row(__fadd_rn(__fadd_rn(part[0][0], part[1][0]), __fadd_rn(part[0][1], part[1][1])));
  }
};

}  // namespace rlk
