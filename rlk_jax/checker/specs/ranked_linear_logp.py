"""What the checker knows of linear_logp with the most probable tokens, and what its definition gives for them."""

from typing import Any

import numpy as np

from rlk_jax.checker import contract, gold
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import INTEGERS, OpSpec, Output, Problem, Results, per_token, shape_of_product
from rlk_jax.checker.specs.linear_logp import head_gold, linear_logp_inputs

_TOP_K = 40
"""More tokens than are possible in mode "neg-inf", where the vocabulary has its default size."""


def _inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Those of linear_logp. In mode "ties" they are −1, 0 and 1, whose sums are exact and often equal."""
    found = linear_logp_inputs(draw)
    if draw.mode == "ties":
        for offset, name in enumerate(("hidden", "lm_head_weight")):
            found[name] = draw.cast(draw.random(8 + offset).integers(-1, 2, found[name].shape))
    return found


def _options(draw: Draw) -> dict[str, Any]:
    """Everything that linear_logp returns is asked for."""
    top_k = min(_TOP_K, draw.sizes.vocab)
    return {"return_lse": True, "return_entropy": True, "return_top_k": top_k, "return_target_rank": True}


def _gold(problem: Problem) -> tuple[Results, float]:
    """All results. Ids and ranks are compared as integers, and masked where rounding decides them.

    Logits that differ by less than twice the largest error that the contract allows a logit may stand in either order.
    Whole numbers have exact sums, so that nothing is left to rounding.
    """
    results, found = head_gold(problem, problem.inputs["target_ids"], {})
    largest = gold.largest_finite(found.logits)
    dtype = problem.inputs["hidden"].dtype
    is_exact = all((x == np.round(x)).all() for x in problem.inputs.values())
    near = 0.0 if is_exact else 2 * largest * contract.tolerance("linear_logp_peaked_wgmma", dtype, "forward")
    top_k = problem.options["return_top_k"]
    ranking = gold.ranking_gold(found.logits, problem.inputs["target_ids"], found.values[1], top_k, near)
    lead = problem.upstream["logp"].shape
    shaped = {name: x.reshape(*lead, *x.shape[1:]) for name, x in ranking._asdict().items()}
    return {**results, **shaped}, largest


def _per_listed_token(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, min(_TOP_K, sizes.vocab)


_OUTPUTS = (
    Output("logp", per_token),
    Output("lse", per_token),
    Output("entropy", per_token),
    Output("top_ids", _per_listed_token, dtype=INTEGERS, differentiable=False),
    Output("top_logps", _per_listed_token, differentiable=False),
    Output("target_rank", per_token, dtype=INTEGERS, differentiable=False),
)

RANKED_LINEAR_LOGP = (
    OpSpec(
        "ranked_linear_logp",
        _inputs,
        _gold,
        outputs=_OUTPUTS,
        gradients=("hidden", "lm_head_weight", "bias"),
        shape=shape_of_product,
        padding={"hidden": 100.0, "target_ids": 0},
        per_row=frozenset((*(x.name for x in _OUTPUTS), "gradient:hidden")),
        modes=("random", "peaked", "huge", "neg-inf", "ties", "bad-ids"),
        large_class="linear_logp_peaked",
        options=_options,
        calls="linear_logp",
    ),
)
"""The spec of linear_logp with the most probable tokens."""
