// Gradients of logits without a softcap, and the choice between them and those with a softcap.
#include "dlogits.cuh"

namespace rlk {

cudaError_t launch(cudaStream_t stream, const Dlogits& d) {
  return d.logits.softcap > 0 ? launch_softcapped(stream, d) : launch_dlogits<false>(stream, d);
}

}  // namespace rlk
