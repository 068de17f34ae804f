"""The operator checker. So far: the tolerance contract that every test of the project reads."""

from rlk_jax.checker.contract import relative_norm, tolerance

__all__ = ["relative_norm", "tolerance"]
