// Launches a product with its tensor maps, its cluster and its shared memory, or a kernel without a product.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "kernels.cuh"
#include "main_loop.cuh"

namespace rlk {

// Finds the driver's function that encodes tensor maps, without linking libcuda.
inline cudaError_t find_encoder(decltype(&cuTensorMapEncodeTiled)* encoder) {
  static std::atomic<void*> known = nullptr;
  void* found = known;
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    known = found;
  }
  *encoder = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  return cudaSuccess;
}

// The tensor map of a matrix that is copied in boxes of `outer` rows of `inner` columns; it stays as it is for a matrix
// without data.
inline cudaError_t tensor_map(CUtensorMap* map, const Matrix& matrix, int inner, int outer) {
  if (matrix.data == nullptr) return cudaSuccess;
  decltype(&cuTensorMapEncodeTiled) encode;
  if (const cudaError_t error = find_encoder(&encode); error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.columns) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(inner), static_cast<cuuint32_t>(outer)}, each[2] = {1, 1};
  // The type of the values does not matter to a copy: both are 16 bits wide, and zeros are the same in both.
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes, strides, box, each,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The dynamic shared memory that a block may ask for. It is one number for every tile because the attribute belongs to
// the kernel, and threads that launch other tiles set it too.
constexpr int kMostSharedBytes = 227 * 1024 - 1024;

// Launches `Op` over at most `most_blocks` blocks of rows (of a cluster) times columns.
template <class Op>
cudaError_t launch_product(cudaStream_t stream, const Operands (&operands)[Op::kStretches], const Tile& tile,
                           int64_t most_blocks, const typename Op::Arguments& arguments) {
  // An A of fewer rows than the tile, which are the same along all stretches, is loaded in boxes of its rows alone.
  // Behind them shared memory holds anything, and so do the products of these rows: an epilogue stores them nowhere, or
  // only into rows that nobody reads.
  const int a_rows = Op::kTransposeA ? tile.rows : static_cast<int>(std::min<int64_t>(tile.rows, operands[0].a.rows));
  const int a_outer = Op::kTransposeA ? 64 : a_rows;
  // Each block of a cluster loads whole boxes of B, or its share of the only one.
  const int b_outer = Op::kTransposeB && Op::kColumns > 64 ? 64 : Op::kColumns / tile.cluster;
  Maps<Op> maps = {};
  maps.step_bytes = (a_rows + Op::kColumns) * kStepBytes;
  cudaError_t error = tensor_map(&maps.out, Op::stored(arguments), 64, 16);
  for (int stretch = 0; stretch < Op::kStretches && error == cudaSuccess; ++stretch) {
    error = tensor_map(&maps.a[stretch], operands[stretch].a, 64, a_outer);
    if (error == cudaSuccess) error = tensor_map(&maps.b[stretch], operands[stretch].b, 64, b_outer);
  }
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(product_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t clusters = std::max<int64_t>(1, std::min<int64_t>(tile.processors / tile.cluster, most_blocks));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = tile.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * tile.cluster));
  config.blockDim = dim3((tile.rows / 64 + 1) * 128);
  config.dynamicSmemBytes = shared_bytes<Op>(tile);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, product_kernel<Op>, maps, tile, arguments);
}

constexpr int kThreads = 128;  // of a block of a kernel without a product

// Launches a kernel without a product and returns this launch's own error. <<<>>> would leave it in the last error, which
// may be another call's.
template <class Arguments>
cudaError_t launch_blocks(void (*kernel)(Arguments), int x, int y, cudaStream_t stream, const Arguments& arguments,
                          int threads = kThreads, size_t shared_bytes = 0) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(x, y);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

// Calls launch(…) with each flag as a type, so that a kernel is compiled for either value of the flag.
template <class Launch>
cudaError_t with_flags(Launch launch) {
  return launch();
}
template <class Launch, class... Flags>
cudaError_t with_flags(Launch launch, bool first, Flags... others) {
  const auto with = [&](auto flag) {
    return with_flags([&](auto... flags) { return launch(flag, flags...); }, others...);
  };
  return first ? with(std::true_type{}) : with(std::false_type{});
}

// The 16-bit type of a kernel.
template <class IsBfloat16>
using Narrow = std::conditional_t<IsBfloat16::value, __nv_bfloat16, __half>;

}  // namespace rlk
