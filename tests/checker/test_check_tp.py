"""`rlk check-tp` passes the recommended matrix, fails for any difference, and prints tracebacks before exit codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rlk_jax import cli, vocab_parallel
from rlk_jax.checker import check_tp, tensor_parallel
from rlk_jax.checker.processes import Finished

SMALL = ("--tokens", "24", "--hidden-size", "32", "--vocab-size", "1000")
MATRIX = {
    "xla fp32": ("--implementation", "xla", "--dtype", "fp32", "--devices", "4"),
    "bf16 against fp32": ("--reference-mode", "fp32", "--devices", "4"),
    "bf16 drift": ("--reference-mode", "matching", "--devices", "8"),
    "fp16, no bias": ("--dtype", "float16", "--no-bias", "--devices", "2"),
    "uneven shards": ("--uneven-shards", "--dtype", "fp32", "--devices", "3"),
    "deterministic": ("--implementation", "deterministic", "--reduction", "canonical", "--devices", "8"),
}


IN_FULL = ("xla fp32", "bf16 drift", "deterministic")


# In `make test`, "uneven shards" has fp32 and "fp16, no bias" the reference in the input dtype.
# test_what_cannot_run_fails catches an --implementation or a --reduction that does not arrive, and
# test_same_bits_at_every_degree (test_vocab_parallel.py) what "deterministic" promises.
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full) if x in IN_FULL else x for x in MATRIX])
def test_recommended_matrix(name, capsys):
    assert cli.main(["check-tp", *SMALL, *MATRIX[name]]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("[")] == [
        next(line for line in printed.splitlines() if line.startswith("[env]")),
        next(line for line in printed.splitlines() if line.startswith("[correctness]")),
        "[result] PASS",
    ]
    compared = ["output", "hidden_grad", "weight_grad", *([] if "no bias" in name else ["bias_grad"]), "same on all"]
    assert [line[2:14].strip() for line in printed.splitlines() if "max_abs" in line] == compared
    assert "FAIL" not in printed


def test_stress(capsys):
    sizes = ("--stress-tokens", "24", "--stress-hidden-size", "32", "--stress-vocab-size", "1000")  # As SMALL's.
    assert cli.main(["check-tp", *SMALL, "--devices", "2", "--run-stress", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "[stress] 24 x 32 x 1000\n  finite outputs and gradients: PASS; " in printed


def test_stress_times_a_program_that_is_compiled(monkeypatch):
    """The op is called twice, once outside jit and once while it is traced: what is timed is a compiled program."""
    calls = []
    honest = vocab_parallel.linear_logp
    monkeypatch.setattr(vocab_parallel, "linear_logp", lambda *x, **options: calls.append(0) or honest(*x, **options))
    problem = tensor_parallel.TensorParallelProblem(8, 8, 64, jnp.float32, True, False, 0, "xla", "sum")
    mesh = Mesh(jax.devices()[:2], ("tp",))
    finite, _, _ = tensor_parallel.stress(mesh, problem)
    assert finite and len(calls) == 2


def test_any_difference_fails(capsys):
    assert cli.main(["check-tp", *SMALL, "--devices", "2", "--atol", "0", "--rtol", "0"]) == 1
    printed = capsys.readouterr().out
    assert "  FAIL\n" in printed
    assert printed.endswith("[result] FAIL\n")


def test_a_gradient_that_is_wrong_by_less_than_atol_is_seen(monkeypatch, capsys):
    """The gradient of hidden lacks −Σ p·W, in a head so large that every element of the gradient is small."""
    honest = tensor_parallel.tensor_parallel_program

    def faulty(problem, mesh, arrays):
        rows = jnp.asarray(np.asarray(arrays.weight), jnp.float32)[np.asarray(arrays.target_ids)]
        of_targets = (rows * np.asarray(arrays.upstream)[:, None]).astype(problem.dtype)
        laid = jax.device_put(of_targets, arrays.hidden.sharding)
        return lambda: honest(problem, mesh, arrays)()._replace(hidden_grad=laid)

    monkeypatch.setattr(tensor_parallel, "tensor_parallel_program", faulty)
    sizes = ("--tokens", "16", "--hidden-size", "1024", "--vocab-size", "8192")
    assert cli.main(["check-tp", *sizes, "--devices", "2"]) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.endswith("FAIL") and "max_abs" in x]
    assert line.split()[0] == "hidden_grad" and float(line.split()[2]) < 1.5e-2


@pytest.mark.parametrize("wrong", ["value", "replica", "infinite"])
def test_planted_faults_are_seen(wrong, monkeypatch, capsys):
    honest = tensor_parallel.tensor_parallel_program

    def faulty(problem, mesh, arrays):
        return lambda: changed(honest(problem, mesh, arrays)())

    def changed(results):
        if wrong == "value":
            return results._replace(weight_grad=results.weight_grad.at[1, 1].add(0.5))
        if wrong == "infinite":
            return results._replace(hidden_grad=results.hidden_grad.at[3].set(jnp.inf))
        parts = [np.asarray(shard.data) for shard in results.output.addressable_shards]
        parts[1] = np.nextafter(parts[1], np.float32(0))
        pieces = [jax.device_put(x, s.device) for x, s in zip(parts, results.output.addressable_shards, strict=True)]
        whole = jax.make_array_from_single_device_arrays(results.output.shape, results.output.sharding, pieces)
        return results._replace(output=whole)

    monkeypatch.setattr(tensor_parallel, "tensor_parallel_program", faulty)
    sizes = ("--stress-tokens", "24", "--stress-hidden-size", "32", "--stress-vocab-size", "1000")  # As SMALL's.
    stress = ("--run-stress", *sizes) if wrong == "infinite" else ()
    assert cli.main(["check-tp", *SMALL, "--devices", "2", *stress]) == 1
    seen = {"value": "weight_grad", "replica": "same on all", "infinite": "finite outputs"}[wrong]
    assert any(seen in line and "FAIL" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "1"), "needs 2 devices"),
        (("--devices", "99"), "needs 99 devices"),
        (("--vocab-size", "3", "--devices", "4"), "--vocab-size 3 is less than the 4 devices"),
        (("--processes", "1"), "--processes must be at least 2"),
        (("--processes", "2", "--devices", "3"), "goes without --coordinator and --devices"),
        (("--coordinator", "127.0.0.1:1"), "go together"),
        (("--coordinator", "junk", "--process-count", "2", "--process-id", "0"), "must be host:port, got 'junk'"),
        (("--coordinator", "h:1", "--process-count", "2", "--process-id", "2"), "less than --process-count, got 2"),
        (("--timeout", "5"), "--timeout is for local processes"),
    ],
)
def test_options_that_fit_nothing(options, message, capsys):
    assert cli.main(["check-tp", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "int8"),
        ("--tokens", "0"),
        ("--seed", "-1"),
        ("--atol", "nan"),
        ("--rtol", "-1"),
        ("--reference-mode", "other"),
        ("--implementation", "bogus"),
    ],
)
def test_bad_values_exit_2(options):
    with pytest.raises(SystemExit) as status:
        cli.main(["check-tp", *options])
    assert status.value.code == 2


def test_local_processes(capsys):
    assert cli.main(["check-tp", *SMALL, "--processes", "2", "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "2 x cpu in 2 process(es)" in printed
    assert printed.endswith("[result] PASS\n")


@pytest.mark.full
def test_local_processes_that_refuse_their_options(capsys):
    """In `make test`, test_report_of_processes catches a wrong exit status or message of processes that end with 2."""
    assert cli.main(["check-tp", "--processes", "2", "--vocab-size", "1"]) == 2
    assert "--vocab-size 1 is less than the 2 devices" in capsys.readouterr().err


REPORTS = {
    "all refuse": ([(2, "[env]\n", "usage\n", False)] * 2, 2, "usage\n", ""),
    "one fails": (
        [(0, "[result] PASS\n", "", False), (1, "", "Traceback\n", False)],
        *(1, "process 1:\nTraceback\n\nexit codes: [0, 1]\n", ""),
    ),
    "the other hangs": (
        [(-9, "", "warning\n", True), (1, "", "Traceback\n", False)],
        1,
        "process 0:\nwarning\n\nprocess 1:\nTraceback\n\n"
        "processes [0] hung after another one failed, and were killed\nexit codes: [-9, 1]\n",
        "[result] FAIL\n",
    ),
    "all pass": ([(0, "[result] PASS\n", "", False)] * 2, 0, "", ""),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report_of_processes(name, capsys):
    finished, status, stderr, stdout = REPORTS[name]
    assert check_tp.report_processes([Finished(*x) for x in finished], 5) == status
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (stderr, stdout)


@pytest.mark.full
def test_tracebacks_come_before_exit_codes(capsys):
    """In `make test`, test_report_of_processes catches a wrong order, and test_what_cannot_run_fails a lost error."""
    assert cli.main(["check-tp", *SMALL, "--processes", "2", "--implementation", "mosaic"]) == 1
    said = capsys.readouterr().err
    assert said.count("ValueError: linear_logp cannot run 'mosaic' here") == 2
    assert said.index("Traceback") < said.index("exit codes: [1, 1]")


def test_what_cannot_run_fails(capsys):
    assert cli.main(["check-tp", *SMALL, "--devices", "2", "--implementation", "xla", "--reduction", "canonical"]) == 1
    captured = capsys.readouterr()
    assert "promises no bits" in captured.err and captured.out.endswith("[result] FAIL\n")


def test_processes_that_take_too_long_are_said_to(capsys):
    assert cli.main(["check-tp", *SMALL, "--processes", "2", "--timeout", "1"]) == 1
    captured = capsys.readouterr()
    assert "no process had ended after 1 s, and all were killed" in captured.err
    assert captured.out.endswith("[result] FAIL\n")
