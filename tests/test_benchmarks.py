"""Benchmarks run end to end on a tiny shape, say what could not run, and go on where a candidate fails."""

import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import pathlib
import re
import sys
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import (
    attention,
    attention_accuracy,
    attention_peers,
    cold,
    common,
    decoder,
    det_gemm,
    few_rows,
    few_tokens,
    grpo,
    grpo_model,
    grpo_plan,
    invariance,
    linear_cross_entropy,
    linear_grpo_loss,
    linear_kl,
    linear_logp,
    logits_ops,
    mismatch,
    processes,
    soak,
    torch_bridge,
    trl,
    tunix,
    vocab_parallel,
)
from benchmarks import programs as benchmark_programs
from benchmarks.common import Candidate, Launch
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.steps import build_steps, make_mesh
from tests.support import quick
from tests.support.helpers import assert_same_bits, assert_within_contract


@pytest.fixture(autouse=True)
def only_what_a_test_makes_is_collected():
    """A candidate that fails costs a collection of garbage, which would take a second with all that is in memory."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def compiled_quickly():
    """For tests that look at no figures."""
    with quick.compiled_quickly():
        yield


class Uncompiled:
    """It stands for a compiled program: it refuses other arguments, and returns zeros in the shapes of the results."""

    def __init__(self, lowered):
        self.lowered = lowered

    def __call__(self, *arguments):
        pair = arguments, self.lowered.args_info
        given, taken = ([(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in pair)
        assert given == taken
        return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), self.lowered.out_info)

    def memory_analysis(self):
        held = {"argument": 3, "output": 2, "alias": 1, "temp": 2**30, "generated_code": 1}
        return types.SimpleNamespace(**{f"{what}_size_in_bytes": count for what, count in held.items()})


@pytest.fixture
def only_lowered(monkeypatch, compiled_quickly):
    """For tests that read no results: what a benchmark lowers is not compiled."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, compiler_options=None: Uncompiled(lowered))


# In `make test`, the programs of smoke tests are only traced and lowered. A program that XLA cannot compile or run is
# left to `make test-full`. The results of those that others are measured against are compared below.
@pytest.fixture(params=["lowered", pytest.param("compiled", marks=pytest.mark.full)])
def programs(request):
    """What becomes of the programs of a benchmark."""
    request.getfixturevalue("only_lowered" if request.param == "lowered" else "compiled_quickly")
    return request.param


@pytest.fixture
def short_chains(monkeypatch):
    """Two calls are in a program where they are too short to hide their launch."""
    monkeypatch.setattr(benchmark_programs, "calls_to_hide_a_launch", lambda *_: 2)


@pytest.mark.parametrize("density, own", [("1", "xla"), pytest.param("0.5", "deterministic", marks=pytest.mark.full)])
def test_smoke(tmp_path, capsys, programs, density, own):
    """In `make test`, the case of "xla" catches a benchmark that does not run. What --mask-density does to the rows is
    left to `make test-full`, but for which tokens count: test_half_of_the_tokens_count.
    """
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", f"mosaic,{own},naive,torch eager,quack (mean loss)"]
    arguments += ["--mask-density", density, "--json", str(out), "--plot", str(picture)]
    assert linear_logp.main(arguments) == 0
    record = json.loads(out.read_text())
    status = {(r["implementation"], r["what"]): r["status"] for r in record["rows"]}
    passes = {"forward", "forward+backward", "frozen head"}
    ranked = {f"{what}, rank {rank}" for what in ("forward", "frozen head") for rank in linear_logp.LOW_RANKS}
    whole = {"forward, entropy", "forward, bias", "forward, softcap"} | ranked
    whole |= {f"forward+backward, {what}" for what in ("all kept", "softcap", "softcap, all kept")}
    both = {f"forward, {what}" for what, _ in linear_logp.RANKINGS}
    allowed = ("all allowed", "9 of 10 allowed", f"{linear_logp.KEPT_IDS} ids allowed")
    both |= {f"{what}, {tokens}" for what in ("forward", "forward+backward") for tokens in allowed}
    of_naive = passes | ({"masked loss"} if density == "0.5" else both)
    passes = of_naive if density == "0.5" else of_naive | whole
    assert {what for n, what in status if n == own} == passes
    assert {what for n, what in status if n == "naive"} == of_naive
    assert all(status[own, what] == "pass" for what in passes)
    assert status["GEMM", "G"] == status["naive", "forward"] == "pass"
    for name in ("mosaic", "torch eager", "quack (mean loss)"):
        assert status[name, ""].startswith("not available")
    assert record["command"].startswith("python -m benchmarks.linear_logp --smoke") and record["device"]
    assert picture.stat().st_size > 1000
    assert "of G" in capsys.readouterr().out


def test_few_tokens_smoke(tmp_path, capsys, programs):
    out = tmp_path / "rows.json"
    assert few_tokens.main(["--smoke", "--implementations", "xla,naive", "--scan", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    found = {(r["implementation"], r["what"], r["steps"]) for r in rows}
    passes = ("forward", "forward+backward", "frozen head")
    assert found == {(name, what, steps) for name in ("xla", "naive") for what in passes for steps in (1, 2)}
    assert all(r["us"] > 0 and (r["implementation"] != "naive" or r["of_naive"] == 1) for r in rows)
    assert "of naive" in capsys.readouterr().out


def test_linear_grpo_loss_smoke(tmp_path, capsys, programs):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "mosaic,xla", "--json", str(out), "--plot", str(picture)]
    assert linear_grpo_loss.main(arguments) == 0
    status = {(r["implementation"], r["what"]): r["status"] for r in json.loads(out.read_text())["rows"]}
    assert status.pop(("mosaic", "")).startswith("not available")
    assert set(status.values()) == {"pass"} and ("xla", "linear_grpo_loss: N·V·2 B + 10 %") in status
    assert picture.stat().st_size > 1000 and "linear_grpo_loss, bfloat16" in capsys.readouterr().out


def test_linear_kl_smoke(tmp_path, capsys, programs):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    names = ",".join(("mosaic", "xla", "naive", linear_kl.LIGER))
    arguments = ["--smoke", "--implementations", names, "--json", str(out), "--plot", str(picture)]
    assert linear_kl.main(arguments) == 0
    status = {(r["implementation"], r["what"]): r["status"] for r in json.loads(out.read_text())["rows"]}
    assert all(status.pop((name, "")).startswith("not available") for name in ("mosaic", linear_kl.LIGER))
    passes = {f"{kind}: {what}" for kind in linear_kl.KINDS for what in linear_kl.PRODUCTS}
    assert set(status) == {(name, what) for name in ("xla", "naive") for what in passes} | {("GEMM", "G")}
    assert set(status.values()) == {"pass"}
    assert picture.stat().st_size > 1000 and "linear_kl, bfloat16" in capsys.readouterr().out


def test_linear_cross_entropy_smoke(tmp_path, capsys, programs):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "mosaic,xla,naive", "--json", str(out), "--plot", str(picture)]
    assert linear_cross_entropy.main(arguments) == 0
    status = {(r["implementation"], r["what"]): r["status"] for r in json.loads(out.read_text())["rows"]}
    assert status.pop(("mosaic", "")).startswith("not available")
    assert set(status.values()) == {"pass"} and ("xla", "linear_cross_entropy, z-loss: forward+backward") in status
    assert ("naive", "linear_cross_entropy: forward") in status
    assert picture.stat().st_size > 1000 and "linear_cross_entropy, bfloat16" in capsys.readouterr().out


