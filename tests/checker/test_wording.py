"""What `rlk check` prints says what failed, and what to do about it."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest

from rlk_jax import cli
from rlk_jax.checker import Sizes, command, listing
from rlk_jax.checker.inputs import Draw
from rlk_jax.checker.specs import SPECS
from rlk_jax.core.terminal import OutputConsole

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "checker.md"
SMALL = ("--batch", "1", "--seq", "2", "--vocab", "17")
PLANTED = "tests.support.planted:"


def printed(capsys, *options) -> str:
    """What a check prints whose candidate fails."""
    assert cli.main(["check", *options]) == 1
    return capsys.readouterr().out


def test_a_gradient_that_must_not_be_is_to_be_detached(capsys):
    said = printed(
        capsys, "--op", "ratio_kl", "--candidate", f"{PLANTED}gradient_of_the_reference", "--check-grad", *SMALL
    )
    assert (
        "fault:gradient:ref_logits the candidate gives ref_logits a gradient, and it must have none: detach it "
        "(stop_gradient in JAX) passed=False"
    ) in said


def test_bits_are_those_of_the_first_call(capsys):
    """Wrong results may have the same bits in every call."""
    wrong = ("--candidate", f"{PLANTED}off_by_one_target", "--check-grad", "--check-invariance")
    said = [line for line in printed(capsys, *wrong, *SMALL).splitlines() if " bits " in line]
    assert len(said) == 6 and all("same bits as in the first call" in line for line in said)
    said = printed(capsys, "--op", "det_gemm", "--candidate", f"{PLANTED}doubled_without_gradients", *wrong[2:])
    assert "forward:c other bits than in the first call" in said


def test_failed_checks_are_named_at_the_end(capsys):
    """A line for each case names them. Where there are many candidates, the line of a failed check names its own."""
    wrong = ("--candidate", f"{PLANTED}off_by_one_target", *SMALL)
    *lines, last = printed(capsys, *wrong, "--check-grad").splitlines()
    assert last == "failed 3 of 4 checks of case=logp-fp32-1x2x17: logp, gradient:logits, forward:logp"
    assert not any(line.startswith("failed ") for line in lines)
    line = printed(capsys, *wrong, "--all", "--op", "logp", "--dtype", "fp32", "--input-mode", "peaked").splitlines()[
        -2
    ]
    assert line.startswith(f"candidate={PLANTED}off_by_one_target case=logp-fp32-1x2x17-peaked output=0 logp ")


@pytest.mark.parametrize(
    ("op", "bug", "check", "row"),
    [
        ("logp", "wrong_beyond_64_rows", "--check-invariance", r"\d\d? % +│ differ"),
        ("ratio_kl", "gradient_of_the_reference", "--check-grad", "– +│ not asked for"),
    ],
    ids=["bits", "values"],
)
def test_a_row_of_the_table_says_whether_bits_or_values_failed(op, bug, check, row, capsys):
    given = ("--all", "--op", op, "--dtype", "fp32", "--input-mode", "random", "--candidate", PLANTED + bug)
    assert re.search(rf"│ {row} +│ FAIL +│$", printed(capsys, *given, check, *SMALL), re.MULTILINE)


def test_a_narrow_table_cuts_no_cell(capsys, monkeypatch):
    monkeypatch.setattr(command, "_ANY_WIDTH", 80)
    said = printed(capsys, "--all", "--op", "logp", "--dtype", "fp32", "--candidate", f"{PLANTED}off_by_one_target")
    table = [line.split("│") for line in said.splitlines() if line.startswith("│")]
    assert "".join(cells[2].strip() for cells in table) == f"{PLANTED}off_by_one_target"


@pytest.mark.parametrize("op", SPECS)
def test_a_list_gives_the_shapes_of_all_arrays(op, capsys):
    """Dimensions that are named hold at other sizes, too."""
    assert cli.main(["check", "--list", "--op", op, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out).values()
    spec, draw = SPECS[op], Draw(sizes=Sizes(batch=12, seq=19, vocab=101, hidden=40, k_dim=51, n_dim=52))
    problem, known = spec.problem(draw), listing.dimensions(spec.sizes(draw.sizes))
    arrays = [*problem.inputs.items(), *problem.options.items(), *problem.upstream.items()]
    for name, x in ((name, x) for name, x in arrays if isinstance(x, np.ndarray)):
        (text,) = {
            found[1]
            for line in (*said["shapes"], *said["option_values"], *said["output_shapes"])
            if (found := re.fullmatch(rf"{name} \[(.*)\]( \w+)?", line))
        }
        assert tuple(known.get(size) or int(size) for size in text.split(", ") if size) == x.shape


def test_a_list_gives_the_values_of_options_in_all_modes(capsys):
    values = {}
    for given in (["attention"], ["ranked_linear_logp", "--vocab", "17"]):
        assert cli.main(["check", "--list", "--op", *given]) == 0
        op, *lines = capsys.readouterr().out.splitlines()
        assert op == given[0] and [line for line in lines if not line.startswith(" ")] == ["input modes"]
        (values[op],) = (line for line in lines if line.startswith("  option values: "))
    assert values["attention"].endswith("sliding_window None or 70, logit_softcap None or 1.5")
    assert "return_top_k 17, " in values["ranked_linear_logp"]


def test_a_terminal_shows_what_is_checked(capsys, monkeypatch):
    """A pipe shows nothing of it."""
    given = ("check", "--all", "--op", "logp", "--dtype", "fp32", "--candidate", "xla", "--input-mode", "random")
    assert cli.main([*given, *SMALL]) == 0 and capsys.readouterr().err == ""
    terminal = functools.partial(OutputConsole, force_terminal=True)
    monkeypatch.setattr(command, "OutputConsole", terminal)
    assert cli.main([*given, *SMALL]) == 0
    said = capsys.readouterr()
    assert "checking logp, xla, fp32" in said.err and "checking" not in said.out


def test_the_docs_show_what_a_list_says(capsys):
    assert cli.main(["check", "--list", "--op", "linear_logp"]) == 0
    listed = capsys.readouterr().out.splitlines()[:7]
    assert "\n".join(f"    {line}" for line in listed) in DOCS.read_text()
