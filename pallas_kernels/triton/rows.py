"""Softmax statistics and gradients of logits that are there already, `[N, V]` in bfloat16, float16 or float32.

A row is read once by each pass; an inactive one never. How a row is cut depends on V alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.triton.call import launch

Array = jax.Array
_WARPS = 4
_LANES = 1024
_DEPTH = 8
"""Columns that each lane takes at a time: one maximum and one rescaling serve them all."""
_GRADIENT_WIDTH = 4096


@dataclass(frozen=True)
class Rows:
    """How logits are read: only the first `columns` of a row count; softcap(x) = c·tanh(x/c) comes first."""

    columns: int
    softcap: float | None
    entropy: bool


def _power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def block(columns: int) -> dict[str, int]:
    """How many lanes read a row of so many columns, and how many columns each lane reads at a time."""
    lanes = min(_LANES, _power_of_two(columns))
    return {"lanes": lanes, "depth": min(_DEPTH, _power_of_two(-(-columns // lanes)))}


def gradient_width(row_length: int) -> int:
    """Columns of one program."""
    return min(_GRADIENT_WIDTH, _power_of_two(row_length))


def _constants(form: Rows, row_length: int) -> dict[str, Any]:
    return {"row_length": row_length, "columns": form.columns, "softcap": form.softcap}


def statistics(
    form: Rows, logits: Array, target_ids: Array, temperature: Array, active: Array
) -> tuple[Array, Array, Array, Array | None]:
    """(maximum, total, target, gap) of each row, float32 `[N]`; gap only with `form.entropy`.

    With x = softcap(logit) over the first columns and s = log2(e)/T: maximum of x, total = Σ 2^((x − maximum)·s),
    target = x of the target (0 where it is none of these columns), gap = Σ 2^((x − maximum)·s)·(maximum − x)·s.
    target_ids, active int32 and temperature float32 `[N]`; an inactive row's total is 1, all else of it 0.
    """
    from pallas_kernels.triton import row_kernels

    n, row_length = logits.shape
    if n == 0:
        empty = jnp.zeros(0, jnp.float32)
        return empty, empty, empty, empty if form.entropy else None
    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    maximum, total, target, gap = launch(
        row_kernels.statistics,
        (logits, target_ids, temperature, active),
        (row, row, row, row),
        {**_constants(form, row_length), "with_gap": form.entropy, **block(form.columns)},
        grid=n,
        num_warps=_WARPS,
    )
    return maximum, total, target, gap if form.entropy else None


def gradients(
    form: Rows,
    logits: Array,
    target_ids: Array,
    active: Array,
    scale: Array,
    maximum: Array,
    log2_total: Array,
    c0: Array,
    c1: Array | None,
    at_target: Array,
    in_place: bool,
) -> Array:
    """Gradient of the logits, in their dtype; in their memory if `in_place`.

    With x = softcap(logit) and p = 2^((x − maximum)·scale − log2_total): p·c0 + p·c1·ln p, and `at_target` at the
    target, times softcap's derivative. Exactly 0 in inactive rows and from column `form.columns` on. Vectors are `[N]`:
    int32 target_ids and active, the others float32.
    """
    from pallas_kernels.triton import row_kernels

    n, row_length = logits.shape
    if logits.size == 0:
        return logits
    width = gradient_width(row_length)
    (out,) = launch(
        row_kernels.gradients,
        (logits, target_ids, active, scale, maximum, log2_total, c0, c0 if c1 is None else c1, at_target),
        (jax.ShapeDtypeStruct(logits.shape, logits.dtype),),
        {**_constants(form, row_length), "with_slope": c1 is not None, "width": width},
        grid=n * -(-row_length // width),
        num_warps=_WARPS,
        aliases={0: 0} if in_place else {},
    )
    return out
