"""Prompts of a given model: rows of a file as tokens, split into train and held-out ones, and the reward of texts."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.prompt_rows import Messages, PromptRows, read_rows
from rlk_jax.grpo.rewards import Rewards, load_rewards
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.shortage import GIVEN_MODEL_REMEDY, Longest
from rlk_jax.grpo.tasks import held_out, require_rows
from rlk_jax.models import ModelConfig, Tokenizer, load_tokenizer
from rlk_jax.models.checkpoint import check, weight_files


@dataclass(frozen=True)
class TextRows:
    """Prompts with their columns, on the host. Token ids are padded on the left, so every completion starts at the same
    slot.
    """

    prompts: Sequence[str | Messages]
    columns: Mapping[str, Sequence[Any]]
    prompt_ids: Int[np.ndarray, "N P"]
    padding: Int[np.ndarray, "N"]

    def take(self, rows: Int[np.ndarray, "M"]) -> "TextRows":
        """The rows of these numbers."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return TextRows([self.prompts[i] for i in rows], columns, self.prompt_ids[rows], self.padding[rows])


@dataclass(frozen=True)
class TextTask:
    """What a given model is trained on. Train and held-out rows have the same widths."""

    train: TextRows
    heldout: TextRows
    tokenizer: Tokenizer
    rewards: Rewards
    digests: Mapping[str, str]
    """Hashes of what a run reads, by name: a resumed run notices what has changed."""
    longest: Longest
    dropped: int
    """How many rows were left out, because their prompts are too long."""

    def scores(self, rows: TextRows, completions: Sequence[str]) -> Float32[np.ndarray, "N R"]:
        """What each reward gives for completions of the rows' prompts."""
        return self.rewards.score(rows.prompts, completions, rows.columns)


def load_text_task(config: GrpoConfig) -> TextTask:
    """The task that a configuration with a model names. Raises BadInput naming what cannot be read or is too long."""
    directory = Path(config.model or "")
    tokenizer = given_tokenizer(directory)
    rewards = load_rewards(config.reward)
    files = [Path(config.prompts or ""), *([Path(config.eval_prompts)] if config.eval_prompts else [])]
    read = [read_rows(path) for path in files]
    ids = [
        [_encoded(tokenizer, prompt, path) for prompt in rows.prompts] for path, rows in zip(files, read, strict=True)
    ]
    for path, rows in zip(files, read, strict=True):
        rewards.check_rows(rows, path)
    kept = [_short_enough(own, config.max_prompt_tokens) for own in ids]
    if len(files) == 1:
        parts = [(0, own) for own in held_out([str(read[0].prompts[i]) for i in kept[0]], kept[0])]
    else:
        parts = [(0, kept[0]), (1, kept[1])]
    given = [(files[file], own) for file, own in parts]
    require_rows(given, "prompt", most_tokens=config.max_prompt_tokens, eval_option="--eval-prompts")
    width, file, row = max((len(ids[file][i]), file, i) for file, own in parts for i in own)
    longest = Longest(shown_prompt(read[file].prompts[row]), width, config.max_new_tokens, GIVEN_MODEL_REMEDY)
    train, heldout = (_padded_rows(read[file], ids[file], own, width, tokenizer.pad_id) for file, own in parts)
    return TextTask(
        train,
        heldout,
        tokenizer,
        rewards,
        {
            "prompts_digest": digest_of_files(*files),
            "tokenizer_digest": tokenizer.digest,
            "reward_digest": rewards.digest,
            "model_digest": digest_of_model(directory),
            **({} if config.teacher is None else {"teacher_digest": digest_of_model(Path(config.teacher))}),
            # The last one: what is named above changes it too.
            "prompt_ids_digest": _digest_of_rows(train, heldout),
        },
        longest,
        sum(map(len, ids)) - sum(map(len, kept)),
    )


def check_weights(directory: str) -> None:
    """Raise BadInput for a checkpoint whose weights cannot be read. `load_text_task` does not need them."""
    with unsupported_is_bad_input():
        check(directory)


def shown_prompt(prompt: str | Messages) -> str:
    """A prompt as people read it: a chat is its messages, one to a line."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{x['role']}: {x['content']}" for x in prompt)


def warn_beyond(described: ModelConfig, tokens: int, command: str) -> None:
    """Say on stderr, in the name of a command, that a model may read more tokens than it was made for."""
    if described.positions is not None and tokens > described.positions:
        made = f"prompt and completion have up to {tokens} tokens, and the model was made for {described.positions}"
        print(f"{command}: warning: {made}", file=sys.stderr)


def given_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises BadInput for one that is missing or not supported."""
    _check_no_run(directory)
    with unsupported_is_bad_input():
        return load_tokenizer(directory)


def _check_no_run(directory: Path) -> None:
    """Raise BadInput for the folder of a run, whose checkpoints are no models, and say how to get its model."""
    try:
        fields = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return
    if not (isinstance(fields, dict) and {GrpoConfig.files_digest, SftConfig.files_digest} & fields.keys()):
        return
    if fields.get("model") is None:
        raise BadInput(f"{directory} is the folder of a run of the built-in policy, which is no checkpoint's model")
    way = "that run's command with --resume --save-hf DIR writes its model to DIR"
    raise BadInput(f"{directory} is the folder of a run and no checkpoint: {way}")


def digest_of_model(directory: Path) -> str:
    """A hash of a checkpoint's sizes and weights, as far as these are there. Raises BadInput for damaged files."""
    with unsupported_is_bad_input():
        files = weight_files(directory)
    return digest_of_files(directory / "config.json", *files)


@contextmanager
def unsupported_is_bad_input() -> Iterator[None]:
    """A context in which what is wrong with a checkpoint is a mistake of the user."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from error


def _encoded(tokenizer: Tokenizer, prompt: str | Messages, path: Path) -> list[int]:
    try:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
    if not ids:
        raise BadInput(f"{path}: the prompt {shown_prompt(prompt)!r} has no tokens")
    return ids


def _short_enough(ids: Sequence[Sequence[int]], most: int | None) -> list[int]:
    """The numbers of the rows that are kept."""
    return [i for i, own in enumerate(ids) if most is None or len(own) <= most]


def _padded_rows(
    rows: PromptRows, ids: Sequence[Sequence[int]], own: Sequence[int], width: int, pad_id: int
) -> TextRows:
    """These rows, padded to the width."""
    prompt_ids = np.full((len(own), width), pad_id, np.int32)
    padding = np.array([width - len(ids[i]) for i in own], np.int32)
    for row, i in enumerate(own):
        prompt_ids[row, padding[row] :] = ids[i]
    columns = {name: [values[i] for i in own] for name, values in rows.columns.items()}
    return TextRows([rows.prompts[i] for i in own], columns, prompt_ids, padding)


def _digest_of_rows(*parts: TextRows) -> str:
    """A hash of what the model reads: a chat template may write the date into a prompt."""
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(rows.prompt_ids.tobytes() + rows.padding.tobytes())
    return digest.hexdigest()


def digest_of_files(*files: Path) -> str:
    """A hash of the files' contents, in this order."""
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
