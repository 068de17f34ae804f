"""The operator checker: planted bugs are caught by the checks that the docs name, whatever a candidate does wrong is a
line of the report, and the command says what it found.
"""

import functools
import itertools
import json
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlk_jax import cli
from rlk_jax.checker import Sizes, assert_op, contract
from rlk_jax.checker.candidates import Candidate, of_function
from rlk_jax.checker.inputs import MODES, Draw
from rlk_jax.checker.options import DTYPES
from rlk_jax.checker.runner import Checks, compare, run_operator_suite
from rlk_jax.checker.specs import SPECS
from tests import planted

ROOT = pathlib.Path(__file__).parent.parent
LINE = re.compile(
    r"  case=\S+ output=\d+( \S.*)? shape=\([\d, ]*\) dtype=\w+ max_abs=\d\.\d{8}e[+-]\d+ mean_abs=\d\.\d{8}e[+-]\d+ "
    r"max_rel=\d\.\d{8}e[+-]\d+ tol=\(atol=\d\.\d{3}e[+-]\d+, rtol=\d\.\d{3}e[+-]\d+\) passed=True"
)
SMALL = ("--batch", "1", "--seq", "2", "--vocab", "17")
PLANTED = {
    "off by one target": ("logp", planted.off_by_one_target, "fp32", "random", "logp"),
    "dropped last vocab tile": ("logp", planted.dropped_last_vocab_tile, "fp32", "random", "logp"),
    "unmasked padding": ("ratio_kl", planted.unmasked_padding, "fp32", "masked-nan", "gradient:policy_logits"),
    "bf16 accumulation at K = 4096": ("det_gemm", planted.bf16_accumulation, "bf16", "random", "c"),
    "N-dependent split": ("det_gemm", planted.n_dependent_split, "bf16", "random", "invariance:alone:c"),
    "swapped sign": ("ratio_kl", planted.swapped_sign, "fp32", "random", "kl"),
    "gradient right only for ones": ("logp", planted.right_only_for_ones, "fp32", "random", "gradient:logits"),
    "wrong scale of dW": ("linear_logp", planted.wrong_scale_of_dw, "fp32", "random", "gradient:lm_head_weight"),
    "clamp of bad ids": ("logp", planted.clamped_ids, "fp32", "bad-ids", "logp"),
}
"""Op, the wrong implementation, dtype; the input mode and the check that catch it."""


def checked(fn, op, mode="random", dtype="fp32", sizes=None, **checks):
    """The one case of the one candidate."""
    candidate = fn if isinstance(fn, Candidate) else of_function(fn, "planted")
    draw = Draw(mode, np.dtype(DTYPES[dtype]).name, sizes=sizes or Sizes())
    report = run_operator_suite(op, candidates=[candidate], cases=[draw], checks=Checks(**checks))
    return report.candidates[0].cases[0]


def failed(case) -> list[str]:
    return [x.name for x in case.outputs if not x.passed]


EVERYTHING = {"gradients": True, "invariance": True}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught_by_the_check_that_the_docs_name(bug):
    op, fn, dtype, mode, check = PLANTED[bug]
    assert check in failed(checked(fn, op, mode, dtype, **EVERYTHING))
    page = (ROOT / "docs" / "checker.md").read_text()
    assert f"| {bug} | {op} | `{mode}` | `{check}` |" in page
    with pytest.raises(AssertionError, match="passed=False"):
        assert_op(fn, op=op, dtype=dtype, modes=[mode], check_invariance=True)


def test_a_gradient_right_only_for_ones_passes_with_ones():
    assert not failed(checked(planted.right_only_for_ones, "logp", gradients=True, grad_mode="ones"))


@pytest.mark.parametrize("op", ["logp", "linear_logp", "ratio_kl"])
def test_what_the_bugs_were_planted_in_passes(op):
    for mode in SPECS[op].modes:
        assert not failed(checked(getattr(planted, op), op, mode, gradients=True))


def test_an_n_dependent_split_is_accurate():
    """So that it is the bits which give it away."""
    names = failed(checked(planted.n_dependent_split, "det_gemm", dtype="bf16", **EVERYTHING))
    assert names and all(x.startswith("invariance:") for x in names)
    assert not failed(checked(planted.det_gemm, "det_gemm", dtype="bf16", **EVERYTHING))


