"""Rotary embeddings as checkpoints describe them: the frequencies of a head's pairs of numbers, by type.

Frequencies are computed once, on the host, in float32, and given to programs as numbers, which "dynamic" alone changes
with the length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from rlk_jax.models.fields import (
    Fields,
    UnsupportedModel,
    boolean,
    optional,
    positive_integer,
    positive_number,
    string,
    table,
)

TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


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

    def frequencies(self) -> np.ndarray:
        """float32 `[size / 2]`: what a position is multiplied by for each pair."""
        exponents = np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size)
        plain = np.float32(1) / np.power(np.float32(self.base), exponents, dtype=np.float32)
        if self.type == "linear":
            return plain / np.float32(self.factor)
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain) if self.type == "yarn" else plain

    def stretched(self, frequencies: Float32[Array, "E/2"], length: Int[Array, ""]) -> Float32[Array, "E/2"]:
        """The frequencies of a "dynamic" rope over `length` positions: those of a larger base beyond the original ones,
        and the same bits up to there.
        """
        ratio = jnp.maximum(length, self.original).astype(jnp.float32) / self.original
        stretch = 1 + self.factor * (ratio - 1)
        return frequencies / stretch ** (jnp.arange(0, self.size, 2, dtype=jnp.float32) / (self.size - 2))

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


def rope_of(fields: Fields, size: int, layer_type: str | None) -> Rope:
    """The rotary embedding of layers of this type, or of all layers where it is None, from the old fields of a
    config.json or the new ones, as transformers 5 does.

    Raises UnsupportedModel for a type that is not among `TYPES`, and for numbers that are missing or mean nothing.
    """
    given = _of_all_layers(fields) if layer_type is None else _of_layers(fields, layer_type)
    kind = _type_of(given)
    if (part := given.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor = {part!r} is not supported, only 1.0.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS[kind]}
    if unknown := sorted(given.keys() - known):
        raise UnsupportedModel(f"rope_type {kind!r} does not take {', '.join(unknown)}.")
    return _with_numbers(Rope(size, kind, positive_number(given, "rope_theta")), given, fields)


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


def _of_all_layers(fields: Fields) -> dict[str, Any]:
    """The parameters of a model whose layers have one rope: `rope_scaling` goes before `rope_parameters`."""
    given = optional(table, fields, "rope_scaling") or optional(table, fields, "rope_parameters") or {}
    return _with_theta(given, fields["rope_theta"])


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _of_layers(fields: Fields, layer_type: str) -> dict[str, Any]:
    """The parameters of one type of layers (Gemma 3). `rope_scaling` is added to those of full attention."""
    by_type = optional(table, fields, "rope_parameters") or {}
    if unknown := sorted(by_type.keys() - set(_LAYER_TYPES)):
        raise UnsupportedModel(f"rope_parameters takes {' and '.join(_LAYER_TYPES)} here, got {', '.join(unknown)}.")
    given = {"rope_type": "default"} if (own := optional(table, by_type, layer_type)) is None else own
    if given.get("truncate") is False:
        raise UnsupportedModel("truncate = False is not supported in the rope_parameters of one type of layer.")
    if layer_type == "sliding_attention":
        return _with_theta(given, fields["rope_local_base_freq"])
    return _with_theta({**given, **(optional(table, fields, "rope_scaling") or {})}, fields["rope_theta"])


def _with_theta(given: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """The parameters that are not null, with the base that a model has where they have none."""
    return {"rope_theta": theta, **{name: x for name, x in given.items() if x is not None}}


def _type_of(given: Fields) -> str:
    """The type of a rope, by its new name or its old one."""
    kind, old = (optional(string, given, name) for name in ("rope_type", "type"))
    if kind is not None and old is not None and kind != old:
        raise UnsupportedModel(f"rope_type {kind!r} is not type {old!r}, which stands beside it.")
    kind = kind or old or "default"
    if kind not in TYPES:
        raise UnsupportedModel(f"rope_type {kind!r} is not among {', '.join(TYPES)}.")
    return kind


def _with_numbers(rope: Rope, given: Fields, fields: Fields) -> Rope:
    """The rope with the numbers of its type."""

    def number(name: str) -> float:
        if given.get(name) is None:
            raise UnsupportedModel(f"rope_type {rope.type!r} needs {name}.")
        return positive_number(given, name)

    if rope.type == "default":
        return rope
    if rope.type == "linear":
        return replace(rope, factor=number("factor"))
    positions = positive_integer(fields, "max_position_embeddings")
    if rope.type == "dynamic":
        if rope.size < 4:
            raise UnsupportedModel(f"rope_type 'dynamic' needs heads of at least 4 numbers, got {rope.size}.")
        return replace(rope, factor=number("factor"), original=positions)
    original = optional(positive_integer, given, "original_max_position_embeddings") or positions
    if rope.type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"high_freq_factor = {high} must be above low_freq_factor = {low}.")
        return replace(rope, factor=number("factor"), original=original, low=low, high=high)
    return _with_yarn(replace(rope, original=original), given, positions / original)


def _with_yarn(rope: Rope, given: Fields, ratio: float) -> Rope:
    """The rope with the numbers of YaRN; `ratio` is the factor where none is given."""
    if rope.base <= 1:
        raise UnsupportedModel(f"rope_type 'yarn' needs a rope_theta above 1, got {rope.base}.")
    factor = optional(positive_number, given, "factor") or ratio
    return replace(
        rope,
        factor=factor,
        low=optional(positive_number, given, "beta_slow") or 1.0,
        high=optional(positive_number, given, "beta_fast") or 32.0,
        truncates=boolean({"truncate": True, **given}, "truncate"),
        attention=optional(positive_number, given, "attention_factor") or _attention(given, factor),
    )


def _attention(given: Fields, factor: float) -> float:
    """What YaRN multiplies cosines and sines by."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, of_all = (_unless_zero(given, name) for name in ("mscale", "mscale_all_dim"))
    return of(weight) / of(of_all) if weight and of_all else of(1)


def _unless_zero(given: Fields, name: str) -> float | None:
    """A positive number, or None where it is 0, which checkpoints write for none."""
    return None if given.get(name) == 0 else optional(positive_number, given, name)
