"""The float64 gold of every op: its definition and hand-written derivative in NumPy, sharing no code with the ops.

An id outside the vocabulary makes its row NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class SoftmaxGold(NamedTuple):
    """Results on N tokens, in float64."""

    values: tuple[np.ndarray, ...]
    """logp, log-sum-exp and entropy, `[N]` each."""
    d_raw: np.ndarray
    """The gradient of the raw logits, `[N, V]`."""
    logits: np.ndarray
    """The logits after softcap and temperature, `[N, V]`; −inf in padding of the vocabulary."""


def softmax_gold(raw: Any, target_ids: Any, temperature: Any, upstream: Any, options: Mapping[str, Any]) -> SoftmaxGold:
    """Log-softmax of raw logits `[N, V]` at the target ids, and its derivative for upstream gradients of (logp, lse,
    entropy). The options are `logit_softcap`, `global_vocab_size` and `label_smoothing` of the ops, and `allowed`, bool
    `[N, V]`. logp is the mean of ln p under the smoothed target.
    """
    raw, t = np.asarray(raw, np.float64), np.asarray(target_ids).reshape(-1)
    rows = np.arange(len(t))
    temperature = np.broadcast_to(np.asarray(temperature, np.float64).reshape(-1, 1), (len(t), 1))
    cap = options.get("logit_softcap")
    capped = cap * np.tanh(raw / cap) if cap else raw
    z = capped / temperature
    vocab_size = options.get("global_vocab_size", raw.shape[1])
    z[:, vocab_size:] = -np.inf
    z[~np.broadcast_to(options.get("allowed", True), z.shape)] = -np.inf
    bad = (t < 0) | (t >= vocab_size)
    t = np.where(bad, 0, t)
    m = z.max(axis=1, keepdims=True)
    lse = m + np.log(np.exp(z - m).sum(axis=1, keepdims=True))
    lse[bad] = np.nan
    p = np.exp(z - lse)
    finite = np.where(p > 0, z, 0)
    mean = (p * finite).sum(axis=1, keepdims=True)
    smoothing = options.get("label_smoothing", 0.0)
    target = np.where(np.arange(z.shape[1]) < vocab_size, np.full_like(z, smoothing / vocab_size), 0)
    target[rows, t] += 1 - smoothing
    logp = np.multiply(target, z - lse, where=target > 0, out=np.zeros_like(z)).sum(axis=1)
    values = (logp, lse[:, 0], (lse - mean)[:, 0])
    g_logp, g_lse, g_entropy = (np.asarray(g, np.float64).reshape(-1, 1) for g in upstream)
    dz = p * (g_lse - g_logp - g_entropy * (finite - mean))
    dz += g_logp * target
    d_raw = dz / temperature
    if cap:
        d_raw *= 1 - (capped / cap) ** 2
    return SoftmaxGold(values, d_raw, z)


def largest_finite(logits: np.ndarray) -> float:
    """The largest |logit| that is finite; 0 where there is none."""
    return float(np.abs(logits[np.isfinite(logits)]).max(initial=0))


class RankingGold(NamedTuple):
    """The most probable tokens of N rows. Ids and ranks are masked where rounding decides them."""

    top_ids: np.ma.MaskedArray
    top_logps: np.ndarray
    target_rank: np.ma.MaskedArray


def ranking_gold(logits: np.ndarray, target_ids: Any, lse: np.ndarray, top_k: int, near: float) -> RankingGold:
    """The `top_k` most probable tokens of logits `[N, V]`, and how many tokens stand before the target. Equal logits
    stand in the order of their ids, and a logit of −inf is no token's: its id is −1.

    An id is masked where a logit beside its own in this order is closer than `near`, and a rank where a logit is so
    close to the target's. Rows whose lse is NaN have id −1 and rank −1.
    """
    bad, t = np.isnan(lse), np.where(np.isnan(lse), 0, np.asarray(target_ids).reshape(-1))[:, None]
    order = np.argsort(-logits, axis=1, kind="stable")
    ordered, own = np.take_along_axis(logits, order, axis=1), np.take_along_axis(logits, t, axis=1)
    is_near = np.zeros((len(t), logits.shape[1] + 1), bool)
    with np.errstate(invalid="ignore"):
        is_near[:, 1:-1] = ordered[:, :-1] - ordered[:, 1:] < near
    is_near &= ~bad[:, None]
    ids = np.where(bad[:, None] | (ordered == -np.inf), -1, order)
    unsure = np.count_nonzero(abs(logits - own) < near, axis=1) > 1
    rank = np.where(bad, -1, np.argmax(order == t, axis=1))
    return RankingGold(
        np.ma.masked_array(ids, is_near[:, :-1] | is_near[:, 1:])[:, :top_k],
        (ordered - lse[:, None])[:, :top_k],
        np.ma.masked_array(rank, unsure & ~bad),
    )


def logps(logits: Any, ids: Any, temperature: float = 1.0, allowed: Any = True) -> np.ndarray:
    """The log-probs of ids `[*lead]` under logits `[*lead, V]`, over allowed tokens, bool `[N, V]`."""
    zeros, flat = np.zeros(np.size(ids)), np.reshape(logits, (-1, np.shape(logits)[-1]))
    return softmax_gold(flat, ids, temperature, (zeros,) * 3, {"allowed": allowed}).values[0].reshape(np.shape(ids))


class CrossEntropyGold(NamedTuple):
    """Results in float64: the loss, and the gradient of Σ upstream·loss with respect to the raw logits `[N, V]`."""

    loss: np.ndarray
    d_raw: np.ndarray
    logits: np.ndarray


def cross_entropy_gold(
    raw: Any,
    target_ids: Any,
    weights: Any,
    upstream: Any,
    *,
    reduction: str,
    z_loss: float,
    temperature: Any = 1.0,
    **options: Any,
) -> CrossEntropyGold:
    """Cross-entropy of raw logits `[N, V]` with weights `[*lead]`, 0 for tokens that do not count; the options are
    those of `softmax_gold`.
    """
    raw = np.asarray(raw, np.float64)
    w = np.asarray(weights, np.float64)
    flat, counts = w.reshape(-1), w.reshape(-1) != 0
    # A token that does not count may have any id, and a row of NaN.
    ids, raw = np.where(counts, np.asarray(target_ids).reshape(-1), 0), np.where(counts[:, None], raw, 0)
    zeros = np.zeros(len(flat))
    logp, lse, _ = softmax_gold(raw, ids, temperature, (zeros,) * 3, options).values
    losses = np.where(counts, flat * (z_loss * lse**2 - logp), 0)
    count = (flat.sum() or 1.0) if reduction == "mean" else 1.0
    g = np.asarray(upstream, np.float64).reshape(-1) * flat / count
    found = softmax_gold(raw, ids, temperature, (-g, 2 * z_loss * lse * g, zeros), options)
    loss = losses.reshape(w.shape) if reduction == "none" else losses.sum() / count
    return CrossEntropyGold(np.asarray(loss), found.d_raw, found.logits)


class RatioKlGold(NamedTuple):
    """Results in float64. `gradient` is that of Σ g_ratio·ratio + Σ g_kl·kl with respect to the policy's logits."""

    ratio: np.ndarray
    kl: np.ndarray
    gradient: np.ndarray


