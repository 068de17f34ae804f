"""linear_logp in Triton, for NVIDIA GPUs from Ampere on: which rows and columns the kernels see, and in which slices.

The forward is one pass over the head that keeps a partial softmax per row and chunk of columns. The backward cuts the
vocabulary into slices whose gradients of logits fit the memory budget; for each it recomputes the logits, writes their
gradients in 16 bits, adds dlogits·W to dH (one float32 chain over all slices) and stores dW and db complete.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton import call
from pallas_kernels.triton import linear_logp as kernels
from pallas_kernels.triton.linear_logp import TILE_COLUMNS, TILE_ROWS, ColumnRange, HeadShape, padded
from rlk_jax import _head_kernels
from rlk_jax._head_kernels import memory_budget
from rlk_jax._logits import RowKernels, by_kernels
from rlk_jax._problem import (
    Gradients,
    LinearLogp,
    LinearLogpFunctions,
    Needs,
    Operands,
    Options,
    Partial,
    Statistics,
    Tokens,
    gradient_bound,
    lifting_power,
    merged,
    real_columns,
    values_of,
)
from rlk_jax._rows import Compacted, compact
from rlk_jax._transforms import apart, as_replicated, varying_like

if TYPE_CHECKING:
    from rlk_jax.dispatch import Device, Problem


def is_ampere(device: "Device") -> bool:
    """Whether it is an NVIDIA GPU of Ampere's compute capability or a later one."""
    found = device.compute_capability or ""
    major = found.partition(".")[0]
    return major.isdecimal() and int(major) >= 8


def cannot_run(problem: "Problem") -> list[str]:
    """Reasons why no kernel runs on this device."""
    reasons = []
    if not is_ampere(problem.device):
        found = problem.device.compute_capability or problem.device.kind
        reasons.append(f"needs an NVIDIA GPU of compute capability 8.0 or later, not {found}")
    missing = call.why_missing()
    if missing:
        reasons.append(missing)
    return reasons


def why_not(problem: "Problem") -> list[str]:
    """Reasons why linear_logp's kernels cannot run this problem."""
    return cannot_run(problem) + _head_kernels.why_not(problem)


