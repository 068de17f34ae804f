"""Fields of the JSON files of a checkpoint, read by type: a value of another type is an error that names its field."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]
_LARGEST_INTEGER, _LARGEST_NUMBER = np.iinfo(np.int32).max, float(np.finfo(np.float32).max)


class UnsupportedModel(ValueError):
    """A checkpoint that `rlk_jax.models` does not compute as its authors do; the text names the field."""


def optional[Value](read: Callable[[Fields, str], Value], fields: Fields, name: str) -> Value | None:
    """What `read` gives, or None for a field that is missing or null."""
    return None if fields.get(name) is None else read(fields, name)


def positive_integer(fields: Fields, name: str) -> int:
    """A field that is an integer of at least 1 that an int32 holds."""
    value: Any = fields.get(name)
    _require(type(value) is int and 1 <= value <= _LARGEST_INTEGER, name, "a positive integer", value)
    return int(value)


def natural_number(fields: Fields, name: str) -> int:
    """A field that is an integer of at least 0 that an int32 holds."""
    value: Any = fields.get(name)
    _require(type(value) is int and 0 <= value <= _LARGEST_INTEGER, name, "an integer of at least 0", value)
    return int(value)


def positive_number(fields: Fields, name: str) -> float:
    """A field that is a number above 0 that a float32 holds."""
    value: Any = fields.get(name)
    _require(type(value) in (int, float) and 0 < value <= _LARGEST_NUMBER, name, "a positive number", value)
    return float(value)


def boolean(fields: Fields, name: str) -> bool:
    """A field that is true or false."""
    value: Any = fields.get(name)
    _require(type(value) is bool, name, "true or false", value)
    return bool(value)


def string(fields: Fields, name: str) -> str:
    """A field that is a string."""
    value: Any = fields.get(name)
    _require(type(value) is str, name, "a string", value)
    return str(value)


def strings(fields: Fields, name: str) -> list[str]:
    """A field that is a list of strings."""
    value: Any = fields.get(name)
    _require(type(value) is list and all(type(x) is str for x in value), name, "a list of strings", value)
    return list(value)


def table(fields: Fields, name: str) -> dict[str, Any]:
    """A field that is an object of fields."""
    value: Any = fields.get(name)
    _require(isinstance(value, Mapping), name, "an object", value)
    return dict(value)


def _require(condition: bool, name: str, kind: str, value: Any) -> None:
    if not condition:
        raise UnsupportedModel(f"{name} must be {kind}, got {value!r}.")
