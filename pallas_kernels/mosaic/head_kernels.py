"""The kernels of linear_logp and det_gemm by the names that the CUDA ones have too."""

from pallas_kernels.mosaic.dlogits import coefficients, dlogits, dlogits_from_kept_exponentials
from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
from pallas_kernels.mosaic.gemm import gemm
from pallas_kernels.mosaic.gradients import add_hidden_gradient, column_sums, store_weight_gradient
from pallas_kernels.mosaic.statistics import partials
__all__ = ["partials", "fold_chunks", "fold_groups", "coefficients", "dlogits", "dlogits_from_kept_exponentials", "add_hidden_gradient", "store_weight_gradient", "column_sums", "gemm"]