def ratio_kl_gold(
    policy: Any,
    ref: Any,
    ids: Any,
    mask: Any,
    old: Any,
    upstream: Sequence[Any],
    temperature: float = 1.0,
    allowed: Any = True,
) -> RatioKlGold:
    """Ratio and k3 KL of the tokens under logits `[*lead, V]`, over allowed tokens, bool `[N, V]`.

    Masked tokens have ratio 1, kl 0 and gradient 0, whatever they hold.
    """
    mask = np.asarray(mask) != 0
    lead, vocab = mask.shape, np.shape(policy)[-1]
    one, zero = np.ones(mask.size), np.zeros(mask.size)
    ids, allowed = np.where(mask, np.asarray(ids), 0), ~mask.reshape(-1, 1) | allowed
    policy, ref = (np.where(mask[..., None], np.asarray(x, np.float64), 0) for x in (policy, ref))
    own = softmax_gold(policy.reshape(-1, vocab), ids, temperature, (one, zero, zero), {"allowed": allowed})
    logp = own.values[0].reshape(lead)
    d, g_ratio, g_kl = logps(ref, ids, temperature, allowed) - logp, *(np.asarray(g, np.float64) for g in upstream)
    ratio = np.where(mask, np.exp(logp - np.where(mask, np.asarray(old, np.float64), 0)), 1)
    kl = np.where(mask, np.exp(d) - d - 1, 0)
    coefficient = np.where(mask, g_ratio * ratio + g_kl * (1 - np.exp(d)), 0)
    return RatioKlGold(ratio, kl, coefficient[..., None] * own.d_raw.reshape(*lead, vocab))


class GrpoLossGold(NamedTuple):
    """Results in float64. `gradient` is that of the loss with respect to the policy's logits."""

    loss: float
    policy_loss: float
    kl: float
    gradient: np.ndarray


