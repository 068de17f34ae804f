"""Prompts with columns of any kind, for rewards that functions give: the rows of a JSONL file."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.json_lines import JSON_KINDS, check_characters, read_json_lines, text_of

Messages = list[dict[str, str]]
"""A chat: each message has the keys `role` and `content`."""
ARGUMENTS = ("prompts", "completions")
"""What a reward function is given beside the columns, so no column may have these names."""
_ROW = '{"prompt": "2+2=", "answer": "4"} or {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}'


class PromptRows(NamedTuple):
    """The rows of a prompts file."""

    prompts: list[str | Messages]
    columns: dict[str, list[Any]]
    """Every other key of the file, with one value per row: None where a row lacks it."""
    lines: list[int]
    """The line of the file that each row comes from, for messages."""
    lacking: dict[str, list[int]]
    """For each column, the lines of the file that lack it."""


def read_rows(path: Path) -> PromptRows:
    """The rows of a JSONL file. `prompt` is a text or a list of chat messages; blank lines are left out.

    Raises BadInput naming the file and line.
    """
    found = read_json_lines(path, _checked_row, _ROW)
    if not found:
        raise BadInput(f"{path}: there is no line with a prompt; a line reads {_ROW}")
    rows = [row for _, row in found]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return PromptRows(
        prompts=[row["prompt"] for row in rows],
        columns={name: [row.get(name) for row in rows] for name in names},
        lines=[line for line, _ in found],
        lacking={name: [line for line, row in found if name not in row] for name in names},
    )


def _checked_row(entry: dict[str, Any]) -> dict[str, Any]:
    """The object of a line, checked."""
    for name in ARGUMENTS:
        if name in entry:
            raise ValueError(f'"{name}" is what reward functions are given anyway; give the column another name')
    check_prompt(entry)
    for name, value in entry.items():
        check_characters(json.dumps([name, value], ensure_ascii=False), name)
    return entry


def check_prompt(entry: dict[str, Any]) -> None:
    """Raise ValueError where `prompt` is neither a text nor a list of chat messages."""
    prompt = entry.get("prompt")
    if not isinstance(prompt, list):
        if "prompt" in entry and not isinstance(prompt, str):
            raise ValueError(f'"prompt" must be a string or an array of chat messages, got {JSON_KINDS[type(prompt)]}')
        text_of(entry, "prompt")
        return
    if not prompt:
        raise ValueError('"prompt" must not be empty')
    for number, message in enumerate(prompt, start=1):
        try:
            _check_message(message)
        except ValueError as error:
            raise ValueError(f'message {number} of "prompt": {error}') from error


def _check_message(message: Any) -> None:
    """Raise ValueError where a value is no chat message. Its other texts, such as a name, are for the chat template."""
    if not isinstance(message, dict):
        raise ValueError(f'expected an object with "role" and "content", got {JSON_KINDS[type(message)]}')
    text_of(message, "role")
    text_of(message, "content", may_be_empty=True)
    for key in message:
        text_of(message, key, may_be_empty=True)
