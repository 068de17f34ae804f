"""What the checker draws for linear_kl, with a teacher's head and with what it lists, and what the definitions give."""

from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, per_token, shape_of_product

_SHARE, _TEMPERATURE, _TEACHER_TEMPERATURE = 0.3, 0.7, 1.3
_MOST_LISTED = 6


def _linear_kl_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Student and teacher of different widths. In mode "ties" the student's head is the same for all tokens; in mode
    "peaked" each has another token that stands out.
    """
    lead, vocab, dim = draw.sizes.lead, draw.sizes.vocab, draw.sizes.hidden
    teacher_dim = dim + 16
    scale = {"huge": 35.0, "peaked": 0.01}.get(draw.mode, 1.0)
    weight = draw.tensor(1, vocab, dim, scale=scale / dim**0.5)
    return {
        "hidden": draw.tensor(0, *lead, dim),
        "lm_head_weight": np.repeat(weight[:1], vocab, axis=0) if draw.mode == "ties" else weight,
        "teacher_hidden": draw.tensor(2, *lead, teacher_dim),
        "teacher_weight": draw.tensor(3, vocab, teacher_dim, scale=scale / teacher_dim**0.5),
        "bias": draw.cast(draw.tensor(4, vocab, scale=scale).astype(np.float32) + draw.peak),
        "teacher_bias": draw.cast(draw.tensor(5, vocab, scale=scale).astype(np.float32) + draw.peak[::-1]),
    }


def _linear_kl_options(draw: Draw) -> dict[str, Any]:
    """The options of a draw. Every kind has a mode.

    A peak stays at p = 0.999: at a lower temperature 1 − p would be lost in float32.
    """
    kind = {"random": "jsd", "peaked": "reverse", "ties": "reverse"}.get(draw.mode, "forward")
    return {
        "kind": kind,
        "beta": _SHARE,
        "temperature": 1.0 if draw.mode == "peaked" else _TEMPERATURE,
        "teacher_temperature": _TEACHER_TEMPERATURE,
    }


def _linear_kl_gold(problem: Problem) -> tuple[Results, float]:
    """All results in float64, and the largest |logit| of the student."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = problem.inputs.values()
    upstream = problem.upstream["divergence"]

    def raw(hidden: Any, weight: Any, bias: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
        return h, w, h @ w.T + np.asarray(bias, np.float64)

    h, w, student = raw(hidden, weight, bias)
    teacher = raw(teacher_hidden, teacher_weight, teacher_bias)[2]
    found = gold.divergence_gold(student, teacher, upstream, **problem.options)
    results = {
        "divergence": found.values.reshape(upstream.shape),
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
        "gradient:bias": found.d_raw.sum(axis=0),
    }
    return results, float(np.abs(found.logits).max())


def _listed_kl_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """The student's hidden states and head."""
    return {name: x for name, x in _linear_kl_inputs(draw).items() if name in ("hidden", "lm_head_weight")}


def _listed_kl_options(draw: Draw) -> dict[str, Any]:
    """The options of a draw, and the most probable tokens of a teacher, in rising order of their ids. Rows list fewer
    and fewer of them, in turns, and −1 stands in the place of the others.
    """
    lead, vocab = draw.sizes.lead, draw.sizes.vocab
    teacher = 2 * draw.random(7).normal(size=(*lead, vocab))
    teacher -= np.log(np.exp(teacher).sum(axis=-1, keepdims=True))
    count = min(_MOST_LISTED, vocab)
    ids = np.sort(np.argsort(-teacher, axis=-1)[..., :count], axis=-1)
    is_listed = np.arange(count) >= np.resize(np.arange(count), lead)[..., None]
    logps = np.where(is_listed, np.take_along_axis(teacher, ids, axis=-1), -np.inf)
    listed = {"teacher_ids": np.where(is_listed, ids, -1).astype(np.int32), "teacher_logps": logps.astype(np.float32)}
    kept = {name: x for name, x in _linear_kl_options(draw).items() if name != "teacher_temperature"}
    return kept | listed


def _listed_kl_gold(problem: Problem) -> tuple[Results, float]:
    """All results in float64, and the largest |logit| of the student."""
    hidden, weight = problem.inputs.values()
    upstream = problem.upstream["divergence"]
    h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
    found = gold.listed_divergence_gold(h @ w.T, upstream, **problem.options)
    results = {
        "divergence": found.values.reshape(upstream.shape),
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
    }
    return results, float(np.abs(found.logits).max())


LINEAR_KL = (
    OpSpec(
        "linear_kl",
        _linear_kl_inputs,
        _linear_kl_gold,
        outputs=(Output("divergence", per_token),),
        gradients=("hidden", "lm_head_weight", "bias"),
        shape=shape_of_product,
        padding={"hidden": 100.0, "teacher_hidden": 100.0},
        per_row=frozenset(("divergence", "gradient:hidden")),
        no_gradients=("teacher_hidden", "teacher_weight", "teacher_bias"),
        modes=("random", "peaked", "huge", "ties"),
        # Where all rows of a head are equal the gradient of hidden is 0, so no relative error exists.
        forward_only=("ties",),
        large_class="linear_kl_peaked",
        large_is_norm=True,
        options=_linear_kl_options,
        unchecked={},
    ),
    OpSpec(
        "listed_linear_kl",
        _listed_kl_inputs,
        _listed_kl_gold,
        outputs=(Output("divergence", per_token),),
        gradients=("hidden", "lm_head_weight"),
        shape=shape_of_product,
        padding={"hidden": 100.0, "teacher_ids": -1, "teacher_logps": 0.0},
        per_row=frozenset(("divergence", "gradient:hidden")),
        modes=("random", "huge", "ties"),
        forward_only=("ties",),
        large_class="linear_kl_peaked",
        large_is_norm=True,
        options=_listed_kl_options,
        unchecked={},
        calls="linear_kl",
    ),
)
"""The specs of linear_kl."""
