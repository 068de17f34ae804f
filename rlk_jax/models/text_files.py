"""The text files of a checkpoint. One that cannot be read is a ValueError that names it, in one line."""

import json
from pathlib import Path
from typing import Any

from rlk_jax.core.named_functions import first_line


def read_text(path: Path) -> str:
    """The text in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {first_line(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return found
