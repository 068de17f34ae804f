"""linear_logp's backward on Hopper: dH, dW and db, slice by slice of the vocabulary."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import GradientRows, KeptExponentials, KeptRowMap, LogitsConfig, Softmax
from pallas_kernels.hopper.parts import Matrix, new_matrix
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, head_dim
from rlk_jax.core.hopper_gradients import new_head_gradients
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, backward_plan, logits_dtype, replaces_kept
from rlk_jax.core.hopper_slices import HeadSlice, bits_of_rows, matrices, over_slices, slice_of
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.softmax import Scaling, fp16_scale, gradient_bound, scaling
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier

Array = jax.Array


class KeptForBackward(NamedTuple):
    """What a forward keeps for the backward of the same tokens: exponentials, and which row of them each token has."""

    exponentials: KeptExponentials
    place: Array


class WrittenGradients(Protocol):
    """What the slices of a backward write to, as `HeadGradients` is."""

    def add(self, use: Any, machine: Machine, chunks: ChunkRange, part: HeadSlice, dlogits: Matrix, /) -> None: ...

    def complete(self, operands: Operands, rows: Compacted, /) -> Gradients: ...


NewGradients = Callable[[HopperPlan, Needs, Operands, tuple[Matrix | None, ...], Scaling | None], WrittenGradients]


def gradients(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    softmax: Softmax,
    kept: KeptForBackward | None,
    upstream: LinearLogp,
    new_gradients: NewGradients = new_head_gradients,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db.

    `new_gradients` gives what the slices write to.
    """
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape[0], head_dim(config, operands)
    dtype = logits_dtype(config, operands.hidden.dtype)
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
    hidden, low_rank_hidden = matrices(plan, rows, operands.hidden)
    row_facts = _gradient_rows(config, rows, tokens, softmax, upstream, dtype)
    row_coefficients, allowed = use.coefficients(row_facts, machine), bits_of_rows(plan, rows, tokens)
    row_scaling = None if row_facts.scale is None else scaling(rows, row_facts.scale)
    written = new_gradients(plan, needs, operands, (hidden, low_rank_hidden), row_scaling)

    def step(chunks: ChunkRange, index: Any) -> None:
        part = slice_of(plan, chunks, index, operands, rows)
        logits = LogitsConfig(part.head, config.logit_softcap)
        memory = new_matrix((plan.matrix_rows, plan.buffer_chunks(chunks) * COLUMNS), dtype)
        if chunks.is_kept and stored is not None:
            exponentials, row_map = stored
            if replaces_kept(config, dim):
                memory, exponentials = exponentials.exponentials, exponentials._replace(exponentials=None)
            buffer = jax.tree.map(jax.new_ref, memory)
            use.dlogits_from_kept_exponentials(
                part.head.vocabulary, machine, part.where, exponentials, row_map, row_coefficients, buffer
            )
        else:
            buffer = jax.tree.map(jax.new_ref, memory)
            head = (part.where._replace(allowed=allowed), hidden, part.weight, part.bias)
            use.dlogits(logits, machine, *head, row_coefficients, buffer, part.term(low_rank_hidden))
        written.add(use, machine, chunks, part, jax.tree.map(jax.freeze, buffer))

    over_slices(plan, step)
    return written.complete(operands, rows)


def _gradient_rows(
    config: HeadConfig, rows: Compacted, tokens: Tokens, softmax: Softmax, upstream: LinearLogp, dtype: Any
) -> GradientRows:
    """What the gradient kernels take for each row. Rows that hold no token have values for which exponentials
    and gradients are 0 whatever the bias.
    """
    scale = fp16_scale(gradient_bound(tokens.temperature, upstream)) if dtype == jnp.float16 else None
    g_logp, smoothing = rows.take(upstream.logp), config.smoothing
    return GradientRows(
        target_ids=rows.take(tokens.target_ids),
        temperature=rows.take(tokens.temperature, 1),
        logp=rows.take(softmax.logp),
        shift=rows.take(softmax.shift, jnp.inf),
        total=rows.take(softmax.total, 1),
        gap=None if upstream.entropy is None else rows.take(softmax.gap),
        target_derivative=None if softmax.target_derivative is None else rows.take(softmax.target_derivative),
        g_logp=g_logp,
        g_lse=None if upstream.lse is None else rows.take(upstream.lse),
        g_entropy=None if upstream.entropy is None else rows.take(upstream.entropy),
        scale=None if scale is None else rows.take(scale, 1),
        g_uniform=None if smoothing is None else g_logp * jnp.float32(smoothing.uniform),
        g_spread=None if smoothing is None else g_logp * jnp.float32(smoothing.share),
    )


def _kept_row_map(plan: HopperPlan, rows: Compacted, place: Array) -> KeptRowMap:
    """Where the backward's rows are among the forward's. The forward may have more rows: tokens whose upstream
    gradients are 0 are active there alone.
    """
    own = jnp.arange(plan.rows, dtype=jnp.int32)
    row = jnp.where(own < rows.count, rows.take(place), own)
    return KeptRowMap(row, jnp.any(row != own, keepdims=True).astype(jnp.int32))
