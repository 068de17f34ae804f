"""Inputs of every op. The same sizes, mode and seed give the same arrays on every machine."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlk_jax.checker.options import Unusable

_LARGEST_SIZE = 2**20
MODES = {
    "random": "normal numbers",
    "constant": "every tensor holds one number, ids are --token-value",
    "peaked": "one logit far above the others: p = 0.999",
    "huge": "logits of 100",
    "neg-inf": "most tokens, whole tiles of them, are impossible",
    "ties": "many equal logits",
    "masked-nan": "masked tokens hold NaN and impossible ids; logits of tokens that no row allows are NaN or infinite",
    "window": "attention with a sliding window and a softcap",
    "bad-ids": "some active ids are outside the vocabulary: to be refused, or NaN in their rows",
}
"""The input modes and what they draw, as `rlk check --list` prints them."""


def _size(default: int, meaning: str) -> Any:
    """A field of `Sizes`. Its meaning is the help of the option that sets it."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem. Each op uses those that it has. Raises `Unusable` for a size out of range."""

    batch: int = _size(2, "sequences; of ops with groups, rounded up to whole groups")
    seq: int = _size(16, "tokens of each sequence; of attention, 128 more")
    vocab: int = _size(257, "tokens of the vocabulary")
    hidden: int = _size(64, "numbers of a hidden state; of attention, those of a head")
    k_dim: int = _size(4096, "columns of a, which are the rows of b, of det_gemm")
    n_dim: int = _size(64, "columns of b, of det_gemm")

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not 1 <= size <= _LARGEST_SIZE:
                raise Unusable(f"{name} must be from 1 to {_LARGEST_SIZE}, got {size}")

    @property
    def lead(self) -> tuple[int, int]:
        """The shape of an array with one number per token."""
        return self.batch, self.seq


@dataclass(frozen=True)
class Draw:
    """How the arrays of one case are drawn. Each array of an op passes an offset of its own, so that arrays differ."""

    mode: str = "random"
    dtype: str = "float32"
    seed: int = 123
    constant_value: float = 0.25
    token_value: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    arranged: bool = True
    """Whether this case is also checked in other batches, where `--check-invariance` asks for it."""

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):
            if not np.isfinite(np.float64(self.cast(self.constant_value + 1))):
                raise Unusable(f"the constant value {self.constant_value} is not finite in {self.dtype}")

    def random(self, offset: int) -> np.random.Generator:
        """The generator of the array with this offset."""
        return np.random.default_rng(self.seed + offset)

    def cast(self, x: Any) -> np.ndarray:
        """`x` in the dtype under test."""
        return np.asarray(x, np.float32).astype(jnp.dtype(self.dtype))

    def tensor(self, offset: int, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers times `scale`, or one number in mode "constant"."""
        if self.mode == "constant":
            return self.cast(np.full(shape, self.constant_value + 0.01 * offset))
        return self.cast(self.random(offset).normal(size=shape) * scale)

    @property
    def impossible(self) -> int:
        """How many tokens at the start of the vocabulary have logits of −inf."""
        return self.sizes.vocab * 7 // 8 if self.mode == "neg-inf" else 0

    @functools.cached_property
    def peak(self) -> np.ndarray:
        """The numbers `[V]` that this mode adds to the logits of every row."""
        added = np.zeros(self.sizes.vocab)
        if self.mode == "peaked":
            added[17 % len(added)] = np.log(999.0 * len(added))
        added[: self.impossible] = -np.inf
        return added

    def logits(self, offset: int) -> np.ndarray:
        """Logits `[batch, seq, vocab]`."""
        shape = (*self.sizes.lead, self.sizes.vocab)
        if self.mode == "ties":
            return self.cast(self.random(offset).integers(0, 2, shape))
        scale = {"huge": 35.0, "peaked": 0.01}.get(self.mode, 1.0)
        return self.cast(self.tensor(offset, *shape, scale=scale).astype(np.float32) + self.peak)

    def ids(self) -> np.ndarray:
        """Ids `[batch, seq]` of possible tokens. Mode "bad-ids" sets one id below the vocabulary and one above it."""
        lead, vocab = self.sizes.lead, self.sizes.vocab
        if self.mode == "constant":
            return np.full(lead, self.token_value % vocab, np.int32)
        ids = self.random(13).integers(self.impossible, vocab, lead, dtype=np.int32)
        if self.mode == "bad-ids":
            ids[0, 0], ids[0, -1] = -1, vocab
        return ids

    def mask(self) -> np.ndarray:
        """A mask `[batch, seq]` of whole sequences; in every second sequence only the first third is active."""
        mask = np.ones(self.sizes.lead, bool)
        mask[1::2, -(-self.sizes.seq // 3) :] = False
        if self.mode == "masked-nan":
            mask[-1, -1] = False
        return mask


SECOND = Sizes(batch=2, seq=40, vocab=512, hidden=128, k_dim=320, n_dim=256)
"""The second sizes at which every op is checked. They have more rows and whole tiles of columns."""


def draws(draw: Draw, modes: Sequence[str], second: bool) -> list[Draw]:
    """A draw for each mode and, where `second` is set and "random" is a mode, one more with the sizes of `SECOND`."""
    found = [replace(draw, mode=mode) for mode in modes]
    return found + [replace(draw, mode="random", sizes=SECOND, arranged=False)] * (second and "random" in modes)
