"""What the checker knows of each op: its inputs, gold, results, and the rows that keep their bits.

A new op joins with a file of its own and a name in `SPECS`.
"""

from rlk_jax.checker.specs.attention import ATTENTION
from rlk_jax.checker.specs.det_gemm import DET_GEMM
from rlk_jax.checker.specs.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from rlk_jax.checker.specs.linear_kl import LINEAR_KL
from rlk_jax.checker.specs.linear_logp import LINEAR_LOGP
from rlk_jax.checker.specs.logits import LOGITS
from rlk_jax.checker.specs.ranked_linear_logp import RANKED_LINEAR_LOGP

SPECS = {
    spec.op: spec
    for spec in (*LOGITS, *LINEAR_LOGP, *RANKED_LINEAR_LOGP, *LINEAR_KL, *LINEAR_CROSS_ENTROPY, *DET_GEMM, *ATTENTION)
}
"""Every op that is checked, by its name."""
