"""linear_kl's backward on Hopper: dH, dW and db of the student, slice by slice of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.divergence import GradientFactors, RowNormalizer
from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core import head as one_head
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.hopper_gradients import new_head_gradients
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange
from rlk_jax.core.hopper_slices import over_slices
from rlk_jax.core.softmax import scaling
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_kl.divergence import row_scale
from rlk_jax.ops.linear_kl.hopper_plan import TwoPlans, backward_plans
from rlk_jax.ops.linear_kl.hopper_slices import BothRows, KlKernels, SliceOfHead, both_rows, two_slices
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


class Upstream(NamedTuple):
    """What a call's backward is given, for each token: temperatures and which tokens count, what the forward found, and
    the upstream gradient, times the power of two that float16 needs.
    """

    tokens: KlTokens
    statistics: Any
    gradient: Array


@dataclass(frozen=True)
class SliceGradients[Kernels: HeadKernels]:
    """How a set of kernels makes the gradients of the student's logits: the plan of the pass; and
    `of_call(use, machine, config, both, upstream)`, which returns what makes those of one slice of both heads
    `[matrix rows, slice's places]`, in hidden's dtype.
    """

    plans: Callable[[KlConfig, tuple[int, int], int, one_head.Needs, Any], TwoPlans]
    of_call: Callable[[Kernels, Machine, KlConfig, BothRows, Upstream], Callable[[SliceOfHead, SliceOfHead], Array]]


def student_gradients[Kernels: HeadKernels](
    of_slices: SliceGradients[Kernels],
    kernels: Callable[[], Kernels],
    machine: Machine | None,
    config: KlConfig,
    needs: Needs,
    operands: Operands,
    tokens: KlTokens,
    statistics: Any,
    upstream: Array,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden
    operands, tokens, statistics, upstream = as_replicated(fusion_barrier((operands, tokens, statistics, upstream)))
    of_head, dtype = one_head.Needs(needs.hidden, needs.weight, needs.bias), typed.dtype
    plans = of_slices.plans(config, dims_of(operands), typed.shape[0], of_head, dtype)
    both = both_rows(plans, operands, tokens)
    scale = row_scale(tokens, statistics.slope, upstream) if dtype == jnp.float16 else None
    given = upstream if scale is None else upstream * scale
    dlogits_of = of_slices.of_call(use, machine, config, both, Upstream(tokens, statistics, given))
    row_scaling = None if scale is None else scaling(both.rows, both.rows.take(scale, 1))
    hidden = (both.student.hidden, None)
    written = new_head_gradients(plans.student, of_head, both.student.operands, hidden, row_scaling)

    def step(chunks: ChunkRange, index: Any) -> None:
        student, teacher = both.slices(chunks, index)
        written.add(use, machine, chunks, student.part, fusion_barrier(dlogits_of(student, teacher)))

    over_slices(plans.student, step)
    found = written.complete(both.student.operands, both.rows)
    return varying_like(Gradients(found.hidden, found.weight, found.bias), typed)


def _in_registers(
    use: KlKernels, machine: Machine, config: KlConfig, both: BothRows, upstream: Upstream
) -> Callable[[SliceOfHead, SliceOfHead], Array]:
    """Gradients by a kernel that makes them of products in its registers."""
    tokens, statistics, gradient = upstream
    weight = rounded_product(gradient, lax.optimization_barrier(1 / tokens.temperature))
    taken = jax.tree.map(both.rows.take, (statistics, GradientFactors(statistics.slope, weight)))
    known, factors = fusion_barrier(taken)

    def dlogits(student: SliceOfHead, teacher: SliceOfHead) -> Array:
        shape = both.plans.student.matrix_rows, student.part.columns.size
        out = jax.new_ref(lax.empty(shape, both.student.hidden.dtype))
        two, normalizers = two_slices(student, teacher, machine), (known.student, known.teacher)
        use.divergence_gradients(two, config.kind, config.beta, normalizers, factors, out)
        return jax.freeze(out)

    return dlogits


IN_REGISTERS = SliceGradients(backward_plans, _in_registers)
"""Those of Mosaic's kernels."""
