"""linear_kl on Hopper from the tokens that a teacher lists, by the kernels of a head.

Two passes over the student's head give its softmax, over all tokens and over the rest. The first one brings the
products of a slice to memory, where those of listed tokens are found. In the backward a kernel gives every token of the
rest its gradient, and listed tokens get theirs, before all are summed up as those of linear_logp are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.allowed import allowed_bits
from pallas_kernels.hopper.arrays import GradientRows, LogitsConfig, Softmax
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core import head as one_head
from rlk_jax.core.allowed import words_of_ids
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.hopper_forward import Listener, new_products, products_so_far
from rlk_jax.core.hopper_gradients import new_head_gradients
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, backward_plan, vocabulary_of
from rlk_jax.core.hopper_slices import HeadSlice, over_slices, places_in_slice, slice_of
from rlk_jax.core.rows import MEMORY_BUDGET, compact
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import logits_of, scaling
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_kl.divergence import raw_gradients, row_scale
from rlk_jax.ops.linear_kl.hopper_plan import products_plan, softmax_plan
from rlk_jax.ops.linear_kl.hopper_slices import RowsOfHead, normalizer_of_softmax, rows_of_head, softmax_of
from rlk_jax.ops.linear_kl.options import Gradients, KlConfig, KlTokens, Needs, Operands
from rlk_jax.ops.linear_kl.top_k import divergence_of_buckets, logits_of_all

Array = jax.Array


class ListStatistics(NamedTuple):
    """What a backward needs of the forward, for each token: the softmax over the rest, the derivative by a logit of the
    rest over the logit's share of it, that by the product of each listed token `[N, k]`, and the sum of all slopes.
    """

    shift: Array
    total: Array
    of_rest: Array
    of_listed: Array
    slope: Array


def list_divergence(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: KlConfig,
    operands: Operands,
    tokens: KlTokens,
    gather: Gather,
) -> tuple[Array, ListStatistics]:
    """The divergence of each token, and what its gradients need. `gather` brings the groups of all devices."""
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden
    operands, tokens = as_replicated(fusion_barrier((operands, tokens)))
    plan = products_plan(config.of_kernels(config.student), *reversed(typed.shape))
    rows = compact(tokens.active, plan.rows)
    head = rows_of_head(plan, rows, operands.student, tokens.temperature, operands.real_columns)
    own = jax.tree.map(rows.take, tokens)._replace(temperature=head.temperature)
    assert own.top_k is not None
    ids, products = own.top_k.ids, new_products(plan)
    listed = jax.new_ref(jnp.zeros(ids.shape, jnp.float32))

    def see(part: HeadSlice) -> None:
        listed[...] = products_so_far(plan, part, products, ids, listed[...])

    student = softmax_of(use, machine, head, rows, gather, listener=Listener(products, see))
    rest = softmax_of(use, machine, replace(head, plan=softmax_plan(plan)), rows, gather, allowed=_rest_bits(plan, ids))
    of_all = logits_of_all(jax.freeze(listed), plan.config.groups.count, gather)
    found = fusion_barrier((student, rest, of_all))
    return varying_like(jax.tree.map(rows.spread, _divergence_of_rows(config, plan, own, *found)), typed)


def _rest_bits(plan: HopperPlan, ids: Array) -> Array:
    """Which columns are of the rest, as kernels with a softmax read it, beside these tokens of each row."""
    words = ~words_of_ids(ids, plan.config.vocab_size, plan.config.memory_budget or MEMORY_BUDGET)
    return fusion_barrier(allowed_bits(vocabulary_of(plan.config), words))


def _divergence_of_rows(
    config: KlConfig, plan: HopperPlan, tokens: KlTokens, student: Softmax, rest: Softmax, products: Array
) -> tuple[Array, ListStatistics]:
    """The divergence of each row, from both softmaxes and the products of listed tokens."""
    top_k = tokens.top_k
    assert top_k is not None
    # A rest without a possible token has no softmax.
    rest = rest._replace(shift=jnp.where(rest.total == 0, 0, rest.shift))
    whole, others = normalizer_of_softmax(student), normalizer_of_softmax(rest)
    one, no_bias = jnp.zeros((1, products.shape[1]), jnp.int32), jnp.zeros((1, 1), jnp.float32)
    logits = logits_of(plan.config, products, no_bias, tokens.temperature, one, 1)
    value, (_, by_bucket, slope) = divergence_of_buckets(config, top_k, logits, whole, others)
    by_product = raw_gradients(config, products, by_bucket[:, 1:], tokens, jnp.ones_like(slope), top_k.is_listed)
    return value, ListStatistics(rest.shift, rest.total, by_bucket[:, 0], by_product, slope)


def list_gradients(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: KlConfig,
    needs: Needs,
    operands: Operands,
    tokens: KlTokens,
    statistics: ListStatistics,
    upstream: Array,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden
    operands, tokens, statistics, upstream = as_replicated(fusion_barrier((operands, tokens, statistics, upstream)))
    of_head, dtype = one_head.Needs(needs.hidden, needs.weight, needs.bias), typed.dtype
    (n, dim), top_k = typed.shape, tokens.top_k
    assert top_k is not None
    plan = backward_plan(config.of_kernels(config.student), dim, n, needs=of_head, dtype=dtype)
    rows = compact(tokens.active, plan.rows)
    head = rows_of_head(plan, rows, operands.student, tokens.temperature, operands.real_columns)
    scale = row_scale(tokens, statistics.slope, upstream) if dtype == jnp.float16 else None
    given = rows.take(upstream if scale is None else upstream * scale)
    row_scaling = None if scale is None else scaling(rows, rows.take(scale, 1))
    known = jax.tree.map(rows.take, statistics)
    coefficients = use.coefficients(_rest_rows(plan, known, head, given), machine)
    listed = fusion_barrier(rounded_product(known.of_listed, given[:, None]).astype(dtype))[: plan.matrix_rows]
    ids, row = rows.take(top_k.ids), jnp.arange(plan.matrix_rows, dtype=jnp.int32)[:, None]
    is_rest, ids = _rest_bits(plan, ids), ids[: plan.matrix_rows]
    written = new_head_gradients(plan, of_head, head.operands, (head.hidden, None), row_scaling)

    def step(chunks: ChunkRange, index: Any) -> None:
        part = slice_of(plan, chunks, index, head.operands, rows)
        out = jax.new_ref(lax.empty((plan.matrix_rows, plan.buffer_chunks(chunks) * COLUMNS), dtype))
        logits = LogitsConfig(part.head, plan.config.logit_softcap)
        where = part.where._replace(allowed=is_rest)
        use.dlogits(logits, machine, where, head.hidden, part.weight, part.bias, coefficients, out)
        dlogits = jax.freeze(out).at[row, places_in_slice(plan, part, ids)].set(listed, mode="drop")
        written.add(use, machine, chunks, part, fusion_barrier(dlogits))

    over_slices(plan, step)
    found = written.complete(head.operands, rows)
    return varying_like(Gradients(found.hidden, found.weight, found.bias), typed)


def _rest_rows(plan: HopperPlan, known: ListStatistics, head: RowsOfHead, given: Array) -> GradientRows:
    """What gives each token of the rest its share of the rest's derivative: that of a log-sum-exp. No row has a target.

    Rows that hold no token, and those without a rest, have values for which exponentials are 0.
    """
    has_rest, nothing = known.total != 0, jnp.zeros_like(given)
    return GradientRows(
        target_ids=jnp.full(plan.rows, -1, jnp.int32),
        temperature=head.temperature,
        logp=nothing,
        shift=jnp.where(has_rest, known.shift, jnp.inf),
        total=jnp.where(has_rest, known.total, 1),
        gap=None,
        target_derivative=None if plan.config.logit_softcap is None else nothing,
        g_logp=nothing,
        g_lse=rounded_product(known.of_rest, given),
        g_entropy=None,
        scale=None,
    )