def traced_steps(*arguments):
    """The steps of a run, which are traced and return zeros."""
    steps = build_steps(*arguments)

    def zeros_of(step):
        return lambda *given: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(step, *given))

    names = ("initial_state", "start_grpo", "warmup_step", "grpo_step")
    return dataclasses.replace(steps, **{name: zeros_of(getattr(steps, name)) for name in names})


def test_mismatch_smoke_and_a_kind_that_fails(tmp_path, capsys, monkeypatch):
    """test_mismatch_of_all_kinds, which runs in full, has steps that are compiled; those of the trainer's own tests
    are, too.
    """
    kinds = {"broken": {"compute_dtype": "float33"}, "stock, float32": {}}
    monkeypatch.setattr(mismatch, "KINDS", kinds)
    monkeypatch.setattr(mismatch, "build_steps", traced_steps)
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    assert mismatch.main(["--smoke", "--json", str(out), "--plot", str(picture)]) == 0
    broken, stock = json.loads(out.read_text())["rows"]
    assert broken["kind"] == "broken" and broken["status"].startswith("not available: compute_dtype")
    assert stock["kind"] == "stock, float32" and stock["status"] == "pass" and stock["mismatch"] == 0
    assert picture.stat().st_size > 1000 and "rollout and training" in capsys.readouterr().out


def test_grpo_plan_smoke_and_an_option_that_fails(tmp_path, capsys, monkeypatch, programs):
    """A model that a run would hold needs more than its states."""
    monkeypatch.setattr(grpo_plan, "OPTIONS", {"broken": {"compute_dtype": "float33"}, "stock": {}})
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    assert grpo_plan.main(["--smoke", "--json", str(out), "--plot", str(picture)]) == 0
    broken, stock = json.loads(out.read_text())["rows"]
    assert broken["status"].startswith("not available: compute_dtype") and broken["model"] == stock["model"] == "tiny"
    assert stock["status"] == "pass" and 0 < stock["states"] < stock["peak"]
    # Only a compiled program knows its memory; tests/grpo/test_plan.py has such plans in `make test`.
    assert stock["program"] == "a GRPO step" or programs == "lowered"
    assert picture.stat().st_size > 1000 and "memory of rlk grpo" in capsys.readouterr().out


@pytest.mark.full
def test_mismatch_of_all_kinds(tmp_path):
    """tests/grpo/test_invariant.py::test_steps_start_at_ratio_one is in `make test` and catches invariant layers that
    mismatch; test_mismatch_smoke_and_a_kind_that_fails catches a benchmark that does not run.
    """
    out = tmp_path / "rows.json"
    assert mismatch.main(["--smoke", "--json", str(out)]) == 0
    found = {r["kind"]: r["mismatch"] for r in json.loads(out.read_text())["rows"]}
    assert list(found) == list(mismatch.KINDS)
    assert found["invariant, bfloat16"] == 0 < found["stock, float32"]


def broken(*arguments):
    raise RuntimeError("no such layer")


