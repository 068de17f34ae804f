"""The table of ops, a line each, and what can be asked of any op. No module below this one lists ops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlk_jax.core import dispatch
from rlk_jax.ops import linear_cross_entropy as cross_entropy
from rlk_jax.ops import linear_grpo_loss as composed
from rlk_jax.ops.attention import api as attend
from rlk_jax.ops.attention import implementations as attend_implementations
from rlk_jax.ops.det_gemm import api as gemm
from rlk_jax.ops.det_gemm import implementations as gemm_implementations
from rlk_jax.ops.linear_kl import api as distill
from rlk_jax.ops.linear_kl import implementations as distill_implementations
from rlk_jax.ops.linear_logp import api as head
from rlk_jax.ops.linear_logp import implementations as head_implementations
from rlk_jax.ops.logits import api as logits
from rlk_jax.ops.logits import implementations as logits_implementations


@dataclass(frozen=True)
class Op:
    """One op: its public function, what describes a call of it to dispatch, and its implementations."""

    function: Callable[..., Any]
    describe: Callable[[Mapping[str, Any]], tuple[dispatch.CallFacts, str | None]]
    numerics_version: int | None = None
    """A number that rises when the bits of an implementation that promises bits change; None for an op that is composed
    of another, whose number counts.
    """
    rows: Sequence[dispatch.Implementation] = ()
    """The implementations, fastest first; empty for an op that is composed of another and runs on that one's."""
    typical: dispatch.TypicalCall | None = None
    """A call that `rlk doctor` speaks of; None for an op that is composed of another."""
    plan: Callable[[Mapping[str, Any]], str] | None = None
    """What says in a sentence how the op goes about a call that `describe` has described; None where there is one way
    alone.
    """


_HEAD = (head_implementations.ROWS, head_implementations.TYPICAL)
_GEMM = (gemm_implementations.ROWS, gemm_implementations.TYPICAL)
_DISTILL = (distill_implementations.ROWS, distill_implementations.TYPICAL)
_LOGITS_ROWS, _TYPICAL = logits_implementations.ROWS, logits_implementations.TYPICAL

OPS = {
    "linear_logp": Op(head.linear_logp, head.describe, 6, *_HEAD),
    "det_gemm": Op(gemm.det_gemm, gemm.describe, 1, *_GEMM),
    "logp": Op(logits.logp, logits.describe_logp, 2, _LOGITS_ROWS, _TYPICAL["logp"]),
    "ratio_kl": Op(logits.ratio_kl, logits.describe_ratio_kl, 3, _LOGITS_ROWS, _TYPICAL["ratio_kl"]),
    "grpo_loss": Op(logits.grpo_loss, logits.describe_grpo_loss, 3, _LOGITS_ROWS, _TYPICAL["grpo_loss"]),
    "attention": Op(attend.attention, attend.describe, 1, attend_implementations.ROWS, attend_implementations.TYPICAL),
    "linear_kl": Op(distill.linear_kl, distill.describe, 3, *_DISTILL),
    "linear_cross_entropy": Op(cross_entropy.linear_cross_entropy, cross_entropy.describe),
    "linear_grpo_loss": Op(composed.linear_grpo_loss, composed.describe, plan=composed.describe_plan),
}

dispatch.TABLE.update({name: op.rows for name, op in OPS.items() if op.rows})

numerics_version = {name: op.numerics_version for name, op in OPS.items() if op.numerics_version is not None}
"""A number per op that rises when the bits of an implementation that promises bits change."""


def explain(op: str, *args: Any, **kwargs: Any) -> dispatch.Decision:
    """Which implementation `rlk_jax.<op>(*args, **kwargs)` would run and why not the others; runs nothing.

    Arrays may be `jax.ShapeDtypeStruct`. Raises ValueError as the op itself would, and for an op that does not exist.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; the ops are {tuple(OPS)}.")
    given = dispatch.bound_arguments(op, OPS[op].function, *args, **kwargs)
    facts, implementation = OPS[op].describe(given)
    decision = dispatch.decide(op, facts, implementation, numerics_version[facts.op])
    plan = OPS[op].plan
    return decision if plan is None else replace(decision, plan=plan(given))


def promising(op: str, *args: Any, **kwargs: Any) -> str:
    """The name of the fastest implementation that promises bits for the call `rlk_jax.<op>(*args, **kwargs)`.

    A call that names an implementation gets that one. Raises ValueError where it promises no bits.
    """
    given = dispatch.bound_arguments(op, OPS[op].function, *args, **kwargs)
    return dispatch.first_promising(*OPS[op].describe(given))
