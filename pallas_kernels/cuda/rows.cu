// The kernels without a product: the fold of partial softmaxes, the coefficients of logits' gradients, these gradients
// from kept exponentials, and sums over rows.
#include "launch.cuh"
#include "logits.cuh"

namespace rlk {
namespace {

constexpr int kAtOnce = 8;  // loads of a thread that are in flight together

struct Partial {
  float shift, total, target, gap, target_derivative, logit_sum;
};

template <bool kSmoothed>
__device__ __forceinline__ Partial load(const Partials& from, int64_t there) {
  return {from.shift[there], from.total[there], from.target[there], from.gap == nullptr ? 0 : from.gap[there],
          from.target_derivative == nullptr ? 0 : from.target_derivative[there],
          kSmoothed ? from.logit_sum[there] : 0};
}

// The fold of `so_far` and of the first `count` parts, in this order.
template <bool kSmoothed>
__device__ __forceinline__ Partial fold(const Partial& so_far, const Partial (&parts)[kAtOnce], int count) {
  Partial whole = {so_far.shift, 0, so_far.target, 0, so_far.target_derivative, so_far.logit_sum};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    // A partial without columns has no maximum.
    if (i < count) whole.shift = max_nan(whole.shift, parts[i].total == 0 ? -INFINITY : parts[i].shift);
  }
  auto add = [&](const Partial& part) {
    const float below = part.total == 0 ? 0 : __fsub_rn(whole.shift, part.shift), factor = exp2_full(-below);
    whole.total = fmaf(part.total, factor, whole.total);
    whole.gap = fmaf(fmaf(part.total, below, part.gap), factor, whole.gap);
  };
  add(so_far);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (i >= count) break;
    add(parts[i]);
    // All partials but the one that holds the target have zeros for it and its derivative.
    whole.target = __fadd_rn(whole.target, parts[i].target);
    whole.target_derivative = __fadd_rn(whole.target_derivative, parts[i].target_derivative);
    if constexpr (kSmoothed) whole.logit_sum = __fadd_rn(whole.logit_sum, parts[i].logit_sum);
  }
  return whole;
}

// The fold of partials first … first + count − 1 of one row, in ascending order, eight at a time.
template <bool kSmoothed>
__device__ __forceinline__ Partial fold_all(const Partials& from, int first, int count, int rows, int row) {
  Partial whole = {-INFINITY, 0, 0, 0, 0, 0};
  for (int i = 0; i < count; i += kAtOnce) {
    Partial parts[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j < count) parts[j] = load<kSmoothed>(from, static_cast<int64_t>(first + i + j) * rows + row);
    }
    whole = fold<kSmoothed>(whole, parts, count - i);
  }
  return whole;
}

template <bool kSmoothed>
__global__ void fold_chunks_kernel(const FoldChunks f) {
  const int row = blockIdx.x * kThreads + threadIdx.x, each = f.chunks / f.groups;
  if (blockIdx.x * kThreads >= *f.active || row >= f.rows) return;
  const Partial whole = fold_all<kSmoothed>(f.of_chunks, blockIdx.y * each, each, f.rows, row);
  const int64_t there = static_cast<int64_t>(blockIdx.y) * f.rows + row;
  f.shift[there] = whole.shift;
  f.total[there] = whole.total;
  f.target[there] = whole.target;
  if (f.gap != nullptr) f.gap[there] = whole.gap;
  if (f.target_derivative != nullptr) f.target_derivative[there] = whole.target_derivative;
  if constexpr (kSmoothed) f.logit_sum[there] = whole.logit_sum;
}

template <bool kSmoothed>
__global__ void fold_groups_kernel(const FoldGroups f) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (blockIdx.x * kThreads >= *f.active || row >= f.rows) return;
  const Partial whole = fold_all<kSmoothed>(f.of_groups, 0, f.groups, f.rows, row);
  // A row without a finite logit has no softmax, and its values are NaN.
  const float shift = whole.shift == -INFINITY ? NAN : whole.shift, log_total = log2f(whole.total);
  // Rounding must not make a probability larger than 1, or an entropy negative.
  f.logp[row] = __fmul_rn(min_nan(__fsub_rn(__fsub_rn(whole.target, shift), log_total), 0.0f), kLn2);
  f.lse[row] = __fmul_rn(__fadd_rn(shift, log_total), kLn2);
  f.shift[row] = shift;
  f.total[row] = whole.total;
  if (f.gap != nullptr) {
    const float gap = divide(whole.gap, whole.total);
    f.entropy[row] = __fmul_rn(max_nan(__fadd_rn(gap, log_total), 0.0f), kLn2);
    f.gap[row] = gap;
  }
  if (f.target_derivative != nullptr) f.target_derivative[row] = whole.target_derivative;
  if constexpr (kSmoothed) f.logit_sum[row] = __fmul_rn(whole.logit_sum, kLn2);
}

