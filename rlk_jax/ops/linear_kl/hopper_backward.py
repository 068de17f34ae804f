"""linear_kl's backward on Hopper: dH, dW and db of the student, slice by slice of the vocabulary."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core import head as one_head
from rlk_jax.core.devices import default_machine
from rlk_jax.core.hopper_gradients import new_head_gradients
from rlk_jax.core.hopper_plan import ChunkRange
from rlk_jax.core.hopper_slices import over_slices
from rlk_jax.core.softmax import fp16_scale, logits_of, scaling
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_kl.divergence import KlStatistics, raw_gradients, slopes_of
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans
from rlk_jax.ops.linear_kl.hopper_slices import BothRows, KlKernels, SliceProducts, both_rows, operands_of
from rlk_jax.ops.linear_kl.options import (
    Gradients,
    KlConfig,
    KlTokens,
    Needs,
    OneHeadConfig,
    Operands,
    dims_of,
)

Array = jax.Array


class _GradientFacts(NamedTuple):
    """What the gradients of a row's logits depend on, `[rows]` each; scale is the power of two that they are multiplied
    by before they are rounded, or None.
    """

    tokens: KlTokens
    statistics: KlStatistics
    upstream: Array
    scale: Array | None


def student_gradients(
    kernels: Callable[[], KlKernels],
    machine: Machine | None,
    config: KlConfig,
    needs: Needs,
    operands: Operands,
    tokens: KlTokens,
    statistics: KlStatistics,
    upstream: Array,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden
    operands, tokens, statistics, upstream = as_replicated(fusion_barrier((operands, tokens, statistics, upstream)))
    of_head, dtype = one_head.Needs(needs.hidden, needs.weight, needs.bias), typed.dtype
    plans = backward_plans(config, dims_of(operands), typed.shape[0], of_head, dtype)
    both = both_rows(plans, operands, tokens)
    facts = _gradient_facts(both, tokens, statistics, upstream, dtype)
    row_scaling = None if facts.scale is None else scaling(both.rows, facts.scale)
    hidden = (both.student.hidden, None)
    written = new_head_gradients(plans.student, of_head, operands_of(operands.student), hidden, row_scaling)

    def step(chunks: ChunkRange, index: Any) -> None:
        student, teacher = both.products(use, machine, chunks, index)
        dlogits = fusion_barrier(_dlogits(config, plans.student.matrix_rows, student, teacher, facts, dtype))
        written.add(use, machine, chunks, student.part, dlogits)

    over_slices(plans.student, step)
    found = written.complete(operands_of(operands.student), both.rows)
    return varying_like(Gradients(found.hidden, found.weight, found.bias), typed)


def _gradient_facts(
    both: BothRows, tokens: KlTokens, statistics: KlStatistics, upstream: Array, dtype: Any
) -> _GradientFacts:
    """Those of the kernels' rows. Rows that hold no token are not active."""
    rows = both.rows
    active = jnp.arange(rows.size, dtype=jnp.int32) < rows.count
    own = KlTokens(both.student.temperature, both.teacher.temperature, active)
    scale = None
    if dtype == jnp.float16:
        # Slopes are at most 1, or as large as the divergence where that is their sum.
        bound = (2 + 2 * jnp.abs(statistics.slope)) * jnp.abs(upstream) / tokens.temperature
        scale = rows.take(fp16_scale(bound), 1)
    statistics, upstream = jax.tree.map(rows.take, (statistics, upstream))
    return fusion_barrier(_GradientFacts(own, statistics, upstream, scale))


def _dlogits(
    config: KlConfig, rows: int, student: SliceProducts, teacher: SliceProducts, facts: _GradientFacts, dtype: Any
) -> Array:
    """The gradients of a slice's products with the student's head, `[rows, places]`, 0 where a place holds no column.

    Every element is computed by itself, in one pass over the products.
    """
    facts = jax.tree.map(lambda x: x[:rows], facts)
    columns, real = student.part.columns[None], config.real_vocab_size

    def logits(head: OneHeadConfig, own: SliceProducts, temperature: Array) -> tuple[Array, Array]:
        """The products with their bias, and the logits."""
        products, bias = own.products.products[:rows], own.products.bias
        bias = jnp.zeros((1, 1), jnp.float32) if bias is None else bias[None]
        return products + bias, logits_of(head, products, bias, temperature, columns, real)

    assert config.teacher is not None
    raw, own = logits(config.student, student, facts.tokens.temperature)
    other = logits(config.teacher, teacher, facts.tokens.teacher_temperature)[1]
    slopes = slopes_of(config, (own, other), facts.statistics)
    gradient = raw_gradients(config, raw, slopes, facts.tokens, facts.upstream, columns < real)
    return (gradient if facts.scale is None else gradient * facts.scale[:, None]).astype(dtype)
