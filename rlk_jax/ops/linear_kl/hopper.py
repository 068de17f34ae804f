"""linear_kl on Hopper, by Mosaic's kernels and by those in CUDA C++, which know one head (hopper_products.py).

One kernel of Mosaic's makes the products with both heads, tile by tile, and sums up what a divergence is made of for
each row and chunk of 256 columns. Chunks are folded to the eight groups of the vocabulary, and these in ascending
order. The divergence from a mixture needs both softmaxes first, which a pass over each head takes. The backward makes
the products once more, slice by slice of the vocabulary, turns them into gradients of the student's logits in 16 bits,
and sums these up as that of linear_logp does. A teacher that lists tokens needs no product of its own (hopper_list.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.divergence import DivergencePartials, MixtureSums, RowNormalizer
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.logits import LN_2
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.hopper_kernels import HeadKernels, cuda_kernels
from rlk_jax.core.hopper_plan import ChunkRange, vocabulary_of
from rlk_jax.core.hopper_slices import over_slices
from rlk_jax.core.shard import Gather
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_kl.hopper_backward import (
    IN_REGISTERS,
    DivergenceStatistics,
    SliceGradients,
    student_gradients,
)
from rlk_jax.ops.linear_kl.hopper_list import list_divergence, list_gradients
from rlk_jax.ops.linear_kl.hopper_plan import TwoPlans, forward_plans, forward_plans_of_products
from rlk_jax.ops.linear_kl.hopper_products import OF_PRODUCTS, divergence_from_products
from rlk_jax.ops.linear_kl.hopper_slices import BothRows, KlKernels, both_rows, softmax_of, two_slices
from rlk_jax.ops.linear_kl.options import Gradients, KlConfig, KlFunctions, KlTokens, Needs, Operands, dims_of

Array = jax.Array


@dataclass(frozen=True)
class _TwoHeads[Kernels: HeadKernels]:
    """How a set of kernels takes the divergence of two heads: the plan of the pass,
    `divergence(use, machine, config, both, gather)` of all rows, which also gives what its gradients need, and these.
    """

    plans: Callable[[KlConfig, tuple[int, int], int], TwoPlans]
    divergence: Callable[[Kernels, Machine, KlConfig, BothRows, Gather], tuple[Array, Any]]
    gradients: SliceGradients[Kernels]


def _kernels() -> KlKernels:
    from pallas_kernels.mosaic import head_kernels

    return head_kernels


def mosaic(machine: Machine | None = None) -> KlFunctions:
    """The implementation by Pallas Mosaic GPU kernels, for one machine; None for the GPU that JAX sees.

    The kernels are imported when one of them is traced.
    """
    return _kl_functions(_TwoHeads(forward_plans, _from_heads, IN_REGISTERS), _kernels, machine)


def cuda(machine: Machine | None = None) -> KlFunctions:
    """The implementation by CUDA C++ kernels, for one machine; None for the GPU that JAX sees."""
    return by_kernels_of_a_head(cuda_kernels, machine)


def by_kernels_of_a_head(kernels: Callable[[], HeadKernels], machine: Machine | None) -> KlFunctions:
    """The implementation by kernels that know one head, whichever language they are written in."""
    two_heads = _TwoHeads(forward_plans_of_products, divergence_from_products, OF_PRODUCTS)
    return _kl_functions(two_heads, kernels, machine)


def _kl_functions[Kernels: HeadKernels](
    two_heads: _TwoHeads[Kernels], kernels: Callable[[], Kernels], machine: Machine | None
) -> KlFunctions:
    of_call = two_heads, kernels, machine
    return KlFunctions(functools.partial(_forward, *of_call), functools.partial(_gradients, *of_call))


def _gradients[Kernels: HeadKernels](
    two_heads: _TwoHeads[Kernels],
    kernels: Callable[[], Kernels],
    machine: Machine | None,
    config: KlConfig,
    needs: Needs,
    operands: Operands,
    tokens: KlTokens,
    statistics: Any,
    upstream: Array,
) -> Gradients:
    """The gradients of the student's operands, for a teacher of either kind."""
    of_call = kernels, machine, config, needs, operands, tokens, statistics, upstream
    return student_gradients(two_heads.gradients, *of_call) if tokens.top_k is None else list_gradients(*of_call)


def _forward[Kernels: HeadKernels](
    two_heads: _TwoHeads[Kernels],
    kernels: Callable[[], Kernels],
    machine: Machine | None,
    config: KlConfig,
    operands: Operands,
    tokens: KlTokens,
    gather: Gather,
) -> tuple[Array, Any]:
    use, machine, typed = kernels(), machine or default_machine(), operands.student.hidden

    def gathered(groups: Any) -> Any:
        """The groups of all devices, of which kernels see values that vary over no mesh axis."""
        return as_replicated(gather(varying_like(groups, typed)))

    if tokens.top_k is not None:
        return list_divergence(kernels, machine, config, operands, tokens, gathered)
    operands, tokens = as_replicated(fusion_barrier((operands, tokens)))
    plans = two_heads.plans(config, dims_of(operands), typed.shape[0])
    both = both_rows(plans, operands, tokens)
    found = two_heads.divergence(use, machine, config, both, gathered)
    return varying_like(jax.tree.map(both.rows.spread, found), typed)


