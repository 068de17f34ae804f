"""`rlk grpo --plan`: the memory of a run by its own programs, for the devices here and for GPUs by name."""

import gc
import io
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies

from rlk_jax import models
from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo import plan, text_steps
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.job import Job
from rlk_jax.grpo.stopping import StopRequest
from tests.grpo import tiny, tiny_text
from tests.support import helpers

OPTIONS: dict[str, Any] = {
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "updates_per_rollout": 1,
    "max_new_tokens": 16,
    "reward": "tests.grpo.tiny_text:letters",
}


HUGE = {"vocab_size": 2**20, "hidden_size": 2**16, "num_attention_heads": 512, "num_key_value_heads": 512}


def describe(directory: Path, **fields: Any) -> str:
    """Write the files of a model of one layer, but not its weights."""
    tiny_text.write_model(directory, num_hidden_layers=1)
    (directory / "model.safetensors").unlink()
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return str(directory)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A model without weights, and prompts."""
    folder = tmp_path_factory.mktemp("given")
    return {"model": describe(folder / "model"), "prompts": str(tiny_text.write_prompts(folder / "prompts.jsonl"))}


def command(files: dict[str, str], *more: str, **changes: Any) -> list[str]:
    values = {**files, **OPTIONS, **changes}
    return [*(f"--{name.replace('_', '-')}={x}" for name, x in values.items()), "--plan", *more]


@pytest.fixture(scope="module")
def planned(files):
    """A function that gives the job and the plan of changed options, each made once."""
    made: dict[str, tuple[Job, plan.Plan]] = {}

    def of(**changes: Any) -> tuple[Job, plan.Plan]:
        if str(changes) not in made:
            with tiny.shared_programs():
                made[str(changes)] = plan.make_plan(GrpoConfig(**files, **{**OPTIONS, **changes}), None, StopRequest())
        return made[str(changes)]

    return of


TWO = {"mesh": "data=2,tensor=1"}


def test_the_plan_has_what_the_programs_of_a_run_need(planned):
    """The programs are those that a run calls, with real states."""
    job, made = planned(**TWO)
    model = nnx.eval_shape(lambda: models.CausalLM(models.read_config(job.config.model), rngs=nnx.Rngs(0)))
    weights = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), nnx.state(model, nnx.Param))
    with mock.patch.object(text_steps, "load_parameters", lambda *_: weights):
        state = job.steps.initial_state()
    for name, tree in state.saved.items():
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        assert made.states[name] == sum(x.data.nbytes for x in shards if x.device == jax.devices()[0]) > 0
    kept = sum(made.states.values())
    start, rollout, step, evaluation = made.programs
    for program, lowered in (
        (start, job.steps.initial_state.lower()),
        (rollout, job.steps.start_grpo.lower(state)),
        (step, job.steps.grpo_step.lower(state, 0)),
        (evaluation, job.steps.heldout_rewards.lower(state.params)),
    ):
        sizes = lowered.compile().memory_analysis()
        assert program.arguments == sizes.argument_size_in_bytes
        assert program.results == sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        assert program.temporaries == sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    assert start.results >= kept and start.beside == step.beside == 0 and step.arguments > kept
    assert evaluation.beside == kept - made.states["params"]
    assert made.largest is step and step.peak == step.arguments + step.results + step.temporaries


def test_nothing_is_allocated_or_written(files, planned, tmp_path, capsys):
    """The weights are missing, and --out and --save-hf are of a run."""
    planned()  # Shared programs are made.
    gc.collect()
    before = len(jax.live_arrays())
    assert tiny.run_here(*command(files), "--out", tmp_path / "out", "--save-hf", files["model"]) == 0
    gc.collect()
    assert len(jax.live_arrays()) == before and not (tmp_path / "out").exists()
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("parameters", "reference", "optimizer", "a rollout", "a GRPO step"))
    # Tables of a small model have a unit that fits it.
    assert " MiB on a device " in shown and re.search(r" parameters +│ (?!0\.00)\d", shown)
    assert re.search(r"\npeak memory of a device: [1-9]\d*\.\d\d MiB; 1 x cpu\n", shown)


@helpers.cover("fields", [({},), (HUGE,)], lambda fields: not fields)
def test_a_run_that_does_not_fit_is_one_line_behind_the_tables(files, tmp_path, capsys, monkeypatch, fields):
    """No machine could hold the model that `make test-full` has; in `make test`, nothing is free."""
    if not fields:
        monkeypatch.setattr(plan, "free_memory", lambda _: 0)
    assert tiny.run_here(*command({**files, "model": describe(tmp_path / "model", **fields)})) == 2
    shown = capsys.readouterr()
    peak = re.search(r"^peak memory of a device: (\d+\.\d\d [GM]iB); 1 x cpu$", shown.out, re.MULTILINE)[1]
    assert shown.err.startswith("rlk grpo: error: out of memory: ") and shown.err.count("\n") == 1
    assert f" needs about {peak} on a device, and " in shown.err
    assert "--remat" in shown.err and "--width" not in shown.err


def test_the_built_in_policy_has_a_plan(capsys):
    assert tiny.run_here(*tiny.options(), "--plan", build=tiny.stand_in_steps) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("a warm-up step", "the start of GRPO", "a GRPO step"))


def in_full(*values: Any) -> Any:
    """Parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        (TWO, 0.8),
        in_full({"micro_batches": 4}, 0.6),
        in_full({"remat": True}, 0.95),
        in_full({"prompts_per_step": 4}, 1.4),
        in_full({"max_new_tokens": 32}, 1.2),
        in_full({"beta": 0.0}, 0.99),
        in_full({"compute_dtype": "bfloat16"}, 0.99),
    ],
    ids=str,
)
def test_options_are_seen_in_the_peak(planned, changes, factor):
    """A plan compiles the programs of its run, so `make test` has one option alone, whose programs
    test_the_plan_has_what_the_programs_of_a_run_need has compiled.
    """
    found, before = planned(**changes)[1].largest.peak, planned()[1].largest.peak
    assert found < before * factor if factor < 1 else found > before * factor


