"""What every implementation of linear_logp takes and gives, and the formulas they share.

An implementation is three functions (`LinearLogpFunctions`): `partials` gives the softmax over its groups of columns,
`merge` makes values and residuals of those of the whole vocabulary, `gradients` turns upstream gradients into those of
the operands. All see flat tokens `[N]`, N >= 0, and one weight: a whole head, or one device's shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax._transforms import varying_like
from rlk_jax._tree import Tree

Array = jax.Array
WeightLayout = Literal["vd", "dv"]


class LinearLogp(NamedTuple):
    """What `linear_logp` knows of each token, float32 `[*lead]`; None where it was not asked for."""

    logp: Array
    lse: Array | None
    entropy: Array | None


HiddenGradient = Literal["rounded", "float32", "groups"]
"""How an implementation gives dH: in hidden's dtype `[N, D]`, as float32 `[1, N, D]`, or a float32 sum for each group
of its tree `[groups, N, D]`."""


@dataclass(frozen=True)
class SoftmaxOptions:
    """The static facts of a call on logits, whether they are given or computed."""

    vocab_size: int
    """Columns; those from `real_vocab_size` on are padding and count as logits of −inf."""
    real_vocab_size: int
    """Of a shard, as many as every shard has at least: `Operands.real_columns` tells how many this one has."""
    logit_softcap: float | None
    return_lse: bool
    return_entropy: bool


@dataclass(frozen=True)
class Options(SoftmaxOptions):
    """The static facts of one call of linear_logp, whose columns are rows of the weight."""

    tree: Tree
    weight_layout: WeightLayout
    may_ignore: bool
    """Some tokens may be ignored: without an ignore_index, an implementation need not look."""
    memory_budget: int | None
    """Bytes for the logits and gradients that an implementation holds at a time; None for its own default."""
    hidden_gradient: HiddenGradient = "rounded"
    """Other than "rounded" for a shard."""
    keeps: bool = False
    """A backward will follow, for which the forward may keep some of what it computes."""


class Inputs(NamedTuple):
    """One call's arrays as the user shaped them; hidden `[*lead, D]`, ids `[*lead]`, temperature `[]` or `[*lead]`."""

    hidden: Any
    lm_head_weight: Any
    target_ids: Any
    bias: Any
    temperature: Any


class LogpInputs(NamedTuple):
    """Of logp: logits `[*lead, V]`, ids `[*lead]`; rows `[K]` and initial `[*lead]` or None."""

    logits: Any
    token_ids: Any
    temperature: Any
    row_indices: Any
    initial: Any


class RatioKlInputs(NamedTuple):
    """Of ratio_kl: both logits `[*lead, V]`, the others `[*lead]`; temperature `[]` or `[*lead]`."""

    policy_logits: Any
    ref_logits: Any
    action_ids: Any
    completion_mask: Any
    old_logps: Any
    temperature: Any


class Operands(NamedTuple):
    """hidden `[N, D]`, weight `[V, D]` ("vd") or `[D, V]` ("dv"), bias `[V]` or None."""

    hidden: Array
    weight: Array
    bias: Array | None
    real_columns: Array | None = None
    """int32 scalar: how many columns are no padding, where only the device knows (a shard of a padded head)."""


@dataclass(frozen=True)
class Needs:
    """Which operands need a gradient; the others cost no work."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients in their operands' shapes and dtypes; None where none is needed."""

    hidden: Array | None
    weight: Array | None
    bias: Array | None

    def like(self, options: Options, operands: Operands) -> "Gradients":
        """The gradients rounded to their operands' dtypes, dH only where that is asked for."""
        rounded = (None if g is None or x is None else g.astype(x.dtype) for g, x in zip(self, operands, strict=False))
        gradients = Gradients(*rounded)
        return gradients if options.hidden_gradient == "rounded" else gradients._replace(hidden=self.hidden)


class Tokens(NamedTuple):
    """One row per token `[N]`: id (int32, in range), temperature (float32; NaN poisons the row), does it count."""

    target_ids: Array
    temperature: Array
    active: Array

    def with_upstream(self, upstream: LinearLogp) -> "Tokens":
        """Those whose upstream gradients are all 0 are not active: they contribute nothing, whatever they hold."""
        has_upstream = reduce(jnp.logical_or, (g != 0 for g in upstream if g is not None))
        return self._replace(active=self.active & has_upstream)


