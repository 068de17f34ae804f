"""Which tokens each row of a draw may take, as the ops are given them and as the definitions read them."""

from typing import Any

import numpy as np

from rlk_jax.checker.inputs import Draw

_BITS = 32
_SHARES = (0.3, 0.02, 0.0, 0.98)
"""The share of the vocabulary that a row allows beside its target; rows take turns."""


def allowed_options(draw: Draw) -> dict[str, Any]:
    """The words of allowed tokens, with bits behind the vocabulary. In mode "bad-ids" a row forbids its target."""
    vocab, lead, ids = draw.sizes.vocab, draw.sizes.lead, draw.ids()
    density = np.resize(_SHARES, lead)[..., None]
    allowed = draw.random(7).random((*lead, -(-vocab // _BITS) * _BITS)) < density
    allowed[..., :vocab] &= ~never_allowed(draw)
    targets = np.clip(ids, 0, vocab - 1)[..., None]
    np.put_along_axis(allowed, targets, True, axis=-1)
    allowed[..., vocab:] = True
    if draw.mode == "bad-ids":
        np.put_along_axis(allowed, (targets + 1) % vocab, True, axis=-1)
        forbids = 0, lead[1] // 2
        allowed[*forbids, targets[*forbids, 0]] = False
    return {"allowed_mask": np.packbits(allowed, axis=-1, bitorder="little").view("<u4").astype(np.uint32)}


def never_allowed(draw: Draw) -> np.ndarray:
    """Which tokens no row allows, `[V]`: in mode "masked-nan" every third one that is no target, else none."""
    tokens = np.arange(draw.sizes.vocab)
    return (tokens % 3 == 0) & ~np.isin(tokens, draw.ids()) & (draw.mode == "masked-nan")


def are_allowed(words: np.ndarray, vocab: int) -> np.ndarray:
    """Which tokens rows of words allow, `[N, V]`."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return bits.reshape(-1, bits.shape[-1])[:, :vocab] != 0


def allowed_targets(target_ids: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Target ids `[N]`; −1, which is no token, for a row that forbids its target."""
    flat = target_ids.reshape(-1)
    has_target = np.take_along_axis(allowed, np.clip(flat, 0, allowed.shape[1] - 1)[:, None], axis=1)[:, 0]
    return np.where(has_target, flat, -1)
