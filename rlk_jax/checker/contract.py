"""Every tolerance of the project, in contract.json: one number per op class, dtype and kind of result.

A value is our own measured worst error with at most 4× head-room; `make test-ops` ends with the table of both.
"""

import functools
import importlib.resources
import json
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

Kind = Literal["forward", "gradient"]


@functools.cache
def _contract() -> dict[str, Any]:
    return json.loads(importlib.resources.files(__package__).joinpath("contract.json").read_text())


def tolerance(op_class: str, dtype: Any, kind: Kind) -> float:
    """The largest error an op of this class may show on inputs of this dtype.

    The error is `relative_norm` against the gold, unless the class's "measure" says otherwise. Raises KeyError for an
    entry that does not exist: there is no default.
    """
    name = np.dtype(dtype).name
    try:
        return float(_contract()["accuracy"][op_class][name][kind])
    except KeyError:
        raise KeyError(f"the contract has no entry for {op_class} / {name} / {kind}") from None


def relative_norm(actual: ArrayLike, gold: ArrayLike) -> float:
    """‖actual − gold‖ / ‖gold‖ over all elements, in float64; 0 where both are empty or 0."""
    a, g = np.asarray(actual, np.float64), np.asarray(gold, np.float64)
    if a.shape != g.shape:
        raise ValueError(f"shapes differ: {a.shape} and {g.shape}")
    error, size = np.linalg.norm((a - g).ravel()), np.linalg.norm(g.ravel())
    return float(error / size) if size else float(np.inf if error else 0)
