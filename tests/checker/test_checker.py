"""The operator checker catches planted bugs by the checks that the docs name, reports everything that a candidate does
wrong, and its command says what it found.
"""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge
from rlk_jax import cli
from rlk_jax.checker import Sizes, assert_op, contract, gold, plugins
from rlk_jax.checker.candidates import Candidate, of_function
from rlk_jax.checker.inputs import MODES, Draw
from rlk_jax.checker.op_spec import OpSpec, Output
from rlk_jax.checker.options import DTYPES
from rlk_jax.checker.runner import Checks, compare, run_operator_suite
from rlk_jax.checker.specs import SPECS
from tests.support import helpers, planted

ROOT = pathlib.Path(__file__).parents[2]
LINE = re.compile(
    r"  case=\S+ output=\d+ \S+ (relative norm \S+ of at most \S+|same bits as in the first call) "
    r"shape=\([\d, ]*\) dtype=\w+ max_abs=\d\.\d{8}e[+-]\d+ mean_abs=\d\.\d{8}e[+-]\d+ max_rel=\d\.\d{8}e[+-]\d+ "
    r"tol=\(atol=\d\.\d{3}e[+-]\d+, rtol=\d\.\d{3}e[+-]\d+\) passed=True"
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
    "mask left out": ("masked_linear_logp", planted.mask_left_out, "fp32", "random", "logp"),
    "mask shifted by a word": ("masked_linear_logp", planted.mask_shifted_by_a_word, "fp32", "random", "logp"),
    "bits behind the vocabulary counted": (
        *("masked_linear_logp", planted.bits_behind_the_vocabulary_counted, "fp32", "random", "logp"),
    ),
    "gradient to tokens that are not allowed": (
        *("masked_linear_logp", planted.gradient_to_tokens_that_are_not_allowed, "fp32", "random"),
        "gradient:lm_head_weight",
    ),
    "mask added to logits": ("masked_linear_logp", planted.mask_added_to_logits, "fp32", "masked-nan", "logp"),
    "forbidden logits lowered": ("masked_logp", planted.forbidden_logits_lowered, "fp32", "masked-nan", "logp"),
    "forbidden target taken": ("masked_logp", planted.forbidden_target_taken, "fp32", "bad-ids", "logp"),
    "reference over all tokens": ("masked_ratio_kl", planted.reference_over_all_tokens, "fp32", "random", "kl"),
    "mask of the first sequence": ("masked_grpo_loss", planted.mask_of_the_first_sequence, "fp32", "random", "loss"),
    "last tile not searched": ("ranked_linear_logp", planted.last_tile_not_searched, "fp32", "random", "top_ids"),
    "higher ids first": ("ranked_linear_logp", planted.higher_ids_first, "fp32", "ties", "top_ids"),
    "impossible tokens listed": ("ranked_linear_logp", planted.impossible_tokens_listed, "fp32", "neg-inf", "top_ids"),
    "bad rows ranked": ("ranked_linear_logp", planted.bad_rows_ranked, "fp32", "bad-ids", "top_ids"),
    "logits for log-probs": ("ranked_linear_logp", planted.logits_for_log_probs, "fp32", "random", "top_logps"),
    "rank from 1": ("ranked_linear_logp", planted.rank_from_1, "fp32", "random", "target_rank"),
    "equal logits before the target": (
        "ranked_linear_logp",
        planted.equal_logits_before_the_target,
        "fp32",
        "ties",
        "target_rank",
    ),
    "mean over ignored tokens": (
        *("linear_cross_entropy", planted.mean_over_ignored_tokens, "fp32", "random", "loss"),
    ),
    "z-loss without a gradient": (
        *("linear_cross_entropy", planted.z_loss_without_gradient, "fp32", "random", "gradient:hidden"),
    ),
    "ignored rows times 0": (*("linear_cross_entropy", planted.ignored_rows_times_0, "fp32", "masked-nan", "loss"),),
    "target not smoothed": (*("smoothed_linear_cross_entropy", planted.target_not_smoothed, "fp32", "random", "loss"),),
    "smoothing of logits": (*("smoothed_linear_cross_entropy", planted.smoothing_of_logits, "fp32", "random", "loss"),),
    "smoothing without a gradient": (
        *("smoothed_linear_cross_entropy", planted.smoothing_without_gradient, "fp32", "random", "gradient:hidden"),
    ),
    "clamp of bad ids": ("logp", planted.clamped_ids, "fp32", "bad-ids", "logp"),
    "doubled where no gradient is asked for": (
        *("det_gemm", planted.doubled_without_gradients, "bf16", "random", "forward:c"),
    ),
    "no lower clip": ("grpo_loss", planted.no_lower_clip, "fp32", "random", "loss"),
    "advantages of the whole batch": ("grpo_loss", planted.whole_batch_advantages, "fp32", "random", "loss"),
    "gradient of the reference": (
        *("ratio_kl", planted.gradient_of_the_reference, "fp32", "random", "fault:gradient:ref_logits"),
    ),
    "wrong beyond 64 rows": ("logp", planted.wrong_beyond_64_rows, "fp32", "random", "invariance:reversed:logp"),
    "swapped student and teacher": (
        *("linear_kl", planted.swapped_student_and_teacher, "fp32", "peaked", "divergence"),
    ),
    "teacher at the student's temperature": (
        *("linear_kl", planted.teacher_at_the_students_temperature, "fp32", "random", "divergence"),
    ),
    "teacher that learns": (
        *("linear_kl", planted.teacher_that_learns, "fp32", "random", "fault:gradient:teacher_hidden"),
    ),
    "rest left out": ("listed_linear_kl", planted.rest_left_out, "fp32", "random", "divergence"),
    "listed tokens in the rest": (
        *("listed_linear_kl", planted.listed_tokens_in_the_rest, "fp32", "random", "divergence"),
    ),
    "none taken for the last token": (
        *("listed_linear_kl", planted.none_taken_for_the_last_token, "fp32", "random", "divergence"),
    ),
    "dropped last key block": ("attention", planted.dropped_last_key_block, "bf16", "random", "output"),
    "mask off by one": ("attention", planted.mask_off_by_one, "bf16", "random", "output"),
    "wrong head of a group": ("attention", planted.wrong_head_of_a_group, "bf16", "random", "output"),
    "scale left out": ("attention", planted.scale_left_out, "bf16", "random", "output"),
    "−inf rows as NaN": ("attention", planted.minus_inf_rows_as_nan, "bf16", "random", "output"),
    "padding times 0": ("attention", planted.padding_times_0, "bf16", "masked-nan", "output"),
    "window one too wide": ("attention", planted.window_one_too_wide, "bf16", "window", "output"),
    "dK of one query block lost": ("attention", planted.dk_of_one_query_block_lost, "bf16", "random", "gradient:key"),
}
"""For each bug: the op, the wrong implementation, the dtype, and the input mode and the check that catch it."""


