"""Prompts with one exact answer each: the built-in arithmetic, or a user's own file; split into train and held-out."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.vocabulary import EOS, PAD, encode

HELDOUT_FRACTION = 0.2
_SPLIT_SEED = 0


class Pair(NamedTuple):
    """A prompt and the one completion that is worth a reward."""

    prompt: str
    answer: str


class Examples(NamedTuple):
    """Encoded pairs. Prompts are padded on the left, so every completion starts at the same slot."""

    prompt_ids: Int[Array, "N P"]
    padding: Int[Array, "N"]
    """How many PAD slots stand before each prompt."""
    answer_ids: Int[Array, "N C"]
    """The answer, EOS, then PAD."""


@dataclass(frozen=True)
class Task:
    """Train and held-out examples. They have the same widths and no prompt in common."""

    train: Examples
    heldout: Examples
    digest: str
    """A hash of all pairs, by which a resumed run notices that its prompts have changed."""


def completion_mask(completion_ids: Int[Array, "*B C"]) -> Bool[Array, "*B C"]:
    """True up to and including the first EOS: these are the tokens that the policy chose."""
    ended = completion_ids == EOS
    return ended.cumsum(axis=-1) - ended == 0


def exact_answer_reward(completion_ids: Int[Array, "B C"], answer_ids: Int[Array, "B C"]) -> Bool[Array, "B"]:
    """True where a completion is the answer, character for character, and then EOS."""
    return ((completion_ids == answer_ids) | ~completion_mask(answer_ids)).all(axis=-1)


def load_task(config: GrpoConfig) -> Task:
    """The task that a configuration names. Raises BadInput for a prompts file that `load_prompts` refuses."""
    return arithmetic_task(config.max_operand) if config.prompts is None else load_prompts(Path(config.prompts))


def arithmetic_task(max_operand: int) -> Task:
    """Sums `a+b=` for a, b in 0..max_operand. `a+b` and `b+a` are both in train or both held out."""
    operands = range(max_operand + 1)
    questions = [sorted({(a, b), (b, a)}) for a in operands for b in operands if a <= b]
    return _split([[Pair(f"{a}+{b}=", str(a + b)) for a, b in question] for question in questions])


def load_prompts(path: Path) -> Task:
    """Task from a JSONL file of `{"prompt": ..., "answer": ...}` lines; other keys and blank lines are ignored.

    Equal prompts are all in train or all held out. Raises BadInput naming the file and line.
    """
    try:
        # splitlines would also cut at characters that JSON strings may hold, such as U+2028.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read prompts file {path}: {error}") from error
    questions: dict[str, list[Pair]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            pair = _parse_pair(line.removesuffix("\r"))
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: {error}") from error
        questions.setdefault(pair.prompt, []).append(pair)
    if len(questions) < 2:
        raise BadInput(f"{path}: needs at least 2 different prompts to hold one out, found {len(questions)}")
    return _split(list(questions.values()))


def _parse_pair(line: str) -> Pair:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deep") from error
    if not isinstance(entry, dict):
        raise ValueError('expected an object {"prompt": ..., "answer": ...}')
    for key in Pair._fields:
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise ValueError(f'"{key}" must be a non-empty string')
        encode(entry[key])
    return Pair(entry["prompt"], entry["answer"])


def _split(questions: list[list[Pair]]) -> Task:
    """Hold out a fixed fraction of the questions; they are the same ones for every seed of a run."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(questions))
    held = max(1, round(HELDOUT_FRACTION * len(questions)))
    heldout = [pair for index in order[:held] for pair in questions[index]]
    train = [pair for index in order[held:] for pair in questions[index]]
    prompt_width = max(len(pair.prompt) for pair in train + heldout)
    answer_width = max(len(pair.answer) for pair in train + heldout) + 1
    return Task(
        train=_encode_pairs(train, prompt_width, answer_width),
        heldout=_encode_pairs(heldout, prompt_width, answer_width),
        digest=hashlib.sha256(json.dumps([train, heldout]).encode()).hexdigest(),
    )


def _encode_pairs(pairs: list[Pair], prompt_width: int, answer_width: int) -> Examples:
    prompt_ids = np.full((len(pairs), prompt_width), PAD, np.int32)
    answer_ids = np.full((len(pairs), answer_width), PAD, np.int32)
    for row, pair in enumerate(pairs):
        prompt_ids[row, prompt_width - len(pair.prompt) :] = encode(pair.prompt)
        answer_ids[row, : len(pair.answer) + 1] = [*encode(pair.answer), EOS]
    padding = (prompt_ids == PAD).sum(axis=1, dtype=np.int32)
    return Examples(jnp.asarray(prompt_ids), jnp.asarray(padding), jnp.asarray(answer_ids))