// 1 − exp(x) for x <= 0, without the cancellation near 0; `power` is exp(x).
__device__ __forceinline__ float minus_expm1(float x, float power) {
  float series = fmaf(x, 1.0f / 120, 1.0f / 24);
  series = fmaf(x, series, 1.0f / 6);
  series = fmaf(x, series, 1.0f / 2);
  series = fmaf(x, series, 1.0f);
  return x > -0.1f ? __fmul_rn(series, -x) : __fsub_rn(1.0f, power);
}

__global__ void coefficients_kernel(const CoefficientsArguments c) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= c.count) return;
  const RowFacts& facts = c.rows;
  const float logp = facts.logp[row], total = facts.total[row], g_logp = facts.g_logp[row];
  const float per_logit = divide(facts.scale == nullptr ? 1.0f : facts.scale[row], facts.temperature[row]);
  const float probability = exp2_full(__fmul_rn(logp, kLog2E));
  const float of_others = minus_expm1(logp, probability);
  float others = -g_logp, at_target = __fmul_rn(g_logp, of_others), slope = 0;
  if (facts.g_lse != nullptr) {
    others = __fsub_rn(facts.g_lse[row], g_logp);
    at_target = fmaf(facts.g_lse[row], probability, at_target);
  }
  if (facts.g_entropy != nullptr) {
    slope = __fmul_rn(facts.g_entropy[row], -kLn2);
    // log p = ln(2)·(y − shift) − ln(total) gives y − shift at the target without the product hidden·Wᵀ.
    const float target = max_nan(fmaf(logp, kLog2E, log2f(total)), -1e30f), gap = facts.gap[row];
    at_target = fmaf(probability, __fmul_rn(slope, __fadd_rn(gap, target)), at_target);
    others = fmaf(gap, slope, others);
  }
  if (facts.g_uniform != nullptr) {
    const float smoothed = __fsub_rn(facts.g_uniform[row], facts.g_spread[row]);
    // Mosaic's compiler fuses the product where this is all that is added to it.
    const bool is_alone = facts.g_lse == nullptr && facts.g_entropy == nullptr;
    at_target = is_alone ? fmaf(g_logp, of_others, smoothed) : __fadd_rn(at_target, smoothed);
    c.uniform[row] = __fmul_rn(facts.g_uniform[row], per_logit);
  }
  const float weight = divide(per_logit, total);
  c.constant[row] = __fmul_rn(weight, others);
  if (c.slope != nullptr) c.slope[row] = __fmul_rn(weight, slope);
  at_target = __fmul_rn(per_logit, at_target);
  c.at_target[row] = facts.target_derivative == nullptr ? at_target : __fmul_rn(at_target, facts.target_derivative[row]);
}

