"""What linear_logp's kernels share, Hopper's and Triton's: what they cannot take, and the room that they may have."""

from typing import TYPE_CHECKING

from rlk_jax._problem import Options

if TYPE_CHECKING:
    from rlk_jax.dispatch import Problem

MEMORY_BUDGET = 512 * 2**20
"""Bytes for a slice's gradients of logits and the copies beside them; three times hidden's, where those are more."""


def why_not(problem: "Problem") -> list[str]:
    """Reasons why tensor cores or 16-byte loads cannot take the operands."""
    reasons = []
    hidden, weight = problem.dtypes[:2]
    if hidden != weight or hidden not in ("bfloat16", "float16"):
        reasons.append(f"needs hidden and lm_head_weight both bfloat16 or both float16, not {hidden} and {weight}")
    if problem.dim % 8:
        reasons.append(f"needs a hidden dim that is a multiple of 8, not {problem.dim}")
    return reasons


def memory_budget(options: Options, dim: int, tokens: int) -> int:
    """The call's own, or the default for this many tokens."""
    return options.memory_budget or max(MEMORY_BUDGET, 3 * 2 * dim * tokens)
