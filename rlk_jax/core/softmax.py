"""The softmax of a row of logits, computed in parts: partial softmaxes, how two fold into one, values and gradients.

Implementations that are written in JAX share these formulas; the kernels have their own.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.allowed import is_allowed
from rlk_jax.core.fixed_order import halving_sum, pairwise_sum, rounded_product
from rlk_jax.core.rows import Compacted
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import varying_like

Array = jax.Array


@dataclass(frozen=True)
class Smoothing:
    """Targets of a call with label smoothing: one token has 1 − share of the probability, and all tokens of the true
    vocabulary, itself among them, have the rest in equal parts.
    """

    share: float
    vocab_size: int
    """How many tokens the share is spread over; for a shard, too, those of the whole vocabulary."""

    @property
    def uniform(self) -> float:
        """The probability that each token has of the share."""
        return self.share / self.vocab_size

    def logp(self, logp: Array, lse: Array, logit_sum: Array) -> Array:
        """Σ t·ln p over all tokens, t being the smoothed target; logit_sum is Σ z. It is −∞ where a token is
        impossible.
        """
        mean = rounded_product(logit_sum, jnp.float32(1 / self.vocab_size)) - lse
        if self.share == 1:
            return mean  # The target's own part is 0·−∞ where it is impossible.
        of_target, of_mean = (
            rounded_product(x, jnp.float32(t)) for x, t in ((logp, 1 - self.share), (mean, self.share))
        )
        return of_target + of_mean


@dataclass(frozen=True)
class SoftmaxConfig:
    """The static facts of a call that takes the softmax of logits, be they given or computed."""

    vocab_size: int
    """Number of columns; those from `real_vocab_size` on are padding and count as logits of −inf."""
    real_vocab_size: int
    """The true vocabulary. In a shard, the least number of real columns that any shard has."""
    logit_softcap: float | None
    return_lse: bool
    return_entropy: bool
    smoothing: Smoothing | None = field(default=None, kw_only=True)
    """How targets are smoothed, None for not at all: logp is then the mean of ln p under the smoothed target."""


class Statistics(NamedTuple):
    """The softmax of each token `[N]`, float32. max and log_sum stay apart: one float32 lse loses 4e-3 at |z| = 100."""

    max: Array
    log_sum: Array
    """ln Σ exp(z − max)"""
    target_logit: Array
    gap: Array | None
    """Σ p·(max − z) >= 0, so that entropy = log_sum + gap; None where entropy was not asked for"""
    logit_sum: Array | None = None
    """Σ z over the true vocabulary; None where targets are not smoothed"""

    def logprobs(self, logits: Array) -> Array:
        """The log-probabilities of the tokens of these logits, `[N]` or `[N, k]`."""
        maximum, log_sum = (x.reshape(-1, *(1,) * (logits.ndim - 1)) for x in (self.max, self.log_sum))
        return (logits - maximum) - log_sum


class Partial(NamedTuple):
    """The softmax over some columns, float32 with one element per token.

    With e = exp(z − max), total is Σ e and gap is Σ e·(max − z), or None where entropy was not asked for. target_logit
    is 0 where the target is not among the columns. logit_sum is Σ z of columns that are no padding, or None where
    targets are not smoothed.
    """

    max: Array
    total: Array
    target_logit: Array
    gap: Array | None
    logit_sum: Array | None = None


def zero_if_neg_inf(maximum: Array) -> Array:
    """The maximum, with 0 in the place of −inf: subtracting −inf from logits that are all −inf would give NaN."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def fold(a: Partial, b: Partial) -> Partial:
    """The softmax over the columns of both partials."""
    maximum = jnp.maximum(a.max, b.max)

    def rescaled(x: Partial) -> tuple[Array, Array | None]:
        below = zero_if_neg_inf(maximum) - x.max
        factor = jnp.exp(-below)
        total = rounded_product(x.total, factor)
        if x.gap is None:
            return total, None
        # Where the factor is 0, the sums are 0 too, and the difference may overflow a product.
        shift = jnp.where(factor == 0, 0, rounded_product(x.total, below))
        return total, rounded_product(x.gap + shift, factor)

    (total_a, gap_a), (total_b, gap_b) = rescaled(a), rescaled(b)
    gap = None if gap_a is None or gap_b is None else gap_a + gap_b
    logit_sum = None if a.logit_sum is None or b.logit_sum is None else a.logit_sum + b.logit_sum
    return Partial(maximum, total_a + total_b, a.target_logit + b.target_logit, gap, logit_sum)