def checked(fn, op, mode="random", dtype="fp32", sizes=None, **checks):
    """The report on one candidate in one case."""
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
    # Each further check would compile programs, and change nothing in this one.
    needed = {"gradients": ":" in check, "invariance": check.startswith("invariance:")}
    assert check in failed(checked(fn, op, mode, dtype, **needed))
    page = (ROOT / "docs" / "checker.md").read_text()
    assert f"| {bug} | {op} | `{mode}` | `{check}` |" in page


# assert_op makes the checks of the test above; one of values and one of bits show that it raises what they find.
@helpers.cover("bug", [(x,) for x in PLANTED], lambda bug: bug in ("off by one target", "N-dependent split"))
def test_assert_op_raises_for_a_planted_bug(bug):
    op, fn, dtype, mode, _ = PLANTED[bug]
    with pytest.raises(AssertionError, match="passed=False"):
        assert_op(fn, op=op, dtype=dtype, modes=[mode], check_invariance=True, sizes=Sizes())


def test_a_gradient_right_only_for_ones_passes_with_ones():
    assert not failed(checked(planted.right_only_for_ones, "logp", gradients=True, grad_mode="ones"))


OPS_OF_PLANTED = (
    *(
        "logp",
        "linear_logp",
        "masked_linear_logp",
        "ranked_linear_logp",
        "linear_kl",
        "linear_cross_entropy",
        "ratio_kl",
        "grpo_loss",
    ),
    *("masked_logp", "masked_ratio_kl", "masked_grpo_loss"),
    *("listed_linear_kl", "smoothed_linear_cross_entropy", "attention"),
)


@pytest.mark.parametrize("op", OPS_OF_PLANTED)
def test_what_the_bugs_were_planted_in_passes(op):
    for mode in SPECS[op].modes:
        assert not failed(checked(getattr(planted, op), op, mode, SPECS[op].dtypes[0], gradients=True))


def test_an_n_dependent_split_is_accurate():
    """The check of bits alone finds it, because its results are accurate."""
    names = failed(checked(planted.n_dependent_split, "det_gemm", dtype="bf16", **EVERYTHING))
    assert names and all(x.startswith("invariance:") for x in names)
    assert not failed(checked(planted.det_gemm, "det_gemm", dtype="bf16", **EVERYTHING))


