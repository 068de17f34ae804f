// Gradients of logits with a softcap. They have a source of their own because ptxas takes it at a lower optimisation
// level (build.py's FLAGS_OF): at others it spills a register.
#include "dlogits.cuh"

namespace rlk {

cudaError_t launch_softcapped(cudaStream_t stream, const Dlogits& d) { return launch_dlogits<true>(stream, d); }

}  // namespace rlk
