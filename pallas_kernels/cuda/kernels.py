"""The CUDA kernels as functions of arrays, with the names and the signatures of `pallas_kernels.mosaic.head_kernels`.

call.py beside it launches them.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cuda.call import (
    call_kernel,
    head_numbers,
    numbers,
    softcap_number,
    tile_numbers,
    vocabulary_numbers,
    write_into,
)
from pallas_kernels.hopper.arrays import (
    Coefficients,
    GradientRows,
    GroupRange,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LargestProducts,
    LogitsConfig,
    Partials,
    SliceProducts,
    Softmax,
    VocabSlice,
)
from pallas_kernels.hopper.tiles import COLUMNS, Machine, gemm_plan, gemm_tile, statistics_tile
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.products import LowRankTerm, padded

Array = jax.Array
Ref = Any
_NO_TERM = LowRankTerm(None, None)


def partials(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    target_ids: Array,
    holds_target: Array | None,
    temperature: Array,
    out: Partials,
    kept: Ref | None = None,
    low_rank: LowRankTerm | None = None,
    products: SliceProducts | None = None,
) -> None:
    """Write the partials of one slice of chunks into the references `out`, and the exponentials of chunks into `kept`,
    or the products of the slice into `products`.

    hidden `[rows, D]` holds whole tiles of rows, or a multiple of 8 below 64; weight is stored as `logits.head` says;
    bias is float32 `[slice's chunks · 256]`; target_ids int32 and temperature float32 have a value for each row of
    whole tiles. holds_target, int32 `[rows / 64, all chunks]`, is not 0 where one of 64 rows has its target in a chunk;
    with None every chunk is searched. kept, a reference `[hidden's rows, first chunks · 256]` in hidden's dtype, takes
    the rounded exponentials of the chunks it has room for; there is none beside `products`. low_rank is a term of the
    head, or None: the chain of a product goes on over its r columns.
    """
    if products is not None:
        _write_products(logits, machine, where, hidden, weight, bias, low_rank, products)
        # Their columns stand as those of a slice that is copied.
        of_slice = replace(logits, head=replace(logits.head, copied=True))
        _partials_of(of_slice, where, products.values[...], None, target_ids, holds_target, temperature, out)
        return
    write_into(
        (*out, kept),
        "rlk_statistics",
        (*where[:3], hidden, weight, target_ids, temperature),
        (where.columns, bias, where.allowed, holds_target, *(low_rank or _NO_TERM)),
        head=head_numbers(logits.head),
        tile=tile_numbers(statistics_tile(hidden.shape[0]), machine),
        softcap=softcap_number(logits),
        has_gap=out.gap is not None,
        has_sum=out.logit_sum is not None,
        kept_chunks=np.int64(0 if kept is None else kept.shape[1] // COLUMNS),
    )


def _write_products(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    low_rank: LowRankTerm | None,
    out: SliceProducts,
) -> None:
    write_into(
        out,
        "rlk_products",
        (*where[:3], hidden, weight),
        (where.columns, bias, where.allowed, *(low_rank or _NO_TERM)),
        head=head_numbers(logits.head),
        tile=tile_numbers(statistics_tile(hidden.shape[0]), machine),
    )


def partials_of_logits(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    products: Array,
    bias: Array | None,
    target_ids: Array,
    temperature: Array,
    out: Partials,
) -> None:
    """Write the partials of products `[N, columns]`, which are float32, into the references `out [chunks, rows]`.

    `where` is the whole vocabulary. Rows are a multiple of THREADS; those behind the last 64 of N are not written, and
    those behind N hold anything. bias is float32 `[chunks · 256]`, or None; target_ids int32 and temperature float32
    are `[rows]`.
    """
    _partials_of(logits, where, products, bias, target_ids, None, temperature, out)


def _partials_of(
    logits: LogitsConfig,
    where: VocabSlice,
    products: Array,
    bias: Array | None,
    target_ids: Array,
    holds_target: Array | None,
    temperature: Array,
    out: Partials,
) -> None:
    """Write the partials of products that are in memory, whose columns are found as those of a head are."""
    write_into(
        out,
        "rlk_statistics_of_products",
        (*where[:3], products, target_ids, temperature),
        (where.columns, bias, where.allowed, holds_target),
        head=head_numbers(logits.head),
        softcap=softcap_number(logits),
        has_gap=out.gap is not None,
        has_sum=out.logit_sum is not None,
    )


def add_largest(
    vocabulary: Vocabulary,
    machine: Machine,
    where: VocabSlice,
    products: SliceProducts,
    count: int,
    best: LargestProducts,
) -> None:
    """Add the products of a slice to the `count` largest products of each row, in `best`.

    Slices are given in ascending order. Rows behind those that count are left as they are. What a row with NaN gets is
    undefined.
    """
    write_into(
        best,
        "rlk_add_largest",
        (*where[:3], *(x[...] for x in products)),
        vocabulary=numbers(*vocabulary_numbers(vocabulary)),
        count=np.int64(count),
    )


def fold_chunks(partials: Partials, groups: int, active: Array, machine: Machine) -> Partials:
    """The partials of groups `[groups, rows]` from those of chunks `[chunks, rows]`, for rows before `active [1]`."""
    row = jax.ShapeDtypeStruct((groups, partials.shift.shape[1]), jnp.float32)
    wanted = [x is not None for x in partials]
    found = iter(call_kernel("rlk_fold_chunks", [row] * sum(wanted), (active, *partials[:3]), partials[3:]))
    return Partials(*(next(found) if x else None for x in wanted))


def fold_groups(partials: Partials, active: Array, machine: Machine) -> Softmax:
    """The softmax of each row from the partials of groups `[groups, rows]`, for rows before `active [1]`."""
    row = jax.ShapeDtypeStruct(partials.shift.shape[1:], jnp.float32)
    with_gap, *others = (x is not None for x in partials[3:])
    wanted = (True, True, True, True, with_gap, with_gap, *others)
    found = iter(call_kernel("rlk_fold_groups", [row] * sum(wanted), (active, *partials[:3]), partials[3:]))
    logp, lse, shift, total, entropy, *rest = (next(found) if x else None for x in wanted)
    return Softmax(logp, lse, entropy, shift, total, *rest)


def coefficients(rows: GradientRows, machine: Machine) -> Coefficients:
    """The coefficients that the gradients of each row's logits are computed from."""
    row = jax.ShapeDtypeStruct(rows.logp.shape, jnp.float32)
    wanted = (True, True, rows.g_entropy is not None, rows.g_uniform is not None)
    of_logp = rows.temperature, rows.logp, rows.total, rows.g_logp
    others = (rows.gap, rows.target_derivative, rows.g_lse, rows.g_entropy, rows.scale, rows.g_uniform, rows.g_spread)
    found = iter(call_kernel("rlk_coefficients", [row] * sum(wanted), of_logp, others))
    constant, at_target, slope, uniform = (next(found) if x else None for x in wanted)
    return Coefficients(rows.target_ids, rows.temperature, rows.shift, constant, slope, at_target, uniform)


