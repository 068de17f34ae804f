// The forward kernel of linear_logp: a partial softmax for each row and chunk of 256 columns, of a product with the head
// or of products that are in memory.
// pallas_kernels/mosaic/statistics.py defines a partial (k, s, t, u), and the sum of logits beside it.
#pragma once

#include "launch.cuh"
#include "logits.cuh"

namespace rlk {
namespace {

template <typename T, bool kIsDv, bool kSoftcap, bool kEntropy, bool kSmoothed>
struct StatisticsOp : ProductWithHead<T, kIsDv> {
  using Arguments = Statistics;
  using Base = ProductWithHead<T, kIsDv>;

  const Statistics& s;

  __device__ __forceinline__ explicit StatisticsOp(const Arguments& s) : Base(s.logits), s(s) {}

  static Matrix stored(const Arguments& s) { return {s.kept, s.logits.hidden.rows, int64_t{s.kept_chunks} * kChunk}; }

  struct Loaded {
    float temperature[2];
    Columns columns;
    bool looks_for_targets;
  };

  __device__ __forceinline__ Loaded load(const Place& place) const {
    Loaded loaded;
    loaded.temperature[0] = s.temperature[place.row()];
    loaded.temperature[1] = s.temperature[place.row() + 8];
    const int chunk = this->chunk(place.column_block);
    loaded.columns = columns_of(s.logits.head.vocabulary, s.logits.where, chunk);
    loaded.looks_for_targets =
        s.holds_target == nullptr || s.holds_target[static_cast<int64_t>(place.row() / 64) * s.chunks + chunk] > 0;
    return loaded;
  }

  __device__ __forceinline__ void finish(const Place& place, const Loaded& loaded, float (&values)[kChunk / 2],
                                         const Stores& stores) const {
    const int chunk = this->chunk(place.column_block);
    add_bias(s.logits.bias, place, values);
    const float scale[2] = {divide(kLog2E, loaded.temperature[0]), divide(kLog2E, loaded.temperature[1])};
    float picked[2] = {0, 0}, picked_derivative[2] = {0, 0};
    if (loaded.looks_for_targets) pick(place, loaded.columns, values, scale, picked, picked_derivative);
    mask(place, loaded.columns.width, -INFINITY, values);
    const Allowed allowed = allowed_of(s.logits, place, chunk);
    only_allowed(s.logits, allowed, values);
    const ExponentScaling scaling[2] = {
        logit_scaling<kSoftcap>(s.logits, largest_of_row(values, 0), scale[0]),
        logit_scaling<kSoftcap>(s.logits, largest_of_row(values, 1), scale[1]),
    };
    // The columns of a softcap are summed strip by strip.
    constexpr int kEights = (kSoftcap ? 64 : kChunk) / 8;
    const int width = loaded.columns.width - place.column();
    float sum[2] = {0, 0}, spread[2] = {0, 0}, y_sum[2] = {0, 0};
    uint32_t kept[kChunk / 64][16];
#pragma unroll
    for (int first = 0; first < kChunk / 8; first += kEights) {
      RowSum total[2], gap[2], ys[2];
#pragma unroll
      for (int i = first; i < first + kEights; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* const pair = values + 4 * i + 2 * r;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            LogitExponent exponent = logit_exponent<kSoftcap>(s.logits, scaling[r], pair[c]);
            // The softcap of −∞ is finite.
            if (kSoftcap && (8 * i + c >= width || !allowed.has(i, r, c))) exponent.y = -INFINITY;
            if constexpr (kSmoothed) ys[r].add(i, c, 8 * i + c < width ? exponent.y : 0);
            const float weight = exp2_approx(exponent.y);
            total[r].add(i, c, weight);
            // The exponential of a logit of −∞ is 0, and 0·∞ must be 0.
            if constexpr (kEntropy) gap[r].add_product(i, c, weight, min_nan(-exponent.y, 1e30f));
            pair[c] = __fmul_rn(kSoftcap ? __fmul_rn(weight, exponent.derivative) : weight, kExponentialScale<T>);
          }
          // A softcap leaves no registers for float32 products until all strips are summed.
          if constexpr (kSoftcap) kept[i / 8][i % 8 * 2 + r] = pair_of<T>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = __fadd_rn(sum[r], total[r].total());
        if constexpr (kEntropy) spread[r] = __fadd_rn(spread[r], gap[r].total());
        if constexpr (kSmoothed) y_sum[r] = __fadd_rn(y_sum[r], ys[r].total());
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t there = static_cast<int64_t>(chunk) * s.rows + place.row() + 8 * r;
      if (place.column() == 0) {
        s.shift[there] = scaling[r].shift;
        s.total[there] = sum[r];
        s.target[there] = picked[r];
        if constexpr (kEntropy) s.gap[there] = spread[r];
        if constexpr (kSoftcap) s.target_derivative[there] = picked_derivative[r];
        if constexpr (kSmoothed) {
          const float of_shift = __fmul_rn(scaling[r].shift, static_cast<float>(loaded.columns.width));
          s.logit_sum[there] = __fadd_rn(y_sum[r], of_shift);
        }
      }
    }
    if (chunk >= s.kept_chunks) return;
    const Target<T> there = {nullptr, 0, place.first_row, chunk * kChunk, 16, kChunk, true, true};
    if constexpr (kSoftcap) {
#pragma unroll
      for (int strip = 0; strip < kChunk / 64; ++strip) store_strip(there, strip, kept[strip], stores);
    } else {
      store_rounded(there, values, stores);
    }
  }