@dataclass(frozen=True)
class Chain:
    """Columns first … end − 1 that one chain of dH sums up, in slices of `width` columns."""

    first: int
    end: int
    width: int

    @property
    def slices(self) -> int:
        return -(-(self.end - self.first) // self.width)


def chains(options: Options, dim: int, tokens: int, *, needs: Needs, dtype: Any, columns: int) -> tuple[Chain, ...]:
    """Of `columns` columns, in slices whose dlogits fit the budget beside hidden's copies, all of about one width."""
    rows = padded(tokens, TILE_ROWS)
    budget = memory_budget(options, dim, tokens)
    copies = 2 if dtype == jnp.float16 and needs.weight else 1
    affordable = max(1, (budget - copies * 2 * rows * dim) // (2 * rows * TILE_COLUMNS))
    tree = options.tree
    of_each = tree.width if options.hidden_gradient == "groups" else tree.groups * tree.width
    count = tree.groups if options.hidden_gradient == "groups" else 1

    def chain(first: int) -> Chain:
        end = max(first, min(first + of_each, columns))
        tiles = max(1, -(-(end - first) // TILE_COLUMNS))
        return Chain(first, end, TILE_COLUMNS * -(-tiles // -(-tiles // affordable)))

    return tuple(chain(i * of_each) for i in range(count))


def _head(options: Options, operands: Operands) -> HeadShape:
    dim, tree = operands.hidden.shape[1], options.tree
    return HeadShape(dim, options.vocab_size, options.weight_layout, options.logit_softcap, tree.groups, tree.width)


def _kernel_operands(options: Options, operands: Operands, rows: Compacted) -> kernels.KernelOperands:
    real = jnp.asarray(real_columns(options, operands), jnp.int32).reshape(1)
    hidden = apart(rows.take(operands.hidden))
    return kernels.KernelOperands(hidden, operands.weight, operands.bias, rows.count, real)


def _partials(options: Options, operands: Operands, tokens: Tokens) -> tuple[Partial, Compacted]:
    """By row, and which token is in which."""
    typed = operands.hidden
    operands, tokens = apart(as_replicated((operands, tokens)))
    rows = compact(tokens.active, padded(typed.shape[0], TILE_ROWS), all_active=not options.may_ignore)
    found = kernels.group_partials(
        _head(options, operands),
        _kernel_operands(options, operands, rows),
        rows.take(tokens.target_ids),
        rows.take(tokens.temperature, 1),
        with_gap=options.return_entropy,
    )
    return varying_like((Partial(*apart(found)), rows), typed)


def _merge(options: Options, groups: Partial, rows: Compacted) -> tuple[LinearLogp, Statistics, None]:
    groups, rows = as_replicated((groups, rows))
    statistics = jax.tree.map(rows.spread, merged(groups))
    return values_of(options, statistics), statistics, None


def _gradients(
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    operands, tokens, statistics, upstream = apart(as_replicated((operands, tokens, statistics, upstream)))
    n, dim = operands.hidden.shape
    dtype = operands.hidden.dtype
    head = _head(options, operands)
    rows = compact(tokens.active, padded(n, TILE_ROWS))
    of_kernels = _kernel_operands(options, operands, rows)
    target_ids, temperature = rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)
    own = jax.tree.map(rows.take, statistics)
    given = jax.tree.map(rows.take, upstream)
    lift = jnp.ones(rows.size, jnp.float32)
    of_weight, unscale = of_kernels, jnp.ones(1, jnp.float32)
    if dtype == jnp.float16:
        lift = rows.take(lifting_power(gradient_bound(tokens.temperature, upstream)), 1)
        # dW sums rows of different scales: hidden makes up for it, the smallest scale (the largest row) exactly.
        common = jnp.min(jnp.where(jnp.arange(rows.size) < rows.count, lift, jnp.inf))
        of_weight = of_kernels._replace(hidden=(of_kernels.hidden * (common / lift)[:, None]).astype(dtype))
        unscale = (1 / common).reshape(1)
    logp = values_of(options, own).logp
    upstreams = (given.logp, given.lse, given.entropy)
    row_coefficients = kernels.coefficients(temperature, own.log_sum, logp, own.gap, *upstreams, lift)

    columns = options.real_vocab_size if operands.real_columns is None else options.vocab_size
    d_weight = d_bias = None
    if needs.weight:
        is_padded = options.real_vocab_size < options.vocab_size
        d_weight = (jnp.zeros if is_padded else lax.empty)(operands.weight.shape, dtype)
    if needs.bias:
        d_bias = jnp.zeros(options.vocab_size, jnp.float32)
    sums = []
    for chain in chains(options, dim, n, needs=needs, dtype=dtype, columns=columns):

        def step(index: Any, so_far: Gradients, chain: Chain = chain) -> Gradients:
            start = chain.first + jnp.asarray(index, jnp.int32) * chain.width
            where = ColumnRange(*(jnp.asarray(x, jnp.int32).reshape(1) for x in (start, chain.first, chain.end)))
            of_logits = kernels.dlogits(
                *(head, of_kernels, target_ids, temperature, own.max, own.log_sum, row_coefficients, where),
                chain.width,
            )
            d_hidden, d_weight, d_bias = so_far
            if d_hidden is not None:
                d_hidden = kernels.add_hidden_gradient(head, of_kernels, of_logits, where, d_hidden)
            if d_weight is not None:
                d_weight = kernels.store_weight_gradient(head, of_weight, of_logits, unscale, where, d_weight)
            if d_bias is not None:
                there = start + jnp.arange(chain.width, dtype=jnp.int32)
                there = jnp.where(there < chain.end, there, options.vocab_size)
                d_bias = d_bias.at[there].set(kernels.column_sums(of_logits, 1 / lift, rows.count), mode="drop")
            return Gradients(d_hidden, d_weight, d_bias)

        new = jnp.zeros if chain.slices == 0 else lax.empty
        start = Gradients(new((rows.size, dim), jnp.float32) if needs.hidden else None, d_weight, d_bias)
        d_hidden, d_weight, d_bias = lax.fori_loop(0, chain.slices, step, start)
        if d_hidden is not None:
            sums.append(rows.spread(d_hidden * (1 / lift)[:, None]))
    d_hidden = None
    if needs.hidden:
        d_hidden = sums[0] if options.hidden_gradient == "rounded" else jnp.stack(sums)
    return apart(Gradients(d_hidden, d_weight, d_bias).like(options, operands))


LINEAR_LOGP = LinearLogpFunctions(_partials, _merge, _gradients)


def _row_kernels() -> RowKernels:
    from pallas_kernels.triton import rows

    return RowKernels(rows.statistics, rows.gradients)


LOGP = by_kernels(_row_kernels)