def _random_numbers(count=itertools.count()):  # noqa: B008
    return 1e-6 * next(count)


def _donates(logits, token_ids):
    found = planted.logp(logits, token_ids)
    logits.delete()
    return found


def _raises(logits, token_ids):
    raise RuntimeError("out of luck\nand more")


@jax.custom_vjp
def _raises_backward(logits, token_ids):
    return planted.logp(logits, token_ids)


_raises_backward.defvjp(lambda *x: (planted.logp(*x), x), lambda saved, g: _raises(*saved))
WRONG = {
    "exception": (_raises, "fault:forward", "raised RuntimeError: out of luck"),
    "exception in the backward": (_raises_backward, "fault:backward", "raised RuntimeError: out of luck"),
    "arity": (lambda x, ids: (planted.logp(x, ids),) * 2, "fault:forward", "gave 2 outputs instead of 1"),
    "too few arguments": (lambda x: x, "fault:forward", "raised TypeError: "),
    "shape": (lambda x, ids: planted.logp(x, ids)[:, 1:], "logp", "shape (2, 15) instead of (2, 16)"),
    "dtype": (lambda x, ids: planted.logp(x, ids).astype(jnp.float16), "logp", "dtype float16 instead of float32"),
    "NaN": (lambda x, ids: planted.logp(x, ids).at[1, 2].set(jnp.nan), "logp", "nan instead of -"),
    "no array": (lambda x, ids: "logp", "fault:forward", "raised "),
    "mutated input": (_donates, "fault:input logits", "logits was changed or given away"),
    "non-determinism": (
        lambda x, ids: planted.logp(x, ids) + _random_numbers(),
        "deterministic:logp",
        "other bits",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_candidate_does_wrong_is_a_line_of_the_report(what):
    fn, name, message = WRONG[what]
    case = checked(fn, "logp", gradients=what not in ("mutated input", "non-determinism"))
    found = {x.name: x.message for x in case.outputs if not x.passed}
    assert message in found[name]


def torch_logp(logits, token_ids):
    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]


def _adds_in_place(logits, token_ids):
    return torch_logp(logits.add_(1), token_ids)


def test_torch_functions_and_what_they_do_wrong():
    torch_candidate = functools.partial(of_function, name="mine", arrays="torch")
    for dtype in DTYPES:
        for mode in SPECS["logp"].modes:
            assert not failed(checked(torch_candidate(torch_logp), "logp", mode, dtype, gradients=True))
    detached = torch_candidate(lambda *x: torch_logp(*x).detach())
    case = checked(detached, "logp", gradients=True)
    assert [x.message for x in case.outputs if not x.passed] == ["the gradient is None"]
    assert failed(checked(torch_candidate(_adds_in_place), "logp")) == ["fault:input logits"]


def test_a_module_that_imports_torch_alone_gets_tensors(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def logp(logits, token_ids):\n"
        "    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--candidate", "mine:logp", "--check-grad", "--check-invariance", *SMALL]) == 0
    assert "candidate=mine:logp backend=mine passed=True pass_rate=1.0000" in capsys.readouterr().out


