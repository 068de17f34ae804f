"""The kernels of linear_logp and det_gemm in Mosaic, under the names and with the signatures of `cuda/kernels.py`.

`add_weight_gradient` and the kernels of linear_kl (those of `divergence.py` and `divergence_gradients.py`) are Mosaic's
alone.
"""

import jax

from pallas_kernels.mosaic import hidden_gradient, weight_gradient
from pallas_kernels.mosaic.divergence import divergence_partials, fold_divergence, fold_mixture, mixture_sums
from pallas_kernels.mosaic.divergence_gradients import divergence_gradients
from pallas_kernels.mosaic.dlogits import coefficients, dlogits
from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
from pallas_kernels.mosaic.gemm import gemm
from pallas_kernels.mosaic.hidden_gradient import folds_groups
from pallas_kernels.mosaic.kept_exponentials import dlogits_from_kept_exponentials
from pallas_kernels.mosaic.largest import add_largest
from pallas_kernels.mosaic.partials import partials
from pallas_kernels.mosaic.partials_of_logits import partials_of_logits
from pallas_kernels.mosaic.weight_gradient import add_weight_gradient, column_sums

# Slices of one shape share these kernels in a program: a function under jit is traced and lowered once.
add_hidden_gradient = jax.jit(hidden_gradient.add_hidden_gradient, static_argnums=(0, 1))
store_weight_gradient = jax.jit(weight_gradient.store_weight_gradient, static_argnums=(0, 1))

__all__ = (
    "add_hidden_gradient",
    "add_largest",
    "add_weight_gradient",
    "coefficients",
    "column_sums",
    "divergence_gradients",
    "divergence_partials",
    "dlogits",
    "dlogits_from_kept_exponentials",
    "fold_chunks",
    "fold_divergence",
    "fold_groups",
    "fold_mixture",
    "folds_groups",
    "gemm",
    "mixture_sums",
    "partials",
    "partials_of_logits",
    "store_weight_gradient",
)
