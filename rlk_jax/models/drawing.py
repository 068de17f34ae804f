"""How a token is drawn from logits: among which tokens, and what is recorded of these."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, PRNGKeyArray

from rlk_jax.core.allowed import EVERY_TOKEN, AllowedTokens, packed_words
from rlk_jax.core.checks import fits_float32, is_number, require, require_not_negative, require_positive_integer


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: they are divided by the temperature; of these, `top_k` keeps the k largest,
    `top_p` the fewest most probable tokens whose share of what is left is at least p, and `min_p` those at least
    `min_p` times as probable as the most probable one, in this order. Of tokens that are as probable as the last one
    that is kept, `top_k` keeps those of the lowest ids; `top_p` and `min_p` keep them all, within the k.

    Where tokens are taken away, `draw` records which are left: their ids with a `top_k`, from the most probable one on
    and −1 behind them, and packed bits without. A `top_k` of at least the vocabulary takes none away.

    A temperature of 0 takes the largest logit, and records nothing. Raises ValueError for a number out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        require_not_negative("temperature", self.temperature)
        if self.top_k is not None:
            require_positive_integer("top_k", self.top_k)
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            require(
                share is None or (is_number(share) and fits_float32(share) and share <= 1),
                f"{name} must be greater than 0 and at most 1, got {share!r}.",
            )

    def truncates(self, vocab_size: int) -> bool:
        """Whether a token is drawn among fewer than so many, which `draw` records then."""
        is_cut = self.top_k is not None and self.top_k < vocab_size
        return self.temperature > 0 and (is_cut or self.top_p not in (None, 1) or self.min_p is not None)

    @property
    def scored_temperature(self) -> float:
        """The temperature of recorded log-probs: 1 where the largest logit is taken."""
        return self.temperature or 1.0

    def draw(self, keys: PRNGKeyArray, logits: Float32[Array, "B V"]) -> tuple[Int32[Array, "B"], AllowedTokens]:
        """A token for each row, by its own key, and what it was drawn among."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), EVERY_TOKEN
        left, ids = self.kept(logits)
        place = jax.vmap(jax.random.categorical)(keys, left).astype(jnp.int32)
        if ids is not None:
            token = jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]
            return token, AllowedTokens(allowed_ids=jnp.where(jnp.isfinite(left), ids, -1))
        is_cut = self.truncates(logits.shape[-1])
        return place, AllowedTokens(allowed_mask=packed_words(jnp.isfinite(left))) if is_cut else EVERY_TOKEN

    def kept(self, logits: Float32[Array, "B V"]) -> tuple[Float32[Array, "B M"], Int32[Array, "B M"] | None]:
        """Logits at the temperature, less the largest one of the row; −inf for tokens that cannot be drawn. With a
        `top_k` they are those of the k most probable tokens, whose ids stand beside them.
        """
        ids, logits = None, (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits, ids = lax.top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            masses = jnp.exp(ordered)
            # The order of these sums is written down, so that it does not follow the number of rows.
            sums = lax.associative_scan(jnp.add, masses, axis=-1)
            # A token is kept where those before it have less than p together.
            is_kept = sums - masses < self.top_p * sums[:, -1:]
            logits = _without_smaller(logits, jnp.min(ordered, axis=-1, keepdims=True, where=is_kept, initial=0))
        if self.min_p is not None:
            logits = _without_smaller(logits, np.log(np.float32(self.min_p)))
        return logits, ids


def _without_smaller(logits: Array, least: Array | np.float32) -> Array:
    """The logits, −inf in the place of those below the least."""
    return jnp.where(logits >= least, logits, -jnp.inf)
