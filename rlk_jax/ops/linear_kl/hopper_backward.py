"""linear_kl's backward on Hopper: dH, dW and db of the student, slice by slice of the vocabulary."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.divergence import GradientFactors, RowNormalizer
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core import head as one_head
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.hopper_gradients import new_head_gradients
from rlk_jax.core.hopper_plan import ChunkRange
from rlk_jax.core.hopper_slices import over_slices
from rlk_jax.core.softmax import scaling
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_kl.divergence import row_scale
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans
from rlk_jax.ops.linear_kl.hopper_slices import KlKernels, both_rows, two_slices
from rlk_jax.ops.linear_kl.options import (
    Gradients,
    KlConfig,
    KlTokens,
    Needs,
    Operands,
    dims_of,
)

Array = jax.Array


class DivergenceStatistics(NamedTuple):
    """What a backward needs of the forward, for each token: the softmaxes of both, and the sum of all slopes."""

    student: RowNormalizer
    teacher: RowNormalizer
    slope: Array


def student_gradients(
    kernels: Callable[[], KlKernels],
    machine: Machine | None,
    config: KlConfig,
    needs: Needs,
    operands: Operands,
    tokens: KlTokens,
    statistics: DivergenceStatistics,
    upstream: Array,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden
    operands, tokens, statistics, upstream = as_replicated(fusion_barrier((operands, tokens, statistics, upstream)))
    of_head, dtype = one_head.Needs(needs.hidden, needs.weight, needs.bias), typed.dtype
    plans = backward_plans(config, dims_of(operands), typed.shape[0], of_head, dtype)
    both = both_rows(plans, operands, tokens)
    scale = row_scale(tokens, statistics.slope, upstream) if dtype == jnp.float16 else None
    weight = rounded_product(upstream, lax.optimization_barrier(1 / tokens.temperature))
    weight = weight if scale is None else weight * scale
    taken = jax.tree.map(both.rows.take, (statistics, GradientFactors(statistics.slope, weight)))
    known, factors = fusion_barrier(taken)
    row_scaling = None if scale is None else scaling(both.rows, both.rows.take(scale, 1))
    hidden = (both.student.hidden, None)
    written = new_head_gradients(plans.student, of_head, both.student.operands, hidden, row_scaling)

    def step(chunks: ChunkRange, index: Any) -> None:
        student, teacher = both.slices(chunks, index)
        out = jax.new_ref(lax.empty((plans.student.matrix_rows, chunks.width * COLUMNS), dtype))
        two, normalizers = two_slices(student, teacher, machine), (known.student, known.teacher)
        use.divergence_gradients(two, config.kind, config.beta, normalizers, factors, out)
        written.add(use, machine, chunks, student.part, fusion_barrier(jax.freeze(out)))

    over_slices(plans.student, step)
    found = written.complete(both.student.operands, both.rows)
    return varying_like(Gradients(found.hidden, found.weight, found.bias), typed)
