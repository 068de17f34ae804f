"""What the checker draws for linear_kl, and what the definition gives for it."""

from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw
from rlk_jax.checker.op_spec import Problem, Results

_SHARE, _TEMPERATURE, _TEACHER_TEMPERATURE = 0.3, 0.7, 1.3


def linear_kl_inputs(draw: Draw) -> dict[str, np.ndarray]:
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


def linear_kl_options(draw: Draw) -> dict[str, Any]:
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


def linear_kl_gold(problem: Problem) -> tuple[Results, float]:
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
