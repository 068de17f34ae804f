// Backward of linear_logp, first half: gradients of the products hidden·Wᵀ for one slice of chunks, in 16 bits.
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
  return x;  // float16 gradients are not rounded through exponentials
}
template <>
__device__ __forceinline__ float rounded_to<__nv_bfloat16>(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

template <typename T, bool kIsDv, bool kSoftcap, bool kEntropy>
struct DlogitsOp : ProductWithHead<T, kIsDv> {
  using Arguments = Dlogits;
  using Base = ProductWithHead<T, kIsDv>;

  const Dlogits& d;

  __device__ __forceinline__ explicit DlogitsOp(const Arguments& d) : Base(d.logits), d(d) {}

  static Matrix stored(const Arguments& d) { return {d.out, d.logits.hidden.rows, int64_t{d.chunks} * kChunk}; }

  struct Row {
    int target;
    float temperature, shift, constant, slope, at_target;
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
                        d.rows.constant[row],   kEntropy ? d.rows.slope[row] : 0, d.rows.at_target[row]};
    }
    loaded.columns = columns_of(d.logits.head.vocabulary, d.logits.where, this->chunk(place.column_block));
    return loaded;
  }

  // Of a row within this chunk: dlogit = 2^(y − k)·(constant + slope·(y − k)). The target's column counts from the thread's
  // first: what it is compared with is then known to the compiler.
  struct Within {
    Powers powers;
    float constant, slope, at_target;
    int target;
  };

  __device__ __forceinline__ Within within(const Row& row, float largest, const Columns& columns, int first_column) const {
    const float scale = divide(kLog2E, row.temperature);
    const int target = place_of(row.target, columns) - first_column;
    if constexpr (kSoftcap) {
      // Nothing is kept beside a softcap: the row's own integer will do.
      return {{0, scale, row.shift, -row.shift}, row.constant, row.slope, row.at_target, target};
    } else {
      const Powers to_powers = powers(largest, scale);
      // A chunk of no finite logit has k = 0, which may be above the row's.
      const float below = min_nan(__fsub_rn(to_powers.shift, row.shift), 0.0f), power = exp2_approx(below);
      // The power is 0 long before, and 0·∞ must be 0.
      const float constant = kEntropy ? fmaf(row.slope, max_nan(below, -1e3f), row.constant) : row.constant;
      return {to_powers, __fmul_rn(power, constant), __fmul_rn(power, row.slope), row.at_target, target};
    }
  }

  __device__ __forceinline__ float gradient(const Within& row, int column, float product) const {
    Bounded bounded = {product, 1};
    if constexpr (kSoftcap) bounded = softcapped(product, d.logits);
    float y = row.powers.exponent(bounded.value), factor = row.constant;
    if constexpr (kSoftcap) y = min_nan(y, 1.0f);
    if constexpr (kEntropy) {
      y = max_nan(y, -1e30f);  // a power of 0 stands beside y = −∞, and 0·∞ must be 0
      factor = fmaf(row.slope, y, factor);
    }
    float found = __fmul_rn(rounded_to<T>(exp2_approx(y)), factor);
    if (column == row.target) found = row.at_target;
    return kSoftcap ? __fmul_rn(found, bounded.derivative) : found;
  }

  __device__ __forceinline__ void finish(const Place& place, const Loaded& loaded, float (&values)[kChunk / 2],
                                         const Stores& stores) const {
    const int first_column = place.column();
    add_bias(d.logits.bias, place, values);
    float largest[2] = {0, 0};
    if constexpr (!kSoftcap) {
      mask(place, loaded.columns.width, -INFINITY, values);
      largest[0] = largest_of_row(values, 0);
      largest[1] = largest_of_row(values, 1);
    }
    const Within rows[2] = {within(loaded.rows[0], largest[0], loaded.columns, first_column),
                            within(loaded.rows[1], largest[1], loaded.columns, first_column)};
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
      }
      if (width < kChunk - 6) {  // some thread's columns may begin at 6
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
      [&](auto is_bfloat16, auto is_dv, auto entropy) {
        return launch_product<DlogitsOp<Narrow<decltype(is_bfloat16)>, is_dv, kSoftcap, entropy>>(
            stream, logits.hidden, logits.head.weight, logits.tile, blocks, d);
      },
      logits.type == Dtype::kBfloat16, logits.head.is_dv, d.rows.slope != nullptr);
}

}  // namespace
}  // namespace rlk
