"""Programs of `rlk grpo --model` on disk: another process finds them, with the same bits; what they are made from tells
them apart.
"""

import shutil
from collections.abc import Callable, Hashable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.core import program_cache
from rlk_jax.grpo import text_steps
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.kept_programs import KeptProgram
from rlk_jax.grpo.policy import Policy, make_policy
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.text_task import load_text_task
from tests.grpo import tiny, tiny_text
from tests.grpo.test_text_run import OPTIONS, command, metrics_of
from tests.support import helpers

ONE_STEP = {"grpo_steps": 1, "updates_per_rollout": 1}
STOCK = {"invariant": False, "compute_dtype": "float32"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where programs are kept."""
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and a file of prompts."""
    where = tmp_path_factory.mktemp("given")
    return tiny_text.write_model(where / "model", num_hidden_layers=1), tiny_text.write_prompts(where / "prompts.jsonl")


@pytest.fixture
def bits_of(files, tmp_path) -> Callable[..., tuple[list[dict], bytes]]:
    """What a run of this name measures and writes."""

    def run(name: str, **changes) -> tuple[list[dict], bytes]:
        saved = tmp_path / f"{name}-hf"
        assert tiny.run_here(*command(files, tmp_path / name, save_hf=saved, **ONE_STEP, **changes)) == 0
        return metrics_of(RunFolder(tmp_path / name)), (saved / "model.safetensors").read_bytes()

    return run


def test_another_run_traces_nothing_and_has_the_same_bits(bits_of, folder, monkeypatch):
    """The layers are those that compile soonest: what is kept is a program of any."""
    expected = bits_of("first", **STOCK)
    assert len(list(folder.iterdir())) == 2
    for traced in ("values", "roll_out"):
        monkeypatch.setattr(Policy, traced, lambda *_, **__: pytest.fail("it was traced again"))
    assert bits_of("second", **STOCK) == expected and len(list(folder.iterdir())) == 2


@pytest.mark.full
def test_programs_that_are_kept_have_the_bits_of_those_that_are_not(bits_of, folder, monkeypatch):
    """The layers are invariant. In make test, test_another_run_traces_nothing_and_has_the_same_bits compares two runs
    that keep programs of stock ones.
    """
    found = bits_of("kept")
    monkeypatch.setenv("RLK_CACHE", "off")
    assert bits_of("off") == found


def key(model: Path, prompts: Path, **changes) -> Hashable:
    config = GrpoConfig(**{**OPTIONS, "model": str(model), "prompts": str(prompts), **changes})
    return text_steps.program_key(config, make_policy(config, make_mesh(config), load_text_task(config).tokenizer))


def test_what_programs_are_made_from_tells_them_apart(files, tmp_path):
    model, prompts = files
    same = {"save_hf": str(tmp_path), "show_every": 3, "checkpoint_every": 7, "reward": "exact"}
    of_run = key(*files)
    assert key(shutil.copytree(model, tmp_path / "copied"), prompts, **same) == of_run
    other_model = tiny_text.write_model(tmp_path / "other", rope_theta=5000.0)
    other_ends = tiny_text.write_model(tmp_path / "ends", eos_token_id=[2, 41])
    changed = [{"learning_rate": 2e-2}, {"seed": 1}, {"top_k": 5}, {"loss_type": "cispo"}, {"grpo_steps": 5}]
    others = [key(other_model, prompts), key(other_ends, prompts), *(key(*files, **x) for x in changed)]
    assert len({repr(x) for x in [of_run, *others]}) == len(others) + 1


@pytest.fixture
def traces() -> list[nnx.State]:
    """The states that `doubled` was traced with."""
    return []


@pytest.fixture
def doubled(traces) -> KeptProgram:
    """A program that doubles the arrays of a state, and says their sum."""
    mesh = make_mesh(GrpoConfig())
    lies = NamedSharding(mesh, PartitionSpec())

    def double(states: nnx.State, by: jax.Array) -> tuple[nnx.State, dict[str, jax.Array]]:
        traces.append(states)
        new = jax.tree.map(lambda x: x * by, states)
        return new, {"sum": sum(x.sum() for x in jax.tree.leaves(new)), "by": by}

    return KeptProgram(double, "doubled", (lies, lies), lies)


def test_states_are_updated_in_place_and_results_have_their_names(folder, doubled):
    def run() -> tuple[nnx.State, dict[str, jax.Array]]:
        given = nnx.State({"a": jnp.arange(3.0), "b": jnp.ones((2, 2))})
        new, named = doubled(given, jnp.float32(2))
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
        return new, named

    ours, theirs = run(), run()
    assert len(list(folder.iterdir())) == 1
    helpers.assert_same_bits(ours, theirs)
    assert list(ours[1]) == ["by", "sum"] and ours[1]["sum"] == 14
    np.testing.assert_array_equal(ours[0]["a"], [0, 2, 4])


@pytest.mark.parametrize("kept", ["on disk", "off", "not to be exported"])
def test_a_process_traces_it_once(folder, doubled, traces, monkeypatch, kept):
    if kept == "off":
        monkeypatch.setenv("RLK_CACHE", "off")
    if kept == "not to be exported":
        monkeypatch.setattr(program_cache, "_exported", lambda function, specs, _: function.trace(*specs) and None)
    given, by = nnx.State({"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}), jnp.float32(2)
    doubled.shapes(given, by)
    doubled.lower(given, by)
    doubled(given, by)
    assert len(traces) == 1 and (kept != "on disk" or len(list(folder.iterdir())) == 1)


def test_shapes_and_the_lowered_program_are_those_of_calls(folder, doubled, caplog):
    (lies, _), by = doubled.states, jnp.float32(2)
    given = jax.device_put(nnx.State({"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}), lies)
    with jax.log_compiles():
        lowered = doubled.lower(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), given), by
        )
        lowered.compile()
        assert caplog.text.count("Compiling jit(double)") == 1 and "@jit_double" in lowered.as_text()
        caplog.clear()
        doubled(jax.tree.map(jnp.copy, given), by)
        assert "Compiling jit(double)" not in caplog.text
    states, named = doubled.shapes(given, jnp.float32(2))
    assert states["b"].shape == (2, 2) and {name: x.shape for name, x in named.items()} == {"by": (), "sum": ()}
    assert len(list(folder.iterdir())) == 1
