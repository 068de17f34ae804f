"""Prompts with their completions: rows of a file as tokens, split into train and held-out ones."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlk_jax import models
from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo.json_lines import read_json_lines, text_of
from rlk_jax.grpo.prompt_rows import Messages, check_prompt
from rlk_jax.grpo.run_config import BadInput
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.shortage import Longest
from rlk_jax.grpo.tasks import held_out, require_rows
from rlk_jax.grpo.text_task import (
    digest_of_files,
    digest_of_model,
    given_tokenizer,
    shown_prompt,
    unsupported_is_bad_input,
)
from rlk_jax.models import Tokenizer

_COMPLETED = '{"prompt": "2+2=", "completion": "4"}, where a prompt may be [{"role": "user", "content": "2+2="}]'
_REMEDY = "--max-tokens, --micro-batches, --rows-per-step and --remat make a step smaller"


class Demonstration(NamedTuple):
    """A prompt with its completion, as tokens. The last token of the completion ends it."""

    prompt: str | Messages
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]

    @property
    def tokens(self) -> int:
        """How many tokens both have."""
        return len(self.prompt_ids) + len(self.completion_ids)


class Widths(NamedTuple):
    """The tokens of the longest row, and those of the longest completion."""

    row: int
    completion: int


@dataclass(frozen=True)
class SftTask:
    """What a given model is trained on, on the host."""

    train: Sequence[Demonstration]
    heldout: Sequence[Demonstration]
    widths: Widths
    tokenizer: Tokenizer
    digests: Mapping[str, str]
    """Hashes of what a run reads, by name: a resumed run notices what has changed."""
    longest: Longest
    dropped: int
    """How many rows were left out, because they are too long."""

    def sequences(self, rows: Sequence[Demonstration | None]) -> Sequences:
        """These rows, padded on the left; the targets of the last slots are the tokens of completions. None stands for
        a row without targets.
        """
        count, (width, targets) = len(rows), self.widths
        token_ids = np.full((count, width), self.tokenizer.pad_id, np.int32)
        target_ids = np.full((count, targets), IGNORED, np.int32)
        padding = np.full(count, width - 2, np.int32)  # A row without targets has one token, as all have at least.
        for i, row in enumerate(rows):
            if row is not None:
                padding[i] = width - row.tokens
                token_ids[i, padding[i] :] = [*row.prompt_ids, *row.completion_ids]
                target_ids[i, targets - len(row.completion_ids) :] = row.completion_ids
        given: Any = token_ids[:, :-1], padding, target_ids
        return Sequences(*given)


def load_sft_task(config: SftConfig) -> SftTask:
    """The task that a configuration names. Raises BadInput naming the file, and the line where one is wrong."""
    directory = Path(config.model or "")
    tokenizer = given_tokenizer(directory)
    with unsupported_is_bad_input():
        positions = models.read_config(directory).positions
    files = [Path(config.data or ""), *([Path(config.eval_data)] if config.eval_data else [])]
    read = [_demonstrations(path, tokenizer) for path in files]
    kept = [_no_longer_than(own, config.max_tokens) for own in read]
    for path, own in zip(files, kept, strict=True):
        _check_lengths(path, own, positions)
    parts = [[row for _, row in own] for own in kept]
    if len(parts) == 1:
        numbers = held_out([str(row.prompt) for row in parts[0]], range(len(parts[0])))
        parts = [[parts[0][i] for i in which] for which in numbers]
    train, heldout = parts
    given = [(files[0], train), (files[-1], heldout)]
    require_rows(given, "row", most_tokens=config.max_tokens, eval_option="--eval-data")
    every = [*train, *heldout]
    widths = Widths(max(row.tokens for row in every), max(len(row.completion_ids) for row in every))
    first = max(every, key=lambda row: len(row.prompt_ids))
    return SftTask(
        train,
        heldout,
        widths,
        tokenizer,
        {
            "data_digest": digest_of_files(*files),
            "tokenizer_digest": tokenizer.digest,
            "model_digest": digest_of_model(directory),
            # The last one: what is named above changes it too.
            "token_ids_digest": _digest_of_tokens(train, heldout),
        },
        Longest(shown_prompt(first.prompt), len(first.prompt_ids), widths.completion, _REMEDY),
        sum(map(len, read)) - len(every),
    )


def _demonstrations(path: Path, tokenizer: Tokenizer) -> list[tuple[int, Demonstration]]:
    """The rows of a file behind the numbers of their lines; keys beside prompt and completion are ignored."""

    def read(entry: dict[str, Any]) -> Demonstration:
        check_prompt(entry)
        prompt, completion = entry["prompt"], text_of(entry, "completion")
        if isinstance(prompt, str):
            prompt_ids, completion_ids = tokenizer.encode(prompt), tokenizer.completion(completion)
        else:
            prompt_ids, completion_ids = tokenizer.chat(prompt), tokenizer.completion(completion, prompt)
        if not prompt_ids:
            raise ValueError('"prompt" has no tokens')
        return Demonstration(prompt, prompt_ids, completion_ids)

    return read_json_lines(path, read, _COMPLETED)


def _no_longer_than(rows: Sequence[tuple[int, Demonstration]], most: int | None) -> list[tuple[int, Demonstration]]:
    return [(line, row) for line, row in rows if most is None or row.tokens <= most]


def _check_lengths(path: Path, rows: Sequence[tuple[int, Demonstration]], positions: int | None) -> None:
    """No row that is kept has more tokens than the model was made for."""
    for line, row in rows:
        if positions is not None and row.tokens > positions:
            raise BadInput(
                f"{path}, line {line}: the row has {row.tokens} tokens, and the model was made for {positions}; "
                f"--max-tokens {positions} leaves such rows out"
            )


def _digest_of_tokens(*parts: Sequence[Demonstration]) -> str:
    """A hash of what the model reads: a chat template may write the date into a prompt."""
    digest = hashlib.sha256()
    for part in parts:
        for row in part:
            digest.update(f"{list(row.prompt_ids)}{list(row.completion_ids)}".encode())
    return digest.hexdigest()
