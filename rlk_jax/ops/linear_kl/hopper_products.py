"""linear_kl on Hopper by the kernels of one head alone, such as those in CUDA C++.

A pass over each head takes its softmax. The next one, slice by slice of the vocabulary, brings the products with both
heads to memory, as many as the budget holds, and XLA makes the terms of the divergence of them. Their sums go by halves
inside a chunk of 256 columns, by pairs of chunks inside a group, then over ascending groups. The backward makes the
products once more, and XLA the gradients of the student's logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core.fixed_order import ascending_sum, pairwise_sum
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, vocabulary_of
from rlk_jax.core.hopper_slices import over_slices
from rlk_jax.core.shard import Gather
from rlk_jax.core.transforms import fusion_barrier
from rlk_jax.ops.linear_kl.divergence import KlStatistics, Terms, derivatives_of, raw_gradients, sums_of_chunks
from rlk_jax.ops.linear_kl.hopper_backward import SliceGradients, Upstream
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans_of_products
from rlk_jax.ops.linear_kl.hopper_slices import (
    BothRows,
    SliceOfHead,
    logits_of_slice,
    normalizer_of_softmax,
    softmax_of,
)
from rlk_jax.ops.linear_kl.options import KlConfig

Array = jax.Array


def divergence_from_products(
    use: HeadKernels, machine: Machine, config: KlConfig, both: BothRows, gather: Gather
) -> tuple[Array, KlStatistics]:
    """The divergence of all rows `[matrix rows]`, and what their gradients need."""
    plan, vocabulary = both.plans.student, vocabulary_of(both.plans.student.config)
    softmaxes = (softmax_of(use, machine, head, both.rows, gather) for head in both.over_one_head())
    # Behind the barrier, both are as they are in the backward: equal heads have equal ones.
    found = [jax.tree.map(lambda x: x[: plan.matrix_rows], normalizer_of_softmax(x)) for x in softmaxes]
    student, teacher = normalizers = fusion_barrier(found)
    of_chunks = vocabulary.chunks, plan.matrix_rows
    sums = [jax.new_ref(lax.empty(of_chunks, jnp.float32)) for _ in Terms._fields]

    def step(chunks: ChunkRange, index: Any) -> None:
        slices = both.slices(chunks, index)
        heads = zip((both.student, both.teacher), slices, strict=True)
        logits = [logits_of_slice(use, machine, *x).logits for x in heads]
        where, number = slices[0].part.where, jnp.arange(chunks.width, dtype=jnp.int32)
        # The last slice of a range may have places for chunks behind it, which are stored nowhere.
        chunk = jnp.where(number < where.chunks, where.first_chunk + number, vocabulary.chunks + number)
        for ref, of_slice in zip(sums, sums_of_chunks(config, normalizers, logits, COLUMNS), strict=True):
            ref[...] = ref[...].at[chunk].set(of_slice.T, mode="drop", unique_indices=True)

    over_slices(plan, step)

    def by_group(ref: Any) -> Array:
        of_groups = jax.freeze(ref).reshape(config.groups.count, -1, plan.matrix_rows)
        return pairwise_sum(jnp.swapaxes(of_groups, 1, 2))

    value, slope = map(ascending_sum, gather([by_group(x) for x in sums]))
    return value, KlStatistics(student, teacher, slope)


def _of_products(
    use: HeadKernels, machine: Machine, config: KlConfig, both: BothRows, upstream: Upstream
) -> Callable[[SliceOfHead, SliceOfHead], Array]:
    """Gradients that XLA makes of products in memory."""
    taken = jax.tree.map(lambda x: both.rows.take(x)[: both.plans.student.matrix_rows], upstream)
    tokens, statistics, gradient = fusion_barrier(taken)
    tokens = tokens._replace(temperature=both.student.temperature[: both.plans.student.matrix_rows])

    def dlogits(student: SliceOfHead, teacher: SliceOfHead) -> Array:
        own = logits_of_slice(use, machine, both.student, student)
        other = logits_of_slice(use, machine, both.teacher, teacher)
        by_logit = derivatives_of(config, (own.logits, other.logits), statistics)
        exact = raw_gradients(config, own.raw, by_logit, tokens, gradient, own.valid)
        return exact.astype(both.student.hidden.dtype)

    return dlogits


OF_PRODUCTS = SliceGradients(backward_plans_of_products, _of_products)
"""Those of kernels that know one head."""