@pytest.mark.parametrize("bug", [planted.last_column_of_whole_tiles_dropped, planted.wrong_beyond_64_rows])
def test_other_sizes_show_what_depends_on_them(bug):
    assert not failed(checked(bug, "logp"))
    with pytest.raises(AssertionError, match="case=logp-fp32-2x40x512 output=0 logp relative norm"):
        assert_op(bug, op="logp", modes=["random"])


@pytest.mark.parametrize("mode", ["random", "peaked", "neg-inf", "ties", "masked-nan"])
def test_both_clips_bind_in_both_signs_of_the_advantages(mode):
    problem = SPECS["grpo_loss"].problem(Draw(mode))
    policy, ref, ids, old, rewards, mask = problem.inputs.values()
    size = problem.options["samples_per_prompt"]
    advantages = gold.group_advantages_gold(rewards, range(0, len(rewards) + 1, size))[:, None]
    ratio = gold.ratio_kl_gold(policy, ref, ids, mask, old, np.zeros((2, *mask.shape))).ratio
    assert len(rewards) // size >= 2 and size >= 3
    for sign, beyond in itertools.product((1, -1), (ratio < 0.8, ratio > 1.2)):
        assert ((sign * advantages > 0) & beyond & mask).any()


def _attention_by_definition(query, key, value, **options):
    """attention in float64, so that rounding hides the order of its sums."""
    key, value = (np.nan_to_num(np.asarray(x, np.float64)) for x in (key, value))
    return jnp.asarray(gold.attention_gold(query, key, value, query, **options).output.astype(query.dtype))


def _wrong_in_other_calls(query, key, value, **options):
    factor = 1 if query.shape[:2] == key.shape[:2] == (2, 129) else 2
    return factor * _attention_by_definition(query, key, value, **options)


def test_a_token_of_attention_is_compared_in_every_other_call():
    calls, sizes = ["alone", "larger batch", "packed", "in parts", "decoded"], Sizes(seq=1, hidden=8)
    for mode, made in (("random", calls), ("window", ["decoded"])):
        right, wrong = (
            checked(fn, "attention", mode, "bf16", sizes, invariance=True)
            for fn in (_attention_by_definition, _wrong_in_other_calls)
        )
        assert not failed(right) and failed(wrong) == [f"invariance:{x}:output" for x in made]


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


class _Ends(BaseException):
    """An error that `except Exception` does not catch."""


def _ends(error):
    def logp(logits, token_ids):
        raise error

    return logp


WRONG = {
    "an exit": (_ends(SystemExit(0)), "fault:forward", "raised SystemExit: 0 (test_checker.py:"),
    "a BaseException": (_ends(_Ends()), "fault:forward", "raised _Ends: _Ends without a word (test_checker.py:"),
    "None beside": (lambda x, ids: (planted.logp(x, ids), None), "fault:forward", "gave 2 outputs instead of 1"),
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


def _refuses_bad_ids(how):
    def logp(logits, token_ids):
        if (token_ids < 0).any():
            return how(logits, token_ids)
        return planted.logp(logits, token_ids)

    return logp


def _donates_and_refuses(logits, token_ids):
    logits.delete()
    raise ValueError("bad ids")


def test_bad_ids_are_refused_by_what_says_so_and_by_no_other_failure():
    for error in (ValueError("bad ids"), IndexError("bad ids")):
        assert not failed(checked(_refuses_bad_ids(_ends(error)), "logp", "bad-ids"))
    for error in (NotImplementedError(), ZeroDivisionError(), TypeError(), SystemExit(0)):
        assert failed(checked(_refuses_bad_ids(_ends(error)), "logp", "bad-ids")) == ["fault:forward"]
    two = _refuses_bad_ids(lambda x, ids: (planted.logp(x, ids),) * 2)
    assert failed(checked(two, "logp", "bad-ids")) == ["fault:forward"]
    assert failed(checked(_refuses_bad_ids(_donates_and_refuses), "logp", "bad-ids")) == ["fault:input logits"]


def torch_logp(logits, token_ids):
    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]


def _adds_in_place(logits, token_ids):
    return torch_logp(logits.add_(1), token_ids)


torch_candidate = functools.partial(of_function, name="mine", arrays="torch")


@helpers.cover("dtype", [(x,) for x in DTYPES], lambda dtype: dtype == "bf16")  # all are sent to torch by one function
def test_torch_functions(dtype):
    for mode in SPECS["logp"].modes:
        assert not failed(checked(torch_candidate(torch_logp), "logp", mode, dtype, gradients=True))


