"""What the checker draws for linear_logp, with and without allowed tokens, and what the definition gives for it."""

from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, per_token, shape_of_product
from rlk_jax.checker.specs.allowed import allowed_options, allowed_targets, are_allowed, never_allowed


def linear_logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """The inputs of linear_logp."""
    vocab, dim = draw.sizes.vocab, draw.sizes.hidden
    scale = (35.0 if draw.mode == "huge" else 0.01 if draw.mode == "peaked" else 1.0) / dim**0.5
    weight, bias = draw.tensor(1, vocab, dim, scale=scale), draw.tensor(2, vocab, scale=scale)
    if draw.mode == "ties":
        weight, bias = np.repeat(weight[:1], vocab, axis=0), 0 * bias
    return {
        "hidden": draw.tensor(0, *draw.sizes.lead, dim),
        "lm_head_weight": weight,
        "target_ids": draw.ids(),
        "bias": draw.cast(bias.astype(np.float32) + draw.peak),
    }


def _linear_logp_gold(problem: Problem) -> tuple[Results, float]:
    """All results in float64, and the largest finite |logit|."""
    results, found = head_gold(problem, problem.inputs["target_ids"], {})
    return results, gold.largest_finite(found.logits)


def _masked_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Those of linear_logp. In mode "masked-nan" every third token that no row allows has a logit of NaN or ±inf."""
    found = linear_logp_inputs(draw)
    if draw.mode == "masked-nan":
        found["bias"][never_allowed(draw)] = np.resize([np.nan, np.inf, -np.inf], int(never_allowed(draw).sum()))
    return found


def _masked_gold(problem: Problem) -> tuple[Results, float]:
    """All results in float64. A row that forbids its target is NaN, as one whose target is no token."""
    allowed = are_allowed(problem.options["allowed_mask"], len(problem.inputs["bias"]))
    results, found = head_gold(problem, allowed_targets(problem.inputs["target_ids"], allowed), {"allowed": allowed})
    return results, gold.largest_finite(found.logits)


def head_gold(problem: Problem, target_ids: np.ndarray, options: dict[str, Any]) -> tuple[Results, gold.SoftmaxGold]:
    """The outputs and gradients of a head with a bias in float64, and what they are made of."""
    hidden, weight, _, bias = problem.inputs.values()
    h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
    names, lead = ("logp", "lse", "entropy"), problem.upstream["logp"].shape
    upstream = tuple(problem.upstream.get(name, np.zeros(lead)) for name in names)
    found = gold.softmax_gold(h @ w.T + np.asarray(bias, np.float64), target_ids, 1.0, upstream, options)
    outputs = {name: x.reshape(lead) for name, x in zip(names, found.values, strict=True)}
    gradients = {
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
        "gradient:bias": found.d_raw.sum(axis=0),
    }
    return outputs | gradients, found


LINEAR_LOGP = (
    OpSpec(
        "linear_logp",
        linear_logp_inputs,
        _linear_logp_gold,
        outputs=(Output("logp", per_token),),
        gradients=("hidden", "lm_head_weight", "bias"),
        shape=shape_of_product,
        padding={"hidden": 100.0, "target_ids": 0},
        per_row=frozenset(("logp", "gradient:hidden")),
        modes=("random", "constant", "peaked", "huge", "ties", "bad-ids"),
        # Where all rows of the head are equal the gradient of hidden is 0, so no relative error exists.
        forward_only=("bad-ids", "constant", "ties"),
        large_class="linear_logp_peaked",
    ),
    OpSpec(
        "masked_linear_logp",
        _masked_inputs,
        _masked_gold,
        outputs=(Output("logp", per_token),),
        gradients=("hidden", "lm_head_weight", "bias"),
        shape=shape_of_product,
        padding={"hidden": 100.0, "target_ids": 0, "allowed_mask": 2**32 - 1},
        per_row=frozenset(("logp", "gradient:hidden")),
        modes=("random", "constant", "peaked", "huge", "ties", "masked-nan", "bad-ids"),
        forward_only=("bad-ids", "constant", "ties"),
        large_class="linear_logp_peaked",
        options=allowed_options,
        calls="linear_logp",
    ),
)
"""The specs of linear_logp."""
