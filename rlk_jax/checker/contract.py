"""Every tolerance of the project stands in contract.json: one number per op class, dtype and kind of result.

A tolerance is at most four times the worst error that we measured. Each leg of `make test` ends with a table of both.
"""

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

Kind = Literal["forward", "gradient"]
"""The kind of result that a tolerance is for."""

FILES = {"rlk_jax": "contract.json", "rl-kernel": "rl_kernel.json"}
"""The files of the project's contract and, for comparison, of RL-Kernel's published one."""


@dataclass(frozen=True)
class Bound:
    """How large an error may be.

    `measure` says what the bound `atol + rtol·|gold|` holds for: every element, or the norms over all elements. With
    "bits" no bit may differ.
    """

    atol: float
    rtol: float
    measure: Literal["norm", "element", "bits"]


@functools.cache
def _contract(name: str = "rlk_jax") -> dict[str, Any]:
    return json.loads(importlib.resources.files(__package__).joinpath(FILES[name]).read_text())


def tolerance(op_class: str, dtype: Any, kind: Kind) -> float:
    """The largest error that an op of this class may show on inputs of this dtype.

    The error is `relative_norm` against the gold, unless the class's "measure" in contract.json says otherwise. Raises
    KeyError for an entry that does not exist, because there is no default.
    """
    name = np.dtype(dtype).name
    try:
        return float(_contract()["accuracy"][op_class][name][kind])
    except KeyError:
        raise KeyError(f"the contract has no entry for {op_class} / {name} / {kind}") from None


def relative_norm(actual: ArrayLike, gold: ArrayLike) -> float:
    """‖actual − gold‖ / ‖gold‖ over all elements, in float64. It is 0 where both arrays are empty or 0."""
    a, g = np.asarray(actual, np.float64), np.asarray(gold, np.float64)
    if a.shape != g.shape:
        raise ValueError(f"shapes differ: {a.shape} and {g.shape}")
    error, size = np.linalg.norm((a - g).ravel()), np.linalg.norm(g.ravel())
    return float(error / size) if size else float(np.inf if error else 0)


def arch_keys() -> tuple[str, ...]:
    """The GPU architectures for which the contract overrides tolerances."""
    return tuple(_contract()["arch_overrides"])


def accuracy(name: str, op_class: str, dtype: Any, kind: Kind, arch_key: str | None, size: float | None) -> Bound:
    """The bound that the named contract sets for a result of this kind.

    Where `size`, the largest |logit|, is given, every element of an output may be wrong in proportion to it. Raises
    KeyError for an entry that does not exist.
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
    """The bound on differences between the same rows in two batches: equal bits, where nothing is allowed."""
    entry = _contract(name)["batch_invariance"]
    return Bound(entry["atol"], entry["rtol"], "element" if any(entry.values()) else "bits")