def group_advantages_gold(rewards: Any, boundaries: Sequence[int]) -> np.ndarray:
    """Rewards `[B]`, normalised within each of the groups that `boundaries` cut."""
    groups = np.split(np.asarray(rewards, np.float64), boundaries[1:-1])
    return np.concatenate([(g - g.mean()) / max(g.std(), 1e-6) for g in groups])


def grpo_loss_gold(
    policy: Any,
    ref: Any,
    ids: Any,
    mask: Any,
    old: Any,
    advantages: np.ndarray,
    *,
    clip: tuple[float, float],
    beta: float,
    allowed: Any = True,
) -> GrpoLossGold:
    """The GRPO loss of `ratio_kl_gold`'s probabilities, as a mean over the active tokens of all sequences. The ratio is
    clipped to `1 − clip[0]` and `1 + clip[1]`, beyond which the gradient is 0.
    """
    mask = np.asarray(mask) != 0
    low, high = 1 - clip[0], 1 + clip[1]
    zeros, count = np.zeros(mask.shape), max(mask.sum(), 1)
    ratio, kl, _ = ratio_kl_gold(policy, ref, ids, mask, old, (zeros, zeros), allowed=allowed)
    a = advantages[:, None]
    outside = np.where(a > 0, ratio > high, ratio < low)
    bounded = np.where(outside, np.where(a > 0, high, low), ratio)
    policy_loss, mean_kl = -(bounded * a)[mask].sum() / count, kl[mask].sum() / count
    g = (np.where(outside, 0, -a) / count, np.full(mask.shape, beta / count))
    gradient = ratio_kl_gold(policy, ref, ids, mask, old, g, allowed=allowed).gradient
    return GrpoLossGold(policy_loss + beta * mean_kl, policy_loss, mean_kl, gradient)


class DivergenceGold(NamedTuple):
    """Results on N tokens, in float64: divergences `[N]`, and the gradient of the student's raw logits `[N, V]`."""

    values: np.ndarray
    d_raw: np.ndarray
    logits: np.ndarray
    """The student's logits after softcap and temperature, `[N, V]`, without padding."""


def divergence_gold(
    raw: Any,
    teacher_raw: Any,
    upstream: Any,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    temperature: Any = 1.0,
    teacher_temperature: Any = None,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    global_vocab_size: int | None = None,
    teacher_global_vocab_size: int | None = None,
) -> DivergenceGold:
    """The divergence of the softmax of raw logits `[N, V]` from a teacher's, and its derivative."""
    teacher_temperature = temperature if teacher_temperature is None else teacher_temperature
    a, z, slope = _tempered(np.asarray(raw, np.float64)[:, :global_vocab_size], temperature, logit_softcap)
    cut = np.asarray(teacher_raw, np.float64)[:, :teacher_global_vocab_size]
    b, _, _ = _tempered(cut, teacher_temperature, teacher_logit_softcap)
    p, q = np.exp(a), np.exp(b)

    def times(weight: np.ndarray, logarithm: np.ndarray) -> np.ndarray:
        return np.where(weight == 0, 0, weight * logarithm)

    with np.errstate(invalid="ignore", divide="ignore"):
        if kind == "forward":
            values, dz = times(q, b - a).sum(axis=1), p - q
        else:
            share = beta if kind == "jsd" else 1.0
            m = np.log(share * q + (1 - share) * p)
            # The derivative by p is share-weighted ln(p / m), and the softmax takes its mean away.
            own, weight = times(p, a - m), (1 - share if kind == "jsd" else 1.0)
            values = weight * own.sum(axis=1)
            values += share * times(q, b - m).sum(axis=1) if kind == "jsd" else 0
            dz = weight * (own - p * own.sum(axis=1, keepdims=True))
    d_raw = np.zeros(np.shape(raw))
    d_raw[:, : z.shape[1]] = np.reshape(upstream, (-1, 1)) * dz * slope
    return DivergenceGold(values, d_raw, z)