def _coefficient_operands(rows: Coefficients) -> tuple[Array, ...]:
    """The coefficients that every kernel of logits' gradients takes; the slope and what is uniform are optional."""
    return rows.target_ids, rows.temperature, rows.shift, rows.constant, rows.at_target


def dlogits(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    rows: Coefficients,
    out: Ref,
    low_rank: LowRankTerm | None = None,
) -> None:
    """Write the gradients of one slice's logits into the reference `out [rows, chunks · 256]`.

    Places that hold no column become 0. hidden is `[rows, D]`; weight, bias and low_rank are those that `partials`
    takes.
    """
    (out[...],) = call_kernel(
        "rlk_dlogits",
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        (*where[:3], hidden, weight, *_coefficient_operands(rows)),
        (where.columns, bias, where.allowed, rows.slope, rows.uniform, *(low_rank or _NO_TERM)),
        head=head_numbers(logits.head),
        tile=tile_numbers(statistics_tile(hidden.shape[0]), machine),
        softcap=softcap_number(logits),
    )


def dlogits_from_kept_exponentials(
    vocabulary: Vocabulary,
    machine: Machine,
    where: VocabSlice,
    kept: KeptExponentials,
    row_map: KeptRowMap,
    rows: Coefficients,
    out: Ref,
) -> None:
    """Write what `dlogits` would write, from the exponentials that the forward kept instead of a product.

    Row i reads row `row_map.row[i]` of what was kept. Where `kept.exponentials` is None, `out` holds the exponentials
    of the first chunks and the gradients take their place.
    """
    in_place = kept.exponentials is None
    (out[...],) = call_kernel(
        "rlk_dlogits_from_kept_exponentials",
        [out[...] if in_place else jax.ShapeDtypeStruct(out.shape, out.dtype)],
        (*where[:3], kept.shift, row_map.row, *_coefficient_operands(rows)),
        (where.columns, rows.uniform, kept.exponentials, row_map.moved if in_place else None),
        vocabulary=numbers(*vocabulary_numbers(vocabulary)),
        rows_at_once=np.int64(statistics_tile(out.shape[0]).cluster_rows),
    )