class DownstreamTest(chex.TestCase):
    """As the tests of a project that has an op of its own."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_logp(self):
        assert_op(self.variant(planted.logp), op="logp", sizes=Sizes(batch=1, seq=3, vocab=70))

    def test_options_by_other_names(self):
        def loss(policy, ref, ids, old, rewards, mask, *, group_size, beta):
            from rlk_jax import grpo_loss

            return grpo_loss(policy, ref, ids, old, rewards, mask, samples_per_prompt=group_size, beta=beta)

        names = {"samples_per_prompt": "group_size", "clip_eps": None}
        assert_op(loss, op="grpo_loss", kwargs=names, modes=["random", "masked-nan"])


@pytest.mark.parametrize(
    ("candidate", "backend"),
    [
        *(("pytorch", "reference"), ("native", "reference"), ("reference", "reference"), ("registry", "xla")),
        *(
            ("bridge", "torch_bridge:xla"),
            ("torch_bridge", "torch_bridge:xla"),
            ("tests.planted:logp", "tests.planted"),
        ),
    ],
)
def test_lines(candidate, backend, capsys):
    given = ["--op", "logp", "--candidate", candidate, "--device", "cpu", "--dtype", "fp32", *SMALL]
    assert cli.main(["check", *given]) == 0
    suite, named, *lines = capsys.readouterr().out.splitlines()
    assert suite == "suite=logp passed=True pass_rate=1.0000"
    assert named == f"candidate={candidate} backend={backend} passed=True pass_rate=1.0000"
    assert lines and all(LINE.fullmatch(line) for line in lines)
    assert lines[0].startswith("  case=logp-fp32-1x2x17 output=0 shape=(1, 2) dtype=float32 max_abs=")


def test_json_is_the_report(capsys):
    given = ("--op", "logp", "--check-grad", "--check-invariance", "--candidate", "deterministic", "--json")
    assert cli.main(["check", *given, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    (candidate,) = found["candidates"]
    (case,) = candidate["cases"]
    assert found["passed"] and found["suite_name"] == "logp" and found["total_candidates"] == 1
    assert candidate["invariance"] == "checked" and candidate["total_outputs"] == len(case["outputs"])
    names = [x["name"] for x in case["outputs"]]
    assert names[:2] == ["logp", "gradient:logits"]
    arrangements = [x.split(":")[1] for x in names if x.startswith("invariance:")]
    assert arrangements == ["alone", "reversed", "padding before", "padding behind"]
    assert sum(case["outputs"][0]["histogram"]) == 2 and case["outputs"][0]["measure"] == "norm"
    assert all(x["measure"] == "bits" for x in case["outputs"][2:])


def test_a_failure_exits_1_and_is_valid_json(capsys):
    given = ["check", "--candidate", "tests.planted:clamped_ids", "--input-mode", "bad-ids", "--json"]
    assert cli.main(given) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert not found["passed"] and found["candidates"][0]["cases"][0]["outputs"][0]["max_abs_error"] == "inf"


BAD = {
    ("--vocab", "0"): "argument --vocab: must be at least 1, got 0",
    ("--batch", "-1"): "argument --batch: must be at least 1, got -1",
    ("--seq", "two"): "argument --seq: invalid positive value: 'two'",
    ("--op", "attention"): "argument --op: invalid choice: 'attention'",
    ("--candidate", "cuda"): "logp cannot run 'cuda' here: ",
    ("--candidate", "cuda-sm90", "--device", "cpu"): "logp cannot run 'cuda' here: ",
    ("--candidate", "mosaic", "--device", "cpu"): "logp cannot run 'mosaic' here: needs compute capability 9.0",
    ("--candidate", "fastest"): "unknown candidate 'fastest'; the candidates are registry, mosaic, ",
    ("--candidate", "nowhere:logp"): "cannot load 'nowhere:logp': No module named 'nowhere'",
    ("--candidate", "tests.planted:nothing"): "cannot load 'tests.planted:nothing': ",
    ("--candidate", "tests.planted:__name__"): "'tests.planted:__name__' is not callable",
    ("--device", "cuda"): "JAX finds no cuda device here, only cpu",
    ("--dtype", "int8"): "argument --dtype: must be one of fp32, bf16, fp16, got 'int8'",
    ("--op", "det_gemm", "--dtype", "fp32"): "det_gemm takes bf16, fp16, not fp32",
    ("--input-mode", "masked-nan"): "logp has no input mode 'masked-nan'; it has random, ",
    ("--input-mode", "strange"): "argument --input-mode: invalid choice: 'strange'",
    ("--arch-key", "sm1"): "argument --arch-key: invalid choice: 'sm1'",
    ("--contract", "none"): "argument --contract: invalid choice: 'none'",
    ("--op", "grpo_loss", "--batch", "1"): "samples_per_prompt must be at least 2 for group normalization.",
    ("--report", "/nowhere/report.html", *SMALL): "cannot write --report: ",
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_a_bad_option_exits_2_with_one_clear_line(options, capsys):
    try:
        status = cli.main(["check", *options])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"rlk check: error: {BAD[options]}")
    assert len(said) == 1 or (len(said) == 2 and said[0].startswith("usage: "))


def test_list(capsys):
    assert cli.main(["check", "--list"]) == 0
    assert "  candidates: xla, deterministic, reference, bridge" in capsys.readouterr().out.splitlines()
    assert cli.main(["check", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(SPECS) and found["det_gemm"]["candidates"] == ["deterministic", "reference", "bridge"]


def test_everything_is_green_and_its_page_stands_alone(tmp_path, capsys):
    page = tmp_path / "report.html"
    assert cli.main(["check", "--all", "--check-grad", "--check-invariance", "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    for op, spec in SPECS.items():
        rows = [line for line in printed.splitlines() if re.match(rf"\W*{op} ", line)]
        assert len(rows) == (3 if op == "det_gemm" else 4) * len(spec.dtypes)
        assert all("PASS" in row for row in rows)
        assert sum(" checked " in row for row in rows) >= len(spec.dtypes)
    text = page.read_text()
    assert "<svg" in text and 'class="pass">PASS' in text and "FAIL" not in text
    assert not re.search(r"\b(?:src|href)=|url\(|@import|<script", text)


def test_a_page_and_a_table_say_what_failed(tmp_path, capsys):
    page = tmp_path / "report.html"
    given = ("--all", "--op", "logp", "--dtype", "fp32", "--candidate", "tests.planted:off_by_one_target")
    assert cli.main(["check", *given, "--report", str(page)]) == 1
    assert re.search(r"case=logp-fp32-2x16x257 output=0 relative norm .* passed=False", capsys.readouterr().out)
    assert 'class="fail">FAIL' in page.read_text() and "relative norm" in page.read_text()


def test_rl_kernels_contract_is_looser():
    """bfloat16 logits rounded once more: RL-Kernel's checker lets it pass."""
    rounded = lambda logits, ids: planted.logp(logits, ids).astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    assert failed(checked(rounded, "logp", dtype="bf16")) == ["logp"]
    assert not failed(checked(rounded, "logp", dtype="bf16", contract="rl-kernel"))


