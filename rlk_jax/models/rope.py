"""Rotary embeddings as checkpoints describe them: the frequencies of a head's pairs of numbers, by type.

Frequencies are computed once, on the host, in float32, and given to programs as numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_OLD_BASE = 10_000.0


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer, for heads of `size` numbers: a type of `TYPES` and its numbers.

    original is the number of positions that the model was first trained on, in the types that know one. attention is
    what cosines and sines are multiplied by (YaRN, arXiv 2309.00071).
    """

    size: int
    type: str
    base: float
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    truncates: bool = True
    attention: float = 1.0

    def frequencies(self, length: int | None = None) -> np.ndarray:
        """float32 `[size / 2]`: what a position is multiplied by for each pair. `length`, the number of positions so
        far, matters to "dynamic" alone.
        """
        base = self.base
        if self.type == "dynamic":
            beyond = max(length or 0, self.original)
            stretch = self.factor * beyond / self.original - (self.factor - 1)
            base = base * stretch ** (self.size / (self.size - 2))
        exponents = np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size)
        plain = np.float32(1) / np.power(np.float32(base), exponents, dtype=np.float32)
        if self.type == "linear":
            return plain / np.float32(self.factor)
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain) if self.type == "yarn" else plain

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        """Long waves are stretched, short ones stay, and those between are mixed (Llama 3.1)."""
        waves = (2 * math.pi / plain).astype(np.float32)
        share = (self.original / waves - self.low) / (self.high - self.low)
        mixed = (1 - share) * plain / self.factor + share * plain
        stretched = np.where(waves > self.original / self.low, plain / self.factor, mixed)
        return np.where(waves < self.original / self.high, plain, stretched).astype(np.float32)

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        """Pairs that turn often keep their frequency, those that turn seldom are stretched; a ramp joins both."""

        def pair_of(turns: float) -> float:
            """The pair that turns so many times over the original positions."""
            return self.size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = pair_of(self.high), pair_of(self.low)
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.size - 1)
        last = last + 0.001 if first == last else last
        ramp = np.clip((np.arange(self.size // 2, dtype=np.float32) - first) / (last - first), 0, 1)
        return (plain / np.float32(self.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rope_of(fields: Mapping[str, Any], size: int, layer_type: str) -> Rope:
    """The rotary embedding of layers of this type, from the old fields of a config.json or the new ones.

    Raises ValueError for a type that is not among `TYPES`, and for numbers that are missing.
    """
    given = _parameters(fields, layer_type)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in TYPES:
        raise ValueError(f"rope_type {kind!r} is not among {', '.join(TYPES)}.")
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor = {given['partial_rotary_factor']} is not supported, only 1.0.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS[kind]}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"rope_type {kind!r} does not take {', '.join(unknown)}.")
    base = given.get("rope_theta")
    rope = Rope(size, kind, _OLD_BASE if base is None else float(base))
    return rope if kind == "default" else _with_numbers(rope, given, fields["max_position_embeddings"])


_NUMBERS: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
"""The numbers that each type takes."""


def _parameters(fields: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The parameters of one type of layers: of `rope_parameters`, which may have them by type, or of the old fields."""
    new = fields.get("rope_parameters")
    if new:
        own = new.get(layer_type, new) if any(isinstance(x, dict) for x in new.values()) else new
        if own is new and any(isinstance(x, dict) for x in new.values()):
            raise ValueError(f"rope_parameters has no {layer_type}.")
        return {"rope_theta": fields.get("rope_theta"), **{k: v for k, v in own.items() if v is not None}}
    local = fields.get("rope_local_base_freq")
    if local is not None and layer_type == "sliding_attention":
        return {"rope_theta": local}
    return {"rope_theta": fields.get("rope_theta"), **(fields.get("rope_scaling") or {})}


def _with_numbers(rope: Rope, given: Mapping[str, Any], positions: int) -> Rope:
    """The rope with the numbers of its type."""

    def number(name: str) -> float:
        if given.get(name) is None:
            raise ValueError(f"rope_type {rope.type!r} needs {name}.")
        return float(given[name])

    original = int(given.get("original_max_position_embeddings") or positions)
    if rope.type == "dynamic":
        return Rope(rope.size, rope.type, rope.base, number("factor"), positions)
    if rope.type == "linear":
        return Rope(rope.size, rope.type, rope.base, number("factor"))
    if rope.type == "llama3":
        ends = number("low_freq_factor"), number("high_freq_factor")
        return Rope(rope.size, rope.type, rope.base, number("factor"), original, *ends)
    factor = positions / original if given.get("factor") is None else float(given["factor"])
    ends = float(given.get("beta_slow") or 1), float(given.get("beta_fast") or 32)
    return Rope(
        rope.size, rope.type, rope.base, factor, original, *ends, given.get("truncate", True), _attention(given, factor)
    )


def _attention(given: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cosines and sines by."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, of_all = given.get("mscale"), given.get("mscale_all_dim")
    return of(weight) / of(of_all) if weight and of_all else of(1)
