"""The threshold by which a loss takes the tokens of the highest entropy."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.tokens import active_mask
from rlk_jax.losses.checks import check_completion_mask, check_per_token, check_top_share


def entropy_threshold(
    entropy: Float[Array, "B T"], completion_mask: Num[Array, "B T"] | Bool[Array, "B T"], *, top_share: float
) -> Float[Array, ""]:
    """The quantile 1 − top_share of the active tokens' entropies: tokens at or above it are the top share.

    Give it the whole batch, and its result to `policy_loss` for every micro-batch and rank. Between two entropies the
    quantile is interpolated, as by torch.quantile. Without active tokens it is 0, and NaN where an active entropy is.
    Appended masked rows or columns change no bit of it.

    Raises ValueError for a mask that is not [B, T], an entropy of another shape or no floats, and a share that is not
    above 0 and at most 1.

    Source: "Beyond the 80/20 rule", arXiv 2506.01939, whose share is 0.2.
    """
    check_per_token("entropy", entropy, check_completion_mask(completion_mask))
    check_top_share(top_share)
    entropy, mask = whole_on_every_device((entropy, active_mask(completion_mask)))
    if mask.size == 0:
        return jnp.zeros((), jnp.float32)
    ordered = jnp.sort(jnp.where(mask, entropy.astype(jnp.float32), jnp.inf), axis=None)
    last = jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - 1, 0)
    place = last.astype(jnp.float32) * (1.0 - top_share)
    below = jnp.floor(place).astype(jnp.int32)
    low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
    found = jnp.where(mask.any(), low + (place - below) * (high - low), 0.0)
    return jnp.where((mask & jnp.isnan(entropy)).any(), jnp.nan, found)
