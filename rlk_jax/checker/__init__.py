"""The operator checker gives one verdict for accuracy, gradients and bits, by the tolerances that every test reads."""

from rlk_jax.checker.contract import relative_norm, tolerance
from rlk_jax.checker.inputs import Sizes
from rlk_jax.checker.runner import assert_op

__all__ = ["Sizes", "assert_op", "relative_norm", "tolerance"]
