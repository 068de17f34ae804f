"""The text files of a checkpoint. One that cannot be read is an UnsupportedModel that names it, in one line."""

import json
from pathlib import Path
from typing import Any

from rlk_jax.core.named_functions import first_line
from rlk_jax.models.fields import UnsupportedModel


def read_text(path: Path) -> str:
    """The text in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(f"{path} is no UTF-8: {first_line(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is no JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path} must hold an object, got a {type(found).__name__}.")
    return found


def object_if_there(path: Path) -> dict[str, Any]:
    """The same; an empty one where there is no file."""
    return read_object(path) if path.exists() else {}
