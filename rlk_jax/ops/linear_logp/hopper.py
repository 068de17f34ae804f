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
    LowRankTerm,
    Partials,
    Softmax,
    VocabSlice,
)
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, padded
from pallas_kernels.hopper.vocabulary import HeadAccess
from rlk_jax.core.devices import default_machine
from rlk_jax.core.gemm import by_kernel
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
    WeightLayout,
    head_dim,
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
        functools.partial(by_kernel, lambda: kernels().gemm, machine),
    )


@dataclass(frozen=True)
class _HeadSlice:
    """One slice of the vocabulary: what the kernels read of the head there, and where its columns belong."""

    where: VocabSlice
    head: HeadAccess
    weight: Array
    bias: Array | None
    low_rank: Array | None
    """B of a low-rank term, cut as the weight is."""
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
    bias = None

    def of_slice(weight: Array) -> Array:
        if not chunks.copied:
            return weight
        taken = weight[there] if config.weight_layout == "vd" else weight[:, there].T
        taken = jnp.where(holds.reshape(-1, 1), taken, 0)
        return jnp.pad(taken, ((0, 0), (0, -taken.shape[1] % DEPTH)))

    low_rank = None if operands.low_rank is None else of_slice(_whole_steps(operands.low_rank, config.weight_layout))
    if operands.bias is not None:
        bias = jnp.where(holds.reshape(-1), operands.bias[there].astype(jnp.float32), 0)
    known = operands.real_columns
    where = VocabSlice(rows.count, first.reshape(1), count.reshape(1), None if known is None else known.reshape(1))
    head = HeadAccess(vocabulary, "vd" if chunks.copied else config.weight_layout, chunks.copied)
    return _HeadSlice(where, head, of_slice(operands.weight), bias, low_rank, columns)


def _over_slices(plan: HopperPlan, step: Callable[[ChunkRange, Any], None]) -> None:
    """Calls `step(range, slice of the range)` for all slices in ascending order."""
    for chunks in plan.ranges:
        if chunks.slices == 1:
            step(chunks, 0)
        else:
            lax.fori_loop(0, chunks.slices, lambda i, _, chunks=chunks: step(chunks, i), None)


def _whole_steps(low_rank: Array, layout: WeightLayout) -> Array:
    """B of a low-rank term with zeros up to a rank that is a multiple of 64."""
    rank_axis = 1 if layout == "vd" else 0
    padding = [(0, 0), (0, 0)]
    padding[rank_axis] = (0, -low_rank.shape[rank_axis] % DEPTH)
    return jnp.pad(low_rank, padding)


def _matrix(plan: HopperPlan, rows: Compacted, hidden: Array) -> Array:
    """The compacted rows of some columns of hidden, followed by zeros, up to a multiple of 64 columns."""
    return fusion_barrier(jnp.pad(rows.take(hidden)[: plan.matrix_rows], ((0, 0), (0, -hidden.shape[1] % DEPTH))))


def _matrices(plan: HopperPlan, rows: Compacted, hidden: Array) -> tuple[Array, Array | None]:
    """hidden's own columns, and those of a low-rank term, as two matrices."""
    dim = plan.dim
    return _matrix(plan, rows, hidden[:, :dim]), _matrix(plan, rows, hidden[:, dim:]) if plan.config.rank else None


