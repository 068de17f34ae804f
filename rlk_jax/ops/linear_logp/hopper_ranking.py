"""The most probable tokens on Hopper: the products with the head once more, slice by slice, by det_gemm's kernel, which
gives the bits of the forward's.

Columns are compared by their products and bias, before softcap and temperature, which keep their order. The log-probs
of the best come from the kernels of the forward, and so have its bits.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig, Partials, Softmax, VocabSlice, new_partials
from pallas_kernels.hopper.tiles import COLUMNS, THREADS, Machine
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.products import padded
from rlk_jax.core.allowed import is_allowed
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.gemm import GemmLayout, by_kernel
from rlk_jax.core.head import HeadConfig, Operands, RankingConfig, head_dim, kernel_memory_budget, real_columns
from rlk_jax.core.hopper_kernels import RankingKernels
from rlk_jax.core.tokens import Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_logp.options import RankingFunctions
from rlk_jax.ops.linear_logp.ranking import BestColumns, Gather, Target, add_columns, no_columns

Array = jax.Array
_BYTES_PER_PRODUCT = 24
"""float32 products without and with a low-rank term, and where XLA sorts for a top-k, products and their columns before
and after it.
"""

_NO_COLUMN = jnp.iinfo(jnp.int32).min
"""What is no column of any shard, as its ranks count columns."""


def ranking_functions(kernels: Callable[[], RankingKernels], machine: Machine | None) -> RankingFunctions:
    """What finds the most probable tokens on one machine; None for the GPU that JAX sees."""
    return RankingFunctions(
        functools.partial(_best, kernels, machine), functools.partial(_logps_of_products, kernels, machine)
    )


def _best(
    kernels: Callable[[], RankingKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
    softmax: Softmax,
    gather: Gather,
) -> BestColumns:
    """Where a rank is wanted, a first pass finds the targets' products, which may be those of another shard."""
    wanted, typed = config.ranking, operands.hidden
    assert wanted is not None
    n = typed.shape[0]
    operands, tokens = as_replicated((fusion_barrier(operands), tokens))
    products = functools.partial(_products_of_slice, kernels, machine, config, operands, tokens)

    def add_slice(i: Array, so_far: tuple[BestColumns, Array]) -> tuple[BestColumns, Array]:
        best, found = so_far
        columns, own = products(i)
        is_target = columns == tokens.target_ids[:, None]
        found = jnp.where(jnp.any(is_target, axis=1), jnp.max(jnp.where(is_target, own, -jnp.inf), axis=1), found)
        return add_columns(best, own, columns, Target(found, tokens.target_ids)), found

    slices = -(-config.vocab_size // _slice_columns(config, operands))
    start = no_columns(RankingConfig(wanted.top_k, has_target_rank=False), n), jnp.zeros(n, jnp.float32)
    best, found = varying_like(lax.fori_loop(0, slices, add_slice, start), typed)
    if not wanted.has_target_rank:
        return best
    target = as_replicated(gather((found[None],))[0].sum(axis=0))

    def count_slice(i: Array, so_far: BestColumns) -> BestColumns:
        columns, own = products(i)
        return add_columns(so_far, own, columns, Target(target, tokens.target_ids))

    counted = lax.fori_loop(0, slices, count_slice, no_columns(RankingConfig(None, has_target_rank=True), n))
    return best._replace(before=varying_like(counted.before, typed))


def _slice_columns(config: HeadConfig, operands: Operands) -> int:
    """Columns of a slice: as many as the budget holds."""
    n = operands.hidden.shape[0]
    budget = kernel_memory_budget(config, head_dim(config, operands), n)
    return min(config.vocab_size, max(1, budget // (_BYTES_PER_PRODUCT * n * COLUMNS)) * COLUMNS)


def _products_of_slice(
    kernels: Callable[[], RankingKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
    index: Array,
) -> tuple[Array, Array]:
    """The columns `[1, C]` of slice number `index`, and the products `[N, C]` with their bias, −inf where a column is
    padding or not allowed. Columns that the slice before has, too, are `_NO_COLUMN`.
    """
    width, dim = _slice_columns(config, operands), head_dim(config, operands)
    first = index * width
    # The last slice begins where it still is a whole one.
    start = jnp.minimum(first, config.vocab_size - width)
    is_vd = config.weight_layout == "vd"
    columns = start + jnp.arange(width, dtype=jnp.int32)[None]
    columns = jnp.where(columns >= first, columns, _NO_COLUMN)

    def product(hidden: Array, weight: Array, so_far: Array | None) -> Array:
        own = lax.dynamic_slice_in_dim(weight, start, width, axis=0 if is_vd else 1)
        layout = GemmLayout(False, is_vd, jnp.float32)
        return by_kernel(lambda: kernels().gemm, machine, layout, hidden, own, so_far)

    found = product(operands.hidden[:, :dim], operands.weight, None)
    if operands.low_rank is not None:
        found = product(operands.hidden[:, dim:], operands.low_rank, found)
    if operands.bias is not None:
        found += lax.dynamic_slice_in_dim(operands.bias, start, width)[None].astype(jnp.float32)
    if config.logit_softcap is not None:
        # A softcap makes a finite logit of −∞, which is a token's.
        found = jnp.where(found == -jnp.inf, jnp.finfo(jnp.float32).min, found)
    counts = (columns != _NO_COLUMN) & (columns < real_columns(config, operands))
    if tokens.allowed is not None:
        counts &= is_allowed(tokens.allowed, columns)
    return columns, jnp.where(counts, found, -jnp.inf)


def _logps_of_products(
    kernels: Callable[[], RankingKernels],
    machine: Machine | None,
    config: HeadConfig,
    tokens: Tokens,
    softmax: Softmax,
    products: Array,
) -> Array:
    """The log-probs of tokens of these products `[N, k]`, as the forward's kernels make them of a target's product."""
    use, machine, typed = kernels(), machine or default_machine(), products
    tokens, softmax, products = as_replicated(fusion_barrier((tokens, softmax, products)))
    n, k = products.shape
    rows = padded(n, THREADS)

    def of_rows(x: Array, fill: float) -> Array:
        return jnp.pad(x, (0, rows - n), constant_values=fill)

    temperature = of_rows(jnp.where(tokens.active, tokens.temperature, 1), 1)
    chunk = fusion_barrier(zeros_behind(products, 1, COLUMNS))
    vocabulary, one = Vocabulary(k, 1, k), jnp.ones(1, jnp.int32)
    logits = LogitsConfig(HeadAccess(vocabulary, "vd", copied=False), config.logit_softcap)
    where = VocabSlice(n * one, 0 * one, one)

    def scaled(place: Array) -> Array:
        """The logits in units of ln 2 of the products at one place of each row."""
        out = new_partials((1, rows), with_gap=False, with_derivative=config.logit_softcap is not None)
        targets = jnp.full(rows, place, jnp.int32)
        use.partials_of_logits(logits, machine, where, chunk, None, targets, temperature, out)
        return fusion_barrier(jax.tree.map(jax.freeze, out)).target[0]

    targets = lax.map(scaled, jnp.arange(k, dtype=jnp.int32)).reshape(1, -1)
    shift, total = (jnp.tile(of_rows(x, 1), k)[None] for x in (softmax.shift, softmax.total))
    groups = fusion_barrier(Partials(shift, total, targets, None, None))
    found = use.fold_groups(groups, k * rows * one, machine)
    logps = fusion_barrier(found.logp).reshape(k, rows)[:, :n].T
    # The softcap of −∞ is finite.
    return varying_like(jnp.where(products == -jnp.inf, -jnp.inf, logps), typed)