__device__ __forceinline__ float2 floats_of(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ float2 floats_of(__half2 pair) { return __half22float2(pair); }

template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// A block computes 64 rows of one chunk; a warp takes one row at a time, with eight columns in each lane. Where rows
// moved, one block for each chunk takes them all in ascending order, so that none is overwritten before it is read.
template <typename T, bool kSmoothed>
__global__ void __launch_bounds__(kThreads) dlogits_from_kept_kernel(const DlogitsFromKept f) {
  constexpr int kRows = kAtOnce * kThreads / 32;  // eight rows for each warp
  const int block = blockIdx.x, place = blockIdx.y;
  const int count = *f.where.rows, end = min(blocks_of(count, f.rows_at_once) * f.rows_at_once, f.rows_out);
  const bool moved = f.moved != nullptr && *f.moved != 0;
  if (place >= *f.where.chunks || (moved && block > 0)) return;
  const int chunk = *f.where.first_chunk + place;
  const Columns columns = columns_of(f.vocabulary, f.where, chunk);
  const int warp = threadIdx.x / 32, column = threadIdx.x % 32 * 8;
  const T* exponentials = static_cast<const T*>(f.exponentials) + static_cast<int64_t>(chunk) * kChunk;
  T* out = static_cast<T*>(f.out) + static_cast<int64_t>(place) * kChunk;
  const int last = moved ? end : min(end, (block + 1) * 64);
  for (int first = moved ? 0 : block * 64; first < last; first += kRows) {
    uint4 found[kAtOnce];
    float shift[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Behind the last row it is loaded again, without a branch, so that all loads are in flight together.
      const int kept_row = f.row_map[min(first + i * (kThreads / 32) + warp, last - 1)];
      found[i] = *reinterpret_cast<const uint4*>(exponentials +
                                                 static_cast<int64_t>(kept_row) * f.kept_chunks * kChunk + column);
      shift[i] = f.shift[static_cast<int64_t>(chunk) * f.shift_rows + kept_row];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * (kThreads / 32) + warp;
      if (row >= last) break;
      // A chunk without a finite logit has k = 0, which may be larger than the row's.
      const float below = min_nan(__fsub_rn(shift[i], f.rows.shift[row]), 0.0f);
      const float power = __fmul_rn(exp2_approx(below), 1 / kExponentialScale<T>);
      const float factor = __fmul_rn(f.rows.constant[row], power);
      const int target = target_place(f.rows.target_ids[row], columns);
      const int holds = row < count ? columns.width : 0;
      const uint32_t pairs[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
      uint32_t gradients[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int here = column + 2 * j;
        const float2 both = floats_of(reinterpret_cast<const PairOf<T>&>(pairs[j]));
        float even, odd;
        if constexpr (kSmoothed) {  // as Mosaic's compiler fuses them
          even = fmaf(factor, both.x, f.rows.uniform[row]);
          odd = fmaf(factor, both.y, f.rows.uniform[row]);
        } else {
          even = __fmul_rn(factor, both.x);
          odd = __fmul_rn(factor, both.y);
        }
        if (here == target) even = f.rows.at_target[row];
        if (here + 1 == target) odd = f.rows.at_target[row];
        gradients[j] = pair_of<T>(here < holds ? even : 0, here + 1 < holds ? odd : 0);
      }
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * f.chunks * kChunk + column) =
          make_uint4(gradients[0], gradients[1], gradients[2], gradients[3]);
    }
  }
}

// Each thread sums two columns: sums of 64 rows, folded in ascending order.
template <typename Pair>
__global__ void __launch_bounds__(kThreads) column_sums_kernel(const ColumnSums s) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x * 2, stride = s.dlogits.columns;
  const int blocks = blocks_of(*s.rows, 64);
  float2 sum = {0, 0};
  for (int block = 0; block < blocks; ++block) {
    const Pair* there = reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(s.dlogits.data) +
                                                      static_cast<int64_t>(block) * 64 * stride + column);
    const int rows = static_cast<int>(min(int64_t{64}, s.dlogits.rows - block * 64));
    float2 of_block = {0, 0};
#pragma unroll 16
    for (int i = 0; i < 64; ++i) {
      // A loop over the rows alone would wait for each of the last ones.
      const float2 values = i < rows ? floats_of(there[i * stride / 2]) : float2{0, 0};
      const float unscale = s.row_unscale == nullptr ? 1.0f : s.row_unscale[block * 64 + i];
      of_block.x = fmaf(values.x, unscale, of_block.x);
      of_block.y = fmaf(values.y, unscale, of_block.y);
    }
    sum.x = __fadd_rn(sum.x, of_block.x);
    sum.y = __fadd_rn(sum.y, of_block.y);
  }
  *reinterpret_cast<float2*>(s.out + column) = sum;
}

}  // namespace

cudaError_t launch(cudaStream_t stream, const FoldChunks& f) {
  const auto kernel = f.logit_sum == nullptr ? fold_chunks_kernel<false> : fold_chunks_kernel<true>;
  return launch_blocks(kernel, blocks_of(f.rows, kThreads), f.groups, stream, f);
}

cudaError_t launch(cudaStream_t stream, const FoldGroups& f) {
  const auto kernel = f.logit_sum == nullptr ? fold_groups_kernel<false> : fold_groups_kernel<true>;
  return launch_blocks(kernel, blocks_of(f.rows, kThreads), 1, stream, f);
}

cudaError_t launch(cudaStream_t stream, const CoefficientsArguments& c) {
  return launch_blocks(coefficients_kernel, blocks_of(c.count, kThreads), 1, stream, c);
}

cudaError_t launch(cudaStream_t stream, const DlogitsFromKept& f) {
  return with_flags(
      [&](auto is_bfloat16, auto smoothed) {
        return launch_blocks(dlogits_from_kept_kernel<Narrow<decltype(is_bfloat16)>, smoothed>,
                             blocks_of(f.rows_out, 64), f.chunks, stream, f);
      },
      f.type == Dtype::kBfloat16, f.rows.uniform != nullptr);
}

cudaError_t launch(cudaStream_t stream, const ColumnSums& s) {
  const auto kernel =
      s.type == Dtype::kBfloat16 ? column_sums_kernel<__nv_bfloat162> : column_sums_kernel<__half2>;
  return launch_blocks(kernel, blocks_of(s.dlogits.columns, kChunk), 1, stream, s);
}

}  // namespace rlk