def test_what_torch_functions_do_wrong():
    detached = torch_candidate(lambda *x: torch_logp(*x).detach())
    case = checked(detached, "logp", gradients=True)
    assert [x.message for x in case.outputs if not x.passed] == ["the gradient is None"]
    assert failed(checked(torch_candidate(_adds_in_place), "logp")) == ["fault:input logits"]


class _ZeroesUpstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids):
        ctx.save_for_backward(logits, token_ids)
        return torch_logp(logits, token_ids)

    @staticmethod
    def backward(ctx, g):
        logits, token_ids = ctx.saved_tensors
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            (found,) = torch.autograd.grad(torch_logp(x, token_ids), x, g)
        g.zero_()
        return found, None


def test_upstream_gradients_must_stay_as_they_were():
    candidate = of_function(_ZeroesUpstream.apply, "mine", arrays="torch")
    assert failed(checked(candidate, "logp", gradients=True)) == ["fault:upstream logp"]


def test_torch_runs_without_gradients_too():
    def logp(logits, token_ids):
        return torch_logp(logits, token_ids) * (1 if torch.is_grad_enabled() else 2)

    candidate = of_function(logp, "mine", arrays="torch")
    assert failed(checked(candidate, "logp", gradients=True)) == ["forward:logp"]


@pytest.mark.parametrize(
    "imports",
    ["from torch import log_softmax", "import torch, jax\nlog_softmax = torch.log_softmax"],
    ids=["from torch", "torch and jax"],
)
def test_arrays_of_a_module_that_imports_otherwise(imports, tmp_path, monkeypatch, capsys):
    name = "mine_" + str(len(imports))
    (tmp_path / f"{name}.py").write_text(
        f"{imports}\n"
        "def logp(logits, token_ids):\n"
        "    return log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]\n"
    )
    monkeypatch.chdir(tmp_path)
    arrays = ["--arrays", "torch"] if "jax" in imports else []
    assert cli.main(["check", "--candidate", f"{name}:logp", *arrays, *SMALL]) == 0, capsys.readouterr().out


