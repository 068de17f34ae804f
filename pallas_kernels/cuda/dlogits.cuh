// The first half of linear_logp's backward: gradients of the logits of one slice of chunks, rounded to 16 bits.
// pallas_kernels/mosaic/dlogits.py has the formulas.
#pragma once

#include "launch.cuh"
#include "logits.cuh"

namespace rlk {
namespace {

template <typename T>
__device__ __forceinline__ float rounded_to(float x);
template <>
__device__ __forceinline__ float rounded_to<__half>(float x) {
  return __half2float(__float2half_rn(x));
}
template <>
__device__ __forceinline__ float rounded_to<__nv_bfloat16>(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

template <typename T, bool kIsDv, bool kSoftcap, bool kEntropy, bool kSmoothed>
struct DlogitsOp : ProductWithHead<T, kIsDv> {
  using Arguments = Dlogits;
  using Base = ProductWithHead<T, kIsDv>;

  const Dlogits& d;

  __device__ __forceinline__ explicit DlogitsOp(const Arguments& d) : Base(d.logits), d(d) {}

  static Matrix stored(const Arguments& d) { return {d.out, d.logits.hidden.rows, int64_t{d.chunks} * kChunk}; }

  struct Row {
    int target;
    float temperature, shift, constant, slope, at_target, uniform;
  };
  struct Loaded {
    Row rows[2];
    Columns columns;
  };

  __device__ __forceinline__ Loaded load(const Place& place) const {
    const int first_row = place.row();
    Loaded loaded;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      loaded.rows[r] = {d.rows.target_ids[row], d.rows.temperature[row], d.rows.shift[row],
                        d.rows.constant[row],   kEntropy ? d.rows.slope[row] : 0, d.rows.at_target[row],
                        kSmoothed ? d.rows.uniform[row] : 0};
    }
    loaded.columns = columns_of(d.logits.head.vocabulary, d.logits.where, this->chunk(place.column_block));
    return loaded;
  }

  // A row's coefficients in this chunk with its own k: a logit's gradient is E·(constant + slope·(y − k)) + uniform·d,
  // where E is the rounded exponential and d the softcap's derivative. The target's column counts from the thread's first
  // column, so that the compiler knows what it is compared with.
  struct Within {
    ExponentScaling scaling;
    float constant, slope, at_target, uniform;
    int target;
  };

  __device__ __forceinline__ Within within(const Row& row, float largest, const Columns& columns, int first_column) const {
    const float scale = divide(kLog2E, row.temperature);
    const int target = target_place(row.target, columns) - first_column;
    const ExponentScaling scaling = logit_scaling<kSoftcap>(d.logits, largest, scale);
    // A chunk without a finite logit has k = 0, which may be larger than the row's.
    const float below = min_nan(__fsub_rn(scaling.shift, row.shift), 0.0f);
    const float power = __fmul_rn(exp2_approx(below), 1 / kExponentialScale<T>);
    // The power is 0 long before −1e3 is reached, and 0·∞ must be 0.
    const float constant = kEntropy ? fmaf(row.slope, max_nan(below, -1e3f), row.constant) : row.constant;
    return {scaling, __fmul_rn(power, constant), __fmul_rn(power, row.slope), row.at_target, row.uniform, target};
  }

  __device__ __forceinline__ float gradient(const Within& row, int column, float product) const {
    const LogitExponent exponent = logit_exponent<kSoftcap>(d.logits, row.scaling, product);
    float y = exponent.y, factor = row.constant;
    if constexpr (kEntropy) {
      y = max_nan(y, -1e30f);  // the exponential of y = −∞ is 0, and 0·∞ must be 0
      factor = fmaf(row.slope, y, factor);
    }
    const float power = kSoftcap ? __fmul_rn(exp2_approx(y), exponent.derivative) : exp2_approx(y);
    const float exponential = rounded_to<T>(__fmul_rn(power, kExponentialScale<T>));
    float found;
    if constexpr (kSmoothed && !kSoftcap) {
      found = fmaf(exponential, factor, row.uniform);  // as Mosaic's compiler fuses it
    } else {
      found = __fmul_rn(exponential, factor);
      if constexpr (kSmoothed) found = fmaf(row.uniform, exponent.derivative, found);
    }
    return column == row.target ? row.at_target : found;
  }

  __device__ __forceinline__ void finish(const Place& place, const Loaded& loaded, float (&values)[kChunk / 2],
                                         const Stores& stores) const {
    const int first_column = place.column();
    add_bias(d.logits.bias, place, values);
    mask(place, loaded.columns.width, -INFINITY, values);
    const Allowed allowed = allowed_of(d.logits, place, this->chunk(place.column_block));
    only_allowed(d.logits, allowed, values);
    const Within rows[2] = {within(loaded.rows[0], largest_of_row(values, 0), loaded.columns, first_column),
                            within(loaded.rows[1], largest_of_row(values, 1), loaded.columns, first_column)};
    const int width = loaded.columns.width - first_column;
    const Target<T> out = {nullptr, 0, place.first_row, place.column_block * kChunk, 16, kChunk, true, true};
#pragma unroll
    for (int strip = 0; strip < kChunk / 64; ++strip) {
      uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = i % 2, column = strip * 64 + i / 2 * 8;
        const float first = gradient(rows[r], column, values[strip * 32 + 2 * i]);
        const float second = gradient(rows[r], column + 1, values[strip * 32 + 2 * i + 1]);
        pairs[i] = pair_of<T>(first, second);
        if constexpr (kSoftcap) {  // the softcap of −∞ is finite
          const int eight = column / 8;
          pairs[i] &= (allowed.has(eight, r, 0) ? 0xffffu : 0) | (allowed.has(eight, r, 1) ? 0xffff0000u : 0);
        }
      }
      if (width < kChunk - 6) {  // a thread's columns begin at 0, 2, 4 or 6: some column may not exist
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int column = strip * 64 + i / 2 * 8;
          pairs[i] &= (column < width ? 0xffffu : 0) | (column + 1 < width ? 0xffff0000u : 0);
        }
      }
      store_strip(out, strip, pairs, stores);
    }
  }
};

template <bool kSoftcap>
cudaError_t launch_dlogits(cudaStream_t stream, const Dlogits& d) {
  const Logits& logits = d.logits;
  const int64_t blocks = int64_t{d.chunks} * blocks_of(logits.hidden.rows, cluster_rows(logits.tile));
  return with_flags(
      [&](auto is_bfloat16, auto is_dv, auto entropy, auto smoothed) -> cudaError_t {
        if constexpr (entropy && smoothed) {
          return cudaErrorInvalidValue;  // no op has both
        } else {
          return launch_product<DlogitsOp<Narrow<decltype(is_bfloat16)>, is_dv, kSoftcap, entropy, smoothed>>(
              stream, {{logits.hidden, logits.head.weight}, logits.low_rank}, logits.tile, blocks, d);
        }
      },
      logits.type == Dtype::kBfloat16, logits.head.is_dv, d.rows.slope != nullptr, d.rows.uniform != nullptr);
}

}  // namespace
}  // namespace rlk
