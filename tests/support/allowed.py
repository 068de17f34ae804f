"""Which tokens each row of a problem may take, in the forms that linear_logp is given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.helpers import Case

EVERYTHING = Case(
    "everything",
    (70,),
    40,
    300,
    bias=True,
    temperature="per token",
    options={"logit_softcap": 3.0, "global_vocab_size": 290, "ignore_index": -1},
)
"""Tests of what is allowed and of rankings share its programs."""


def allowed_of(case: Any, problem: Any, seed: int = 0) -> np.ndarray:
    """`allowed_beside` of a problem's targets, in the true vocabulary."""
    allowed = allowed_beside(problem.target_ids, case.vocab, seed)
    allowed[..., case.options.get("global_vocab_size", case.vocab) :] = False
    return allowed


def allowed_beside(target_ids: Any, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Which tokens each row allows, bool `[*lead, V]`: its target, and none to nearly all of the others.

    A problem of one row allows some: beside its target alone, errors would be relative to one logit, which may be 0.
    """
    rng, ids = np.random.default_rng(seed), np.asarray(target_ids)
    density = np.resize([0.3, 0.02, 0.0, 0.98], ids.shape)
    allowed = rng.random((*ids.shape, vocab_size)) < density[..., None]
    np.put_along_axis(allowed, ids[..., None], True, axis=-1)
    return allowed


def ids_of(allowed: np.ndarray, seed: int = 0) -> jax.Array:
    """`allowed_ids` of bool `[..., V]`, in random order, with duplicates and with padding among them."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.permutation(np.append(np.flatnonzero(x), np.flatnonzero(x)[:3]))
        for x in allowed.reshape(-1, allowed.shape[-1])
    ]
    found = np.full((len(rows), 1 + max(map(len, rows))), -1, np.int32)
    for padded, x in zip(found, rows, strict=True):
        padded[: len(x)] = x
    return jnp.asarray(rng.permuted(found, axis=1).reshape(*allowed.shape[:-1], -1))


def mask_of(allowed: np.ndarray, dtype: Any = np.uint32) -> jax.Array:
    """`allowed_mask` of bool `[..., V]`, packed by NumPy."""
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)])
    return jnp.asarray(np.packbits(padded, axis=-1, bitorder="little").view("<u4").view(dtype))