def test_invariance_smoke_and_layers_that_cannot_run(tmp_path, capsys, monkeypatch, programs):
    mismatch_of, kinds = invariance.mismatch_of, {"stock": decoder.OPERATIONS["stock"]}

    def traced_mismatch(*case):
        jax.eval_shape(functools.partial(mismatch_of, *case))
        return 1.0

    if programs == "lowered":
        monkeypatch.setattr(invariance, "float", lambda x: x, raising=False)
        monkeypatch.setattr(invariance, "mismatch_of", traced_mismatch)
    kinds["invariant"] = dataclasses.replace(kinds["stock"], dense=broken)
    monkeypatch.setattr(invariance, "OPERATIONS", kinds)
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    assert invariance.main(["--smoke", "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(r["phase"], r["layers"]) for r in rows} == {(x, k) for x in invariance.SMOKE_CASE.phases for k in kinds}
    for r in rows:
        if r["layers"] == "invariant":
            assert r["status"] == "not available: no such layer"
        elif r["phase"] == "mismatch":
            assert r["mismatch"] > 0
        else:
            assert r["status"] == "pass" and r["tokens_per_second"] > 0 and r["of_stock"] == 1 and r["peak_mib"] > 0
    shown = capsys.readouterr().out
    assert picture.stat().st_size > 1000 and "no such layer" in shown and "tokens/s" in shown


def test_few_rows_smoke(tmp_path, programs, monkeypatch):
    monkeypatch.setattr(few_rows, "_MOST_BYTES", 0)  # Two products are in a program then.
    times = iter((1.5, 3.0, *(2.0,) * 100))
    monkeypatch.setattr(
        few_rows, "kernel_microseconds", lambda run, rounds: jax.block_until_ready(run()) and next(times)
    )
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    assert few_rows.main(["--smoke", "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["status"] for r in rows} == {"pass"} and {r["m"] for r in rows} == {1, 8}
    assert {r["matrix"]: (r["k"], r["n"]) for r in rows} == few_rows.matrices(invariance.SMOKE_CASE.sizes)
    assert [r["speed"] for r in rows[:3]] == [1, 0.5, 1] and picture.stat().st_size > 1000


def test_kernels_take_no_time_on_a_cpu():
    assert few_rows.kernel_microseconds(lambda: jnp.ones(3) + 1, rounds=1) == 0


@pytest.mark.full
def test_invariance_of_all_layers(tmp_path):
    """tests/grpo/test_invariant.py::test_steps_start_at_ratio_one is in `make test` and catches invariant layers that
    mismatch; test_invariance_smoke_and_layers_that_cannot_run catches a benchmark that does not run.
    """
    out = tmp_path / "rows.json"
    assert invariance.main(["--smoke", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["status"] for r in rows} == {"pass"}
    found = {r["layers"]: r["mismatch"] for r in rows if r["phase"] == "mismatch"}
    assert found["invariant"] == 0 < found["stock"]


def test_a_program_that_fails_leaves_the_next_one_new_arrays():
    made, carried = [], None

    def program(arrays, wanted):
        if wanted is None:
            raise jax_ran_out()
        return arrays + 1, wanted

    carried = invariance.Carried(lambda: made.append(len(made)) or 10 * len(made))
    launches = [carried.launch(program, x) for x in ("a", None, "b")]
    assert launches[0].start() == "a" and launches[0].start() == "a"
    with pytest.raises(jax.errors.JaxRuntimeError):
        launches[1].start()
    assert launches[2].start() == "b" and made == [0, 1]


def kill_first_child():
    while not (children := multiprocessing.active_children()):
        time.sleep(0.01)
    children[0].kill()


def test_grpo_smoke_and_a_child_that_dies(tmp_path, capsys, monkeypatch, programs):
    """Two cases run in processes of their own, which compile what they run: one is killed, and one is on a mesh. In
    `make test`, the latter cannot run here. The others run in this process.
    """
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    out, picture, four = tmp_path / "rows.json", tmp_path / "rows.png", "data=2,tensor=2"
    measure, apart = grpo.measure, [(grpo.ONE_DEVICE, "mosaic"), (four, "xla" if programs == "compiled" else "mosaic")]

    def measure_some_apart(shape, mesh, what, candidate, *timing):
        run = measure if (mesh, candidate) in apart else grpo.measure_here
        return run(shape, mesh, what, candidate, *timing)

    monkeypatch.setattr(grpo, "measure", measure_some_apart)
    threading.Thread(target=kill_first_child, daemon=True).start()
    arguments = ["--smoke", "--rollout", "--implementations", "mosaic,xla", "--meshes", f"{grpo.ONE_DEVICE};{four}"]
    assert grpo.main([*arguments, "--json", str(out), "--plot", str(picture)]) == 0
    rows = [tuple(r[x] for x in ("mesh", "candidate", "status")) for r in json.loads(out.read_text())["rows"]]
    assert rows[0] == (grpo.ONE_DEVICE, "mosaic", "died: exit code -9")
    assert rows[2][:2] == (four, "mosaic") and "cannot run 'mosaic' here" in rows[2][2]
    assert rows[1::2] == [(grpo.ONE_DEVICE, "xla", "pass"), (four, "xla", "pass")]
    shown = capsys.readouterr().out
    assert picture.stat().st_size > 1000 and grpo.STEP in shown and "1.00" in shown
    assert json.loads(out.read_text())["timing"] == grpo.TIMING
    assert f"'{grpo.ONE_DEVICE};{four}'" in json.loads(out.read_text())["command"]


def moments_after_a_grpo_update(candidate, mesh):
    new, batch = grpo.make_inputs(grpo.SMOKE_SHAPES)
    devices = make_mesh(GrpoConfig(mesh=mesh, prompts_per_step=batch.mask.shape[0]))
    compiled, start = grpo.update_of(candidate, devices, new, batch)
    return jax.device_get(jax.tree.leaves(compiled(start())[1][0].mu))


@pytest.mark.parametrize(
    "on_one_device, on_mesh",
    [
        (("linear_grpo_loss xla",), ()),
        pytest.param(("xla", "linear_grpo_loss xla"), ("xla", "linear_grpo_loss xla"), marks=pytest.mark.full),
    ],
)
def test_a_grpo_update_is_the_same_by_every_candidate_on_every_mesh(compiled_quickly, on_one_device, on_mesh):
    """The second case runs in full only.

    In `make test`, the first case compares an update by one call with "naive". test_grpo_smoke_and_a_child_that_dies
    catches a candidate that cannot run on a mesh, test_the_bits_of_linear_logp_and_policy_loss
    (tests/ops/test_linear_grpo_loss.py) other bits of linear_grpo_loss than of two calls, and
    test_a_deterministic_warm_start_has_the_bits_of_the_unsharded_one (tests/grpo/test_sharded.py) a wrong update on a
    mesh of the trainer. A benchmark that updates otherwise on a mesh is left to `make test-full` alone.
    """
    both = "data=2,tensor=2"
    expected = moments_after_a_grpo_update("naive", grpo.ONE_DEVICE)
    own = [moments_after_a_grpo_update(x, grpo.ONE_DEVICE) for x in on_one_device]
    for moments in own[1:]:
        assert_same_bits(moments, own[0])
    for moments in (own[0], *(moments_after_a_grpo_update(x, both) for x in on_mesh)):
        for x, y in zip(moments, expected, strict=True):
            assert_within_contract(x[tuple(map(slice, y.shape))], y, "grpo_decoder", jnp.bfloat16, "gradient")
    with pytest.raises(ValueError, match="naive takes no head that is cut"):
        moments_after_a_grpo_update("naive", both)


@nnx.jit
def log_probs_of_next_tokens(model, tokens):
    logits = model.lm_head(model(tokens[:, :-1], jnp.zeros(tokens.shape[0], jnp.int32)))
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.parametrize("candidate", [pytest.param("naive", marks=pytest.mark.full), "xla"])
def test_a_rollout_records_its_own_log_probs_of_the_logits_that_it_samples_from(compiled_quickly, candidate):
    """The case of "naive" runs in full only.

    In `make test`, test_a_grpo_update_is_the_same_by_every_candidate_on_every_mesh catches wrong log-probs of "naive".
    The case of "xla" catches a rollout that records log-probs of other logits than it samples from.
    """
    new, batch = grpo.make_inputs(grpo.SMOKE_SHAPES)
    mesh = make_mesh(GrpoConfig(prompts_per_step=batch.mask.shape[0]))
    model, head = new(), MeshHead(mesh, 300, candidate, jnp.bfloat16)
    program = jax.jit(lambda params: grpo.rolled_out(candidate, head, nnx.graphdef(model), params, batch))
    compiled = program.lower(nnx.state(model)).compile()
    # The program has one product for the prompts, and one in the loop over tokens.
    assert len(re.findall(r"= \w+\[\d+,300\]\S* dot\(", compiled.as_text())) == 2
    found = compiled(nnx.state(model))
    assert_same_bits(found.tokens[:, 0], batch.tokens[:, 0])
    assert (found.tokens[:, 1:] != batch.tokens[:, 1:]).any() and found.mask.any()
    logps = log_probs_of_next_tokens(model, found.tokens)
    assert_within_contract(
        jnp.where(found.mask, found.old_logps, 0),
        jnp.where(found.mask, logps, 0),
        "grpo_decoder",
        jnp.bfloat16,
        "forward",
    )


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (linear_logp, ["--rounds", "0"], "argument --rounds: must be a positive integer, got '0'"),
        (linear_logp, ["--shapes", "4096,2048"], '--shapes: must be "N,D,V;N,D,V;…" of positive integers, got \'4096,'),
        (det_gemm, ["--shapes", "1,2,3;"], "--shapes: must be \"M,K,N;M,K,N;…\" of positive integers, got '1,2,3;'"),
        (grpo, ["--shapes", "0,2,3,4,5"], '--shapes: must be "B,T,D,L,V;B,T,D,L,V;…" of positive integers, got \'0,2'),
        (grpo, ["--dtype", "float32"], "argument --dtype: invalid choice: 'float32'"),
        (
            invariance,
            ["--phases", "update,dream"],
            "--phases: must be names among update, prefill, decode 1, ",
        ),
        (mismatch, ["--steps", "ten"], "argument --steps: must be a positive integer, got 'ten'"),
        (vocab_parallel, ["--mask-density", "0.0"], "--mask-density: must be above 0 and at most 1, got '0.0'"),
        (logits_ops, ["--mask-density", "1.5"], "--mask-density: must be above 0 and at most 1, got '1.5'"),
        (trl, ["--trainers", "grpo,foo"], "--trainers: must be names among grpo, sft, distillation, got foo"),
        (
            trl,
            ["--models", "qwen"],
            "must be names among qwen2.5-0.5b, smollm2-135m, tiny and folders that exist, got q",
        ),
        (trl, ["--completions", "8"], "--completions: must be \"8x512,32x512,…\", sequences x tokens, got '8'"),
        (trl, ["--json", "no/rows.json"], "argument --json: there is no folder no to write rows.json in"),
        (grpo, ["--meshes", "data=2"], "--meshes: must be \"data=N,tensor=M;…\" of positive integers, got 'data=2'"),
        (
            grpo_model,
            ["--model", "no", "--prompts", "no"],
            "error: no is no directory: that of a checkpoint is",
        ),
        (soak, ["--what", "brige"], "--what: must be names among bridge, stock, limits, command, got brige"),
        (cold, ["--what", "naiv"], "--what: must be names among linear_logp, naive, torch_bridge, got naiv"),
        (cold, ["--shape", "8,64"], "--shape: must be \"N,D,V\" of positive integers, got '8,64'"),
    ],
)
def test_bad_arguments(capsys, benchmark, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(arguments)
    assert message in capsys.readouterr().err


def test_a_pass_that_no_candidate_has_is_told(capsys, only_lowered):
    arguments = ["--smoke", "--implementations", "naive", "--passes", "forward;backward"]
    assert linear_logp.main(arguments) == 1
    assert capsys.readouterr().err.endswith("no candidate was measured in a pass 'backward'\n")


COMPARING = [attention, attention_accuracy, det_gemm, few_tokens, grpo, linear_cross_entropy, linear_grpo_loss]
COMPARING += [linear_kl, linear_logp, logits_ops, torch_bridge, vocab_parallel, trl, tunix]


@pytest.mark.parametrize("benchmark", COMPARING)
def test_an_unknown_candidate_is_refused_with_those_that_are_known(capsys, benchmark, monkeypatch):
    monkeypatch.setenv(common.PREALLOCATE, "")  # which restores the variable after the test
    option = "--candidates" if benchmark in (trl, tunix) else "--implementations"
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--smoke", option, "magic"])
    *_, said = capsys.readouterr().err.splitlines()
    assert re.search(rf"argument {option}: must be names among \w.*, got magic$", said)


def test_a_checkpoints_folder_is_a_model_of_trl(tmp_path):
    assert trl._options().parse_args(["--models", f"tiny,{tmp_path}"]).models == ["tiny", str(tmp_path)]


def test_the_table_of_trl_has_the_devices_memory_beside_the_allocators(capsys):
    losses = {"losses": [0.5], "grad_norms": [1.5]}
    stock = trl.Row(
        "grpo", "tiny", 4, 8, trl.STOCK, "pass", 10.0, 9.0, 1.0, 1000.0, 0.0, 2000.0, **losses, state_mib=750.0
    )
    bridge = trl.Row("grpo", "tiny", 4, 8, trl.BRIDGE, "pass", 9.0, 9.0, 1.0, 900.0, 300.0, 2500.0, **losses)
    trl._show([stock, bridge])
    head, *rows = (x for x in capsys.readouterr().out.splitlines() if "memory" in x or "bridge" in x)
    assert re.search(r"memory\W+of stock\W+torch and JAX\W+of stock\W+state", head)
    assert re.search(r"2500\.0 MiB\W+1\.250\W+1200\.0 MiB\W+1\.200", rows[0])


def test_a_record_has_the_versions_of_peers_and_clients_that_are_installed(monkeypatch, tmp_path):
    versions = {"trl": "1.16.0", "jax": "0.11.2"}
    monkeypatch.setattr(common, "installed_version", versions.get)
    monkeypatch.setattr(common.doctor, "installed_version", versions.get)
    common.write(tmp_path / "rows.json", "linear_logp", [], [])
    packages = json.loads((tmp_path / "rows.json").read_text())["packages"]
    assert packages["trl"] == "1.16.0" and packages["jax"] == "0.11.2" and packages["torch"] is None
    assert set(packages) == {"rlk-jax", *common.doctor.PACKAGES, "trl"}


@pytest.mark.parametrize(
    "benchmark", [attention, linear_logp, linear_grpo_loss, logits_ops, det_gemm, torch_bridge, vocab_parallel]
)
def test_status_1_where_no_candidate_could_run(benchmark, tmp_path, capsys, monkeypatch, only_lowered, short_chains):
    runs_torch = benchmark in (attention, linear_logp, logits_ops, det_gemm, torch_bridge)
    monkeypatch.setenv(common.PREALLOCATE, "")  # which restores the variable after the test
    monkeypatch.delenv(common.PREALLOCATE)
    measure_shapes = common.measure_shapes

    def checked(*arguments):
        """JAX's backend starts in here at the earliest."""
        assert os.environ.get(common.PREALLOCATE) == ("false" if runs_torch else None)
        return measure_shapes(*arguments)

    monkeypatch.setattr(common, "measure_shapes", checked)
    picture, absent = tmp_path / "rows.png", "cce" if benchmark is torch_bridge else "mosaic"
    assert benchmark.main(["--smoke", "--implementations", absent, "--plot", str(picture)]) == 1
    assert picture.exists() != (f"nothing to draw in {picture}" in capsys.readouterr().err)


def test_tokens_that_are_no_sequences_of_one_length_are_told(only_lowered):
    (row,) = (
        r
        for r in linear_logp.measure(linear_grpo_loss.candidates_of, "float32", 1.0, [], "12,8,20", ["xla"], 1, 0.0)
        if r.what != "G"
    )
    assert row.status == "not available: 12 tokens are not 8 sequences of one length"


def test_all_are_warmed_before_the_first_round():
    started = []
    candidates = {name: Candidate(Launch(lambda name=name: started.append(name))) for name in "ab"}
    common.milliseconds(candidates, 1, warm=0.0, timed=0.0)
    assert started == ["a"] * 3 + ["b"] * 3 + [started[-3]] * 2 + [started[-1]] * 2 and started[-3] != started[-1]


def jax_ran_out():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")


def torch_ran_out():
    torch = pytest.importorskip("torch")
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes.")


@pytest.mark.parametrize("error", [jax_ran_out, torch_ran_out])
@pytest.mark.parametrize("call", [1, 2, 6], ids=["first run", "warm-up", "round 2 of 3"])
def test_a_candidate_that_fails_while_it_is_timed_has_a_status_and_the_others_go_on(error, call):
    started = {"failing": 0, "other": 0}

    def start(name):
        started[name] += 1
        if (name, started[name]) == ("failing", call):
            raise error()

    candidates = {name: Candidate(Launch(lambda name=name: start(name))) for name in started}
    ms, failed = common.milliseconds(candidates, 3, warm=0.0, timed=0.0)
    assert failed == {"failing": f"out of memory: {error()}"} and list(candidates) == list(ms) == ["other"]
    assert started == {"failing": call, "other": 3 + 3 * 2}


class Held:
    """It stands for the arrays and tensors of a candidate."""


@pytest.mark.parametrize("fails", ["while it is built", "while it is timed"])
def test_what_failed_gives_its_memory_back_before_the_next_candidate(monkeypatch, fails):
    emptied, held = [], []
    cuda = types.SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: emptied.append(held[0]() is None))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    def failing():
        tensor = Held()
        tensor.cycle = tensor
        held.append(weakref.ref(tensor))

        def start():
            assert tensor
            raise jax_ran_out()

        if fails == "while it is built":
            start()
        return Candidate(Launch(start))

    def next_one():
        return Candidate(Launch(lambda: emptied.append(emptied[-1] and held[0]() is None)))

    found, failed = common.measure_candidates({"failing": failing, "next": next_one}, 1, 0.0)
    assert list(found) == ["next"] and list(failed) == ["failing"] and emptied[-1]


@pytest.mark.parametrize(
    "error, status",
    [
        (MemoryError(), "out of memory: MemoryError"),
        (RuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY"), "out of memory: INTERNAL: CUDA_ERROR_OUT_OF_MEMORY"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate 9"), "out of memory: RESOURCE_EXHAUSTED"),
        (ImportError("No module named 'cce'"), "not available: No module named 'cce'"),
        (ValueError("not on CPU:\nbecause"), "not available: not on CPU:"),
        (NotImplementedError(), "not available: NotImplementedError"),
        (jax.errors.JaxRuntimeError("UNIMPLEMENTED: no fp8"), "not available: UNIMPLEMENTED: no fp8"),
        (jax.errors.JaxRuntimeError("INTERNAL: illegal address"), "failed: JaxRuntimeError: INTERNAL: illegal address"),
        (TypeError("a bug"), "failed: TypeError: a bug"),
        (AssertionError(), "failed: AssertionError: AssertionError"),
    ],
)
def test_an_error_of_an_unexpected_kind_is_seen(capsys, error, status):
    def failing():
        raise error

    found = common.attempt(failing).status
    assert found.startswith(status)
    is_expected = not status.startswith("failed")
    assert ("Traceback" not in capsys.readouterr().err) == is_expected
    assert common.exit_status(["pass", found]) == int(not is_expected)


def test_an_interrupt_ends_a_benchmark():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        common.attempt(interrupted)


BASELINES = {
    attention: "cudnn",
    linear_logp: "GEMM",
    linear_grpo_loss: "GEMM",
    logits_ops: "copy: negation",
    det_gemm: "cuBLAS",
    torch_bridge: "jax",
    vocab_parallel: "naive",
}


@pytest.mark.parametrize("failing", ["baseline", "candidate"])
@pytest.mark.parametrize("benchmark", BASELINES)
def test_every_benchmark_goes_on_where_a_candidate_fails_while_it_is_timed(
    tmp_path, capsys, monkeypatch, benchmark, failing
):
    """The candidates of this test compute nothing."""
    if benchmark is torch_bridge:
        pytest.importorskip("torch")
    own = {torch_bridge: ("bridge", "bridge validate")}.get(benchmark, ("xla", "deterministic"))
    fails = BASELINES[benchmark] if failing == "baseline" else own[0]
    failed, ran = set(), set()

    def candidate(key):
        def start():
            if fails in key:
                failed.add(key)
                raise jax_ran_out()
            ran.add(key)

        return Candidate(Launch(start), extra_bytes=2**20)

    def build(builders):
        keys = [
            tuple(what if x == "" else x for x in key) if "" in key[1:2] else key
            for key in builders
            for what in ("forward", "forward+backward")
        ]
        return {key: candidate(key) for key in keys}, {}

    monkeypatch.setattr(common, "_build", build)
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    names = ",".join({*own, BASELINES[benchmark]} - {"GEMM", "cuBLAS", "copy: negation"})
    arguments = ["--smoke", "--implementations", names, "--json", str(out), "--plot", str(picture)]
    assert benchmark.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(failed) == sum(r["status"].startswith("out of memory: RESOURCE_EXHAUSTED") for r in rows) > 0
    assert len(ran) == sum(r["status"] == "pass" for r in rows) > 0
    assert "out of memory" in capsys.readouterr().out


def test_attention_smoke(tmp_path, capsys, monkeypatch, programs):
    monkeypatch.setattr(attention, "MOST_CALLS", 2)
    monkeypatch.setattr(attention, "ROTATED", attention_peers.Sizes(2, 1, 24, 4, 2, 16).cache_bytes + 1)
    out, picture, absent = tmp_path / "rows.json", tmp_path / "rows.png", ("cudnn", "mosaic", attention_peers.FLASH_3)
    arguments = ["--smoke", "--window", "2", "--implementations", f"{attention_peers.FLASH_3},mosaic,xla"]
    assert attention.main([*arguments, "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    status = {(r["what"], r["implementation"]): r["status"] for r in rows}
    both = ("forward", "forward+backward")
    passes = {"decode", *both, *(f"{what}, windowed" for what in both)}
    assert {what for what, _ in status} == {*passes, "copy"}
    assert all(status[what, "xla"] == "pass" for what in passes)
    assert all(status[what, name].startswith("not available") for what in passes for name in absent)
    for r in rows:
        if r["status"] == "pass":
            assert (r["of_whole"] is None) != r["what"].endswith(", windowed")
            assert (r["of_copy"] is None) != (r["what"] in ("copy", "decode"))
    assert max(r["of_copy"] for r in rows if r["what"] == "copy") == 1
    assert picture.stat().st_size > 1000 and "speed of cudnn = 1" in capsys.readouterr().out


def test_attention_accuracy_smoke(tmp_path, capsys):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "cudnn,xla", "--json", str(out), "--plot", str(picture)]
    assert attention_accuracy.main(arguments) == 0
    cudnn, *rows = json.loads(out.read_text())["rows"]
    assert cudnn["status"].startswith("not available")
    assert [r["data"] for r in rows] == ["plain", "peaked"]
    assert all(1e-4 < r[x] < 1e-2 for r in rows for x in attention_accuracy.RESULTS)
    assert picture.stat().st_size > 1000 and "errors of attention" in capsys.readouterr().out


@pytest.mark.parametrize("length, window", [(16, 3), (1, None)])
def test_what_attention_is_measured_against_is_the_same(length, window):
    sizes = attention_accuracy.SMOKE_SIZES._replace(length=length)
    problem = attention_accuracy.make_problem(attention_accuracy.SMOKE_SIZES, "bfloat16", 1.0)
    arguments = problem.query[:, -length:], problem.key, problem.value
    by = {name: attention_peers.attend_by(name, sizes, window) for name in ("jax xla", "xla")}
    actual, expected = (jax.jit(attend)(*arguments) for attend in by.values())
    assert_within_contract(actual, expected, "attention", jnp.bfloat16, "forward")


def test_operations_of_attention_count_what_a_query_sees():
    whole, part = attention_peers.Sizes(2, 9, 9, 4, 2, 16), attention_peers.Sizes(2, 3, 9, 4, 2, 16)
    for sizes, window, seen in [
        (whole, None, 40.5),
        (whole, 4, 28),
        (part, None, 22.5),
        (part, 7, 20.5),
        (part, 4, 12),
    ]:
        assert sizes.flops(window) == 4 * 2 * 4 * 16 * seen


def test_torch_bridge_smoke(tmp_path, compiled_quickly):
    pytest.importorskip("torch")
    out = tmp_path / "rows.json"
    assert torch_bridge.main(["--smoke", "--dtype", "float32", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    passed = {(r["candidate"], r["what"]) for r in rows if r["status"] == "pass"}
    assert passed == {(n, w) for n in torch_bridge.OURS for w in ("forward", "forward+backward")}
    assert {r["candidate"] for r in rows if r["status"].startswith("not available")} >= {"torch.compile", "cce"}
    compared = {r["candidate"] for r in rows if r["over_jax_us"] is not None}
    assert compared == set(torch_bridge.OURS) - set(torch_bridge.OTHER_BUDGETS)


def test_budgets_of_the_bridge():
    weight = jax.ShapeDtypeStruct((151936, 4096), "bfloat16")
    found = {name: torch_bridge.budget_of(name, 8192, weight) for name in torch_bridge.BRIDGES}
    assert found == {
        "bridge": 256 * 2**20,
        "bridge validate": 256 * 2**20,
        "bridge default budget": None,
        "bridge all kept": 2 * 8192 * 151936 * 11 // 10,
    }


def test_a_pass_that_runs_out_of_memory_costs_its_own_row(monkeypatch, only_lowered):
    def exhausted():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    own_candidates = linear_logp.own_candidates

    def short(name, inputs):
        found = own_candidates(name, inputs)
        return found | {"forward": lambda: dataclasses.replace(found["forward"](), launch=Launch(exhausted))}

    monkeypatch.setattr(linear_logp, "own_candidates", short)
    passes = ["forward", "forward+backward", "frozen head"]
    rows = linear_logp.measure(linear_logp.candidates_of, "float32", 1.0, passes, "16,8,20", ["naive"], 1, 0.0)
    status = {r.what: r.status.split(":")[0] for r in rows}
    assert status == {"G": "pass", "forward": "out of memory", "forward+backward": "pass", "frozen head": "pass"}


@pytest.mark.parametrize("what", ["top 20", "rank", "9 of 10 allowed", f"{linear_logp.KEPT_IDS} ids allowed"])
def test_naive_masks_and_rankings_are_right(compiled_quickly, what):
    inputs = linear_logp.make_inputs("8,16,200", "float32", 1.0)
    arguments = inputs.hidden, inputs.weight, inputs.target_ids
    options = {**dict(linear_logp.RANKINGS), **inputs.allowed()}[what]
    expected = linear_logp.linear_logp(*arguments, **options, implementation="reference")
    found = jax.tree.leaves(linear_logp.naive(*arguments, **options))
    names = {"top 20": ("logp", "top_logps", "top_ids"), "rank": ("logp", "target_rank")}.get(what)
    right = (expected,) if names is None else tuple(getattr(expected, x) for x in names)
    for actual, value in zip(found, right, strict=True):
        assert_within_contract(actual, value, "linear_logp", jnp.float32, "forward")


@pytest.mark.parametrize("what", linear_cross_entropy.OPTIONS)
def test_naive_cross_entropy_is_right(compiled_quickly, what):
    inputs = linear_logp.make_inputs("8,16,200", "float32", 1.0)
    options = linear_cross_entropy.OPTIONS[what]
    found = linear_cross_entropy.naive(inputs.hidden, inputs.weight, inputs.target_ids, **options)
    op = linear_cross_entropy.linear_cross_entropy
    expected = op(inputs.hidden, inputs.weight, inputs.target_ids, **options, implementation="reference")
    assert_within_contract(found, expected, "linear_logp", jnp.float32, "forward")


def test_nine_of_ten_tokens_are_allowed():
    words = linear_logp.make_inputs("200,8,6400", "float32", 1.0).allowed()["9 of 10 allowed"]["allowed_mask"]
    assert abs(jnp.bitwise_count(words).sum() / words.size / 32 - 0.9) < 0.005


def test_half_of_the_tokens_count():
    inputs = linear_logp.make_inputs("10,8,20", "float32", 0.5)
    assert inputs.active.tolist() == [False] * 5 + [True] * 5


@pytest.mark.parametrize("own", ["deterministic canonical", pytest.param("xla", marks=pytest.mark.full)])
def test_vocab_parallel_smoke(tmp_path, programs, own):
    """In `make test`, the case of "deterministic canonical" catches a benchmark that does not run, and
    test_every_benchmark_goes_on_where_a_candidate_fails_while_it_is_timed catches rows of "xla" that are missing.
    """
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", f"mosaic,{own},naive"]
    arguments += ["--mask-density", "0.5", "--json", str(out), "--plot", str(picture)]
    assert vocab_parallel.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    passed = {(r["implementation"], r["degree"], r["what"]) for r in rows if r["status"] == "pass"}
    passes = ("forward", "forward+backward")
    assert passed == {(name, degree, what) for name in (own, "naive") for degree in (1, 2) for what in passes}
    assert {r["degree"] for r in rows if r["status"].startswith("not available")} == {1, 2}
    assert all(r["efficiency"] > 0 for r in rows if r["implementation"] in ("xla", "naive"))
    assert picture.stat().st_size > 1000


def test_naive_vocab_parallel_is_right(compiled_quickly):
    inputs = linear_logp.make_inputs("8,16,64", "float32", 1.0)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("tp",))
    arguments = inputs.hidden, inputs.weight, inputs.target_ids
    expected = jax.jit(linear_logp.naive)(*arguments)
    actual = jax.jit(functools.partial(vocab_parallel.naive, mesh))(*arguments)
    assert_within_contract(actual, expected, "linear_logp", jnp.float32, "forward")


def test_det_gemm_smoke(tmp_path, capsys, programs, short_chains):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "mosaic,deterministic,triton persistent"]
    assert det_gemm.main([*arguments, "--json", str(out), "--plot", str(picture)]) == 0
    record = json.loads(out.read_text())
    status = {(r["implementation"], r["shape"], r["what"]): r["status"] for r in record["rows"]}
    large, small = det_gemm.SMOKE_SHAPES.split(";")
    passes = {(large, "forward"), (large, "dA"), (large, "dB"), (small, "forward [K,N]"), (small, "forward [N,K]")}
    for name in ("cuBLAS", "deterministic"):
        assert {(shape, what) for n, shape, what in status if n == name and status[n, shape, what] == "pass"} == passes
    for name in ("mosaic", "triton persistent"):
        assert all(status[name, *x].startswith("not available") for x in passes)
    assert picture.stat().st_size > 1000
    assert "speed of cuBLAS = 1" in capsys.readouterr().out


def test_what_det_gemm_is_measured_against_is_the_same_product(short_chains):
    for shape in det_gemm.SMOKE_SHAPES.split(";"):
        for x in det_gemm.passes_of(shape, "bfloat16").values():
            expected, actual = (launch.start()[-1] for launch in (x.by("cuBLAS"), x.by("deterministic")))
            assert_within_contract(actual, expected, "det_gemm", jnp.bfloat16, "gradient")


def test_logits_ops_smoke(tmp_path, capsys, programs):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "mosaic,xla,naive,torch.compile"]
    assert logits_ops.main([*arguments, "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    status = {(r["op"], r["implementation"], r["what"]): r["status"] for r in rows}
    passes = {
        f"{what}{masked}"
        for what in ("forward", "forward+backward", "forward+backward, in place")
        for masked in ("", ", masked")
    }
    for op in logits_ops.OPS:
        own = {what for what in passes if op != logits_ops.ALLOWED or not what.endswith(", masked")}
        assert {what for o, name, what in status if (o, name) == (op, "xla")} == own
        assert all(status[op, "xla", what] == "pass" for what in own)
        assert all(status[op, "mosaic", what].startswith("not available") for what in own)
    assert status["logp", "torch.compile", "forward"].startswith("not available")
    assert all((r["of_whole"] is not None) == r["what"].endswith(", masked") for r in rows if r["op"] and r["ms"])
    assert picture.stat().st_size > 1000
    assert "of copy" in capsys.readouterr().out


@pytest.mark.parametrize("op", logits_ops.OPS)
def test_what_logits_ops_are_measured_against_is_the_same(compiled_quickly, op):
    inputs = logits_ops.make_inputs("2,6,50", "float32")
    active = inputs.mask(0.5)

    @functools.partial(jax.jit, static_argnums=0)
    def value(name, policy):
        return logits_ops.OPS[op](name, policy, inputs, active, False)

    found = {name: value(name, inputs.policy) for name in ("naive", "reference")}
    # The naive ratio_kl leaves out two constants 1: that of a masked ratio, and that of k3.
    naive = jnp.where(active, found["naive"] - (op == "ratio_kl"), op == "ratio_kl")
    assert_within_contract(naive, found["reference"], op.split()[0], jnp.float32, "forward")


def test_cold(tmp_path, capsys, monkeypatch, compiled_quickly):
    """Every stage of every case has a figure, and processes that are timed find bytecode and empty caches."""
    path, found, in_process = tmp_path / "cold.json", [], cold.in_process

    def noted(what, shape, bytecode, caches):
        found.append((bool([*bytecode.rglob("cold*.pyc")]), caches.exists()))
        return in_process(what, shape, bytecode, caches)

    monkeypatch.setattr(cold, "in_process", noted)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert cold.main(["--shape", "8,64,256", "--what", "linear_logp", "--json", str(path)]) == 0
    assert found == [(False, False), (True, False), (True, True)]
    rows = json.loads(path.read_text())["rows"]
    assert [(row["what"], row["caches"]) for row in rows] == [("linear_logp", "empty"), ("linear_logp", "full")]
    for row in rows:
        stages = ["import jax", "import rlk_jax", "start", "trace", "lower", "compile", "run"]
        assert list(row["seconds"]) == stages
        assert all(x >= 0 for x in row["seconds"].values())
    assert "compile" in capsys.readouterr().out
    for name in cold.CASES.keys() - {"linear_logp"}:
        stages = cold.Stages()
        cold.CASES[name](8, 64, 256, stages=stages)
        assert next(iter(stages.seconds)).startswith("import") and len(stages.seconds) > 3, name


def test_a_soak_judges_curves_by_thirds_and_by_their_bounds():
    flat, rising = [5.0, 100, 100, 100, 100, 101, 101, 7], [5.0, 5, 100, 100, 101.5, 101.5]
    curves = {"step ms": rising, "host MiB": flat, "device MiB": rising, "programs on disk MiB": rising}
    row = soak.Row("a run", "pass", curves=curves, bounds={"programs on disk MiB": 101, "step ms": 101.5})
    assert soak.risen(row) == ["device MiB rose from 100.0 to 101.5"]
    assert soak.exceeded(row) == ["programs on disk MiB reached 101.5 of 101"]


@pytest.mark.parametrize(("last", "faults"), [(109.0, []), (111.0, ["step ms rose from 100.0 to 111.0"])])
def test_a_soak_judges_the_drift_of_step_times_by_medians(last, faults):
    """The first third, and a step that compiles, say nothing."""
    curves = {"step ms": [900.0, 900, 900, 100, 5000, 100, last, last, 9000]}
    assert soak.risen(soak.Row("a run", "pass", curves=curves)) == faults


@pytest.mark.parametrize(
    ("smoke", "status"),
    [(True, "pass"), (False, "failed: step ms rose from 2.0 to 4.0; host MiB rose from 2.0 to 4.0")],
)
def test_only_a_long_soak_is_judged(monkeypatch, tmp_path, capsys, smoke, status):
    curves = {"step ms": [1.0, 2, 4], "host MiB": [1.0, 2, 4]}
    monkeypatch.setattr(soak, "runs", lambda smoke: {"command": lambda: (curves, {})})
    monkeypatch.setattr(soak.processes, "in_own_process", lambda function, *arguments: function(*arguments))
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--what", "command", "--json", str(out), "--plot", str(picture), *["--smoke"] * smoke]
    assert soak.main(arguments) == int(not smoke)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["status"] == status and row["curves"] == curves and picture.stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "last of middle" in shown and "1.10" in shown and "1.01" in shown


FOR_A_GPU = [attention, cold, det_gemm, few_rows, few_tokens, grpo, grpo_plan, invariance, linear_cross_entropy]
FOR_A_GPU += [linear_grpo_loss, linear_kl, linear_logp, logits_ops, soak, torch_bridge, trl, vocab_parallel]
FOR_A_CPU = [attention_accuracy, grpo_model, mismatch, tunix]


def test_every_benchmark_says_what_its_sizes_are_for():
    folder = pathlib.Path(common.__file__).parent
    named = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text()}
    assert named == {module.__name__.removeprefix("benchmarks.") for module in FOR_A_GPU + FOR_A_CPU}


@pytest.mark.parametrize("benchmark", FOR_A_GPU)
def test_sizes_of_a_gpu_are_not_measured_on_a_cpu(capsys, monkeypatch, benchmark):
    """Unless they are asked for, which test_a_cpu_measures_what_it_is_asked_for has."""
    monkeypatch.setattr(processes, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setenv(common.PREALLOCATE, "")  # which restores the variable after the test
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([])
    printed, said = capsys.readouterr()
    assert not printed and re.fullmatch(r"no GPU here: these sizes take hours on a CPU; --[^\n]+\n", said)


def test_the_process_that_looks_for_a_gpu_finds_none(capsys):
    with pytest.raises(SystemExit, match="2"):
        common.require_gpu("--smoke has small ones")
    assert capsys.readouterr().err.endswith("; --smoke has small ones\n")


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_cpu_measures_what_it_is_asked_for(monkeypatch, backend):
    """A GPU has sizes of its own, too."""
    monkeypatch.setattr(processes, "in_own_process", lambda function: backend)
    parser = common.parser("some", None, shapes="4096,64,70000;1,2,3", implementations="xla")
    cases = {("--shapes", "4096,64,70000"): ["4096,64,70000"], ("--smoke",): ["1,1,1"]}
    cases |= {(): ["4096,64,70000", "1,2,3"]} if backend == "gpu" else {}
    for arguments, expected in cases.items():
        assert common.asked_shapes(parser.parse_args(arguments), "1,1,1") == expected


class LoggingProcess:
    """It stands for a process that has logged one step more whenever it is looked at, and ends after the eighth."""

    pid = os.getpid()

    def __init__(self, path):
        self.path, self.steps = path, 0

    def poll(self):
        self.steps += 1
        self.path.write_text("{}\n" * self.steps)
        return 0 if self.steps > 8 else None


def test_a_soak_samples_a_process_as_it_logs(tmp_path):
    """The first steps are left out."""
    path = tmp_path / "metrics.jsonl"
    curves = soak.sampled(LoggingProcess(path), path, every=2)
    assert list(map(len, curves.values())) == [3, 3]
    assert min(curves["step ms"]) > 0 and min(curves["host MiB"]) > 1


def test_a_soak_of_a_command_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert soak.measure_here("command", True).status.startswith("failed: CalledProcessError")