def _term(low_rank_hidden: Array | None, part: _HeadSlice) -> LowRankTerm | None:
    """What a low-rank term adds to a product with a slice of the head."""
    return None if low_rank_hidden is None else LowRankTerm(low_rank_hidden, part.low_rank)


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
    n, dim = operands.hidden.shape[0], head_dim(config, operands)
    typed = operands.hidden
    operands, tokens = fusion_barrier(as_replicated((operands, tokens)))
    keeping = kept_chunks(config, dim, n, operands.hidden.dtype)
    plan, vocabulary = forward_plan(config, dim, n, keeping), vocabulary_of(config)
    rows = compact(tokens.active, plan.rows, all_active=not config.may_ignore)
    hidden, low_rank_hidden = _matrices(plan, rows, operands.hidden)
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
        head = (part.where, hidden, part.weight, part.bias)
        use.partials(logits, machine, *head, *per_token, out, exponentials, _term(low_rank_hidden, part))

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
    n, dim = operands.hidden.shape[0], head_dim(config, operands)
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
    hidden, low_rank_hidden = _matrices(plan, rows, operands.hidden)
    row_facts = _gradient_rows(rows, tokens, softmax, upstream, dtype)
    row_coefficients = use.coefficients(row_facts, machine)
    common, weight_hidden, row_unscale = None, (hidden, low_rank_hidden), None
    if row_facts.scale is not None:
        row_unscale = 1 / row_facts.scale
        # dW sums rows of different scales, so hidden is rescaled to the smallest; the row that has it stays exact.
        common = jnp.min(jnp.where(jnp.arange(plan.rows) < rows.count, row_facts.scale, jnp.inf))
        factor = (common / row_facts.scale)[: plan.matrix_rows, None]
        weight_hidden = jax.tree.map(lambda x: (x * factor).astype(dtype), weight_hidden)

    d_weight = d_bias = d_low_rank = None
    d_hidden, d_columns = [], []
    if needs.hidden:
        d_hidden = _new_sums(plan, dim, dtype)
        d_columns = _new_sums(plan, config.rank, dtype) if config.rank else []
    new_gradient = jnp.zeros if config.real_vocab_size < config.vocab_size else lax.empty
    if needs.weight:
        d_weight = jax.new_ref(new_gradient(operands.weight.shape, dtype))
    if needs.low_rank:
        shape = jax.eval_shape(lambda x: _whole_steps(x, config.weight_layout), operands.low_rank).shape
        d_low_rank = jax.new_ref(new_gradient(shape, dtype))
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
            head = (part.where, hidden, part.weight, part.bias)
            use.dlogits(logits, machine, *head, row_coefficients, buffer, _term(low_rank_hidden, part))
        slice_dlogits = jax.freeze(buffer)
        of_slice = (part.head, machine, part.where, slice_dlogits)
        for parts, weight in ((d_hidden, part.weight), (d_columns, part.low_rank)):
            if parts and weight is not None:
                out = parts[chunks.chain.start // len(chunks.chain)]
                use.add_hidden_gradient(*of_slice, weight, row_unscale, chunks.chain, out)
        for gradient, of_rows in zip((d_weight, d_low_rank), weight_hidden, strict=True):
            if gradient is None or of_rows is None:
                continue
            unscale = None if common is None else (1 / common).reshape(1)
            store = functools.partial(use.store_weight_gradient, *of_slice, of_rows, unscale)
            if chunks.copied:
                rows_of_slice = jax.new_ref(lax.empty((part.columns.size, of_rows.shape[1]), dtype))
                store(rows_of_slice)
                gradient[...] = _stored(gradient[...], jax.freeze(rows_of_slice), part.columns, config)
            else:
                store(gradient)
        if d_bias is not None:
            sums = use.column_sums(part.where, slice_dlogits, row_unscale, machine)
            d_bias[...] = d_bias[...].at[part.columns].set(sums, mode="drop")

    _over_slices(plan, step)
    sums = [[x.chain if x.rounded is None else x.rounded for x in part] for part in (d_hidden, d_columns)]
    # The barrier has dW, which needs hidden, complete before dH's rows are spread: hidden is not held beside them.
    complete = fusion_barrier(jax.tree.map(jax.freeze, (*sums, d_weight, d_bias, d_low_rank)))
    of_hidden, of_columns, d_weight, d_bias, d_low_rank = complete
    spread = [rows.spread(x[:, :dim]) for x in of_hidden]
    if of_columns:
        columns = (rows.spread(x[:, : config.rank]) for x in of_columns)
        spread = [jnp.concatenate(pair, axis=1) for pair in zip(spread, columns, strict=True)]
    hidden_gradient = (jnp.stack(spread) if config.is_shard else spread[0]) if needs.hidden else None
    if d_low_rank is not None:
        d_low_rank = d_low_rank[:, : config.rank] if config.weight_layout == "vd" else d_low_rank[: config.rank]
    return fusion_barrier(Gradients(hidden_gradient, d_weight, d_bias, d_low_rank).like(config, operands))


def _new_sums(plan: HopperPlan, columns: int, dtype: Any) -> list[HiddenGradient]:
    """Memory for the sums over the vocabulary that give the gradient of some columns of hidden, one for each part."""
    shape = (plan.rows, padded(columns, COLUMNS))
    rounded = None if plan.config.is_shard else jax.new_ref(lax.empty(shape, dtype))
    parts = range(plan.config.hidden_gradient_parts)
    return [HiddenGradient(jax.new_ref(lax.empty(shape, jnp.float32)), rounded) for _ in parts]


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
    """`d_weight` with the rows of one slice `[places, at least D]` where their columns are."""
    rows_of_slice = rows_of_slice[:, : d_weight.shape[1 if config.weight_layout == "vd" else 0]]
    if config.weight_layout == "vd":
        return d_weight.at[columns].set(rows_of_slice, mode="drop")
    return d_weight.at[:, columns].set(rows_of_slice.T, mode="drop")
