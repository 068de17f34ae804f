"""`rlk prompts arithmetic` writes sums that `rlk grpo` reads, and refuses what gives none."""

import json
import subprocess
import sys

import pytest

from rlk_jax import cli
from rlk_jax.grpo.prompt_rows import read_rows
from rlk_jax.grpo.rewards import load_rewards

COMMAND = ["prompts", "arithmetic"]


def printed(capsys, *options: str) -> str:
    assert cli.main([*COMMAND, *options]) == 0
    return capsys.readouterr().out


def rows(capsys, *options: str) -> list[dict]:
    return [json.loads(line) for line in printed(capsys, *options).splitlines()]


def test_a_row_asks_in_a_chat(capsys):
    found = rows(capsys)
    assert len(found) == 1000
    for row in found:
        question = f"What is {row['a']} + {row['b']}? Answer with the number only."
        assert row["prompt"] == [{"role": "user", "content": question}]
        assert 0 <= min(row["a"], row["b"]) <= max(row["a"], row["b"]) <= 99
        assert row["answer"] == str(row["a"] + row["b"])


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 9), (-3, 4), (95, 99)])
def test_all_sums_are_there_once_in_one_of_both_orders(capsys, low, high):
    operands = range(low, high + 1)
    sums = {frozenset((a, b)) for a in operands for b in operands}
    found = rows(capsys, f"--count={len(sums)}", f"--min-operand={low}", f"--max-operand={high}")
    assert len(found) == len(sums) and {frozenset((row["a"], row["b"])) for row in found} == sums
    if high - low > 5:
        assert {row["a"] < row["b"] for row in found if row["a"] != row["b"]} == {True, False}
        assert [row["a"] for row in found] != sorted(row["a"] for row in found)


@pytest.mark.parametrize(("high", "count"), [(9, 55), (43, 990), (44, 1000)])
def test_a_count_that_is_not_given_is_at_most_that_of_all_sums(capsys, high, count):
    found = rows(capsys, f"--max-operand={high}")
    assert len(found) == len({frozenset((row["a"], row["b"])) for row in found}) == count


def test_the_seed_draws_the_sums(capsys):
    first, again, other = (printed(capsys, "--count=30", f"--seed={seed}") for seed in (3, 3, 4))
    assert first == again and set(first.splitlines()) != set(other.splitlines())
    assert len(rows(capsys, "--count=5", f"--max-operand={10**9}", f"--min-operand={-(10**9)}")) == 5


def test_a_template_of_ones_own_as_plain_text(capsys):
    for row in rows(capsys, "--count=9", "--plain", "--template", "日本 {b:>3} und {a} {{}}?"):
        assert row["prompt"] == f"日本 {row['b']:>3} und {row['a']} {{}}?"


def test_the_trainer_reads_what_is_written(capsys, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(printed(capsys, "--count=20"))
    found, rewards = read_rows(path), load_rewards("exact,last_number")
    rewards.check_rows(found, path)
    right = [str(a + b) for a, b in zip(found.columns["a"], found.columns["b"], strict=True)]
    assert rewards.score(found.prompts, right, found.columns).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--count=56", "--max-operand=9"], "--count 56 is more than the 55 sums of operands in 0..9"),
        (["--count=0"], "--count must be at least 1, got 0"),
        (["--min-operand=3", "--max-operand=2"], "--min-operand 3 is greater than --max-operand 2"),
        ([f"--max-operand={10**9 + 1}"], "operands must be within -1000000000..1000000000"),
        ([f"--min-operand={-(10**9) - 1}"], "operands must be within -1000000000..1000000000"),
        (["--template=Sum?"], "--template must have {a} and {b} where the operands stand: it has neither"),
        (["--template={a} + {c}"], "--template must have {a} and {b} where the operands stand: it has {a}, {c}"),
        (["--template={} + {}"], "--template must have {a} and {b} where the operands stand: it has {}"),
        (["--template={a} + {b"], "--template must have {a} and {b} where the operands stand: expected '}' before"),
        (["--template={a} + {b:s}"], "--template must have {a} and {b} where the operands stand: Unknown format code"),
        (["--template={a} + {b:{c}}"], "--template must have {a} and {b} where the operands stand: 'c'"),
    ],
)
def test_what_gives_no_sums_exits_2_with_one_line(capsys, options, reason):
    assert cli.main([*COMMAND, *options]) == 2
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert line.startswith(f"rlk prompts: error: {reason}") and not found.out


@pytest.mark.parametrize("arguments", [["prompts"], ["prompts", "poems"], [*COMMAND, "--count=many"]])
def test_bad_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("rlk prompts")


def in_a_shell(pipeline: str) -> subprocess.CompletedProcess[str]:
    """A pipeline of bash in which `$0` is `rlk prompts arithmetic`; its status is that of any part that fails."""
    rlk = " ".join([sys.executable, "-m", "rlk_jax.cli", *COMMAND])
    command = ["bash", "-c", f"set -o pipefail; {pipeline.replace('$0', rlk)}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_reader_may_stop_early():
    """5050 rows are more than a pipe holds. The status is that of a process which SIGPIPE has ended."""
    done = in_a_shell("$0 --count=5050 | head -n 2")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (141, "", 2)


def test_an_output_that_is_full_is_one_line():
    done = in_a_shell("$0 --count=5 > /dev/full")
    assert (done.returncode, done.stderr) == (2, "rlk prompts: error: [Errno 28] No space left on device\n")