def test_options_are_seen_in_the_states(files):
    """Nothing but the program that makes them is compiled."""
    changes = ({}, {"compute_dtype": "bfloat16"}, {"beta": 0.0})
    configs = [GrpoConfig(**files, **OPTIONS, **x) for x in changes]
    whole, rounded, without = (plan.make_plan(x, None, StopRequest(signal=2))[1].states for x in configs)
    assert whole["reference"] == whole["params"] == 2 * rounded["reference"] and "reference" not in without
    assert whole["params"] == rounded["params"] == without["params"]


# In make test, the larger record is counted.
@pytest.mark.parametrize(("changes", "size"), [({"top_p": 0.9}, 4 * 9), in_full({"top_k": 50, "top_p": 0.9}, 4 * 50)])
def test_what_tokens_were_drawn_among_is_counted(files, changes, size):
    """A rollout gives so many bytes more for each token: a word for each 32 of the vocabulary, or k ids. A step takes
    them. The programs are lowered alone.
    """

    def moved(**changes: Any) -> np.ndarray:
        """The bytes that a rollout gives, and that a step takes."""
        job, _ = plan.make_plan(GrpoConfig(**files, **OPTIONS, **changes), None, StopRequest(signal=2))
        state = job.steps.initial_state.lower().out_info
        given = job.steps.start_grpo.lower(state).out_info, job.steps.grpo_step.lower(state, 0).args_info
        return np.array([sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in given])

    np.testing.assert_array_equal(moved(**changes) - moved(), 2 * 4 * 16 * size)


def test_what_is_free_may_be_unknown(files, capsys, monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda _: None)
    assert tiny.run_here(*command(files)) == 0
    assert capsys.readouterr().err == "rlk grpo: warning: it is unknown here whether the run fits into memory\n"


def test_a_plan_that_is_interrupted_compiles_no_more_and_says_nothing(files):
    config, console = GrpoConfig(**files, **OPTIONS), OutputConsole(file=io.StringIO())
    assert plan.plan(config, None, console, StopRequest(signal=2)) == 130 and not console.file.getvalue()
    assert len(plan.make_plan(config, None, StopRequest(signal=2))[1].programs) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "--resume"], "argument --resume: not allowed with argument --plan"),
        (["--plan", "--overwrite"], "argument --overwrite: not allowed with argument --plan"),
        (["--plan", "--device", "h900"], "argument --device: invalid choice: 'h900' (choose from 'h100', 'h200', "),
    ],
    ids=str,
)
def test_a_mistake_in_the_options_is_bad_usage(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        tiny.run_here(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "--device", "h100"], "--device is of a given model: it has no meaning without --model"),
        (["--device", "h100", "--out", "out"], "--device is of --plan: a run takes the devices that are here"),
        ([], "--out is missing: the folder of checkpoints, metrics and report"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert tiny.run_here(*tiny.options(), *arguments) == 2
    assert capsys.readouterr().err == f"rlk grpo: error: {message}\n"


@pytest.fixture
def settings():
    """The settings of JAX that a plan for a named GPU changes."""
    before = {name: getattr(jax.config, name) for name in ("jax_platforms", "jax_enable_compilation_cache")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_plugin_that_is_missing_is_one_line(files, capsys, monkeypatch, settings):
    def missing(**_: Any) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert tiny.run_here(*command(files, "--device=h100")) == 2
    needed = "--device h100 needs JAX's CUDA plugin, of rlk-jax's extra `cuda13`: pip install \"rlk-jax[cuda13]\""
    assert capsys.readouterr().err == f"rlk grpo: error: {needed}\n"


def test_jax_takes_a_share_of_a_gpus_memory(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert GPUS["h100"].usable_memory == GPUS["h100"].memory * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert GPUS["h100"].usable_memory == GPUS["h100"].memory // 2
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1")
    assert GPUS["h100"].usable_memory == GPUS["h100"].memory


def test_a_share_that_jax_refuses_is_one_line(files, capsys, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "half")
    assert tiny.run_here(*command(files, "--device=h100")) == 2
    assert capsys.readouterr().err == "rlk grpo: error: XLA_CLIENT_MEM_FRACTION=half is not a number\n"


@pytest.mark.full
@pytest.mark.parametrize("device", ["h100", "b200"])
def test_a_gpu_that_is_not_here(files, device):
    """In `make test`, sm90.py compiles for an H200 by its description."""
    if "RLK_SM90_PLUGINS" not in os.environ:
        pytest.skip("needs jax's CUDA plugins, whose folder RLK_SM90_PLUGINS names")
    paths = os.pathsep.join([os.getcwd(), os.environ["RLK_SM90_PLUGINS"]])
    arguments = command(files, f"--device={device}", "--invariant", mesh="data=2,tensor=1", compute_dtype="bfloat16")
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([*tiny.COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"peak memory of a device: \d+\.\d\d MiB; 2 x {GPUS[device].title}\n", done.stdout)
