// The forward kernels of linear_logp without a softcap, and the choice between them and those with a softcap.
#include "statistics.cuh"

namespace rlk {

cudaError_t launch(cudaStream_t stream, const Statistics& s) {
  return s.logits.softcap > 0 ? launch_softcapped(stream, s) : launch_statistics<false>(stream, s);
}

cudaError_t launch(cudaStream_t stream, const StatisticsOfProducts& s) {
  return s.statistics.logits.softcap > 0 ? launch_softcapped(stream, s) : launch_statistics<false>(stream, s);
}

}  // namespace rlk