def empty_partial(rows: int, like: Array, *, with_gap: bool, with_sum: bool = False) -> Partial:
    """The softmax over no columns, from which a fold starts; it varies over mesh axes as `like` does."""
    zeros = jnp.zeros(rows, jnp.float32)
    optional = (zeros if wanted else None for wanted in (with_gap, with_sum))
    start = Partial(jnp.full(rows, -jnp.inf, jnp.float32), zeros, zeros, *optional)
    return varying_like(start, like)


def merged(groups: Partial) -> Statistics:
    """The softmax of each token from its partials `[groups, rows]`, folded in ascending order."""
    wanted = {"with_gap": groups.gap is not None, "with_sum": groups.logit_sum is not None}
    start = empty_partial(groups.max.shape[1], groups.max, **wanted)
    whole, _ = lax.scan(lambda so_far, group: (fold(so_far, group), None), start, groups)
    gap = None if whole.gap is None else whole.gap / whole.total
    return Statistics(whole.max, jnp.log(whole.total), whole.target_logit, gap, whole.logit_sum)


def partial_of_rows(logits: Array, target_logit: Array, *, with_gap: bool, summed: Array | None = None) -> Partial:
    """The softmax of every row of `logits [rows, V]`, summed in whatever order XLA picks; summed marks the columns
    whose logits are summed up too, or is None.
    """
    maximum = logits.max(axis=1)
    centred = logits - zero_if_neg_inf(maximum)[:, None]
    exponentials = jnp.exp(centred)
    gap = -jnp.where(exponentials == 0, 0, exponentials * centred).sum(axis=1) if with_gap else None
    logit_sum = None if summed is None else jnp.where(summed, logits, 0).sum(axis=1)
    return Partial(maximum, exponentials.sum(axis=1), target_logit, gap, logit_sum)


def fixed_order_partial(logits: Array, is_target: Array, *, with_gap: bool, summed: Array | None = None) -> Partial:
    """The softmax of every row of `logits [rows, 256]`, summed by halves; is_target marks each row's target, and summed
    the columns whose logits are summed up too, or is None.
    """
    maximum = logits.max(axis=1)
    below = zero_if_neg_inf(maximum)[:, None] - logits
    exponentials = jnp.exp(-below)
    gaps = jnp.where(exponentials == 0, 0, rounded_product(exponentials, below)) if with_gap else None
    return Partial(
        max=maximum,
        total=halving_sum(exponentials),
        target_logit=halving_sum(jnp.where(is_target, logits, 0)),
        gap=None if gaps is None else halving_sum(gaps),
        logit_sum=None if summed is None else halving_sum(jnp.where(summed, logits, 0)),
    )


def partial_of_chunks(chunks: Partial) -> Partial:
    """The softmax of rows over all their chunks `[..., chunks]`, of which it has maxima and totals, summed by pairs."""
    maximum = chunks.max.max(axis=-1)
    factor = jnp.exp(chunks.max - zero_if_neg_inf(maximum)[..., None])
    return Partial(maximum, pairwise_sum(rounded_product(chunks.total, factor)), jnp.zeros_like(maximum), None)


def values_of(config: SoftmaxConfig, statistics: Statistics) -> LinearLogp:
    """logp = (z_t − max) − log_sum; lse = max + log_sum; entropy = log_sum + gap. logp is the mean under a smoothed
    target where targets are smoothed.
    """
    logp, lse = statistics.logprobs(statistics.target_logit), statistics.max + statistics.log_sum
    if config.smoothing is not None:
        assert statistics.logit_sum is not None
        logp = config.smoothing.logp(logp, lse, statistics.logit_sum)
    entropy = statistics.log_sum + statistics.gap if statistics.gap is not None else None
    return LinearLogp(logp, lse if config.return_lse else None, entropy)


def values_of_no_tokens(config: SoftmaxConfig, lead: tuple[int, ...]) -> LinearLogp:
    """The values that are asked for, in a lead shape without tokens."""
    nothing = jnp.zeros(lead, jnp.float32)
    return LinearLogp(nothing, nothing if config.return_lse else None, nothing if config.return_entropy else None)


def divided_by_temperature(x: Array, temperature: Array) -> Array:
    """x · (1 / temperature): for a division, XLA would divide in some programs and multiply in others."""
    return rounded_product(x, lax.optimization_barrier(1 / temperature)[:, None])


def gradient_bound(temperature: Array, upstream: LinearLogp) -> Array:
    """A bound on |gradient of a logit| in each row. The entropy's part of it is |p·(z − Σ p·z)| <= 1/e + ln V < 14."""
    return (
        sum(weight * jnp.abs(g) for weight, g in zip((1, 1, 14), upstream, strict=True) if g is not None) / temperature
    )


