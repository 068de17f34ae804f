"""The float64 gold of every op, in NumPy: definitions with hand-written derivatives, sharing no code with the ops.

An id outside the vocabulary makes its row NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class SoftmaxGold(NamedTuple):
    """(logp, lse, entropy) `[N]`, the gradient of the raw logits and the logits themselves `[N, V]`, in float64."""

    values: tuple[np.ndarray, ...]
    d_raw: np.ndarray
    logits: np.ndarray


def softmax(raw: Any, target_ids: Any, temperature: Any, upstream: Any, options: Mapping[str, Any]) -> SoftmaxGold:
    """The definition on raw logits `[N, V]`, and its derivative for upstream gradients of (logp, lse, entropy)."""
    raw, t = np.asarray(raw, np.float64), np.asarray(target_ids).reshape(-1)
    rows = np.arange(len(t))
    temperature = np.broadcast_to(np.asarray(temperature, np.float64).reshape(-1, 1), (len(t), 1))
    cap = options.get("logit_softcap")
    capped = cap * np.tanh(raw / cap) if cap else raw
    z = capped / temperature
    vocab_size = options.get("global_vocab_size", raw.shape[1])
    z[:, vocab_size:] = -np.inf
    bad = (t < 0) | (t >= vocab_size)
    t = np.where(bad, 0, t)
    m = z.max(axis=1, keepdims=True)
    lse = m + np.log(np.exp(z - m).sum(axis=1, keepdims=True))
    lse[bad] = np.nan
    p = np.exp(z - lse)
    finite = np.where(p > 0, z, 0)
    mean = (p * finite).sum(axis=1, keepdims=True)
    values = (z[rows, t] - lse[:, 0], lse[:, 0], (lse - mean)[:, 0])
    g_logp, g_lse, g_entropy = (np.asarray(g, np.float64).reshape(-1, 1) for g in upstream)
    dz = p * (g_lse - g_logp - g_entropy * (finite - mean))
    dz[rows, t] += g_logp[:, 0]
    d_raw = dz / temperature
    if cap:
        d_raw *= 1 - (capped / cap) ** 2
    return SoftmaxGold(values, d_raw, z)


def logps(logits: Any, ids: Any, temperature: float = 1.0) -> np.ndarray:
    """Of ids `[*lead]` and logits `[*lead, V]`, the log-probs alone."""
    zeros, flat = np.zeros(np.size(ids)), np.reshape(logits, (-1, np.shape(logits)[-1]))
    return softmax(flat, ids, temperature, (zeros,) * 3, {}).values[0].reshape(np.shape(ids))


class RatioKlGold(NamedTuple):
    """float64; `gradient` of (Σ g_ratio·ratio + Σ g_kl·kl) with respect to the policy's logits."""

    ratio: np.ndarray
    kl: np.ndarray
    gradient: np.ndarray


def ratio_kl(
    policy: Any, ref: Any, ids: Any, mask: Any, old: Any, upstream: Sequence[Any], temperature: float = 1.0
) -> RatioKlGold:
    """Of logits `[*lead, V]`; masked tokens have ratio 1, kl 0 and no gradient, whatever they hold."""
    mask = np.asarray(mask) != 0
    lead, vocab = mask.shape, np.shape(policy)[-1]
    one, zero = np.ones(mask.size), np.zeros(mask.size)
    ids = np.where(mask, np.asarray(ids), 0)
    policy, ref = (np.where(mask[..., None], np.asarray(x, np.float64), 0) for x in (policy, ref))
    own = softmax(policy.reshape(-1, vocab), ids, temperature, (one, zero, zero), {})
    logp = own.values[0].reshape(lead)
    d, g_ratio, g_kl = logps(ref, ids, temperature) - logp, *(np.asarray(g, np.float64) for g in upstream)
    ratio = np.where(mask, np.exp(logp - np.where(mask, np.asarray(old, np.float64), 0)), 1)
    kl = np.where(mask, np.exp(d) - d - 1, 0)
    coefficient = np.where(mask, g_ratio * ratio + g_kl * (1 - np.exp(d)), 0)
    return RatioKlGold(ratio, kl, coefficient[..., None] * own.d_raw.reshape(*lead, vocab))


class GrpoLossGold(NamedTuple):
    """float64; `gradient` of the loss with respect to the policy's logits."""

    loss: float
    policy_loss: float
    kl: float
    gradient: np.ndarray


def group_advantages(rewards: Any, boundaries: Sequence[int]) -> np.ndarray:
    """Rewards `[B]` normalised within each group, which `boundaries` cut."""
    groups = np.split(np.asarray(rewards, np.float64), boundaries[1:-1])
    return np.concatenate([(g - g.mean()) / max(g.std(), 1e-6) for g in groups])


def grpo_loss(
    policy: Any,
    ref: Any,
    ids: Any,
    mask: Any,
    old: Any,
    advantages: np.ndarray,
    *,
    clip: tuple[float, float],
    beta: float,
) -> GrpoLossGold:
    """The mean over active tokens of all sequences; the clip is flat beyond its bounds `1 − clip[0]`, `1 + clip[1]`."""
    mask = np.asarray(mask) != 0
    low, high = 1 - clip[0], 1 + clip[1]
    zeros, count = np.zeros(mask.shape), max(mask.sum(), 1)
    ratio, kl, _ = ratio_kl(policy, ref, ids, mask, old, (zeros, zeros))
    a = advantages[:, None]
    outside = np.where(a > 0, ratio > high, ratio < low)
    bounded = np.where(outside, np.where(a > 0, high, low), ratio)
    policy_loss, mean_kl = -(bounded * a)[mask].sum() / count, kl[mask].sum() / count
    g = (np.where(outside, 0, -a) / count, np.full(mask.shape, beta / count))
    gradient = ratio_kl(policy, ref, ids, mask, old, g).gradient
    return GrpoLossGold(policy_loss + beta * mean_kl, policy_loss, mean_kl, gradient)
