// Gradients of logits beside a softcap. Apart, for a lower optimisation level of ptxas: at others it spills a register.
#include "dlogits.cuh"

namespace rlk {

cudaError_t launch_softcapped(cudaStream_t stream, const Dlogits& d) { return launch_dlogits<true>(stream, d); }

}  // namespace rlk
