"""What the checker knows of attention."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.arrange_attention import arrange_attention
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results

_HEADS, _KEY_HEADS, _PADDING_BEFORE = 4, 2, 7


def _several_blocks(sizes: Sizes) -> Sizes:
    """The sizes with 128 tokens more, so that keys and queries are cut into several blocks."""
    return replace(sizes, seq=sizes.seq + 128)


def _attention_padding(sizes: Sizes) -> np.ndarray:
    """Padding `[batch]` of every second sequence, the last one among them."""
    return np.where(np.arange(sizes.batch) % 2 == (sizes.batch - 1) % 2, _PADDING_BEFORE, 0).astype(np.int32)


def _attention_shape(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, _HEADS, sizes.hidden


def _attention_inputs(draw: Draw) -> dict[str, np.ndarray]:
    lead, size = draw.sizes.lead, draw.sizes.hidden
    found = {
        "query": draw.tensor(0, *lead, _HEADS, size, scale=12.0 if draw.mode == "peaked" else 1.0),
        "key": draw.tensor(1, *lead, _KEY_HEADS, size),
        "value": draw.tensor(2, *lead, _KEY_HEADS, size),
    }
    if draw.mode == "masked-nan":
        is_before = np.arange(draw.sizes.seq) < _attention_padding(draw.sizes)[:, None]
        found["key"][is_before] = found["value"][is_before] = np.nan
    return found


def _attention_options(draw: Draw) -> dict[str, Any]:
    """How the sequences lie; in mode "window" a window of more keys than a block of 64, and a softcap."""
    sliding_window, logit_softcap = (70, 1.5) if draw.mode == "window" else (None, None)
    return {
        "start": 0,
        "padding": _attention_padding(draw.sizes),
        "segment_starts": None,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
    }


def _attention_gold(problem: Problem) -> tuple[Results, float]:
    query, key, value = problem.inputs.values()
    found = gold.attention_gold(query, key, value, problem.upstream["output"], **problem.options)
    gradients = {f"gradient:{name}": getattr(found, name) for name in problem.inputs}
    return {"output": found.output, **gradients}, gold.largest_finite(found.scores)


ATTENTION = (
    OpSpec(
        "attention",
        _attention_inputs,
        _attention_gold,
        outputs=(Output("output", _attention_shape, dtype=None),),
        gradients=("query", "key", "value"),
        shape=_attention_shape,
        padding={"query": 1e4, "key": np.nan, "value": np.nan},
        per_row=frozenset(("output", "gradient:query")),
        sums_per_row=frozenset(("gradient:key", "gradient:value")),
        modes=("random", "peaked", "masked-nan", "window"),
        arrangements=arrange_attention,
        large_class="attention_peaked",
        large_is_norm=True,
        dtypes=("bf16", "fp16"),
        sizes=_several_blocks,
        options=_attention_options,
    ),
)
"""The spec of attention."""
