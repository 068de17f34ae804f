"""The Triton kernels of linear_logp as functions: partial softmaxes, and for each slice of the vocabulary dlogits, dH,
dW and db. All logits are never held at once.

One tile serves every GPU from Ampere on: it takes at most 163 KiB of shared memory and copies without TMA. Neither
tiles nor grids depend on the number of tokens in a way that reaches a bit of a row.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.products import LowRankTerm
from pallas_kernels.triton.call import launch

Array = jax.Array
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 128, 64
"""Rows and columns of one tile of a product, and the block of K that it takes at a time. A softmax chunk is as wide."""
_BAND = 16
_TILE_WARPS = 8
_TILE_STAGES = 3
_FOLD_ROWS = 16
_SUM_ROWS, _SUM_COLUMNS = 64, 128


@dataclass(frozen=True)
class HeadShape:
    """The static facts of a head `[V, D]` ("vd") or `[D, V]` ("dv") and of the softmax's tree over it."""

    dim: int
    vocab_size: int
    layout: Literal["vd", "dv"]
    softcap: float | None
    groups: int
    group_width: int

    @property
    def group_chunks(self) -> int:
        """How many chunks of `TILE_COLUMNS` columns a group has; the last one may be narrower."""
        return -(-self.group_width // TILE_COLUMNS)

    @property
    def _constants(self) -> dict[str, Any]:
        return {"dim": self.dim, "vocab_size": self.vocab_size, "layout": self.layout, **_TILE}


_TILE = {"rows": TILE_ROWS, "columns": TILE_COLUMNS, "depth": TILE_DEPTH, "band": _BAND}


class KernelOperands(NamedTuple):
    """The operands that every kernel of one call shares.

    hidden `[rows, D]` holds whole tiles of rows and is 0 from row `active_rows` on. weight is stored as the `HeadShape`
    says. bias is `[V]` or None. active_rows and real_columns, int32 `[1]`, are how many rows count and the size of the
    true vocabulary. low_rank is None without a low-rank term. allowed, uint8 `[rows, bytes]` of which bit i of byte j
    is column 8·j + i, says which columns each row may take; None stands for all.
    """

    hidden: Array
    weight: Array
    bias: Array | None
    active_rows: Array
    real_columns: Array
    low_rank: LowRankTerm | None = None
    allowed: Array | None = None

    def _of_logits(self, per_row: Array) -> tuple[Array, ...]:
        """The arrays that logits are computed from; others stand for those that are None, and are not read."""
        low_rank = LowRankTerm(self.hidden, self.weight) if self.low_rank is None else self.low_rank
        others = (per_row if x is None else x for x in (self.bias, self.allowed))
        return self.hidden, self.weight, *low_rank, *others


class PartialSoftmax(NamedTuple):
    """The softmax of each row over some columns of z = logits / temperature.

    maximum is max z, total is Σ e^(z − maximum), target is the z of the row's target, 0 where it is not among the
    columns, gap is Σ e^(z − maximum)·(maximum − z), or None where no entropy is asked for, and logit_sum is Σ z, or
    None where targets are not smoothed.
    """

    maximum: Array
    total: Array
    target: Array
    gap: Array | None
    logit_sum: Array | None


class UpstreamGradients(NamedTuple):
    """The upstream gradients of each row's values, float32 `[rows]`; lse and entropy are None where nothing asks for
    them.

    Where targets are smoothed, each logit has uniform as a part of the target, and spread is what the target gives to
    all of them; both are None elsewhere.
    """

    logp: Array
    lse: Array | None
    entropy: Array | None
    uniform: Array | None
    spread: Array | None


class LogitCoefficients(NamedTuple):
    """What the gradients of a row's logits are computed from, float32 `[rows]` each.

    A logit's gradient is p·(constant + slope·ln p) + uniform; the target's is `at_target`. slope is None where no
    entropy has an upstream gradient, and uniform where targets are not smoothed.
    """

    constant: Array
    slope: Array | None
    at_target: Array
    uniform: Array | None


class ColumnRange(NamedTuple):
    """The columns of one slice, int32 `[1]` each.

    start is the slice's first column. dH is summed up in chains of slices, and chain_start and chain_end are the first
    column of the slice's chain and the one behind its last.
    """

    start: Array
    chain_start: Array
    chain_end: Array


def _tiles(rows: int, columns: int) -> int:
    """How many tiles a result of this size has."""
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)


