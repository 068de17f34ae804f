"""What `rlk check --list` says of an op: what a function under check is given, and what it gives."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import candidates
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import OpSpec

_DISTINCT = Sizes(batch=8, seq=11, vocab=1009, hidden=62, k_dim=257, n_dim=83)
"""Sizes by which the dimensions of all arrays are told apart."""


def facts(spec: OpSpec, draw: Draw) -> dict[str, list[str]]:
    """What is known of an op, and the candidates that run the problem of this draw here."""
    problem, distinct = spec.problem(draw), spec.problem(replace(draw, sizes=_DISTINCT))
    return {
        "inputs": list(problem.inputs),
        "shapes": list(_shapes(spec, draw.dtype, distinct.inputs)),
        "options": list(problem.options),
        "option_values": [*_shapes(spec, draw.dtype, distinct.options), *_values(spec, draw)],
        "outputs": [x.name for x in spec.outputs],
        "output_shapes": list(_shapes(spec, draw.dtype, distinct.upstream)),
        "gradients": list(spec.gradients),
        "dtypes": list(spec.dtypes),
        "input_modes": list(spec.modes),
        "candidates": candidates.runnable(spec, problem),
    }


def dimensions(sizes: Sizes) -> dict[str, int]:
    """The dimensions that arrays have at these sizes, by the names that stand in a shape."""
    return vars(sizes) | {
        "batch·seq": sizes.batch * sizes.seq,
        "hidden + 16": sizes.hidden + 16,
        "⌈vocab/32⌉": -(-sizes.vocab // 32),
    }


def _shapes(spec: OpSpec, dtype: str, drawn: Mapping[str, Any]) -> Iterator[str]:
    """The shape of each array that `_DISTINCT` gave, and its dtype where that is not the one under check."""
    names = {size: name for name, size in dimensions(spec.sizes(_DISTINCT)).items()}
    for name, x in drawn.items():
        if isinstance(x, np.ndarray):
            shape = ", ".join(str(names.get(size, size)) for size in x.shape)
            yield f"{name} [{shape}]" + ("" if x.dtype == dtype else f" {x.dtype}")


def _values(spec: OpSpec, draw: Draw) -> Iterator[str]:
    """The values that each option which is no array has in the op's input modes."""
    draw = replace(draw, sizes=spec.sizes(draw.sizes))
    drawn = [spec.options(replace(draw, mode=mode)) for mode in spec.modes]
    for name, x in drawn[0].items():
        if not isinstance(x, np.ndarray):
            yield f"{name} {' or '.join(dict.fromkeys(repr(options[name]) for options in drawn))}"
