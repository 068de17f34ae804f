"""`rlk grpo`'s steps on GPUs: rollouts in the bits of training, on one and on several."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.steps import Steps, TrainState, build_steps, head_of, make_mesh
from rlk_jax.grpo.tasks import task_of
from tests import helpers
from tests.grpo import prompts

WARMUP = 60
ONE = "data=1,tensor=1"


class Warm(NamedTuple):
    """Weights that are right now and then, on the host, and the file of their prompts of mixed lengths."""

    state: TrainState
    file: str


def config(**changes: Any) -> GrpoConfig:
    sizes = {"width": 32, "layers": 1, "heads": 2, "prompts_per_step": 8, "samples_per_prompt": 8}
    training = {"warmup_learning_rate": 5e-3, "updates_per_rollout": 1, "compute_dtype": "bfloat16"}
    return GrpoConfig(**{**sizes, **training, **changes})


def build(chosen: GrpoConfig) -> Steps:
    return build_steps(chosen, task_of(chosen), make_mesh(chosen))


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Warm:
    file = prompts.write(tmp_path_factory.mktemp("prompts") / "mixed.jsonl", longest=150)
    steps = build(config(prompts=file))
    state = steps.initial_state()
    for step in range(WARMUP):
        state, _ = steps.warmup_step(state, step)
    return Warm(jax.device_get(state), file)


def one_step(warm: Warm, mesh: str = ONE, **changes: Any) -> dict[str, np.ndarray]:
    """The metrics of the first GRPO step from these weights."""
    chosen = config(mesh=mesh, prompts=warm.file, **changes)
    devices = make_mesh(chosen)
    head, steps = head_of(chosen, devices), build(chosen)
    whole = jax.device_put(warm.state, NamedSharding(devices, PartitionSpec()))
    state = steps.start_grpo(jax.jit(head.cut, out_shardings=head.shardings(warm.state))(whole))
    return jax.device_get(steps.grpo_step(state, WARMUP)[1])


INVARIANT: dict[str, Any] = {"invariant": True, "implementation": "mosaic"}
SAVING: dict[str, Any] = {"micro_batches": 4, "packing": True, "rollout_buckets": 2}


@pytest.fixture(scope="module")
def alone(warm) -> dict[str, np.ndarray]:
    return one_step(warm, **INVARIANT)


def assert_first_update_starts_at_ratio_one(measured: dict[str, np.ndarray]) -> None:
    assert measured["mismatch"] == 0 and measured["clip_fraction"] == 0
    assert measured["ratio_min"] == measured["ratio_max"] == 1


def test_a_rollout_has_the_bits_of_training(alone):
    assert 0 < alone["reward"] < 1
    assert_first_update_starts_at_ratio_one(alone)


def test_stock_layers_decode_with_other_bits(warm):
    assert one_step(warm, implementation="mosaic")["mismatch"] > 0


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (ONE, SAVING),
        ("data=2,tensor=1", {}),
        ("data=1,tensor=2", {}),
        ("data=2,tensor=1", SAVING),
        ("data=2,tensor=2", SAVING),
        ("data=4,tensor=1", {}),
        ("data=1,tensor=4", {}),
    ],
)
def test_other_meshes_batches_and_rows_measure_the_same(warm, alone, mesh, changes):
    """The same samples, for log-probs have the same bits; losses are sums in other orders."""
    if config(mesh=mesh).mesh_shape[0] * config(mesh=mesh).mesh_shape[1] > jax.device_count():
        pytest.skip(f"{mesh} needs more than {jax.device_count()} GPUs")
    measured = one_step(warm, mesh, **INVARIANT, **changes)
    assert_first_update_starts_at_ratio_one(measured)
    assert (measured["reward"], measured["tokens"]) == (alone["reward"], alone["tokens"])
    found = [jnp.array([x[name] for name in sorted(alone.keys() - {"tokens"})]) for x in (measured, alone)]
    helpers.assert_within_contract(*found, "grpo_training", jnp.float32, "forward")
