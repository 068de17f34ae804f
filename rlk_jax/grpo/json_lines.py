"""Files of JSON lines that users write: each mistake is BadInput that names the file and the line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlk_jax.grpo.config import BadInput

_ARRAY = "a JSON array, where each line must hold one object of its own"
JSON_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
"""What JSON calls a value, by its type in Python."""


def read_json_lines[T](path: Path, read: Callable[[dict[str, Any]], T], example: str) -> list[tuple[int, T]]:
    """What `read` makes of the object on each line of a file, behind the line's number; blank lines are left out.

    Raises BadInput for a file that cannot be read, and for a line that is no object or for which `read` raises
    ValueError: its message then names the file and the line, and ends with the example of a line.
    """
    try:
        # splitlines would also cut at characters that JSON strings may hold, such as U+2028.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read file {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append((number, read(_object(line.removesuffix("\r")))))
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: {error}; a line reads {example}") from error
    return found


def text_of(entry: dict[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    """The text that an object has under a key. Raises ValueError where it has none."""
    if key not in entry:
        raise ValueError(f'"{key}" is missing')
    text = entry[key]
    if not isinstance(text, str):
        raise ValueError(f'"{key}" must be a string, got {JSON_KINDS[type(text)]}')
    if not text and not may_be_empty:
        raise ValueError(f'"{key}" must not be empty')
    check_characters(text, key)
    return text


def check_characters(text: str, key: str) -> None:
    """Raise ValueError where a text, which an object has under this key, holds half of a surrogate pair."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f'"{key}" holds {half.group()!r}, a lone surrogate, which is no character')


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(_ARRAY if line.lstrip().startswith("[") else f"not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deep") from error
    if isinstance(entry, list):
        raise ValueError(_ARRAY)
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {JSON_KINDS[type(entry)]}")
    return entry
