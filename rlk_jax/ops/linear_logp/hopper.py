"""linear_logp on Hopper, by Mosaic's or CUDA's kernels: which rows and columns they see, and in which slices.

The forward is one pass over the head that keeps a partial softmax per row and chunk of 256 columns. The backward cuts
the vocabulary into slices whose gradients of logits fit the memory budget; for each slice it recomputes the logits,
writes their gradients in 16 bits, adds dlogits·W to dH (one float32 chain over all slices) and stores dW and db
complete.

A forward whose backward will run keeps the exponentials of the first chunks in bfloat16, as many as the budget holds
(`kept_chunks`). The backward makes their gradients in their place, and recomputes the rest in the same memory. That
takes three products and a share of the fourth, and gives the same bits, since recomputed exponentials are rounded
alike.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import (
    GradientRows,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LogitsConfig,
    Partials,
    Softmax,
    VocabSlice,
)
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, padded
from pallas_kernels.hopper.vocabulary import HeadAccess
from rlk_jax.core.devices import default_machine
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.softmax import fp16_scale, gradient_bound
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_logp.hopper_kernels import HeadKernels
from rlk_jax.ops.linear_logp.hopper_plan import (
    ChunkRange,
    HopperPlan,
    backward_plan,
    forward_plan,
    kept_chunks,
    replaces_kept,
    vocabulary_of,
)
from rlk_jax.ops.linear_logp.options import (
    Gradients,
    HeadConfig,
    LinearLogpFunctions,
    Needs,
    Operands,
    real_columns,
)

Array = jax.Array


def _mosaic_kernels() -> HeadKernels:
    from pallas_kernels.mosaic import head_kernels

    return head_kernels


def _cuda_kernels() -> HeadKernels:
    from pallas_kernels.cuda import kernels

    return kernels


def mosaic(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by Pallas Mosaic GPU kernels, for one machine; None for the GPU that JAX sees.

    The kernels are imported when one of them is traced.
    """
    return _functions(_mosaic_kernels, machine)


