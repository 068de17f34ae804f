"""The kernels of linear_logp and det_gemm in Mosaic, under the names and with the signatures of `cuda/kernels.py`.

`add_weight_gradient` is Mosaic's alone.
"""

from pallas_kernels.mosaic.dlogits import coefficients, dlogits, dlogits_from_kept_exponentials
from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
from pallas_kernels.mosaic.gemm import gemm
from pallas_kernels.mosaic.hidden_gradient import add_hidden_gradient
from pallas_kernels.mosaic.statistics import partials
from pallas_kernels.mosaic.weight_gradient import add_weight_gradient, column_sums, store_weight_gradient

__all__ = (
    "add_hidden_gradient",
    "add_weight_gradient",
    "coefficients",
    "column_sums",
    "dlogits",
    "dlogits_from_kept_exponentials",
    "fold_chunks",
    "fold_groups",
    "gemm",
    "partials",
    "store_weight_gradient",
)