def _from_heads(
    use: KlKernels, machine: Machine, config: KlConfig, both: BothRows, gather: Gather
) -> tuple[Array, DivergenceStatistics]:
    return (_from_mixture if config.kind == "jsd" else _from_one)(use, machine, config, both, gather)


def _from_one(
    use: KlKernels, machine: Machine, config: KlConfig, both: BothRows, gather: Gather
) -> tuple[Array, DivergenceStatistics]:
    """The divergence of the teacher from the student or of the student from the teacher, by one pass."""
    plans, count = both.plans, both.rows.count
    shape = vocabulary_of(plans.student.config).chunks, plans.student.rows
    out = DivergencePartials(*(jax.new_ref(lax.empty(shape, jnp.float32)) for _ in DivergencePartials._fields))

    def step(chunks: ChunkRange, index: Any) -> None:
        a, b = both.slices(chunks, index)
        if config.kind == "forward":
            a, b = b, a
        use.divergence_partials(two_slices(a, b, machine), out)

    over_slices(plans.student, step)
    groups = use.fold_divergence(jax.tree.map(jax.freeze, out), config.groups.count, count, machine)
    whole = fusion_barrier(use.fold_divergence(gather(groups), 1, count, machine))
    value, a, b = _divergence_of(jax.tree.map(lambda x: x[0], whole))
    if config.kind == "forward":
        # The slopes p − q add up to 0.
        return value, DivergenceStatistics(b, a, jnp.zeros_like(value))
    return value, DivergenceStatistics(a, b, value)


def _from_mixture(
    use: KlKernels, machine: Machine, config: KlConfig, both: BothRows, gather: Gather
) -> tuple[Array, DivergenceStatistics]:
    """The divergence of both from their mixture: a first pass over each head gives its softmax, and a second one over
    both the terms.
    """
    plans, count = both.plans, both.rows.count
    heads = both.over_one_head()
    softmaxes = [softmax_of(use, machine, head, both.rows, gather) for head in heads]
    student, teacher = (RowNormalizer(x.shift, jnp.log2(x.total)) for x in softmaxes)
    student, teacher = fusion_barrier((student, teacher))
    shape = vocabulary_of(plans.student.config).chunks, plans.student.rows
    out = MixtureSums(*(jax.new_ref(lax.empty(shape, jnp.float32)) for _ in MixtureSums._fields))

    def step(chunks: ChunkRange, index: Any) -> None:
        two = two_slices(*both.slices(chunks, index), machine)
        use.mixture_sums(two, config.beta, (student, teacher), out)

    over_slices(plans.student, step)
    groups = use.fold_mixture(jax.tree.map(jax.freeze, out), config.groups.count, count, machine)
    value, slope = (x[0] for x in fusion_barrier(use.fold_mixture(gather(groups), 1, count, machine)))
    return value, DivergenceStatistics(student, teacher, slope)


def _divergence_of(whole: DivergencePartials) -> tuple[Array, RowNormalizer, RowNormalizer]:
    """D(a ‖ b) of each row `[rows]`, and the normalizers of a and b, from the partials over the whole vocabulary.

    With u + 1 = Σ eᵇ / Σ eᵃ, D is (Σ excess) / Σ eᵃ − (u − ln(1 + u)). None of both cancels where b is near a. Where u
    is large, it is ln(1 + u) − (Σ cross) / Σ eᵃ.
    """
    # A row without a possible token has no softmax, and its values are NaN.
    total_a, total_b = (jnp.where(x == 0, jnp.nan, x) for x in (whole.total_a, whole.total_b))
    shift = whole.shift_b - whole.shift_a
    ratio = total_b / total_a
    u = ratio * _power_of_two(shift) - 1
    apart = rounded_product(shift, jnp.float32(LN_2)) + jnp.log(ratio)
    log_ratio = jnp.where(jnp.abs(u) < 0.5, jnp.log1p(u), apart)
    excess = (whole.excess / total_a) * _power_of_two(jnp.maximum(shift, 0))
    far = log_ratio - rounded_product(whole.cross / total_a, jnp.float32(LN_2))
    value = jnp.maximum(jnp.where(u < 1, excess - (u - log_ratio), far), 0)
    return value, RowNormalizer(whole.shift_a, jnp.log2(total_a)), RowNormalizer(whole.shift_b, jnp.log2(total_b))


def _power_of_two(exponent: Array) -> Array:
    """2^exponent of integers in float32, within its range."""
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 127).astype(jnp.int32))
