"""Prompts with one exact answer each: the built-in arithmetic, or a user's own file; split into train and held-out."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.json_lines import read_json_lines, text_of
from rlk_jax.grpo.run_config import BadField
from rlk_jax.grpo.shortage import BUILT_IN_POLICY_REMEDY, Longest, shortage_is_bad_input
from rlk_jax.grpo.vocabulary import EOS, PAD, Characters

HELDOUT_FRACTION = 0.2
_SPLIT_SEED = 0
_LINE = '{"prompt": "2+2=", "answer": "4"}'


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
    digests: Mapping[str, str]
    """A hash of all pairs by its name, by which a resumed run notices that its prompts have changed."""
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
        raise BadField(f"`vocab_size` must be at least {needed}, got {config.vocab_size}")
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
    pairs = [pair for _, pair in read_json_lines(path, _pair, _LINE)]
    kept = [pair for pair in pairs if max_prompt_tokens is None or len(pair.prompt) <= max_prompt_tokens]
    questions = _by_text([pair.prompt for pair in kept], kept)
    if len(questions) < 2:
        which = "" if max_prompt_tokens is None else f" of at most {max_prompt_tokens} tokens"
        raise BadInput(f"{path}: needs at least 2 different prompts{which} to hold one out, found {len(questions)}")
    return replace(_split(questions), dropped=len(pairs) - len(kept))


def _pair(entry: dict[str, Any]) -> Pair:
    return Pair(*(text_of(entry, key) for key in Pair._fields))


def _split(questions: list[list[Pair]]) -> Task:
    """Hold out a fixed fraction of the questions; they are the same ones for every seed of a run."""
    train, heldout = _train_and_heldout(questions)
    prompts, answers = zip(*train, *heldout, strict=True)
    characters = Characters.of(prompts + answers)
    longest_prompt = max(prompts, key=len)
    longest = Longest(longest_prompt, len(longest_prompt), max(map(len, answers)), BUILT_IN_POLICY_REMEDY)
    with shortage_is_bad_input(longest.advice):
        return Task(
            train=_encode_pairs(train, characters, longest),
            heldout=_encode_pairs(heldout, characters, longest),
            digests={"prompts_digest": hashlib.sha256(json.dumps([train, heldout]).encode()).hexdigest()},
            vocab_size=characters.size,
            longest=longest,
        )


def held_out(texts: Sequence[str], items: Sequence[int]) -> tuple[list[int], list[int]]:
    """The items, one for each text, that are trained on, and those that are held out. Equal texts are all in one part,
    which is the same for every seed of a run.
    """
    train, heldout = _train_and_heldout(_by_text(texts, items))
    return sorted(train), sorted(heldout)


def require_rows(
    parts: Sequence[tuple[Path, Sequence[Any]]], what: str, *, most_tokens: int | None, eval_option: str
) -> None:
    """Raise BadInput where the rows to train on, or those held out, are none. Each part stands behind its file."""
    (file, train), (eval_file, heldout) = parts
    at_most = "" if most_tokens is None else f" of at most {most_tokens} tokens"
    if not train and heldout and file == eval_file:
        raise BadInput(f"{file} has one prompt alone{at_most}, which is held out: give other prompts, or {eval_option}")
    for path, part, use in ((file, train, "to train on"), (eval_file, heldout, "held out")):
        if not part:
            raise BadInput(f"{path} has no {what} {use}{at_most}")


def _by_text[Item](texts: Sequence[str], items: Sequence[Item]) -> list[list[Item]]:
    """The items of equal texts together, in the order in which texts come first."""
    groups: dict[str, list[Item]] = {}
    for text, item in zip(texts, items, strict=True):
        groups.setdefault(text, []).append(item)
    return list(groups.values())


def _train_and_heldout[Item](groups: Sequence[Sequence[Item]]) -> tuple[list[Item], list[Item]]:
    """The items of the groups that are trained on, and those of the held-out ones, in a fixed random order."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(groups))
    held = max(1, round(HELDOUT_FRACTION * len(groups)))
    train, heldout = ([item for index in part for item in groups[index]] for part in (order[held:], order[:held]))
    return train, heldout


def _encode_pairs(pairs: list[Pair], characters: Characters, longest: Longest) -> Examples:
    prompt_width, answer_width = longest.prompt_tokens, longest.completion_tokens + 1
    prompt_ids = np.full((len(pairs), prompt_width), PAD, np.int32)
    answer_ids = np.full((len(pairs), answer_width), PAD, np.int32)
    for row, pair in enumerate(pairs):
        prompt_ids[row, prompt_width - len(pair.prompt) :] = characters.encode(pair.prompt)
        answer_ids[row, : len(pair.answer) + 1] = [*characters.encode(pair.answer), EOS]
    padding = (prompt_ids == PAD).sum(axis=1, dtype=np.int32)
    return Examples(jnp.asarray(prompt_ids), jnp.asarray(padding), jnp.asarray(answer_ids))
