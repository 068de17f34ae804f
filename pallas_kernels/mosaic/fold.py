"""The fixed fold of softmax partials: chunks of a group in ascending order, then the groups in ascending order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LN_2, Partials, Softmax
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.mosaic.launch import launch

Array = jax.Array
Ref = Any
_AT_ONCE = 8
"""Partials loaded together, so that their latencies overlap."""


def _layout() -> Any:
    return plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _fill(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.float32), _layout())


def _fold(so_far: Partials, refs: Partials, first: Any, count: int, rows: Any) -> Partials:
    """`so_far` and partials first … first + count − 1, in this order."""

    def load(ref: Ref, i: int) -> Array:
        return plgpu.load(ref.at[first + i, rows], layout=_layout(), optimized=False)

    parts = [Partials(*(None if ref is None else load(ref, i) for ref in refs)) for i in range(count)]
    shift = so_far.shift
    for part in parts:
        # An empty partial says nothing about the maximum.
        shift = jnp.maximum(shift, jnp.where(part.total == 0, -jnp.inf, part.shift))
    total, target, gap = _fill(0), so_far.target, None if refs.gap is None else _fill(0)
    for part in (so_far, *parts):
        below = jnp.where(part.total == 0, 0, shift - part.shift)
        factor = jnp.exp2(-below)
        total = total + part.total * factor
        if gap is not None:
            gap = gap + (part.gap + part.total * below) * factor
    for part in parts:
        target = target + part.target
    return Partials(shift, total, target, gap)


def _fold_all(refs: Partials, first: Any, count: int, rows: Any) -> Partials:
    start = Partials(_fill(-jnp.inf), _fill(0), _fill(0), None if refs.gap is None else _fill(0))
    whole, rest = divmod(count, _AT_ONCE)
    folded = lax.fori_loop(0, whole, lambda i, so_far: _fold(so_far, refs, first + i * _AT_ONCE, _AT_ONCE, rows), start)
    return _fold(folded, refs, first + whole * _AT_ONCE, rest, rows) if rest else folded


def fold_chunks(partials: Partials, groups: int, active: Array, machine: Machine) -> Partials:
    """Partials of chunks `[chunks, rows]` to those of groups `[groups, rows]`, for rows before `active [1]`."""
    chunks, n = partials.shift.shape

    def body(active: Ref, refs: Partials, out: Partials) -> None:
        block, group = lax.axis_index("blocks"), lax.axis_index("groups")

        @pl.when(block * THREADS < active[0])
        def _() -> None:
            rows = pl.ds(block * THREADS, THREADS)
            folded = _fold_all(refs, group * (chunks // groups), chunks // groups, rows)
            for ref, value in zip(out, folded, strict=True):
                if ref is not None:
                    ref[group, rows] = value

    row = jax.ShapeDtypeStruct((groups, n), jnp.float32)
    out_type = Partials(row, row, row, None if partials.gap is None else row)
    return launch(body, "linear_logp_fold", machine, out_type, (n // THREADS, groups), active, partials)


def fold_groups(partials: Partials, active: Array, machine: Machine) -> Softmax:
    """Partials of groups `[groups, rows]` to the softmax of each row."""
    groups, n = partials.shift.shape

    def body(active: Ref, refs: Partials, out: Softmax) -> None:
        block = lax.axis_index("blocks")

        @pl.when(block * THREADS < active[0])
        def _() -> None:
            rows = pl.ds(block * THREADS, THREADS)
            shift, total, target, gap = _fold_all(refs, 0, groups, rows)
            # A row without a finite logit has no softmax: NaN.
            shift = jnp.where(shift == -jnp.inf, jnp.nan, shift)
            log_total = jnp.log2(total)
            # Rounding must not make a probability larger than 1, or an entropy negative.
            out.logp[rows] = jnp.minimum((target - shift) - log_total, 0) * LN_2
            out.lse[rows] = (shift + log_total) * LN_2
            out.shift[rows] = shift
            out.total[rows] = total
            if gap is not None:
                out.entropy[rows] = jnp.maximum(log_total + gap / total, 0) * LN_2
                out.gap[rows] = gap / total

    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    entropy = None if partials.gap is None else row
    out_type = Softmax(row, row, entropy, row, row, entropy)
    return launch(body, "linear_logp_merge", machine, out_type, (n // THREADS,), active, partials)
