"""Completions of a run with their rewards: as JSON lines in a file, and as a table on the terminal."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Column, Table

from rlk_jax.core.files import written_whole
from rlk_jax.core.terminal import escaped
from rlk_jax.grpo.config import BadInput


class Sample(NamedTuple):
    """One completion."""

    step: int
    """Counted as in the metrics. It is −1 for held-out prompts before training, and one more than the last step after
    it.
    """
    prompt: str
    """The text that the model was given; a chat is its messages, one line per message, "role: content"."""
    completion: str
    rewards: dict[str, float]
    """By the name of the reward."""
    reward: float
    """All rewards combined."""
    tokens: int
    ended: bool
    """False where the completion ran into the limit of tokens."""


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Append each sample to a file as a line of JSON."""
    lines = [json.dumps(x._asdict(), ensure_ascii=False) + "\n" for x in samples]
    # A lone surrogate, which UTF-8 cannot hold, becomes \udc80 or the like: JSON reads that as the surrogate again.
    with path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.writelines(lines)


def read_samples(path: Path) -> list[Sample]:
    """All samples of a file. A last line without its end, which a killed run leaves, is left out.

    Raises BadInput naming another line that holds no sample.
    """
    return [sample for _, sample in _lines(path)]


def cut_after(path: Path, step: int) -> None:
    """Drop the samples of this step and later ones, which a resumed run writes again, and a last line without its end.

    The file is replaced whole or not at all. One that is not there stays so.
    """
    if not path.exists():
        return
    with written_whole(path) as new, new.open("wb") as file:
        file.writelines(line for line, sample in _lines(path) if sample.step < step)


def _lines(path: Path) -> Iterator[tuple[bytes, Sample]]:
    """The whole lines of a file, and the sample that each of them holds."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    yield line, Sample(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise BadInput(f"{path}, line {number}: not a completion with its rewards") from error


def samples_table(samples: Sequence[Sample], width: int) -> Table:
    """A table of samples that is `width` columns wide. Each text is shown as it is, without what would move the cursor
    or colour the terminal: ⏎ is a new line, and other control characters are escaped. Of long texts the middle is left
    out.
    """
    table = Table(
        Column("prompt", ratio=2, overflow="fold"),
        Column("completion", ratio=3, overflow="fold"),
        Column("reward", max_width=width // 3, overflow="fold"),
        width=width,
        show_lines=True,
    )
    for sample in samples:
        prompt, completion = _cut(_visible(sample.prompt), width), _cut(_visible(sample.completion), 3 * width)
        measured = "\n".join([*map(_visible, rewards_texts(sample)), *length_texts(sample), f"step {sample.step}"])
        table.add_row(prompt, completion, measured)
    return table


def rewards_texts(sample: Sample) -> list[str]:
    """The combined reward, for a person to read; where several make it up, each of them too, with its name."""
    named = [f"{name} {x:.3f}" for name, x in sample.rewards.items()]
    return [f"{sample.reward:.3f}", *(named if len(named) > 1 else [])]


def gain_text(before: float, after: float) -> str:
    """By how much a reward has risen, with its sign, for a person to read."""
    return f"{after - before:+.3f}"


def length_texts(sample: Sample) -> list[str]:
    """The length of a completion, for a person to read, and that the limit cut it where that is so."""
    return [f"{sample.tokens} token{'' if sample.tokens == 1 else 's'}", *([] if sample.ended else ["at limit"])]


def _visible(text: str) -> str:
    """A text on one line, in which every character can be seen and none does anything to a terminal."""
    return escaped(text.replace("\n", "⏎"))


def _cut(text: str, length: int) -> str:
    """A text of at most so many characters: the middle of a longer one becomes …"""
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"