def folds_groups(machine: Machine) -> bool:
    """Whether `add_hidden_gradient` folds several groups to a total in one call: its blocks do not wait for others."""
    return False


def add_hidden_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Array,
    weight: Array,
    unscale: Array | None,
    groups: GroupRange,
    out: HiddenGradient,
) -> None:
    """Add dlogits·W over one slice's columns in `groups` to the sums in `out`, in place.

    The weight is the head's, or that of a low-rank term, for which the sums are the gradient of its columns of hidden.

    Each element has one float32 chain for each group. It starts from 0 at the group's first chunk, whatever `out`
    holds, and a slice that begins inside a group goes on from `out.chains`, so that slices change no bits. Where
    `out.chains` is None, slices begin and end at the edges of groups.

    Without `out.total` each group's chain is left in `out.chains`. The caller folds them, and unscale is not read. With
    it `groups` is one group: a slice that ends inside it leaves the chain in `out.chains`, and one that ends it adds
    the chain to `out.total`, which the first group starts. The last group of the vocabulary multiplies each row of the
    fold by unscale, float32 `[rows]` or None, and writes it to `out.rounded` in that dtype, or to `out.total` where
    `rounded` is None. Rows of the sums behind the last row of dlogits hold anything.
    """
    write_into(
        out,
        "rlk_hidden_gradient",
        (*where[:3], dlogits, weight, *groups),
        (unscale,),
        head=head_numbers(head),
        tile=tile_numbers(gemm_tile(dlogits.shape[0]), machine),
        has_chains=out.chains is not None,
        has_total=out.total is not None,
    )


def store_weight_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Array,
    hidden: Array,
    unscale: Array | None,
    out: Ref,
) -> None:
    """Write one slice's rows of dW = dlogitsᵀ·H (columns of its transpose for "dv") into the reference `out`, complete.

    hidden `[rows, D]`, or `[rows, r]` for a low-rank term, is zero from row `where.rows` on. Sums are multiplied by
    unscale, float32 `[1]` or None, and rounded once to out's dtype.
    """
    rows = dlogits.shape[1] if head.layout == "vd" else hidden.shape[1]
    (out[...],) = call_kernel(
        "rlk_weight_gradient",
        [out[...]],
        (*where[:3], dlogits, hidden),
        (where.columns, unscale),
        head=head_numbers(head),
        tile=tile_numbers(gemm_tile(rows), machine),
    )


def column_sums(where: VocabSlice, dlogits: Array, row_unscale: Array | None, machine: Machine) -> Array:
    """The sum over rows of one slice's gradients, float32 `[columns]`: sums of 64 rows, folded in ascending order.

    row_unscale, float32 `[rows]` or None, multiplies each row.
    """
    out = jax.ShapeDtypeStruct(dlogits.shape[1:], jnp.float32)
    return call_kernel("rlk_column_sums", [out], (where.rows, dlogits), (row_unscale,))[0]


def gemm(
    a: Array,
    b: Array,
    start: Array | None,
    *,
    a_transposed: bool,
    b_transposed: bool,
    out_dtype: Any,
    machine: Machine,
) -> Array:
    """start + A·B, `[M, N]` in out_dtype. No dimension may be 0.

    a is `[M, K]`, or `[K, M]` with a_transposed; b is `[K, N]`, or `[N, K]` with b_transposed; both are bfloat16, or
    both float16. start is float32 `[M, N]`, or None for sums that start from 0.
    """
    k, m = a.shape if a_transposed else a.shape[::-1]
    n = b.shape[0 if b_transposed else 1]
    plan = gemm_plan(m, n, machine.sm_count, a_transposed=a_transposed, accumulates=start is not None)
    # To the kernel an operand is transposed where K does not run along its rows in memory.
    operands = [(a, a_transposed), (b, not b_transposed)]
    (along_rows, rows_transposed), (along_columns, columns_transposed) = operands[:: -1 if plan.swapped else 1]
    return call_kernel(
        "rlk_gemm",
        [jax.ShapeDtypeStruct((m, n), out_dtype)],
        (_readable(along_rows), _readable(along_columns)),
        (start,),
        tile=tile_numbers(plan.tile, machine),
        tile_columns=np.int64(plan.tile.columns),
        a_transposed=rows_transposed,
        b_transposed=columns_transposed,
        swapped=plan.swapped,
        depth=np.int64(k),
    )[0]


def _readable(operand: Array) -> Array:
    """The operand with zeros behind its rows, up to a multiple of 16 bytes, which tensor copies need."""
    columns = operand.shape[1]
    return jnp.pad(operand, ((0, 0), (0, padded(columns, 8) - columns))) if columns % 8 else operand
