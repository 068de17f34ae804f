"""Prompts with one exact answer each: the built-in arithmetic, or a user's own file; split into train and held-out."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.shortage import Longest, shortage_is_bad_input
from rlk_jax.grpo.vocabulary import EOS, PAD, Characters

HELDOUT_FRACTION = 0.2
_SPLIT_SEED = 0
_LINE = '{"prompt": "2+2=", "answer": "4"}'
_ARRAY = "a JSON array, where each line must hold one object of its own"
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
"""What JSON calls a value, by its type in Python."""


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
    vocab_size: int
    """How many tokens the policy has."""
    longest: Longest
    dropped: int = 0
    """How many lines of a prompts file were left out, because their prompts are too long."""


def completion_mask(completion_ids: Int[Array, "*B C"]) -> Bool[Array, "*B C"]:
    """True up to and including the first EOS: these are the tokens that the policy chose."""
    ended = completion_ids == EOS
    return ended.cumsum(axis=-1) - ended == 0


def exact_answer_reward(completion_ids: Int[Array, "B C"], answer_ids: Int[Array, "B C"]) -> Bool[Array, "B"]:
    """True where a completion is the answer, character for character, and then EOS."""
    return ((completion_ids == answer_ids) | ~completion_mask(answer_ids)).all(axis=-1)


def load_task(config: GrpoConfig) -> Task:
    """The task that a configuration names. Raises BadInput for a prompts file that `load_prompts` refuses, and for a
    vocabulary that is too small for its characters.
    """
    if config.prompts is None:
        task = arithmetic_task(config.max_operand)
    else:
        task = load_prompts(Path(config.prompts), config.max_prompt_tokens)
    if config.vocab_size is None:
        return task
    if config.vocab_size < task.vocab_size:
        needed = f"{task.vocab_size} for the characters of {config.prompts}"
        raise BadInput(f"vocab_size must be at least {needed}, got {config.vocab_size}")
    return replace(task, vocab_size=config.vocab_size)


def arithmetic_task(max_operand: int) -> Task:
    """Sums `a+b=` for a, b in 0..max_operand. `a+b` and `b+a` are both in train or both held out."""
    operands = range(max_operand + 1)
    questions = [sorted({(a, b), (b, a)}) for a in operands for b in operands if a <= b]
    return _split([[Pair(f"{a}+{b}=", str(a + b)) for a, b in question] for question in questions])


def load_prompts(path: Path, max_prompt_tokens: int | None = None) -> Task:
    """Task from a JSONL file of `{"prompt": ..., "answer": ...}` lines; other keys and blank lines are ignored, and so
    are longer prompts than `max_prompt_tokens`.

    Equal prompts are all in train or all held out. Raises BadInput naming the file and line.
    """
    pairs = _read_pairs(path)
    kept = [pair for pair in pairs if max_prompt_tokens is None or len(pair.prompt) <= max_prompt_tokens]
    questions: dict[str, list[Pair]] = {}
    for pair in kept:
        questions.setdefault(pair.prompt, []).append(pair)
    if len(questions) < 2:
        which = "" if max_prompt_tokens is None else f" of at most {max_prompt_tokens} tokens"
        raise BadInput(f"{path}: needs at least 2 different prompts{which} to hold one out, found {len(questions)}")
    return replace(_split(list(questions.values())), dropped=len(pairs) - len(kept))


def _read_pairs(path: Path) -> list[Pair]:
    try:
        # splitlines would also cut at characters that JSON strings may hold, such as U+2028.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read prompts file {path}: {error}") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            pairs.append(_parse_pair(line.removesuffix("\r")))
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: {error}; a line reads {_LINE}") from error
    return pairs


def _parse_pair(line: str) -> Pair:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(_ARRAY if line.lstrip().startswith("[") else f"not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deep") from error
    if isinstance(entry, list):
        raise ValueError(_ARRAY)
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {_KINDS[type(entry)]}")
    return Pair(*(_text_of(entry, key) for key in Pair._fields))


def _text_of(entry: dict[str, Any], key: str) -> str:
    """The text that an object of a prompts file has under a key. Raises ValueError where it has none."""
    if key not in entry:
        raise ValueError(f'"{key}" is missing')
    text = entry[key]
    if not isinstance(text, str):
        raise ValueError(f'"{key}" must be a string, got {_KINDS[type(text)]}')
    if not text:
        raise ValueError(f'"{key}" must not be empty')
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f'"{key}" holds {half.group()!r}, a lone surrogate, which is no character')
    return text


def _split(questions: list[list[Pair]]) -> Task:
    """Hold out a fixed fraction of the questions; they are the same ones for every seed of a run."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(questions))
    held = max(1, round(HELDOUT_FRACTION * len(questions)))
    heldout = [pair for index in order[:held] for pair in questions[index]]
    train = [pair for index in order[held:] for pair in questions[index]]
    prompts, answers = zip(*train, *heldout, strict=True)
    characters = Characters.of(prompts + answers)
    longest = Longest(max(prompts, key=len), max(answers, key=len))
    with shortage_is_bad_input(longest):
        return Task(
            train=_encode_pairs(train, characters, longest),
            heldout=_encode_pairs(heldout, characters, longest),
            digest=hashlib.sha256(json.dumps([train, heldout]).encode()).hexdigest(),
            vocab_size=characters.size,
            longest=longest,
        )


def _encode_pairs(pairs: list[Pair], characters: Characters, longest: Longest) -> Examples:
    prompt_width, answer_width = len(longest.prompt), len(longest.answer) + 1
    prompt_ids = np.full((len(pairs), prompt_width), PAD, np.int32)
    answer_ids = np.full((len(pairs), answer_width), PAD, np.int32)
    for row, pair in enumerate(pairs):
        prompt_ids[row, prompt_width - len(pair.prompt) :] = characters.encode(pair.prompt)
        answer_ids[row, : len(pair.answer) + 1] = [*characters.encode(pair.answer), EOS]
    padding = (prompt_ids == PAD).sum(axis=1, dtype=np.int32)
    return Examples(jnp.asarray(prompt_ids), jnp.asarray(padding), jnp.asarray(answer_ids))