def fp16_scale(bound: Array) -> Array:
    """The power of two that lifts `bound` to between 2¹⁴ and 2¹⁵, so that float16 gradients near 1e-9 survive."""
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.float32(1), jnp.clip(15 - exponent, -100, 100))


class Scaling(NamedTuple):
    """How rows of gradients that were multiplied by powers of two, as float16 needs, become true ones again."""

    row_unscale: Array
    """What each row is multiplied by where rows stay apart, float32 `[rows]`."""
    to_common: Array
    """What each row is multiplied by before rows are summed up, so that all have the smallest power of two."""
    unscale: Array
    """What the sums of rows are multiplied by, float32 `[1]`."""


def scaling(rows: Compacted, scale: Array) -> Scaling:
    """The scaling of rows that were multiplied by `scale`."""
    common = jnp.min(jnp.where(jnp.arange(rows.size) < rows.count, scale, jnp.inf))
    return Scaling(1 / scale, common / scale, (1 / common).reshape(1))


def counted_columns(columns: Array, real_columns: Any, allowed: Array | None) -> Array:
    """Which columns are no padding, `[1, columns]`, and allowed in a row, `[rows, columns]`."""
    is_real = columns < real_columns
    return is_real if allowed is None else is_real & is_allowed(allowed, columns)


def logits_of(
    config: SoftmaxConfig,
    products: Array,
    bias: Array,
    temperature: Array,
    columns: Array,
    real_columns: Any,
    allowed: Array | None = None,
) -> Array:
    """softcap(products + bias) / temperature, −inf in columns that are padding or not allowed; `bias` and `columns` are
    `[1, columns]`, and `allowed` is that of Tokens.
    """
    logits = products + bias
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits * (1 / config.logit_softcap))
    logits = divided_by_temperature(logits, temperature)
    # A poisoned row stays NaN in every column, so that its maximum is NaN too.
    counts = counted_columns(columns, real_columns, allowed)
    return jnp.where(counts, logits, jnp.where(jnp.isnan(temperature), jnp.nan, -jnp.inf)[:, None])


def product_gradients(
    config: SoftmaxConfig,
    products: Array,
    bias: Array,
    tokens: Tokens,
    columns: Array,
    real_columns: Any,
    statistics: Statistics,
    upstream: LinearLogp,
) -> Array:
    """The gradient with respect to `products` `[rows, columns]`; exactly 0 in inactive rows, and in columns that are
    padding or not allowed.

    With p = exp(z − lse) and upstream gradients g:
      dz_v = −g_logp·p_v + p_v·(g_lse − g_entropy·(z_v − Σ p·z)).
    At the target, −g_logp·expm1(logp) stands in the place of g_logp·(1 − p). A smoothed target t adds g_logp·t_v
    elsewhere, and g_logp·(t_v − 1) at the target.
    """
    logits = logits_of(config, products, bias, tokens.temperature, columns, real_columns, tokens.allowed)
    centred = logits - statistics.max[:, None]
    logprob = centred - statistics.log_sum[:, None]
    probability = jnp.exp(logprob)
    is_target = columns == tokens.target_ids[:, None]
    gradient = rounded_product(-upstream.logp[:, None], jnp.where(is_target, jnp.expm1(logprob), probability))
    if config.smoothing is not None:
        uniform, share = (jnp.float32(x) for x in (config.smoothing.uniform, config.smoothing.share))
        gradient += rounded_product(upstream.logp[:, None], jnp.where(is_target, uniform - share, uniform))
    if upstream.lse is not None:
        gradient += rounded_product(upstream.lse[:, None], probability)
    if upstream.entropy is not None:
        assert statistics.gap is not None
        # A logit of −inf has p = 0, and 0·∞ must be 0.
        spread = jnp.where(probability == 0, 0, centred + statistics.gap[:, None])
        gradient += rounded_product(-upstream.entropy[:, None], probability * spread)
    counts = tokens.active[:, None] & counted_columns(columns, real_columns, tokens.allowed)
    return before_softcap(config, gradient, products + bias, tokens.temperature, counts)


def before_softcap(config: SoftmaxConfig, gradient: Array, raw: Array, temperature: Array, counts: Array) -> Array:
    """The gradient with respect to `raw`, the logits before softcap and temperature, from that with respect to logits;
    exactly 0 where it does not count.
    """
    if config.logit_softcap is not None:
        # This is 1 − tanh², without the cancellation where tanh is near 1.
        decay = jnp.exp((-2 / config.logit_softcap) * jnp.abs(raw))
        gradient *= 4 * decay / jnp.square(1 + decay)
    return jnp.where(counts, divided_by_temperature(gradient, temperature), 0)
