"""Completions of a run on disk and on the terminal."""

import io
import json
import re
import unicodedata

import pytest

from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.samples import Sample, append_samples, cut_after, read_samples, samples_table

SUM = Sample(0, "user: 1+1=", "2", {"exact": 1.0}, 1.0, tokens=2, ended=True)
TEXTS = ("two\nlines\r\n\u2028", "日本語 😀", "\x00\x1b[31mred", "half \udc80", '"quoted" \\n', "")


def printed(samples: list[Sample], width: int) -> str:
    """What a terminal with colours gets."""
    console = OutputConsole(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(samples_table(samples, width))
    return console.file.getvalue()


def cells(output: str) -> list[str]:
    """The text of each column of the body of a table with one row. A line that was too long is one again."""
    lines = [[x.strip() for x in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return ["".join(column) for column in zip(*lines, strict=True)]


def test_samples_come_back_as_they_were(tmp_path):
    path = tmp_path / "completions.jsonl"
    first = [SUM._replace(step=-1, prompt=x, completion=x) for x in TEXTS]
    second = [SUM._replace(step=7, rewards={"exact": 0.0, "form": 0.25}, reward=0.125, ended=False)]
    append_samples(path, first)
    append_samples(path, second)
    assert read_samples(path) == first + second
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["completion"] for line in lines[:-1]] == [*TEXTS, "2"] and lines[-1] == ""
    assert "日本語 😀" in lines[1]  # A person can read it.


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_last_line_without_its_end_is_no_sample(lost, tmp_path):
    path = tmp_path / "completions.jsonl"
    append_samples(path, [SUM, SUM._replace(step=1, completion="日本語")])
    path.write_bytes(path.read_bytes()[:-lost])
    assert read_samples(path) == [SUM]
    cut_after(path, 5)
    append_samples(path, [SUM._replace(step=2)])  # Nothing is left of the broken line, which would spoil this one.
    assert read_samples(path) == [SUM, SUM._replace(step=2)]


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1}', "null", '{"other": 1}', "\udcff"])
def test_another_broken_line_is_named(line, tmp_path):
    path = tmp_path / "completions.jsonl"
    append_samples(path, [SUM])
    whole = path.read_bytes() + line.encode(errors="surrogateescape") + b"\n"
    path.write_bytes(whole)
    for call in (read_samples, lambda x: cut_after(x, 0)):
        with pytest.raises(BadInput, match=r"^\S+completions.jsonl, line 2: not a completion with its rewards$"):
            call(path)
    assert path.read_bytes() == whole and list(tmp_path.iterdir()) == [path]


def test_a_resumed_run_drops_what_it_writes_again(tmp_path):
    path = tmp_path / "completions.jsonl"
    cut_after(path, 3)
    assert not path.exists()
    samples = [SUM._replace(step=step, completion=f"{step}") for step in (-1, 0, 2, 3, 4, 1)]
    append_samples(path, samples)
    cut_after(path, 3)
    assert [x.step for x in read_samples(path)] == [-1, 0, 2, 1]
    cut_after(path, 0)
    assert read_samples(path) == samples[:1] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/]", "[link=x]", ":smile:", "a  b", "日本語", "\u3000x"])
def test_a_table_shows_texts_as_they_are(text):
    prompt, completion, _ = cells(printed([SUM._replace(prompt=f">{text}<", completion=f">{text}<")], 120))
    assert prompt == completion == f">{text}<"


def test_a_table_lets_no_control_character_through():
    text = "".join(map(chr, range(0x20))) + "\x7f\x9b2J\u202e\udc80\u2028[red]"
    sample = SUM._replace(prompt=text, completion=text, rewards={text: 1.0, "form": 0.0})
    output = printed([sample], 300)
    other = set(re.sub(r"\x1b\[(\d+(;\d+)*)?m", "", output))  # Colours are rich's own.
    assert {x for x in other if unicodedata.category(x)[0] == "C" or x == "\u2028"} == {"\n"}
    assert output.count("\x1b") == printed([SUM._replace(rewards={"exact": 1.0, "form": 0.0})], 300).count("\x1b")
    for shown in (r"\x00", "⏎", r"\x1b", r"\x9b2J", r"\u202e", r"\udc80", r"\u2028[red]"):
        assert cells(output)[1].count(shown) == 1


def test_a_table_cuts_long_texts_in_their_middle():
    long = "".join(chr(0x4E00 + i) for i in range(1000))
    prompt, completion, _ = cells(printed([SUM._replace(prompt=long, completion=long)], 100))
    for cell, length in ((prompt, 100), (completion, 300)):
        head, tail = cell.split("…")
        assert long.startswith(head) and long.endswith(tail) and len(cell) == length
        assert abs(len(head) - len(tail)) <= 1
    exact = SUM._replace(prompt="p" * 100, completion="c" * 300)
    assert cells(printed([exact], 100))[:2] == [exact.prompt, exact.completion]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_says_rewards_and_length_in_any_width(width):
    several = SUM._replace(step=12, rewards={"exact": 0.0, "form": 1.0}, reward=0.25, tokens=16, ended=False)
    output = printed([SUM._replace(completion="word " * 99), several], width)
    lines = [x.split("│")[3].strip() for x in output.splitlines() if x.startswith("│")]
    assert [x for x in lines if x] == [
        *("1.000", "2 tokens", "step 0"),
        *("0.250", "exact 0.000", "form 1.000", "16 tokens", "at limit", "step 12"),
    ]
    widths = {len(re.sub(r"\x1b\[[\d;]*m", "", x)) for x in output.splitlines()}
    assert widths == {width}
