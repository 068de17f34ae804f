"""What the checker knows of linear_cross_entropy."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, arrange_padding_behind, scalar, shape_of_product
from rlk_jax.checker.specs.linear_logp import linear_logp_inputs

_LEFT_OUT = -100


def _cross_entropy_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Those of linear_logp, with a mask's ignored tokens among them."""
    found, ignored = linear_logp_inputs(draw), ~draw.mask()
    if draw.mode == "masked-nan":
        found["hidden"][ignored] = np.nan
    found["target_ids"] = np.where(ignored, _LEFT_OUT, found["target_ids"])
    return found


def _cross_entropy_options(draw: Draw) -> dict[str, Any]:
    """A mean over weights from 0 to 2, some of them 0."""
    weights = np.maximum(draw.random(7).uniform(-0.5, 2, draw.sizes.lead), 0).astype(np.float32)
    weights[0] = 1
    return {"reduction": "mean", "ignore_index": _LEFT_OUT, "token_weights": weights, "z_loss": 1e-3}


def _cross_entropy_gold(problem: Problem) -> tuple[Results, float]:
    hidden, weight, ids, bias = problem.inputs.values()
    options = dict(problem.options)
    weights = np.where(ids == options.pop("ignore_index"), 0, options.pop("token_weights"))
    h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
    h = np.where(weights.reshape(-1, 1) == 0, 0, h)
    raw = h @ w.T + np.asarray(bias, np.float64)
    found = gold.cross_entropy_gold(raw, ids, weights, problem.upstream["loss"], **options)
    results = {
        "loss": found.loss,
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
        "gradient:bias": found.d_raw.sum(axis=0),
    }
    return results, gold.largest_finite(found.logits)


def _smoothed_options(draw: Draw) -> dict[str, Any]:
    return {**_cross_entropy_options(draw), "label_smoothing": 0.1}


_CROSS_ENTROPY = OpSpec(
    "linear_cross_entropy",
    _cross_entropy_inputs,
    _cross_entropy_gold,
    outputs=(Output("loss", scalar),),
    gradients=("hidden", "lm_head_weight", "bias"),
    shape=shape_of_product,
    padding={"hidden": np.nan, "target_ids": _LEFT_OUT, "token_weights": 1},
    per_row=frozenset(("gradient:hidden",)),
    modes=("random", "constant", "peaked", "huge", "ties", "masked-nan", "bad-ids"),
    forward_only=("bad-ids", "constant", "ties"),
    arrangements=arrange_padding_behind,
    large_class="linear_logp_peaked",
    options=_cross_entropy_options,
    runs_on="linear_logp",
)

LINEAR_CROSS_ENTROPY = (
    _CROSS_ENTROPY,
    replace(
        _CROSS_ENTROPY,
        op="smoothed_linear_cross_entropy",
        # At a peak one entry of db has nearly the whole norm, and its rounding to bf16 is above the tolerance.
        modes=("random", "huge"),
        options=_smoothed_options,
        calls="linear_cross_entropy",
    ),
)
"""The specs of linear_cross_entropy."""