def cuda(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by CUDA C++ kernels, for one machine; None for the GPU that JAX sees."""
    return _functions(_cuda_kernels, machine)


def _functions(kernels: Callable[[], HeadKernels], machine: Machine | None) -> LinearLogpFunctions:
    return LinearLogpFunctions(
        functools.partial(_partials, kernels, machine),
        functools.partial(_merge, kernels, machine),
        functools.partial(_gradients, kernels, machine),
    )


@dataclass(frozen=True)
class _HeadSlice:
    """One slice of the vocabulary: what the kernels read of the head there, and where its columns belong."""

    where: VocabSlice
    head: HeadAccess
    weight: Array
    bias: Array | None
    columns: Array
    """The column of each place `[slice's chunks · 256]`; V where a place holds none."""


def _slice(plan: HopperPlan, chunks: ChunkRange, index: Any, operands: Operands, rows: Compacted) -> _HeadSlice:
    """Slice number `index` of a range of chunks."""
    config, vocabulary = plan.config, vocabulary_of(plan.config)
    real = real_columns(config, operands)
    first = chunks.first + jnp.asarray(index, jnp.int32) * chunks.width
    count = jnp.minimum(chunks.width, chunks.end - first)
    chunk = (first + jnp.arange(chunks.width, dtype=jnp.int32))[:, None]
    place = jnp.arange(COLUMNS, dtype=jnp.int32)
    holds = (place < vocabulary.width(chunk, real)) & (chunk < chunks.end)
    columns = jnp.where(holds, vocabulary.start(chunk) + place, config.vocab_size).reshape(-1)
    there = jnp.minimum(columns, jnp.maximum(real - 1, 0))
    weight, bias = operands.weight, None
    if chunks.copied:
        taken = weight[there] if config.weight_layout == "vd" else weight[:, there].T
        taken = jnp.where(holds.reshape(-1, 1), taken, 0)
        weight = jnp.pad(taken, ((0, 0), (0, -plan.dim % DEPTH)))
    if operands.bias is not None:
        bias = jnp.where(holds.reshape(-1), operands.bias[there].astype(jnp.float32), 0)
    known = operands.real_columns
    where = VocabSlice(rows.count, first.reshape(1), count.reshape(1), None if known is None else known.reshape(1))
    head = HeadAccess(vocabulary, "vd" if chunks.copied else config.weight_layout, chunks.copied)
    return _HeadSlice(where, head, weight, bias, columns)


def _over_slices(plan: HopperPlan, step: Callable[[ChunkRange, Any], None]) -> None:
    """Calls `step(range, slice of the range)` for all slices in ascending order."""
    for chunks in plan.ranges:
        if chunks.slices == 1:
            step(chunks, 0)
        else:
            lax.fori_loop(0, chunks.slices, lambda i, _, chunks=chunks: step(chunks, i), None)


def _matrix(plan: HopperPlan, rows: Compacted, hidden: Array) -> Array:
    """The compacted hidden rows, followed by zeros, up to a hidden dim that is a multiple of 64."""
    return fusion_barrier(jnp.pad(rows.take(hidden)[: plan.matrix_rows], ((0, 0), (0, -plan.dim % DEPTH))))


def _holds_target(plan: HopperPlan, target_ids: Array) -> Array | None:
    """Which blocks of 64 rows have a target in which chunk, `[rows / 64, chunks]`; None for few rows, where knowing it
    costs more than it saves.
    """
    if plan.tokens <= 128:
        return None
    vocabulary = vocabulary_of(plan.config)
    block = jnp.arange(plan.rows, dtype=jnp.int32) // 64
    # Most targets of a shard's tokens lie in other shards.
    is_here = (target_ids >= 0) & (target_ids < plan.config.vocab_size)
    chunk = jnp.where(is_here, vocabulary.chunk_of(target_ids), vocabulary.chunks)
    return jnp.zeros((plan.rows // 64, vocabulary.chunks), jnp.int32).at[block, chunk].set(1, mode="drop")


class _KeptForBackward(NamedTuple):
    """What a forward keeps for the backward of the same tokens: exponentials, and which row of them each token has."""

    exponentials: KeptExponentials
    place: Array


def _partials(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
) -> tuple[Partials, tuple[Compacted, _KeptForBackward | None]]:
    """The partials of every group by row of the kernels; which token is in which row, and what is kept."""
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape
    typed = operands.hidden
    operands, tokens = fusion_barrier(as_replicated((operands, tokens)))
    keeping = kept_chunks(config, dim, n, operands.hidden.dtype)
    plan, vocabulary = forward_plan(config, dim, n, keeping), vocabulary_of(config)
    rows = compact(tokens.active, plan.rows, all_active=not config.may_ignore)
    hidden = _matrix(plan, rows, operands.hidden)
    target_ids, temperature = rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)

    holds_target = _holds_target(plan, target_ids)

    def new() -> Any:
        return jax.new_ref(lax.empty((vocabulary.chunks, plan.rows), jnp.float32))

    out = Partials(new(), new(), new(), new() if config.return_entropy else None)
    exponentials = jax.new_ref(lax.empty((plan.matrix_rows, keeping * COLUMNS), hidden.dtype)) if keeping else None

    def step(chunks: ChunkRange, index: Any) -> None:
        part = _slice(plan, chunks, index, operands, rows)
        logits = LogitsConfig(part.head, config.logit_softcap)
        per_token = (target_ids, holds_target, temperature)
        use.partials(logits, machine, part.where, hidden, part.weight, part.bias, *per_token, out, exponentials)

    _over_slices(plan, step)
    of_chunks = jax.tree.map(jax.freeze, out)
    groups = use.fold_chunks(of_chunks, config.groups.count, rows.count, machine)
    kept = None
    if exponentials is not None:
        place = jnp.arange(n, dtype=jnp.int32) if rows.place is None else rows.place
        kept = _KeptForBackward(KeptExponentials(jax.freeze(exponentials), of_chunks.shift[:keeping]), place)
    return varying_like((groups, (rows, kept)), typed)


def _merge(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    groups: Partials,
    state: tuple[Compacted, _KeptForBackward | None],
) -> tuple[LinearLogp, Softmax, _KeptForBackward | None]:
    """The values and the softmax of every token, from the groups of the whole vocabulary."""
    groups, (rows, kept) = as_replicated((groups, state))
    softmax = jax.tree.map(rows.spread, kernels().fold_groups(groups, rows.count, machine or default_machine()))
    softmax, kept = fusion_barrier((softmax, kept))
    return LinearLogp(softmax.logp, softmax.lse if config.return_lse else None, softmax.entropy), softmax, kept


def _gradients(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    softmax: Softmax,
    kept: _KeptForBackward | None,
    upstream: LinearLogp,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape
    dtype = operands.hidden.dtype
    if upstream.entropy is not None:
        # The entropy's gradient needs logits more exactly than rounded exponentials tell them.
        kept = None
    operands, tokens, softmax, kept, upstream = fusion_barrier(
        as_replicated((operands, tokens, softmax, kept, upstream))
    )
    keeping = 0 if kept is None else kept.exponentials.exponentials.shape[1] // COLUMNS
    plan = backward_plan(config, dim, n, needs=needs, dtype=dtype, kept=keeping)
    rows = compact(tokens.active, plan.rows)
    stored = None if kept is None else (kept.exponentials, _kept_row_map(plan, rows, kept.place))
    hidden = _matrix(plan, rows, operands.hidden)
    row_facts = _gradient_rows(rows, tokens, softmax, upstream, dtype)
    row_coefficients = use.coefficients(row_facts, machine)
    common, weight_hidden, row_unscale = None, hidden, None
    if row_facts.scale is not None:
        row_unscale = 1 / row_facts.scale
        # dW sums rows of different scales, so hidden is rescaled to the smallest; the row that has it stays exact.
        common = jnp.min(jnp.where(jnp.arange(plan.rows) < rows.count, row_facts.scale, jnp.inf))
        factor = (common / row_facts.scale)[: plan.matrix_rows, None]
        weight_hidden = (hidden * factor).astype(dtype)

    d_weight = d_bias = None
    d_hidden = []
    if needs.hidden:
        shape = (plan.rows, padded(dim, COLUMNS))
        rounded = None if config.is_shard else jax.new_ref(lax.empty(shape, dtype))
        parts = range(config.hidden_gradient_parts)
        d_hidden = [HiddenGradient(jax.new_ref(lax.empty(shape, jnp.float32)), rounded) for _ in parts]
    if needs.weight:
        is_padded = config.real_vocab_size < config.vocab_size
        d_weight = jax.new_ref((jnp.zeros if is_padded else lax.empty)(operands.weight.shape, dtype))
    if needs.bias:
        d_bias = jax.new_ref(jnp.zeros(config.vocab_size, jnp.float32))

    def step(chunks: ChunkRange, index: Any) -> None:
        part = _slice(plan, chunks, index, operands, rows)
        logits = LogitsConfig(part.head, config.logit_softcap)
        written = lax.empty((plan.matrix_rows, chunks.width * COLUMNS), dtype)
        if chunks.is_kept and stored is not None:
            exponentials, row_map = stored
            if replaces_kept(config, dim):
                written, exponentials = exponentials.exponentials, exponentials._replace(exponentials=None)
            buffer = jax.new_ref(written)
            use.dlogits_from_kept_exponentials(
                part.head.vocabulary, machine, part.where, exponentials, row_map, row_coefficients, buffer
            )
        else:
            buffer = jax.new_ref(written)
            use.dlogits(logits, machine, part.where, hidden, part.weight, part.bias, row_coefficients, buffer)
        slice_dlogits = jax.freeze(buffer)
        if d_hidden:
            out = d_hidden[chunks.chain.start // len(chunks.chain)]
            use.add_hidden_gradient(
                part.head, machine, part.where, slice_dlogits, part.weight, row_unscale, chunks.chain, out
            )
        if d_weight is not None:
            unscale = None if common is None else (1 / common).reshape(1)
            store = functools.partial(
                use.store_weight_gradient, part.head, machine, part.where, slice_dlogits, weight_hidden, unscale
            )
            if chunks.copied:
                rows_of_slice = jax.new_ref(lax.empty(part.weight.shape, dtype))
                store(rows_of_slice)
                d_weight[...] = _stored(d_weight[...], jax.freeze(rows_of_slice)[:, :dim], part.columns, config)
            else:
                store(d_weight)
        if d_bias is not None:
            sums = use.column_sums(part.where, slice_dlogits, row_unscale, machine)
            d_bias[...] = d_bias[...].at[part.columns].set(sums, mode="drop")

    _over_slices(plan, step)
    complete = [x.chain if x.rounded is None else x.rounded for x in d_hidden], d_weight, d_bias
    # The barrier has dW, which needs hidden, complete before dH's rows are spread: hidden is not held beside them.
    sums, *of_head = fusion_barrier(jax.tree.map(jax.freeze, complete))
    sums = [rows.spread(x[:, :dim]) for x in sums]
    hidden_gradient = (jnp.stack(sums) if config.is_shard else sums[0]) if needs.hidden else None
    return fusion_barrier(Gradients(hidden_gradient, *of_head).like(config, operands))


def _gradient_rows(rows: Compacted, tokens: Tokens, softmax: Softmax, upstream: LinearLogp, dtype: Any) -> GradientRows:
    """What the gradient kernels take for each row. Rows that hold no token have values for which exponentials
    and gradients are 0 whatever the bias.
    """
    scale = fp16_scale(gradient_bound(tokens.temperature, upstream)) if dtype == jnp.float16 else None
    return GradientRows(
        target_ids=rows.take(tokens.target_ids),
        temperature=rows.take(tokens.temperature, 1),
        logp=rows.take(softmax.logp),
        shift=rows.take(softmax.shift, jnp.inf),
        total=rows.take(softmax.total, 1),
        gap=None if upstream.entropy is None else rows.take(softmax.gap),
        g_logp=rows.take(upstream.logp),
        g_lse=None if upstream.lse is None else rows.take(upstream.lse),
        g_entropy=None if upstream.entropy is None else rows.take(upstream.entropy),
        scale=None if scale is None else rows.take(scale, 1),
    )


def _kept_row_map(plan: HopperPlan, rows: Compacted, place: Array) -> KeptRowMap:
    """Where the backward's rows are among the forward's. The forward may have more rows: tokens whose upstream
    gradients are 0 are active there alone.
    """
    own = jnp.arange(plan.rows, dtype=jnp.int32)
    row = jnp.where(own < rows.count, rows.take(place), own)
    return KeptRowMap(row, jnp.any(row != own, keepdims=True).astype(jnp.int32))


def _stored(d_weight: Array, rows_of_slice: Array, columns: Array, config: HeadConfig) -> Array:
    """`d_weight` with the rows of one slice `[places, D]` where their columns are."""
    if config.weight_layout == "vd":
        return d_weight.at[columns].set(rows_of_slice, mode="drop")
    return d_weight.at[:, columns].set(rows_of_slice.T, mode="drop")