def test_contracts_fit_every_spec():
    for name, spec in itertools.product(contract.FILES, SPECS.values()):
        assert contract.batch_invariance(name) == contract.Bound(0, 0, "bits")
        for dtype, mode, kind in itertools.product(spec.dtypes, spec.modes, ("forward", "gradient")):
            for arch_key in (None, *contract.arch_keys()):
                bound = contract.accuracy(name, spec.op_class(mode), DTYPES[dtype], kind, arch_key, None)
                assert bound.atol + bound.rtol > 0 and (name == "rl-kernel") == (bound.measure == "element")


def test_arch_overrides_take_the_place_of_a_class():
    def bound(dtype, arch_key):
        return contract.accuracy("rlk_jax", "linear_logp", dtype, "forward", arch_key, None).rtol

    assert bound("bfloat16", "sm90") == contract.tolerance("linear_logp_wgmma", "bfloat16", "forward")
    assert bound("float32", "sm90") == bound("float32", None) == contract.tolerance("linear_logp", "float32", "forward")


def test_bits_tell_zeros_apart_and_infinities_must_be_equal():
    bits, norm = (
        contract.batch_invariance("rlk_jax"),
        contract.accuracy("rlk_jax", "logp", "float32", "forward", None, None),
    )
    zero, inf, nan = np.zeros(1, np.float32), np.full(1, np.inf), np.full(1, np.nan)
    assert not compare(0, "x", -zero, zero, bits).passed and compare(0, "x", -zero, zero, norm).passed
    assert compare(0, "x", inf, inf, norm).passed and not compare(0, "x", -inf, inf, norm).passed
    assert not compare(0, "x", inf, zero, norm).passed and compare(0, "x", nan, nan, norm).passed


@pytest.mark.parametrize("op", SPECS)
def test_inputs_are_deterministic_and_differ_by_mode(op):
    spec, seen = SPECS[op], set()
    for mode in spec.modes:
        first, again = (spec.problem(Draw(mode)).inputs for _ in range(2))
        assert all(first[name].tobytes() == again[name].tobytes() for name in first)
        seen.add(b"".join(x.tobytes() for x in first.values()))
    assert len(seen) == len(spec.modes) and set(spec.modes) <= set(MODES)