WRONG_ARGUMENTS = {
    "(did you mean attention?)": {"op": "atention"},
    "op: invalid choice: 'logpp' (choose from logp, ": {"op": "logpp"},
    "logp has no input mode 'masked_nan'; it has random, ": {"modes": ["masked_nan"]},
    "logp takes fp32, bf16, fp16, not int8": {"dtype": "int8"},
    "arch_key: invalid choice: 'sm9' (choose from ": {"arch_key": "sm9"},
    "arrays: invalid choice: 'pytorch' (choose from ": {"arrays": "pytorch"},
    "kwargs: invalid choice: 'nope' (choose from ": {"kwargs": {"nope": "x"}},
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_assert_op_refuses_what_it_does_not_know(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        assert_op(planted.logp, **{"op": "logp", **WRONG_ARGUMENTS[message]})
    with pytest.raises(ValueError, match="vocab must be from 1 to 1048576, got 0"):
        Sizes(vocab=0)


def test_assert_op_takes_the_first_dtype_of_the_op():
    assert_op(planted.det_gemm, op="det_gemm", modes=["random"], sizes=Sizes(k_dim=128))
    assert_op(planted.logp, op="logp", modes=["random"], dtype="float32", sizes=Sizes(vocab=70))


@pytest.mark.full
def test_assert_op_works_where_assert_does_not():
    """In `make test` its message, which no assert would have, shows that assert_op raises by itself."""
    code = (
        "from rlk_jax.checker import Sizes, assert_op\nfrom tests.support import planted\n"
        "assert_op(planted.off_by_one_target, op='logp', modes=['random'], check_grad=False, sizes=Sizes())"
    )
    found = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        found.returncode == 1 and "AssertionError: candidate=off_by_one_target case=logp-fp32-2x16x257" in found.stderr
    )


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
    """Tests as they stand in a project that has an op of its own."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_logp(self):
        assert_op(self.variant(planted.logp), op="logp", sizes=Sizes(batch=1, seq=3, vocab=70))

    def test_options_by_other_names(self):
        def loss(policy, ref, ids, old, rewards, mask, *, group_size, beta):
            from rlk_jax import grpo_loss

            return grpo_loss(policy, ref, ids, old, rewards, mask, samples_per_prompt=group_size, beta=beta)

        names = {"samples_per_prompt": "group_size", "clip_eps": None}
        sizes = Sizes(seq=4, vocab=70)
        assert_op(loss, op="grpo_loss", kwargs=names, check_grad=False, modes=["random", "masked-nan"], sizes=sizes)


@pytest.mark.parametrize(
    ("candidate", "backend"),
    [
        *(("pytorch", "reference"), ("native", "reference"), ("reference", "reference"), ("registry", "xla")),
        *(
            ("bridge", "torch_bridge:xla"),
            ("torch_bridge", "torch_bridge:xla"),
            ("tests.support.planted:logp", "tests.support.planted"),
        ),
    ],
)
def test_lines(candidate, backend, capsys):
    given = ["--op", "logp", "--candidate", candidate, "--device", "cpu", "--dtype", "fp32", *SMALL]
    assert cli.main(["check", *given]) == 0
    suite, named, *lines = capsys.readouterr().out.splitlines()
    assert suite == "suite=logp passed=True pass_rate=1.0000 (1 of 1 candidates)"
    assert named == f"candidate={candidate} backend={backend} passed=True pass_rate=1.0000 (2 of 2 checks)"
    assert all(LINE.fullmatch(line) for line in lines)
    accuracy, bits = lines
    assert re.match(r"  case=logp-fp32-1x2x17 output=0 logp relative norm \S+ of at most 4.0e-07 shape=\(1", accuracy)
    assert bits.startswith("  case=logp-fp32-1x2x17 output=0 deterministic:logp same bits as in the first call ")


def test_a_line_says_what_was_compared(capsys):
    """Where nothing could be compared, it holds no numbers. A rate says what it is a share of."""
    given = ["check", "--op", "logp", "--candidate", "tests.checker.test_checker:_raises", *SMALL]
    assert cli.main(given) == 1
    suite, candidate, line, failures = capsys.readouterr().out.splitlines()
    assert failures == "failed 1 of 1 checks of case=logp-fp32-1x2x17: fault:forward"
    assert suite.endswith("pass_rate=0.0000 (0 of 1 candidates)")
    assert candidate.endswith("pass_rate=0.0000 (0 of 1 checks)")
    said = r"raised RuntimeError: out of luck \(test_checker.py:\d+\)"
    assert re.fullmatch(rf"  case=logp-fp32-1x2x17 output=0 fault:forward {said} passed=False", line)
    x = np.float32([1.25])
    assert compare(0, "x", x, x - 0.25, contract.Bound(0.5, 0.0, "element")).message == "0.5 times what is allowed"
    assert compare(0, "x", x, x, contract.Bound(0.0, 0.0, "element")).message == "equal"


def test_json_is_the_report(capsys):
    given = ("--op", "logp", "--check-grad", "--check-invariance", "--candidate", "deterministic", "--json")
    assert cli.main(["check", *given, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    (candidate,) = found["candidates"]
    (case,) = candidate["cases"]
    assert found["passed"] and found["suite_name"] == "logp" and found["total_candidates"] == 1
    assert candidate["invariance"] == "checked" and candidate["total_outputs"] == len(case["outputs"])
    names = [x["name"] for x in case["outputs"]]
    assert names[:3] == ["logp", "gradient:logits", "forward:logp"]
    arrangements = [x.split(":")[1] for x in names if x.startswith("invariance:")]
    assert arrangements == ["alone", "reversed", "padding before", "padding behind"]
    assert sum(case["outputs"][0]["histogram"]) == 2 and case["outputs"][0]["measure"] == "norm"
    assert all(x["measure"] == "bits" for x in case["outputs"][2:])


def test_a_failure_exits_1_and_is_valid_json(capsys):
    given = ["check", "--candidate", "tests.support.planted:clamped_ids", "--input-mode", "bad-ids", "--json"]
    assert cli.main(given) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert not found["passed"] and found["candidates"][0]["cases"][0]["outputs"][0]["max_abs_error"] == "inf"


BAD = {
    ("--vocab", "0"): "argument --vocab: must be at least 1, got 0",
    ("--batch", "-1"): "argument --batch: must be at least 1, got -1",
    ("--seq", "two"): "argument --seq: invalid positive value: 'two'",
    ("--op", "conv"): "argument --op: invalid choice: 'conv'",
    ("--candidate", "cuda"): "logp cannot run 'cuda' here: ",
    ("--candidate", "xla", "--arrays", "torch"): "--arrays is for a module:function, not xla",
    ("--candidate", "cuda-sm90", "--device", "cpu"): "logp cannot run 'cuda' here: ",
    ("--candidate", "mosaic", "--device", "cpu"): "logp cannot run 'mosaic' here: needs compute capability 9.0",
    ("--candidate", "fastest"): "unknown candidate 'fastest'; the candidates are registry, mosaic, ",
    ("--candidate", "determinstic"): "unknown candidate 'determinstic' (did you mean deterministic?); the ",
    ("--candidate", "nowhere:logp"): "cannot load 'nowhere:logp': No module named 'nowhere'",
    ("--candidate", "tests.support.planted:nothing"): "cannot load 'tests.support.planted:nothing': ",
    ("--candidate", "tests.support.planted:__name__"): "'tests.support.planted:__name__' is not callable",
    ("--device", "cuda"): "JAX finds no cuda device here, only cpu",
    ("--dtype", "int8"): "argument --dtype: must be one of fp32, bf16, fp16, got 'int8'",
    ("--op", "det_gemm", "--dtype", "fp32"): "det_gemm takes bf16, fp16, not fp32",
    ("--input-mode", "masked-nan"): "logp has no input mode 'masked-nan'; it has random, ",
    ("--input-mode", "strange"): "argument --input-mode: invalid choice: 'strange'",
    ("--arch-key", "sm1"): "argument --arch-key: invalid choice: 'sm1'",
    ("--contract", "none"): "argument --contract: invalid choice: 'none'",
    ("--all", "--op", "det_gemm", "--dtype", "fp32", "--report", "/dev/null"): "det_gemm takes bf16, fp16, not fp32",
    ("--all", "--candidate", "mosaic", "--device", "cpu"): f"{[*SPECS][-1]} cannot run 'mosaic' here: ",
    ("--seed", "-1"): "argument --seed: must be at least 0, got -1",
    ("--grad-seed", "-1"): "argument --grad-seed: must be at least 0, got -1",
    ("--constant-value", "nan"): "the constant value nan is not finite in float32",
    ("--constant-value", "1e39"): "the constant value 1e+39 is not finite in float32",
    ("--constant-value", "70000", "--dtype", "fp16"): "the constant value 70000.0 is not finite in float16",
    ("--vocab", "3000000000"): "vocab must be from 1 to 1048576, got 3000000000",
    ("--vocab", "99999999999999999999"): "vocab must be from 1 to 1048576, got 99999999999999999999",
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


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise RuntimeError('boom')", "def logp(:"])
def test_a_module_that_cannot_be_imported_exits_2(code, tmp_path, monkeypatch, capsys):
    name = f"broken_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--candidate", f"{name}:logp"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"rlk check: error: cannot load '{name}:logp': ")


def _module(tmp_path, monkeypatch, name, code):
    (tmp_path / f"{name}.py").write_text(f"from tests.support import planted\n{code}")
    monkeypatch.chdir(tmp_path)


def test_an_exit_of_a_candidate_is_a_failure(tmp_path, monkeypatch, capsys):
    _module(tmp_path, monkeypatch, "leaves", "def logp(logits, token_ids):\n    raise SystemExit(0)\n")
    assert cli.main(["check", "--candidate", "leaves:logp"]) == 1
    assert "raised SystemExit: 0 (leaves.py:3)" in capsys.readouterr().out


def test_what_a_candidate_prints_is_no_part_of_the_report(tmp_path, monkeypatch, capsys):
    code = "print('hello')\ndef logp(*x):\n    print('hello')\n    return planted.logp(*x)\n"
    _module(tmp_path, monkeypatch, "talks", code)
    assert cli.main(["check", "--candidate", "talks:logp", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"] and "hello" in said.err


def test_names_with_markup_and_functions_without_a_module(tmp_path, monkeypatch, capsys):
    _module(tmp_path, monkeypatch, "marked", "globals()['[/red]'] = planted.logp\n")
    given = ["check", "--all", "--op", "logp", "--dtype", "fp32", "--report", str(tmp_path / "report.html")]
    assert cli.main([*given, "--candidate", "marked:[/red]"]) == 0
    assert "[/red]" in capsys.readouterr().out
    assert cli.main([*given, "--candidate", "torch:log_softmax"]) == 1
    lines = capsys.readouterr().out
    assert "–" in lines and "inf %" not in (tmp_path / "report.html").read_text()


def test_all_skips_ops_without_the_candidate_or_the_mode(capsys):
    assert cli.main(["check", "--all", "--candidate", "xla", "--dtype", "fp32", "--input-mode", "masked-nan"]) == 0
    passed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "PASS" in line]
    assert passed == [
        "masked_logp",
        "ratio_kl",
        "masked_ratio_kl",
        "grpo_loss",
        "masked_linear_logp",
        "linear_cross_entropy",
    ]


def test_whole_groups_whatever_the_batch(capsys):
    assert cli.main(["check", "--op", "grpo_loss", "--batch", "1", "--check-grad"]) == 0
    assert "case=grpo_loss-fp32-8x16x257 " in capsys.readouterr().out
    assert cli.main(["check", "--list", "--batch", "1"]) == 0


def test_a_device_by_its_name():
    with jax.default_device("cpu"):
        assert not failed(checked(planted.logp, "logp"))


def test_no_promise_of_bits_is_said(capsys):
    assert cli.main(["check", "--candidate", "xla", "--check-invariance", *SMALL]) == 0
    assert "  invariance is not checked: xla promises no bits" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("size", [("--batch", "1"), ("--seq", "1"), ("--batch", "1", "--seq", "1")])
def test_masked_nan_always_has_a_masked_token(size, capsys):
    given = ["--op", "ratio_kl", "--candidate", "tests.support.planted:unmasked_padding", "--input-mode", "masked-nan"]
    assert cli.main(["check", *given, "--check-grad", *size]) == 1
    assert "gradient:policy_logits" in capsys.readouterr().out


def _square_sum_inputs(draw):
    return {"x": draw.tensor(0, *draw.sizes.lead, draw.sizes.hidden)}


def _square_sum_gold(problem):
    x, g = np.asarray(problem.inputs["x"], np.float64), problem.upstream["y"]
    return {"y": (x * x).sum(axis=-1), "gradient:x": 2 * x * g[..., None]}, 1.0


SQUARE_SUM = OpSpec(
    "square_sum",
    _square_sum_inputs,
    _square_sum_gold,
    outputs=(Output("y", lambda sizes: sizes.lead),),
    gradients=("x",),
    shape=lambda sizes: (*sizes.lead, sizes.hidden),
    padding={"x": 0},
    per_row=frozenset(("y", "gradient:x")),
    modes=("random", "constant"),
)


def square_sum(x):
    return (x.astype(jnp.float32) ** 2).sum(axis=-1)


def test_adding_an_op_as_the_docs_say(monkeypatch, capsys):
    """A new op gets an entry of SPECS, then tolerances from what is measured. It needs no entry in dispatch's table."""
    monkeypatch.setitem(SPECS, "square_sum", SQUARE_SUM)
    given = ["check", "--op", "square_sum", "--all", "--check-grad", "--dtype", "fp32"]
    assert cli.main([*given, "--candidate", "tests.checker.test_checker:square_sum"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"output=0 y no tolerance in the contract; measured \d\.\de-\d\d ", said)
    assert re.search(r"│ – +│ not asked for +│ FAIL +│", said)  # no share of a tolerance that is not there
    ours, published = contract._contract(), contract._contract("rl-kernel")
    monkeypatch.setitem(ours["accuracy"], "square_sum", {"float32": {"forward": 4e-7, "gradient": 4e-7}})
    monkeypatch.setitem(published["classes"], "square_sum", "reduction")
    for name in contract.FILES:
        assert cli.main([*given, "--candidate", "tests.checker.test_checker:square_sum", "--contract", name]) == 0
    assert cli.main(given) == 2 and cli.main(["check", "--op", "square_sum"]) == 2
    refusal = "rlk check: error: square_sum has no implementation here: give --candidate module:function"
    assert capsys.readouterr().err.splitlines()[-2:] == [refusal] * 2
    assert cli.main(["check", "--list"]) == 0 and "square_sum" in capsys.readouterr().out


def test_the_bridge_without_pytorch_names_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(plugins, "has_torch", lambda: False)
    assert cli.main(["check", "--op", "logp", "--candidate", "bridge"]) == 2
    needed = 'torch_bridge needs PyTorch, of rlk-jax\'s extra `torch`: pip install "rlk-jax[torch]"'
    assert needed in capsys.readouterr().err


def test_an_op_that_the_bridge_lacks(monkeypatch, capsys):
    monkeypatch.delattr(torch_bridge, "logp")
    assert cli.main(["check", "--op", "logp", "--candidate", "bridge"]) == 2
    assert "torch_bridge has no logp" in capsys.readouterr().err


def test_a_list_needs_no_torch(monkeypatch, capsys):
    """Its import takes seconds. The ops that the list gives to the bridge are those that it has."""
    monkeypatch.setattr(plugins, "bridge", None)
    assert cli.main(["check", "--list", "--json"]) == 0
    for op, facts in json.loads(capsys.readouterr().out).items():
        assert ("bridge" in facts["candidates"]) == hasattr(torch_bridge, SPECS[op].function)


def test_list(capsys):
    assert cli.main(["check", "--list"]) == 0
    assert "  candidates: xla, deterministic, reference, bridge" in capsys.readouterr().out.splitlines()
    assert cli.main(["check", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(SPECS) and found["det_gemm"]["candidates"] == ["deterministic", "reference", "bridge"]


def _in_few_checks():
    """(op, candidate, dtype, whether other batches are compared) of the checks that no other test of `make test` makes:
    float16, in which gradients are scaled, in every input mode.

    Other batches have tests of their own, for every op but grpo_loss; those of linear_logp have a softcap. What a mask,
    the teacher's list and z-loss add stands before `deterministic` is called, and has tests in float32. The reference
    and torch_bridge have no code for a dtype.
    """
    for op, spec in SPECS.items():
        names = {row.name for row in spec.implementations}
        if "xla" in names and op != "logp":
            yield op, "xla", "fp16", False
        if spec.function == op and op not in ("logp", "linear_cross_entropy"):
            yield op, "deterministic", "fp16", op in ("linear_logp", "grpo_loss")


# In `make test`, one op has all candidates, as the command has where none is named. In full all ops have them, in every
# dtype.
@helpers.cover(
    "op, candidate, dtype, arranged",
    [*_in_few_checks(), ("logp", None, "fp16", True), *((op, None, None, True) for op in SPECS)],
    lambda op, candidate, dtype, arranged: dtype is not None,
)
def test_everything_is_green_and_its_page_stands_alone(op, candidate, dtype, arranged, tmp_path, capsys):
    page, spec = tmp_path / "report.html", SPECS[op]
    given = ["check", "--all", "--op", op, "--check-grad", "--report", str(page)]
    given += ["--dtype", dtype] if dtype else []
    given += ["--candidate", candidate] if candidate else []
    given += ["--check-invariance"] if arranged else []
    assert cli.main(given) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(rf"\W*{op} ", line)]
    on_cpus = {row.name for row in spec.implementations} & {"reference", "xla", "deterministic"}
    candidates = 1 if candidate else len(on_cpus) + hasattr(torch_bridge, spec.function)
    assert len(rows) == candidates * (1 if dtype else len(spec.dtypes))
    assert all("PASS" in row for row in rows)
    assert any(" checked " in row for row in rows) == arranged
    assert re.fullmatch(r"(\d+)/\1 checks passed in \d+ s", printed.splitlines()[-1])
    text = page.read_text()
    assert "<svg" in text and 'class="good">PASS' in text and "FAIL" not in text
    assert not re.search(r"\b(?:src|href)=|url\(|@import|<script", text)


def test_a_page_and_a_table_say_what_failed(tmp_path, capsys):
    page = tmp_path / "report.html"
    given = ("--all", "--op", "logp", "--dtype", "fp32", "--candidate", "tests.support.planted:off_by_one_target")
    assert cli.main(["check", *given, "--report", str(page)]) == 1
    assert re.search(r"case=logp-fp32-2x16x257 output=0 logp relative norm .* passed=False", capsys.readouterr().out)
    assert 'class="bad">FAIL' in page.read_text() and "relative norm" in page.read_text()


def test_a_run_of_many_checks_lets_go_of_its_programs(capsys):
    """A process that kept the programs of all ops would crash for want of memory mappings."""
    client = jax.devices("cpu")[0].client
    jax.clear_caches()
    before = len(client.live_executables())
    assert cli.main(["check", "--all", "--op", "logp", "--dtype", "fp32", "--candidate", "reference"]) == 0
    assert len(client.live_executables()) <= before


def test_rl_kernels_contract_is_looser():
    """RL-Kernel's tolerances let log-probs pass that were rounded to bfloat16."""
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

    for dtype in ("bfloat16", "float32"):
        assert bound(dtype, "sm90") == contract.tolerance("linear_logp_wgmma", dtype, "forward")
        assert bound(dtype, "sm80") == bound(dtype, None) == contract.tolerance("linear_logp", dtype, "forward")


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
        first, again = (spec.problem(Draw(mode)) for _ in range(2))
        bits, bits_again = (b"".join(x.tobytes() for x in problem.inputs.values()) for problem in (first, again))
        assert bits == bits_again and repr(first.options) == repr(again.options)
        seen.add((bits, repr(first.options)))
    assert len(seen) == len(spec.modes) and set(spec.modes) <= set(MODES)
