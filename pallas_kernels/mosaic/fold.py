"""The fixed fold of softmax partials: chunks of a group in ascending order, then the groups in ascending order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import Partials, Softmax
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.logits import LN_2
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any
_PARTIALS_AT_ONCE = 8
"""Partials that are folded together: their shifts first, then their sums."""
_MOST_IN_MEMORY = 80
"""Partials of a row, at most, that are in shared memory at a time; a multiple of `_PARTIALS_AT_ONCE`."""


def _layout() -> Any:
    """The layout of values that each thread holds for one row."""
    return plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _fill(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.float32), _layout())


def _empty(like: Partials) -> Partials:
    """The fold of no partial, with the fields that `like` has."""
    return Partials(_fill(-jnp.inf), *(None if ref is None else _fill(0) for ref in like[1:]))


def _fold(so_far: Partials, refs: Partials, first: Any, count: int, rows: Any) -> Partials:
    """The fold of `so_far` and of partials first … first + count − 1 of `refs`, in this order.

    The loops are unrolled by LLVM, which loads what both need once.
    """

    def load(i: Any) -> Partials:
        values = (None if ref is None else plgpu.load(ref.at[first + i, rows], optimized=False) for ref in refs)
        return Partials(*values)

    def larger(i: Any, shift: Array) -> Array:
        part = load(i)
        # A partial without columns has no maximum.
        return jnp.maximum(shift, jnp.where(part.total == 0, -jnp.inf, part.shift))

    shift = lax.fori_loop(0, count, larger, so_far.shift)

    def added(sums: Partials, part: Partials) -> Partials:
        """The total and the gap of `sums`, whose shift is the largest, with those of a part."""
        below = jnp.where(part.total == 0, 0, shift - part.shift)
        factor = jnp.exp2(-below)
        gap = None if sums.gap is None else sums.gap + (part.gap + part.total * below) * factor
        return sums._replace(total=sums.total + part.total * factor, gap=gap)

    def step(i: Any, sums: Partials) -> Partials:
        part = load(i)
        derivative = None if refs.target_derivative is None else sums.target_derivative + part.target_derivative
        logit_sum = None if refs.logit_sum is None else sums.logit_sum + part.logit_sum
        # All partials but the one that holds the target have zeros for a target and its derivative.
        target = sums.target + part.target
        return added(sums, part)._replace(target=target, target_derivative=derivative, logit_sum=logit_sum)

    start = so_far._replace(shift=shift, total=_fill(0), gap=None if refs.gap is None else _fill(0))
    return lax.fori_loop(0, count, step, added(start, so_far))


def _fold_all(so_far: Partials, refs: Partials, count: int, rows: Any) -> Partials:
    """The fold of `so_far` and of the first `count` partials of `refs`, in ascending order."""
    whole, rest = divmod(count, _PARTIALS_AT_ONCE)

    def step(i: Array, so_far: Partials) -> Partials:
        return _fold(so_far, refs, i * _PARTIALS_AT_ONCE, _PARTIALS_AT_ONCE, rows)

    folded = lax.fori_loop(0, whole, step, so_far)
    return _fold(folded, refs, whole * _PARTIALS_AT_ONCE, rest, rows) if rest else folded


def _fold_through_memory(partials_gmem: Partials, first: Any, count: int, rows: Any) -> Partials:
    """The fold of partials first … first + count − 1, which are brought to shared memory together: one after the other,
    the latency of each would count.
    """
    refs, tree = jax.tree.flatten(partials_gmem)
    batches = -(-count // _MOST_IN_MEMORY)
    size = min(count, padded(-(-count // batches), _PARTIALS_AT_ONCE))
    whole, rest = divmod(count, size)

    def scoped(*scratch: Any) -> Partials:
        *memory, is_loaded = scratch

        def fold_batch(start: Any, size: int, so_far: Partials) -> Partials:
            there = [x.at[pl.ds(0, size)] for x in memory]
            for ref, smem in zip(refs, there, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[pl.ds(start, size), rows], smem, is_loaded)
            plgpu.barrier_wait(is_loaded)
            folded = _fold_all(so_far, jax.tree.unflatten(tree, there), size, slice(None))
            # All threads have read what the next batch overwrites.
            plgpu.commit_smem()
            return folded

        folded = _empty(partials_gmem)
        folded = lax.fori_loop(0, whole, lambda i, x: fold_batch(first + i * size, size, x), folded)
        return fold_batch(first + whole * size, rest, folded) if rest else folded

    memory = [plgpu.SMEM((size, THREADS), jnp.float32) for _ in refs]
    return pl.run_scoped(scoped, *memory, plgpu.Barrier(num_arrivals=len(refs)))


def fold_chunks(partials: Partials, groups: int, active: Array, machine: Machine) -> Partials:
    """The partials of groups `[groups, rows]` from those of chunks `[chunks, rows]`, for rows before `active [1]`."""
    chunks, n = partials.shift.shape

    def body(active_gmem: Ref, partials_gmem: Partials, out_gmem: Partials) -> None:
        block, group = lax.axis_index("blocks"), lax.axis_index("groups")

        @pl.when(block * THREADS < active_gmem[0])
        def _() -> None:
            rows = pl.ds(block * THREADS, THREADS)
            folded = _fold_through_memory(partials_gmem, group * (chunks // groups), chunks // groups, rows)
            for ref, value in zip(out_gmem, folded, strict=True):
                if ref is not None:
                    ref[group, rows] = value

    row = jax.ShapeDtypeStruct((groups, n), jnp.float32)
    out_type = Partials(*(None if x is None else row for x in partials))
    return launch(body, "linear_logp_fold", machine, out_type, (n // THREADS, groups), active, partials)


def fold_groups(partials: Partials, active: Array, machine: Machine) -> Softmax:
    """The softmax of each row from the partials of groups `[groups, rows]`, for rows before `active [1]`."""
    groups, n = partials.shift.shape

    def body(active_gmem: Ref, partials_gmem: Partials, out_gmem: Softmax) -> None:
        block = lax.axis_index("blocks")

        @pl.when(block * THREADS < active_gmem[0])
        def _() -> None:
            rows = pl.ds(block * THREADS, THREADS)
            start = _empty(partials_gmem)
            shift, total, target, gap, derivative, logit_sum = _fold_all(start, partials_gmem, groups, rows)
            # A row without a finite logit has no softmax, and its values are NaN.
            shift = jnp.where(shift == -jnp.inf, jnp.nan, shift)
            log_total = jnp.log2(total)
            # Rounding must not make a probability larger than 1, or an entropy negative.
            out_gmem.logp[rows] = jnp.minimum((target - shift) - log_total, 0) * LN_2
            out_gmem.lse[rows] = (shift + log_total) * LN_2
            out_gmem.shift[rows] = shift
            out_gmem.total[rows] = total
            if gap is not None:
                out_gmem.entropy[rows] = jnp.maximum(log_total + gap / total, 0) * LN_2
                out_gmem.gap[rows] = gap / total
            if derivative is not None:
                out_gmem.target_derivative[rows] = derivative
            if logit_sum is not None:
                out_gmem.logit_sum[rows] = logit_sum * LN_2

    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    entropy, derivative, logit_sum = (None if x is None else row for x in partials[3:])
    out_type = Softmax(row, row, entropy, row, row, entropy, derivative, logit_sum)
    return launch(body, "linear_logp_merge", machine, out_type, (n // THREADS,), active, partials)