  // The y of each row's target and the derivative of its softcap, 0 where the target is not among the columns.
  __device__ __forceinline__ void pick(const Place& place, const Columns& columns, float (&values)[kChunk / 2],
                                       const float (&scale)[2], float (&picked)[2], float (&derivative)[2]) const {
    const int target[2] = {target_place(s.target_ids[place.row()], columns),
                           target_place(s.target_ids[place.row() + 8], columns)};
    float found[2] = {0, 0};
    for_pairs(place.column(), values, [&](int r, int column, float& first, float& second) {
      if (column == target[r]) found[r] = first;
      if (column + 1 == target[r]) found[r] = second;
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Softcapped value = {sum_of_row(found[r]), 0};
      if constexpr (kSoftcap) value = softcapped(value.value, s.logits);
      picked[r] = __fmul_rn(scale[r], value.value);
      derivative[r] = target[r] < 0 ? 0 : value.derivative;
    }
  }
};

// Calls launch(entropy, smoothed) for a kernel with what the statistics ask for.
template <class Launch>
cudaError_t with_sums(const Statistics& s, Launch launch) {
  return with_flags(
      [&](auto entropy, auto smoothed) -> cudaError_t {
        if constexpr (entropy && smoothed) {
          return cudaErrorInvalidValue;  // no op has both
        } else {
          return launch(entropy, smoothed);
        }
      },
      s.gap != nullptr, s.logit_sum != nullptr);
}

template <bool kSoftcap>
cudaError_t launch_statistics(cudaStream_t stream, const Statistics& s) {
  const Logits& logits = s.logits;
  const int64_t blocks = int64_t{s.chunks} * blocks_of(logits.hidden.rows, cluster_rows(logits.tile));
  return with_sums(s, [&](auto entropy, auto smoothed) {
    return with_flags(
        [&](auto is_bfloat16, auto is_dv) {
          return launch_product<StatisticsOp<Narrow<decltype(is_bfloat16)>, is_dv, kSoftcap, entropy, smoothed>>(
              stream, {{logits.hidden, logits.head.weight}, logits.low_rank}, logits.tile, blocks, s);
        },
        logits.type == Dtype::kBfloat16, logits.head.is_dv);
  });
}

// The epilogue of the product, a block for 64 rows of a chunk: products are where a product would leave them.
template <class Op>
__global__ void __launch_bounds__(kThreads) statistics_of_products_kernel(const StatisticsOfProducts s) {
  const Logits& logits = s.statistics.logits;
  const Place place = {static_cast<int>(blockIdx.x) * 64 + warp_index() * 16, static_cast<int>(blockIdx.y)};
  if (blockIdx.x * 64 >= *logits.where.rows || place.column_block >= *logits.where.chunks) return;
  const Op op(s.statistics);
  const typename Op::Loaded loaded = op.load(place);
  const int first_column = head_row(logits.head, *logits.where.first_chunk, place.column_block);
  float values[kChunk / 2];
  for_pairs(place.column(), values, [&](int r, int column, float& first, float& second) {
    const int64_t row = place.row() + 8 * r;
    const float* there = s.products + row * s.product_columns + first_column + column;
    first = load_or_zero(there, row < s.product_rows && column < loaded.columns.width);
    second = load_or_zero(there + 1, row < s.product_rows && column + 1 < loaded.columns.width);
  });
  op.finish(place, loaded, values, Stores{});
}

template <bool kSoftcap>
cudaError_t launch_statistics(cudaStream_t stream, const StatisticsOfProducts& s) {
  return with_sums(s.statistics, [&](auto entropy, auto smoothed) {
    // The type is that of kept exponentials, of which there are none.
    using Op = StatisticsOp<__nv_bfloat16, false, kSoftcap, entropy, smoothed>;
    return launch_blocks(statistics_of_products_kernel<Op>, blocks_of(static_cast<int>(s.product_rows), 64),
                         s.statistics.chunks, stream, s);
  });
}

}  // namespace
}  // namespace rlk
