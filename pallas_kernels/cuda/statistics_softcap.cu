// The forward kernels of linear_logp with a softcap. They have a source of their own because ptxas takes it at a lower
// optimisation level (build.py's FLAGS_OF): at others it spills registers.
#include "statistics.cuh"

namespace rlk {

cudaError_t launch_softcapped(cudaStream_t stream, const Statistics& s) { return launch_statistics<true>(stream, s); }
cudaError_t launch_softcapped(cudaStream_t stream, const StatisticsOfProducts& s) {
  return launch_statistics<true>(stream, s);
}

}  // namespace rlk