def listed_divergence_gold(
    raw: np.ndarray,
    upstream: Any,
    *,
    teacher_ids: np.ndarray,
    teacher_logps: np.ndarray,
    kind: str,
    beta: float,
    temperature: Any,
) -> DivergenceGold:
    """The divergence of the softmax of raw logits `[N, V]` from what a teacher lists `[*lead, k]`, and its derivative.

    Each listed token is a bucket, and all others are one more, the first.
    """
    a, z, slope = _tempered(raw, temperature, None)
    ids, probability = (x.reshape(len(raw), -1) for x in (teacher_ids, np.exp(np.asarray(teacher_logps, np.float64))))
    q = np.concatenate([1 - probability.sum(axis=1, keepdims=True), probability], axis=1)
    bucket = np.zeros(raw.shape, int)
    rows, places = np.nonzero(ids >= 0)
    bucket[rows, ids[rows, places]] = 1 + places
    p = np.zeros(q.shape)
    np.add.at(p, (np.arange(len(raw))[:, None], bucket), np.exp(a))
    share = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    m = share * q + (1 - share) * p
    is_bucket = p > 0  # One that lists nothing is none.
    own, other, mixed = (np.where(is_bucket, x, 1.0) for x in (p, q, m))
    if kind == "forward":
        values, per_bucket = other * np.log(other / own), -other / own
    elif kind == "reverse":
        values, per_bucket = own * np.log(own / other), np.log(own / other)
    else:
        values = share * other * np.log(other / mixed) + (1 - share) * own * np.log(own / mixed)
        per_bucket = (1 - share) * np.log(own / mixed)
    values, per_bucket = np.where(is_bucket, values, 0), np.where(is_bucket, per_bucket, 0)
    mean = (p * per_bucket).sum(axis=1, keepdims=True)
    dz = np.exp(a) * (np.take_along_axis(per_bucket, bucket, axis=1) - mean)
    return DivergenceGold(values.sum(axis=1), np.reshape(upstream, (-1, 1)) * dz * slope, z)


def _tempered(raw: np.ndarray, temperature: Any, cap: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities and logits after softcap and temperature, and the derivative of these logits by raw ones."""
    temperature = np.broadcast_to(np.asarray(temperature, np.float64).reshape(-1, 1), (len(raw), 1))
    tangent = np.tanh(raw / cap) if cap else 0.0
    z = (cap * tangent if cap else raw) / temperature
    largest = z.max(axis=1, keepdims=True)
    lse = largest + np.log(np.exp(z - largest).sum(axis=1, keepdims=True))
    return z - lse, z, (1 - np.square(tangent)) / temperature


class AttentionGold(NamedTuple):
    """Results in float64: the output, and the gradients of query, key and value."""

    output: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scores: np.ndarray
    """The scores after the softcap, `[B, H, T, S]`; −inf where a query does not see a slot."""


def attention_gold(
    query: Any,
    key: Any,
    value: Any,
    upstream: Any,
    *,
    start: int = 0,
    padding: Any = None,
    segment_starts: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> AttentionGold:
    """Causal attention of queries `[B, T, H, E]` to the slots of keys `[B, S, G, E]` and values `[B, S, G, F]`, whose
    heads are shared in order, and its derivative for an upstream gradient `[B, T, H, F]`.
    """
    batch, length, heads, size = np.shape(query)
    slots, groups = np.shape(key)[1:3]
    first = np.zeros((batch, 1)) if padding is None else np.asarray(padding)[:, None]
    first = np.broadcast_to(first if segment_starts is None else segment_starts, (batch, length))[..., None]
    own, slot = start + np.arange(length)[:, None], np.arange(slots)
    visible = (slot >= first) & (slot <= own)
    if sliding_window is not None:
        visible &= slot > own - sliding_window
    is_seen = visible.any(axis=1)[..., None, None]
    visible = visible[:, None]
    q, g = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, upstream))
    shared = (np.where(is_seen, np.asarray(x, np.float64), 0).swapaxes(1, 2) for x in (key, value))
    k, v = (np.repeat(x, heads // groups, axis=1) for x in shared)
    scale = size**-0.5 if scale is None else scale
    z, slope = scale * q @ k.swapaxes(2, 3), 1.0
    if logit_softcap is not None:
        tangent = np.tanh(z / logit_softcap)
        z, slope = logit_softcap * tangent, 1 - tangent**2
    z = np.where(visible, z, -np.inf)
    exponentials = np.exp(z - np.maximum(z.max(axis=3, keepdims=True), np.finfo(np.float64).min))
    p = exponentials / np.maximum(exponentials.sum(axis=3, keepdims=True), 1)
    output = p @ v
    dp = g @ v.swapaxes(2, 3)
    dz = scale * slope * p * (dp - (g * output).sum(axis=3, keepdims=True))

    def of_groups(x: np.ndarray) -> np.ndarray:
        """Sums over the heads that share a key."""
        return x.reshape(batch, groups, -1, *x.shape[2:]).sum(axis=2).swapaxes(1, 2)

    d_key, d_value = of_groups(dz.swapaxes(2, 3) @ q), of_groups(p.swapaxes(2, 3) @ g)
    return AttentionGold(output.swapaxes(1, 2), (dz @ k).swapaxes(1, 2), d_key, d_value, z)