class Statistics(NamedTuple):
    """The softmax of each token `[N]`, float32. max and log_sum stay apart: one float32 lse loses 4e-3 at |z| = 100."""

    max: Array
    log_sum: Array
    """ln Σ exp(z − max)"""
    target_logit: Array
    gap: Array | None
    """Σ p·(max − z) >= 0, so that entropy = log_sum + gap; None where entropy was not asked for"""


class Partial(NamedTuple):
    """Softmax over some columns, a row per token: maximum, Σ e, the target's logit if among them, Σ e·(max − z)."""

    max: Array
    total: Array
    target_logit: Array
    gap: Array | None


Gather = Callable[[Any], Any]
"""From `[groups, ...]` of one shard to `[all groups, ...]` of the whole vocabulary, in its order."""


@dataclass(frozen=True)
class LinearLogpFunctions:
    """`partials` gives `[groups, rows]` and a state that `merge` is given again, beside the groups of all devices.

    `merge` also gives a residual, a row `[N]` per token, and what else is kept for `gradients` of the same tokens, or
    None; `gradients` is given both.
    """

    partials: Callable[[Options, Operands, Tokens], tuple[Any, Any]]
    merge: Callable[[Options, Any, Any], tuple[LinearLogp, Any, Any]]
    gradients: Callable[[Options, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]

    def forward(
        self, options: Options, operands: Operands, tokens: Tokens, gather: Gather
    ) -> tuple[LinearLogp, Any, Any]:
        """What `merge` gives, the groups of other devices gathered in between."""
        groups, state = self.partials(options, operands, tokens)
        return self.merge(options, gather(groups), state)


@dataclass(frozen=True)
class HeadFunctions:
    """The same for a whole head, however it lies over the devices of a program."""

    forward: Callable[[Options, Operands, Tokens, Gather], tuple[LinearLogp, Any, Any]]
    gradients: Callable[[Options, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]
    on_device: LinearLogpFunctions
    """For callers that spread the head themselves, and gather by other means than a mesh axis."""


@dataclass(frozen=True)
class LogpFunctions:
    """The same for logits `[N, V]` that are given: `forward` also gives a residual, a row `[N]` per token; `gradient`
    is that of the logits in their dtype, 0 in inactive rows.
    """

    forward: Callable[[SoftmaxOptions, Array, Tokens], tuple[LinearLogp, Any]]
    gradient: Callable[[SoftmaxOptions, Array, Tokens, Any, LinearLogp, bool], Array]
    """The last argument says that it may stand where the logits do."""


def real_columns(options: Options, operands: Operands) -> Any:
    """Columns from here on are padding."""
    return options.real_vocab_size if operands.real_columns is None else operands.real_columns


def finite(maximum: Array) -> Array:
    """A maximum to subtract: 0 where every logit is −inf."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def fold(a: Partial, b: Partial) -> Partial:
    """The softmax over the columns of both."""
    maximum = jnp.maximum(a.max, b.max)

    def rescaled(x: Partial) -> tuple[Array, Array | None]:
        below = finite(maximum) - x.max
        factor = jnp.exp(-below)
        total = rounded_product(x.total, factor)
        if x.gap is None:
            return total, None
        # A factor of 0 stands beside sums of 0 and beside differences that overflow a product.
        shift = jnp.where(factor == 0, 0, rounded_product(x.total, below))
        return total, rounded_product(x.gap + shift, factor)

    (total_a, gap_a), (total_b, gap_b) = rescaled(a), rescaled(b)
    gap = None if gap_a is None or gap_b is None else gap_a + gap_b
    return Partial(maximum, total_a + total_b, a.target_logit + b.target_logit, gap)


def empty_partial(rows: int, like: Array, *, with_gap: bool) -> Partial:
    """The softmax over no columns: where a fold starts, varying as `like` does."""
    zeros = jnp.zeros(rows, jnp.float32)
    start = Partial(jnp.full(rows, -jnp.inf, jnp.float32), zeros, zeros, zeros if with_gap else None)
    return varying_like(start, like)


def merged(groups: Partial) -> Statistics:
    """The softmax of each token from its partials `[groups, rows]`, folded in ascending order."""
    start = empty_partial(groups.max.shape[1], groups.max, with_gap=groups.gap is not None)
    whole, _ = lax.scan(lambda so_far, group: (fold(so_far, group), None), start, groups)
    gap = None if whole.gap is None else whole.gap / whole.total
    return Statistics(whole.max, jnp.log(whole.total), whole.target_logit, gap)


def values_of(options: SoftmaxOptions, statistics: Statistics) -> LinearLogp:
    """logp = (z_t − max) − log_sum; lse = max + log_sum; entropy = log_sum + gap."""
    logp = (statistics.target_logit - statistics.max) - statistics.log_sum
    lse = statistics.max + statistics.log_sum if options.return_lse else None
    entropy = statistics.log_sum + statistics.gap if statistics.gap is not None else None
    return LinearLogp(logp, lse, entropy)


def rounded_product(a: Array, b: Array) -> Array:
    """a·b, rounded whatever is added to it: abs and select keep compilers from fusing a product and a sum.

    Which products they fuse depends on the surrounding program; bits must not.
    """
    magnitude = jnp.abs(a * b)
    return jnp.where((a < 0) != (b < 0), -magnitude, magnitude)


def per_temperature(x: Array, temperature: Array) -> Array:
    """x / temperature, by the reciprocal: whether XLA divides or multiplies would depend on the surrounding program."""
    return rounded_product(x, lax.optimization_barrier(1 / temperature)[:, None])


def gradient_bound(temperature: Array, upstream: LinearLogp) -> Array:
    """A bound on |gradient of a logit| of each row: |p·(z − Σ p·z)| <= 1/e + ln V < 14 is the entropy's share."""
    return (
        sum(weight * jnp.abs(g) for weight, g in zip((1, 1, 14), upstream, strict=True) if g is not None) / temperature
    )


def lifting_power(bound: Array) -> Array:
    """The power of two that lifts `bound` to between 2¹⁴ and 2¹⁵: float16 gradients near 1e-9 survive it."""
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.float32(1), jnp.clip(15 - exponent, -100, 100))


def logits_of(
    options: SoftmaxOptions, products: Array, bias: Array, temperature: Array, columns: Array, real_columns: Any
) -> Array:
    """softcap(products + bias) / temperature, −inf in padding columns; `bias` and `columns` are `[1, columns]`."""
    logits = products + bias
    if options.logit_softcap is not None:
        logits = options.logit_softcap * jnp.tanh(logits * (1 / options.logit_softcap))
    logits = per_temperature(logits, temperature)
    # A poisoned row stays NaN in every column, so that its max is NaN too.
    return jnp.where(columns < real_columns, logits, jnp.where(jnp.isnan(temperature), jnp.nan, -jnp.inf)[:, None])


def dproducts_of(
    options: SoftmaxOptions,
    products: Array,
    bias: Array,
    tokens: Tokens,
    columns: Array,
    real_columns: Any,
    statistics: Statistics,
    upstream: LinearLogp,
) -> Array:
    """Gradient with respect to `products` `[rows, columns]`; exactly 0 in inactive rows and in padding columns.

    With p = exp(z − lse) and upstream gradients g:
      dz_v = −g_logp·p_v + p_v·(g_lse − g_entropy·(z_v − Σ p·z)),
    and at the target −g_logp·expm1(logp) in the place of g_logp·(1 − p).
    """
    logits = logits_of(options, products, bias, tokens.temperature, columns, real_columns)
    centred = logits - statistics.max[:, None]
    logprob = centred - statistics.log_sum[:, None]
    probability = jnp.exp(logprob)
    is_target = columns == tokens.target_ids[:, None]
    gradient = rounded_product(-upstream.logp[:, None], jnp.where(is_target, jnp.expm1(logprob), probability))
    if upstream.lse is not None:
        gradient += rounded_product(upstream.lse[:, None], probability)
    if upstream.entropy is not None:
        assert statistics.gap is not None
        # p = 0 at logits of −inf, where 0·∞ must be 0.
        spread = jnp.where(probability == 0, 0, centred + statistics.gap[:, None])
        gradient += rounded_product(-upstream.entropy[:, None], probability * spread)
    if options.logit_softcap is not None:
        # 1 − tanh², without the cancellation where tanh is near 1.
        decay = jnp.exp((-2 / options.logit_softcap) * jnp.abs(products + bias))
        gradient *= 4 * decay / jnp.square(1 + decay)
    counts = tokens.active[:, None] & (columns < real_columns)
    return jnp.where(counts, per_temperature(gradient, tokens.temperature), 0)
