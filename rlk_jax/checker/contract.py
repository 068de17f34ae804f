"""Every tolerance of the project, in contract.json: one number per op class, dtype and kind of result.

A value is our own measured worst error with at most 4× head-room; the legs of `make test` end with a table of both.
"""

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

Kind = Literal["forward", "gradient"]


FILES = {"rlk_jax": "contract.json", "rl-kernel": "rl_kernel.json"}
"""The contract of the project, and RL-Kernel's published one for comparison."""


@dataclass(frozen=True)
class Bound:
    """What an error may be: `atol + rtol·|gold|` of every element, or of the norms over all of them, or no bit."""

    atol: float
    rtol: float
    measure: Literal["norm", "element", "bits"]


@functools.cache
def _contract(name: str = "rlk_jax") -> dict[str, Any]:
    return json.loads(importlib.resources.files(__package__).joinpath(FILES[name]).read_text())


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


def arch_keys() -> tuple[str, ...]:
    """The architectures that the contract knows."""
    return tuple(_contract()["arch_overrides"])


def accuracy(name: str, op_class: str, dtype: Any, kind: Kind, arch_key: str | None, size: float | None) -> Bound:
    """The bound of the named contract; errors of a class that is measured so are allowed in proportion to `size`, the
    largest |logit|.
    """
    if name == "rl-kernel":
        published = _contract(name)
        entry = published["accuracy"][published["classes"][op_class]][np.dtype(dtype).name]
        return Bound(entry["atol"], entry["rtol"], "element")
    override = _contract()["arch_overrides"].get(arch_key, {}).get(op_class)
    if override is not None and np.dtype(dtype).name in _contract()["accuracy"][override]:
        op_class = override
    allowed = tolerance(op_class, dtype, kind)
    if size is not None and kind == "forward":
        return Bound(allowed * size, 0.0, "element")
    return Bound(0.0, allowed, "norm")


def batch_invariance(name: str) -> Bound:
    """The bound between the same rows in two batches; the raw bits where nothing is allowed."""
    entry = _contract(name)["batch_invariance"]
    return Bound(entry["atol"], entry["rtol"], "element" if any(entry.values()) else "bits")
