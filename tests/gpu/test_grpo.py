"""`rlk grpo`'s steps on GPUs: rollouts in the bits of training, on one and on several."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.steps import Steps, TrainState, build_steps, head_of, make_mesh
from rlk_jax.grpo.tasks import arithmetic_task
from tests import helpers

WARMUP = 60
ONE = "data=1,tensor=1"


def config(**changes: Any) -> GrpoConfig:
    sizes = {"max_operand": 9, "prompts_per_step": 8, "samples_per_prompt": 8}
    return GrpoConfig(
        **{**sizes, "warmup_learning_rate": 5e-3, "updates_per_rollout": 1, "compute_dtype": "bfloat16", **changes}
    )


def build(**changes: Any) -> Steps:
    chosen = config(**changes)
    return build_steps(chosen, arithmetic_task(chosen.max_operand), make_mesh(chosen))


@pytest.fixture(scope="module")
def warm() -> TrainState:
    """Weights that are right now and then, on the host."""
    steps = build()
    state = steps.initial_state()
    for step in range(WARMUP):
        state, _ = steps.warmup_step(state, step)
    return jax.device_get(state)


def one_step(warm: TrainState, mesh: str = ONE, **changes: Any) -> dict[str, np.ndarray]:
    """The metrics of the first GRPO step from these weights."""
    chosen = config(mesh=mesh, **changes)
    devices = make_mesh(chosen)
    head, steps = head_of(chosen, devices), build(mesh=mesh, **changes)
    whole = jax.device_put(warm, NamedSharding(devices, PartitionSpec()))
    state = steps.start_grpo(jax.jit(head.cut, out_shardings=head.shardings(warm))(whole))
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
    names = "loss", "policy_loss", "kl"
    found = [jnp.array([x[name] for name in names]) for x in (measured, alone)]
    helpers.assert_within_contract(*found, "grpo_sharded", jnp.float32, "forward")
