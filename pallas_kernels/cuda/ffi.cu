// The FFI handlers between XLA and the launchers: they turn buffers and attributes into the structs of kernels.cuh.
//
// Optional operands follow the fixed ones, and `given` has a bit for each of them that says whether it is there.
// Results that are written in place alias operands: what a call does not write stays as it was.
#include <string>

#include "kernels.cuh"
#include "xla/ffi/api/ffi.h"

namespace rlk {
namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Numbers = ffi::Span<const int64_t>;

// Makes the stream's device current for as long as a launcher runs, since XLA's threads serve several devices.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

// Launches a kernel; an error says which one.
template <class Arguments>
ffi::Error run(const char* name, cudaStream_t stream, int device, const Arguments& arguments) {
  const OnDevice here(device);
  const cudaError_t error = here.error() != cudaSuccess ? here.error() : launch(stream, arguments);
  if (error == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // clears the error, which later calls must not take for theirs
  return ffi::Error::Internal(std::string(name) + ": " + cudaGetErrorString(error));
}

template <typename T>
T* data(const AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

template <typename T>
T* data(ffi::Result<AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

int size(const AnyBuffer& buffer, int dimension) { return static_cast<int>(buffer.dimensions()[dimension]); }

Matrix matrix(const AnyBuffer& buffer) {
  return {buffer.untyped_data(), buffer.dimensions()[0], buffer.dimensions()[1]};
}

Dtype dtype(const AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::BF16: return Dtype::kBfloat16;
    case ffi::DataType::F16: return Dtype::kFloat16;
    default: return Dtype::kFloat32;
  }
}

// The optional operands, in the order of their bits.
class Optional {
 public:
  Optional(ffi::RemainingArgs buffers, int64_t given) : buffers_(buffers), given_(given) {}
  template <typename T>
  T* next() {
    return of_next<T*>([](const AnyBuffer& buffer) { return data<T>(buffer); });
  }
  Operands next_operands() { return {of_next<Matrix>(matrix), of_next<Matrix>(matrix)}; }

 private:
  // of(the next operand), or a T of zeros where it is not given.
  template <typename T, class Of>
  T of_next(Of of) {
    const bool is_given = given_ & 1;
    given_ >>= 1;
    if (!is_given) return T{};
    const auto buffer = buffers_.get<AnyBuffer>(index_++);
    return buffer.has_value() ? of(*buffer) : T{};
  }

  ffi::RemainingArgs buffers_;
  int64_t given_;
  size_t index_ = 0;
};

// The results that follow the fixed ones, in their order.
class MoreResults {
 public:
  explicit MoreResults(ffi::RemainingRets buffers) : buffers_(buffers) {}
  // The next result where it is asked for, else null.
  template <typename T>
  T* next(bool is_asked_for) {
    if (!is_asked_for) return nullptr;
    auto buffer = buffers_.get<AnyBuffer>(index_++);
    return buffer.has_value() ? data<T>(*buffer) : nullptr;
  }

 private:
  ffi::RemainingRets buffers_;
  size_t index_ = 0;
};

Tile tile(Numbers numbers) {
  return {static_cast<int>(numbers[0]), static_cast<int>(numbers[1]), static_cast<int>(numbers[2]),
          Divisor(static_cast<int>(numbers[3])), static_cast<int>(numbers[4])};
}

Vocabulary vocabulary(Numbers numbers) {
  const int width = static_cast<int>(numbers[2]);
  return {static_cast<int>(numbers[0]), static_cast<int>(numbers[1]), width, Divisor((width + kChunk - 1) / kChunk)};
}

// The numbers are the vocabulary's size, its groups and their width, whether the head is [D, V], and whether it is a
// copied slice.
Head head(Numbers numbers, const AnyBuffer& weight) {
  return {vocabulary(numbers), numbers[3] != 0, numbers[4] != 0, matrix(weight)};
}

VocabSlice slice(const AnyBuffer& rows, const AnyBuffer& first_chunk, const AnyBuffer& chunks, Optional& optional) {
  return {data<const int>(rows), data<const int>(first_chunk), data<const int>(chunks), optional.next<const int>()};
}

// Logits of products that are in memory: without hidden, its type and a tile. The weight gives its sizes alone.
Logits logits(const AnyBuffer& rows, const AnyBuffer& first_chunk, const AnyBuffer& chunks, const AnyBuffer& weight,
              Optional& optional, Numbers of_head, double softcap) {
  Logits logits = {head(of_head, weight), slice(rows, first_chunk, chunks, optional)};
  logits.bias = optional.next<const float>();
  logits.softcap = static_cast<float>(softcap);
  logits.inverse_softcap = softcap > 0 ? static_cast<float>(1 / softcap) : 0;
  logits.allowed = optional.next<const int>();
  return logits;
}

Logits logits(const AnyBuffer& rows, const AnyBuffer& first_chunk, const AnyBuffer& chunks, const AnyBuffer& hidden,
              const AnyBuffer& weight, Optional& optional, Numbers of_head, Numbers of_tile, double softcap) {
  Logits of_product = logits(rows, first_chunk, chunks, weight, optional, of_head, softcap);
  of_product.hidden = matrix(hidden);
  of_product.type = dtype(hidden);
  of_product.tile = tile(of_tile);
  return of_product;
}

// Statistics without logits: the facts about each row, and results, of which those behind the first three follow where
// they are asked for.
Statistics statistics_of(const AnyBuffer& target_ids, const AnyBuffer& temperature, ffi::Result<AnyBuffer>& shift,
                         ffi::Result<AnyBuffer>& total, ffi::Result<AnyBuffer>& target, MoreResults& more, bool has_gap,
                         bool has_derivative, bool has_sum) {
  Statistics s = {};
  s.target_ids = data<const int>(target_ids);
  s.temperature = data<const float>(temperature);
  s.chunks = size(*shift, 0);
  s.rows = size(*shift, 1);
  s.shift = data<float>(shift);
  s.total = data<float>(total);
  s.target = data<float>(target);
  s.gap = more.next<float>(has_gap);
  s.target_derivative = more.next<float>(has_derivative);
  s.logit_sum = more.next<float>(has_sum);
  return s;
}

// Optional: columns, bias, allowed, holds_target, the operands of a low-rank term. Results: shift, total, target, then gap,
// target_derivative, logit_sum and kept where they are asked for.
ffi::Error statistics(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                      AnyBuffer hidden, AnyBuffer weight, AnyBuffer target_ids, AnyBuffer temperature,
                      ffi::RemainingArgs rest, ffi::Result<AnyBuffer> shift, ffi::Result<AnyBuffer> total,
                      ffi::Result<AnyBuffer> target, ffi::RemainingRets more, int64_t given, Numbers of_head,
                      Numbers of_tile, double softcap, bool has_gap, bool has_sum, int64_t kept_chunks) {
  Optional optional(rest, given);
  MoreResults results(more);
  Statistics s = statistics_of(target_ids, temperature, shift, total, target, results, has_gap, softcap > 0, has_sum);
  s.logits = logits(rows, first_chunk, chunks, hidden, weight, optional, of_head, of_tile, softcap);
  s.holds_target = optional.next<const int>();
  s.logits.low_rank = optional.next_operands();
  s.kept_chunks = static_cast<int>(kept_chunks);
  s.kept = results.next<void>(kept_chunks > 0);
  return run("rlk_statistics", stream, device, s);
}

// Optional: columns, bias, allowed, holds_target. Results: those of `statistics` without kept.
ffi::Error statistics_of_products(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk,
                                  AnyBuffer chunks, AnyBuffer products, AnyBuffer target_ids, AnyBuffer temperature,
                                  ffi::RemainingArgs rest, ffi::Result<AnyBuffer> shift, ffi::Result<AnyBuffer> total,
                                  ffi::Result<AnyBuffer> target, ffi::RemainingRets more, int64_t given,
                                  Numbers of_head, double softcap, bool has_gap, bool has_sum) {
  Optional optional(rest, given);
  MoreResults results(more);
  StatisticsOfProducts s = {};
  s.statistics = statistics_of(target_ids, temperature, shift, total, target, results, has_gap, softcap > 0, has_sum);
  s.statistics.logits = logits(rows, first_chunk, chunks, products, optional, of_head, softcap);
  s.statistics.holds_target = optional.next<const int>();
  s.products = data<const float>(products);
  s.product_rows = size(products, 0);
  s.product_columns = size(products, 1);
  return run("rlk_statistics_of_products", stream, device, s);
}

// Optional: columns, bias, allowed, the operands of a low-rank term.
ffi::Error products(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                    AnyBuffer hidden, AnyBuffer weight, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> values,
                    ffi::Result<AnyBuffer> largest, int64_t given, Numbers of_head, Numbers of_tile) {
  Optional optional(rest, given);
  Products p = {};
  p.logits = logits(rows, first_chunk, chunks, hidden, weight, optional, of_head, of_tile, 0);
  p.logits.low_rank = optional.next_operands();
  p.values = data<float>(values);
  p.largest = data<float>(largest);
  p.chunks = size(*largest, 0);
  p.rows = size(*largest, 1);
  return run("rlk_products", stream, device, p);
}

ffi::Error add_largest(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                       AnyBuffer values, AnyBuffer largest, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> list,
                       ffi::Result<AnyBuffer> list_columns, int64_t given, Numbers of_vocabulary, int64_t count) {
  Optional optional(rest, given);
  AddLargest a = {slice(rows, first_chunk, chunks, optional), vocabulary(of_vocabulary)};
  a.values = data<const float>(values);
  a.largest = data<const float>(largest);
  a.value_rows = size(values, 0);
  a.chunks = size(largest, 0);
  a.rows = size(largest, 1);
  a.list = data<float>(list);
  a.list_columns = data<int>(list_columns);
  a.count = static_cast<int>(count);
  return run("rlk_add_largest", stream, device, a);
}

Partials partials(const AnyBuffer& shift, const AnyBuffer& total, const AnyBuffer& target, Optional& optional) {
  Partials partials = {data<const float>(shift), data<const float>(total), data<const float>(target)};
  partials.gap = optional.next<const float>();
  partials.target_derivative = optional.next<const float>();
  partials.logit_sum = optional.next<const float>();
  return partials;
}

// Optional: gap, target_derivative, logit_sum, and with each its result.
ffi::Error fold_chunks(cudaStream_t stream, int32_t device, AnyBuffer active, AnyBuffer shift, AnyBuffer total,
                       AnyBuffer target, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> shift_out,
                       ffi::Result<AnyBuffer> total_out, ffi::Result<AnyBuffer> target_out, ffi::RemainingRets more,
                       int64_t given) {
  Optional optional(rest, given);
  FoldChunks f = {data<const int>(active), partials(shift, total, target, optional)};
  f.chunks = size(shift, 0);
  f.groups = size(*shift_out, 0);
  f.rows = size(shift, 1);
  f.shift = data<float>(shift_out);
  f.total = data<float>(total_out);
  f.target = data<float>(target_out);
  MoreResults results(more);
  f.gap = results.next<float>(f.of_chunks.gap);
  f.target_derivative = results.next<float>(f.of_chunks.target_derivative);
  f.logit_sum = results.next<float>(f.of_chunks.logit_sum);
  return run("rlk_fold_chunks", stream, device, f);
}

// Optional: gap, and with it the results entropy and gap; target_derivative, logit_sum, and with each its result.
ffi::Error fold_groups(cudaStream_t stream, int32_t device, AnyBuffer active, AnyBuffer shift, AnyBuffer total,
                       AnyBuffer target, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> logp,
                       ffi::Result<AnyBuffer> lse, ffi::Result<AnyBuffer> shift_out, ffi::Result<AnyBuffer> total_out,
                       ffi::RemainingRets more, int64_t given) {
  Optional optional(rest, given);
  FoldGroups f = {data<const int>(active), partials(shift, total, target, optional)};
  f.groups = size(shift, 0);
  f.rows = size(shift, 1);
  f.logp = data<float>(logp);
  f.lse = data<float>(lse);
  f.shift = data<float>(shift_out);
  f.total = data<float>(total_out);
  MoreResults results(more);
  f.entropy = results.next<float>(f.of_groups.gap);
  f.gap = results.next<float>(f.of_groups.gap);
  f.target_derivative = results.next<float>(f.of_groups.target_derivative);
  f.logit_sum = results.next<float>(f.of_groups.logit_sum);
  return run("rlk_fold_groups", stream, device, f);
}

// Optional: gap, target_derivative, g_lse, g_entropy, scale, g_uniform, g_spread. Results: constant, at_target, then slope
// beside g_entropy and uniform beside g_uniform.
ffi::Error coefficients(cudaStream_t stream, int32_t device, AnyBuffer temperature, AnyBuffer logp, AnyBuffer total,
                        AnyBuffer g_logp, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> constant,
                        ffi::Result<AnyBuffer> at_target, ffi::RemainingRets more, int64_t given) {
  Optional optional(rest, given);
  CoefficientsArguments c = {};
  c.rows.temperature = data<const float>(temperature);
  c.rows.logp = data<const float>(logp);
  c.rows.total = data<const float>(total);
  c.rows.g_logp = data<const float>(g_logp);
  c.rows.gap = optional.next<const float>();
  c.rows.target_derivative = optional.next<const float>();
  c.rows.g_lse = optional.next<const float>();
  c.rows.g_entropy = optional.next<const float>();
  c.rows.scale = optional.next<const float>();
  c.rows.g_uniform = optional.next<const float>();
  c.rows.g_spread = optional.next<const float>();
  c.count = size(logp, 0);
  c.constant = data<float>(constant);
  c.at_target = data<float>(at_target);
  MoreResults results(more);
  c.slope = results.next<float>(c.rows.g_entropy);
  c.uniform = results.next<float>(c.rows.g_uniform);
  return run("rlk_coefficients", stream, device, c);
}

// Without a slope and what is uniform, which are optional operands.
Coefficients coefficients_of(const AnyBuffer& target_ids, const AnyBuffer& temperature, const AnyBuffer& shift,
                             const AnyBuffer& constant, const AnyBuffer& at_target) {
  Coefficients rows = {data<const int>(target_ids), data<const float>(temperature), data<const float>(shift),
                       data<const float>(constant)};
  rows.at_target = data<const float>(at_target);
  return rows;
}

// Optional: columns, bias, allowed, slope, uniform, the operands of a low-rank term.
ffi::Error dlogits(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                   AnyBuffer hidden, AnyBuffer weight, AnyBuffer target_ids, AnyBuffer temperature, AnyBuffer shift,
                   AnyBuffer constant, AnyBuffer at_target, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> out,
                   int64_t given, Numbers of_head, Numbers of_tile, double softcap) {
  Optional optional(rest, given);
  Dlogits d = {};
  d.logits = logits(rows, first_chunk, chunks, hidden, weight, optional, of_head, of_tile, softcap);
  d.rows = coefficients_of(target_ids, temperature, shift, constant, at_target);
  d.rows.slope = optional.next<const float>();
  d.rows.uniform = optional.next<const float>();
  d.logits.low_rank = optional.next_operands();
  d.out = data<void>(out);
  d.chunks = size(*out, 1) / kChunk;
  return run("rlk_dlogits", stream, device, d);
}

// Optional: columns; uniform; exponentials, which are in the result where they are not given; moved.
ffi::Error dlogits_from_kept_exponentials(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk,
                                          AnyBuffer chunks, AnyBuffer kept_shift, AnyBuffer row_map,
                                          AnyBuffer target_ids, AnyBuffer temperature, AnyBuffer shift,
                                          AnyBuffer constant, AnyBuffer at_target, ffi::RemainingArgs rest,
                                          ffi::Result<AnyBuffer> out, int64_t given, Numbers of_vocabulary,
                                          int64_t rows_at_once) {
  Optional optional(rest, given);
  DlogitsFromKept f = {};
  f.where = slice(rows, first_chunk, chunks, optional);
  f.vocabulary = vocabulary(of_vocabulary);
  f.rows = coefficients_of(target_ids, temperature, shift, constant, at_target);
  f.rows.uniform = optional.next<const float>();
  f.out = data<void>(out);
  f.exponentials = optional.next<const void>();
  if (f.exponentials == nullptr) f.exponentials = f.out;
  f.moved = optional.next<const int>();
  f.shift = data<const float>(kept_shift);
  f.row_map = data<const int>(row_map);
  f.kept_chunks = size(kept_shift, 0);
  f.shift_rows = size(kept_shift, 1);
  f.rows_out = size(*out, 0);
  f.chunks = size(*out, 1) / kChunk;
  f.rows_at_once = static_cast<int>(rows_at_once);
  f.type = dtype(*out);
  return run("rlk_dlogits_from_kept_exponentials", stream, device, f);
}

// Optional: unscale. Results: those of chains, total and rounded that there are.
ffi::Error hidden_gradient(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                           AnyBuffer dlogits, AnyBuffer weight, AnyBuffer first_group, AnyBuffer groups,
                           ffi::RemainingArgs rest, ffi::RemainingRets results, int64_t given, Numbers of_head,
                           Numbers of_tile, bool has_chains, bool has_total) {
  const auto sums = results.get<AnyBuffer>(0);
  if (!sums.has_value()) return sums.error();
  const auto shape = (*sums)->dimensions().last(2);
  Optional optional(rest, given);
  HiddenGradient h = {};
  h.head = head(of_head, weight);
  h.where = {data<const int>(rows), data<const int>(first_chunk), data<const int>(chunks), nullptr};
  h.groups = {data<const int>(first_group), data<const int>(groups)};
  h.dlogits = matrix(dlogits);
  h.unscale = optional.next<const float>();
  MoreResults each(results);
  h.chains = each.next<float>(has_chains);
  h.total = each.next<float>(has_total);
  h.rounded = each.next<void>(results.size() > static_cast<size_t>(has_chains + has_total));
  h.rows = static_cast<int>(shape[0]);
  h.column_blocks = Divisor(static_cast<int>(shape[1]) / kChunk);
  h.type = dtype(dlogits);
  h.tile = tile(of_tile);
  return run("rlk_hidden_gradient", stream, device, h);
}

// Optional: columns, unscale.
ffi::Error weight_gradient(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer first_chunk, AnyBuffer chunks,
                           AnyBuffer dlogits, AnyBuffer hidden, ffi::RemainingArgs rest, ffi::Result<AnyBuffer> out,
                           int64_t given, Numbers of_head, Numbers of_tile) {
  Optional optional(rest, given);
  WeightGradient w = {};
  w.head = head(of_head, *out);
  w.where = slice(rows, first_chunk, chunks, optional);
  w.dlogits = matrix(dlogits);
  w.hidden = matrix(hidden);
  w.unscale = optional.next<const float>();
  w.out = data<void>(out);
  w.type = dtype(dlogits);
  w.tile = tile(of_tile);
  return run("rlk_weight_gradient", stream, device, w);
}

// Optional: row_unscale.
ffi::Error column_sums(cudaStream_t stream, int32_t device, AnyBuffer rows, AnyBuffer dlogits, ffi::RemainingArgs rest,
                       ffi::Result<AnyBuffer> out, int64_t given) {
  Optional optional(rest, given);
  ColumnSums s = {};
  s.rows = data<const int>(rows);
  s.dlogits = matrix(dlogits);
  s.row_unscale = optional.next<const float>();
  s.out = data<float>(out);
  s.type = dtype(dlogits);
  return run("rlk_column_sums", stream, device, s);
}

// Optional: start. `a` runs along the rows of a tile, `b` along its columns; with `swapped` operands the tiles are
// those of Cᵀ.
ffi::Error gemm(cudaStream_t stream, int32_t device, AnyBuffer a, AnyBuffer b, ffi::RemainingArgs rest,
                ffi::Result<AnyBuffer> out, int64_t given, Numbers of_tile, int64_t tile_columns, bool a_transposed,
                bool b_transposed, bool swapped, int64_t depth) {
  Optional optional(rest, given);
  Gemm g = {};
  g.a = matrix(a);
  g.b = matrix(b);
  g.a_transposed = a_transposed;
  g.b_transposed = b_transposed;
  g.depth = depth;
  g.start = optional.next<const float>();
  g.out = data<void>(out);
  g.rows = size(*out, swapped ? 1 : 0);
  g.columns = size(*out, swapped ? 0 : 1);
  g.swapped = swapped;
  g.type = dtype(a);
  g.out_type = dtype(*out);
  g.tile = tile(of_tile);
  g.tile_columns = static_cast<int>(tile_columns);
  return run("rlk_gemm", stream, device, g);
}

auto bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace
}  // namespace rlk

// The version of XLA's FFI that this library was built against. To register the library with another version would
// break JAX.
extern "C" int rlk_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// The handlers do nothing but launch on the stream, and use no memory but what is passed in: CUDA graphs may capture
// them.
#define RLK_HANDLER(NAME, BINDING)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(rlk_##NAME, rlk::NAME, rlk::BINDING, \
                                {xla::ffi::Traits::kCmdBufferCompatible})
#define RLK_ARG Arg<xla::ffi::AnyBuffer>()
#define RLK_RET Ret<xla::ffi::AnyBuffer>()
#define RLK_NUMBERS(NAME) Attr<xla::ffi::Span<const int64_t>>(NAME)
#define RLK_SLICE RLK_ARG.RLK_ARG.RLK_ARG

RLK_HANDLER(statistics, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                            .RLK_RET.RLK_RET.RLK_RET.RemainingRets()
                            .Attr<int64_t>("given").RLK_NUMBERS("head").RLK_NUMBERS("tile").Attr<double>("softcap")
                            .Attr<bool>("has_gap").Attr<bool>("has_sum").Attr<int64_t>("kept_chunks"));
RLK_HANDLER(statistics_of_products, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                                        .RLK_RET.RLK_RET.RLK_RET.RemainingRets()
                                        .Attr<int64_t>("given").RLK_NUMBERS("head").Attr<double>("softcap")
                                        .Attr<bool>("has_gap").Attr<bool>("has_sum"));
RLK_HANDLER(products, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RemainingArgs().RLK_RET.RLK_RET
                          .Attr<int64_t>("given").RLK_NUMBERS("head").RLK_NUMBERS("tile"));
RLK_HANDLER(add_largest, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RemainingArgs().RLK_RET.RLK_RET
                             .Attr<int64_t>("given").RLK_NUMBERS("vocabulary").Attr<int64_t>("count"));
RLK_HANDLER(fold_chunks, bind().RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                             .RLK_RET.RLK_RET.RLK_RET.RemainingRets().Attr<int64_t>("given"));
RLK_HANDLER(fold_groups, bind().RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                             .RLK_RET.RLK_RET.RLK_RET.RLK_RET.RemainingRets().Attr<int64_t>("given"));
RLK_HANDLER(coefficients, bind().RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                              .RLK_RET.RLK_RET.RemainingRets().Attr<int64_t>("given"));
RLK_HANDLER(dlogits, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs()
                         .RLK_RET.Attr<int64_t>("given").RLK_NUMBERS("head").RLK_NUMBERS("tile")
                         .Attr<double>("softcap"));
RLK_HANDLER(dlogits_from_kept_exponentials, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG
                             .RemainingArgs().RLK_RET.Attr<int64_t>("given").RLK_NUMBERS("vocabulary")
                             .Attr<int64_t>("rows_at_once"));
RLK_HANDLER(hidden_gradient, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RLK_ARG.RLK_ARG.RemainingArgs().RemainingRets()
                                 .Attr<int64_t>("given").RLK_NUMBERS("head").RLK_NUMBERS("tile")
                                 .Attr<bool>("has_chains").Attr<bool>("has_total"));
RLK_HANDLER(weight_gradient, bind().RLK_SLICE.RLK_ARG.RLK_ARG.RemainingArgs().RLK_RET
                                 .Attr<int64_t>("given").RLK_NUMBERS("head").RLK_NUMBERS("tile"));
RLK_HANDLER(column_sums, bind().RLK_ARG.RLK_ARG.RemainingArgs().RLK_RET.Attr<int64_t>("given"));
RLK_HANDLER(gemm, bind().RLK_ARG.RLK_ARG.RemainingArgs().RLK_RET.Attr<int64_t>("given").RLK_NUMBERS("tile")
                      .Attr<int64_t>("tile_columns").Attr<bool>("a_transposed").Attr<bool>("b_transposed")
                      .Attr<bool>("swapped").Attr<int64_t>("depth"));