def _vector(n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def _logit_constants(head: HeadShape, operands: KernelOperands) -> dict[str, Any]:
    """What kernels that compute logits are compiled for."""
    rank = 0 if operands.low_rank is None else operands.low_rank.hidden.shape[1]
    mask_bytes = 0 if operands.allowed is None else operands.allowed.shape[1]
    changing = {"rank": rank, "softcap": head.softcap, "has_bias": operands.bias is not None, "mask_bytes": mask_bytes}
    return head._constants | changing


def group_partials(
    head: HeadShape,
    operands: KernelOperands,
    target_ids: Array,
    temperature: Array,
    *,
    with_gap: bool,
    with_sum: bool,
) -> PartialSoftmax:
    """The softmax of each row over each group of the tree, `[groups, rows]`.

    target_ids int32 and temperature float32 are `[rows]`. with_gap: an entropy is asked for. with_sum: targets are
    smoothed.
    """
    from pallas_kernels.triton import head_kernels

    n = operands.hidden.shape[0]
    chunks = head.groups * head.group_chunks
    of_chunk = jax.ShapeDtypeStruct((n, chunks), jnp.float32)
    wanted = {"with_gap": with_gap, "with_sum": with_sum}
    of_chunks = launch(
        head_kernels.partials,
        (
            *operands._of_logits(temperature),
            *(target_ids, temperature, operands.active_rows, operands.real_columns),
        ),
        (of_chunk, of_chunk, of_chunk, *(of_chunk if x else _vector(1) for x in wanted.values())),
        {
            **_logit_constants(head, operands),
            **wanted,
            "groups": head.groups,
            "group_width": head.group_width,
        },
        grid=_tiles(n, chunks * TILE_COLUMNS),
        num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
    )
    of_group = jax.ShapeDtypeStruct((head.groups, n), jnp.float32)
    width = 1 << (head.group_chunks - 1).bit_length()
    maximum, total, target, gap, logit_sum = launch(
        head_kernels.fold,
        (*of_chunks, temperature, operands.active_rows),
        (of_group, of_group, of_group, *(of_group if x else _vector(1) for x in wanted.values())),
        {
            "groups": head.groups,
            "group_chunks": head.group_chunks,
            **wanted,
            "rows": _FOLD_ROWS,
            "width": width,
        },
        grid=n // _FOLD_ROWS * head.groups,
        num_warps=4,
    )
    return PartialSoftmax(maximum, total, target, gap if with_gap else None, logit_sum if with_sum else None)


def logits(
    head: HeadShape, operands: KernelOperands, temperature: Array, where: ColumnRange, slice_width: int
) -> Array:
    """One slice's logits / temperature, float32 `[rows, slice_width]`: −inf behind the slice's columns, and where they
    do not count or are not allowed. Rows that do not count may hold anything.
    """
    from pallas_kernels.triton import head_kernels

    n = operands.hidden.shape[0]
    end = jnp.minimum(where.chain_end, operands.real_columns)
    (out,) = launch(
        head_kernels.logits,
        (*operands._of_logits(temperature), temperature, operands.active_rows, where.start, end),
        (jax.ShapeDtypeStruct((n, slice_width), jnp.float32),),
        {**_logit_constants(head, operands), "slice_width": slice_width},
        grid=_tiles(n, slice_width),
        num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
    )
    return out


def coefficients(
    temperature: Array,
    log_sum: Array,
    logp: Array,
    gap: Array | None,
    upstream: UpstreamGradients,
    lift: Array,
) -> LogitCoefficients:
    """The coefficients of logits' gradients from the upstream gradients, all float32 `[rows]`. logp is that of the
    target's own token, and the gradients of a row's logits are multiplied by `lift`.
    """
    from pallas_kernels.triton import head_gradient_kernels

    n = logp.shape[0]
    other = (logp if x is None else x for x in (gap, *upstream))
    has_entropy, has_uniform = upstream.entropy is not None, upstream.uniform is not None
    constant, slope, at_target, uniform = launch(
        head_gradient_kernels.coefficients,
        (temperature, log_sum, logp, *other, lift),
        (_vector(n),) * 4,
        {
            "with_lse": upstream.lse is not None,
            "with_entropy": has_entropy,
            "with_uniform": has_uniform,
            "rows": TILE_ROWS,
        },
        grid=n // TILE_ROWS,
        num_warps=4,
    )
    return LogitCoefficients(constant, slope if has_entropy else None, at_target, uniform if has_uniform else None)


def dlogits(
    head: HeadShape,
    operands: KernelOperands,
    target_ids: Array,
    temperature: Array,
    maximum: Array,
    log_sum: Array,
    rows: LogitCoefficients,
    where: ColumnRange,
    slice_width: int,
) -> Array:
    """The gradients of one slice's products hidden·Wᵀ, `[rows, slice_width]` in hidden's dtype.

    target_ids, temperature, maximum and log_sum are `[rows]`; log_sum is the logarithm of the softmax's total.
    """
    from pallas_kernels.triton import head_gradient_kernels

    n = operands.hidden.shape[0]
    of_rows = (rows.constant if x is None else x for x in rows)
    (out,) = launch(
        head_gradient_kernels.dlogits,
        (
            *operands._of_logits(temperature),
            *(target_ids, temperature, maximum, log_sum),
            *(*of_rows, operands.active_rows, operands.real_columns, where.start),
        ),
        (jax.ShapeDtypeStruct((n, slice_width), operands.hidden.dtype),),
        {
            **_logit_constants(head, operands),
            "with_slope": rows.slope is not None,
            "with_uniform": rows.uniform is not None,
            "slice_width": slice_width,
        },
        grid=_tiles(n, slice_width),
        num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
    )
    return out


def add_hidden_gradient(
    head: HeadShape, operands: KernelOperands, of_logits: Array, where: ColumnRange, chain: Array
) -> Array:
    """chain + dlogits·W over one slice, float32 `[rows, D]`, in chain's memory.

    The first slice of a chain starts from 0, whatever `chain` holds.
    """
    from pallas_kernels.triton import head_gradient_kernels

    end = jnp.minimum(where.chain_end, operands.real_columns)
    (out,) = launch(
        head_gradient_kernels.hidden_gradient,
        (of_logits, operands.weight, operands.active_rows, where.start, where.chain_start, end, chain),
        (jax.ShapeDtypeStruct(chain.shape, chain.dtype),),
        {**head._constants, "slice_width": of_logits.shape[1]},
        grid=_tiles(*chain.shape),
        num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
        aliases={6: 0},
    )
    return out


def store_weight_gradient(
    head: HeadShape, operands: KernelOperands, of_logits: Array, unscale: Array, where: ColumnRange, d_weight: Array
) -> Array:
    """d_weight with one slice's part of dlogitsᵀ·H, times unscale `[1]` and rounded once, in d_weight's memory."""
    from pallas_kernels.triton import head_gradient_kernels

    slice_width = of_logits.shape[1]
    end = jnp.minimum(where.chain_end, operands.real_columns)
    (out,) = launch(
        head_gradient_kernels.weight_gradient,
        (of_logits, operands.hidden, unscale, operands.active_rows, where.start, end, d_weight),
        (jax.ShapeDtypeStruct(d_weight.shape, d_weight.dtype),),
        {**head._constants, "slice_width": slice_width},
        grid=_tiles(slice_width, head.dim) if head.layout == "vd" else _tiles(head.dim, slice_width),
        num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
        aliases={6: 0},
    )
    return out


def column_sums(of_logits: Array, row_unscale: Array, count: Array) -> Array:
    """The sum over rows of one slice's gradients times row_unscale `[rows]`, float32 `[slice_width]`."""
    from pallas_kernels.triton import head_gradient_kernels

    slice_width = of_logits.shape[1]
    (out,) = launch(
        head_gradient_kernels.column_sums,
        (of_logits, row_unscale, count),
        (_vector(slice_width),),
        {"slice_width": slice_width, "rows": _SUM_ROWS, "columns": _SUM_COLUMNS},
        grid=slice_width // _SUM_COLUMNS,
        num_warps=4,
    )
    return out
