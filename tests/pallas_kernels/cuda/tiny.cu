// One kernel and one handler that launches it: the build is tested with this source.
#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <int kValue>
__global__ void fill(float* x) {
  x[threadIdx.x] = kValue;
}

static ffi::Error Fill(cudaStream_t stream, ffi::ResultBuffer<ffi::F32> out) {
  fill<3><<<1, 32, 0, stream>>>(out->typed_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(rlk_tiny, Fill,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ret<ffi::Buffer<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" int rlk_ffi_api_version(void) { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
