"""`rlk grpo`'s steps on GPUs: rollouts in the bits of training, on one and on several."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.steps import TrainingSteps, TrainState, build_steps, make_head, make_mesh
from rlk_jax.grpo.tasks import load_task
from tests.grpo import prompts, tiny, tiny_text
from tests.grpo.test_shards import built, trained
from tests.support import helpers

WARMUP = 60
ADAM_B1 = 0.9
ONE = "data=1,tensor=1"


class Warm(NamedTuple):
    """Weights that are right now and then, on the host, and the file of their prompts of mixed lengths."""

    state: TrainState
    file: str


def config(**changes: Any) -> GrpoConfig:
    sizes = {"width": 32, "layers": 1, "heads": 2, "prompts_per_step": 8, "samples_per_prompt": 8}
    training = {"warmup_learning_rate": 5e-3, "updates_per_rollout": 1, "compute_dtype": "bfloat16"}
    return GrpoConfig(**{**sizes, **training, **changes})


def build(chosen: GrpoConfig) -> TrainingSteps:
    return build_steps(chosen, load_task(chosen), make_mesh(chosen))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    return prompts.write(tmp_path_factory.mktemp("prompts") / "mixed.jsonl", longest=150)


@pytest.fixture(scope="module")
def warm(file) -> Warm:
    steps = build(config(prompts=file))
    state = steps.initial_state()
    for step in range(WARMUP):
        state, _ = steps.warmup_step(state, step)
    return Warm(jax.device_get(state), file)


class Run(NamedTuple):
    """The metrics of the first two GRPO steps, and the gradients of the first update, clipped, of a whole head."""

    metrics: list[dict[str, np.ndarray]]
    gradients: jax.Array


def two_steps(warm: Warm, mesh: str = ONE, **changes: Any) -> Run:
    """From these weights."""
    chosen = config(mesh=mesh, prompts=warm.file, **changes)
    devices = make_mesh(chosen)
    head, steps = make_head(chosen, load_task(chosen), devices), build(chosen)
    whole = jax.device_put(warm.state, NamedSharding(devices, PartitionSpec()))
    state = steps.start_grpo(jax.jit(head.shard, out_shardings=head.shardings(warm.state))(whole))
    state, first = steps.grpo_step(state, WARMUP)
    moments = jax.device_get(head.unshard(optax.tree_utils.tree_get(state.opt_state, "mu")))
    _, second = steps.grpo_step(state, WARMUP + 1)
    gradients = jnp.concatenate([x.ravel() for x in jax.tree.leaves(moments)]) / (1 - ADAM_B1)
    return Run(jax.device_get([first, second]), gradients)


INVARIANT: dict[str, Any] = {"invariant": True, "implementation": "mosaic"}
SAVING: dict[str, Any] = {"micro_batches": 4, "packing": True, "rollout_buckets": 2}


@pytest.fixture(scope="module")
def alone(warm) -> Run:
    return two_steps(warm, **INVARIANT)


def assert_rollouts_have_the_bits_of_training(run: Run) -> None:
    """In both steps: the second is of weights that moved."""
    assert np.any(np.asarray(run.gradients))
    for measured in run.metrics:
        assert measured["mismatch"] == 0 and measured["clip_fraction"] == 0
        assert measured["ratio_min"] == measured["ratio_max"] == 1


def test_a_rollout_has_the_bits_of_training(alone):
    assert 0 < alone.metrics[0]["reward"] < 1
    assert_rollouts_have_the_bits_of_training(alone)


def test_stock_layers_decode_with_other_bits(warm):
    assert all(measured["mismatch"] > 0 for measured in two_steps(warm, implementation="mosaic").metrics)


def on_gpus(count: int, mesh: str, changes: dict[str, Any]) -> Any:
    """A parameter of a test; marked, for a test that skips itself would have its fixtures first."""
    too_few = pytest.mark.skipif(jax.device_count() < count, reason=f"needs {count} GPUs")
    return pytest.param(mesh, changes, marks=too_few, id=f"{mesh}{', saving' if changes else ''}")


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        on_gpus(1, ONE, SAVING),
        on_gpus(2, "data=2,tensor=1", {}),
        on_gpus(2, "data=1,tensor=2", {}),
        on_gpus(2, "data=2,tensor=1", SAVING),
        on_gpus(2, "data=1,tensor=2", SAVING),
        on_gpus(4, "data=2,tensor=2", SAVING),
        on_gpus(4, "data=4,tensor=1", {}),
        on_gpus(4, "data=1,tensor=4", {}),
    ],
)
def test_other_meshes_batches_and_rows_measure_the_same(warm, alone, mesh, changes):
    """The same samples, for log-probs have the same bits; losses and gradients are sums in other orders, and what
    they move the weights by is not the same any more.
    """
    run = two_steps(warm, mesh, **INVARIANT, **changes)
    assert_rollouts_have_the_bits_of_training(run)
    first, expected = run.metrics[0], alone.metrics[0]
    assert (first["reward"], first["tokens"]) == (expected["reward"], expected["tokens"])
    # Ratios are exactly 1, and would drown the rest.
    names = sorted(x for x in expected if "ratio" not in x and x != "tokens")
    found = [jnp.array([x[name] for name in names]) for x in (first, expected)]
    helpers.assert_within_contract(*found, "grpo_training", jnp.float32, "forward")
    helpers.assert_within_contract(run.gradients, alone.gradients, "grpo_accumulation", jnp.bfloat16, "gradient")


@pytest.mark.parametrize("changes", [{}, {**INVARIANT, **SAVING, "compute_dtype": "bfloat16"}], ids=["stock", "saving"])
def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(file, tmp_path, changes):
    """In another process, which runs what the first has tuned and kept: nothing is tuned again."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    folder, run = RunFolder(tmp_path / "out"), tiny.run_apart(environment)
    tiny.assert_resumes(folder, run, **changes, prompts=file, width=32, samples_per_prompt=8)
    assert tiny.tuned(folder)


def test_programs_stay_where_the_user_keeps_them(file, tmp_path):
    run = tiny.run_apart({**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own")})
    folder = RunFolder(tmp_path / "out")
    assert run(*tiny.options(prompts=file), "--out", folder.path) == 0
    assert any((tmp_path / "own").iterdir()) and not folder.programs.exists()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 GPUs")
def test_a_given_model_on_two_gpus_has_the_bits_of_micro_batches(tmp_path):
    """Its states are cut over "data", and its layers fetch their parameters."""
    model = tiny_text.write_model(tmp_path / "model", hidden_size=128, intermediate_size=192, tie_word_embeddings=True)
    given = {"model": str(model), "prompts": str(tiny_text.write_prompts(tmp_path / "prompts.jsonl"))}
    plain = {"implementation": None, "max_gradient_norm": 0.1}
    one, many = (
        trained(built(given, **plain, **how), 5) for how in ({"micro_batches": 2}, {"mesh": "data=2,tensor=1"})
    )
    helpers.assert_same_bits(one[0], many[0])
    assert [line["mismatch"] for line in (*one[1], *many[1])] == [0] * 10
