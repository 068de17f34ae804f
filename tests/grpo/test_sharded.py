"""Training with the LM head sharded over the tensor axis: where it lies, and that it trains as a whole one does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.steps import Metrics, TrainingSteps, TrainState, make_head, make_mesh
from rlk_jax.grpo.tasks import load_task
from rlk_jax.grpo.vocabulary import VOCAB_SIZE
from tests.grpo import tiny
from tests.support import helpers

WARMUP, MORE_WARMUP, GRPO = 60, 3, 20
STORED = 128
"""Columns that a head of 97 is stored with: it is cut where the softmax's groups of 16 end."""


class Run(NamedTuple):
    """The head, the last state, and what the last phase measured."""

    head: MeshHead
    final: TrainState
    measured: dict[str, np.ndarray]


def build(**changes) -> tuple[MeshHead, TrainingSteps]:
    config = tiny.config(**tiny.LEARNING, **changes)
    task, mesh = load_task(config), make_mesh(config)
    return make_head(config, task, mesh), tiny.shared_steps(config, task, mesh)


@pytest.fixture(scope="module")
def warm() -> TrainState:
    """Weights that are right now and then, so that GRPO has something to learn from. They are on the host, with a whole
    head.
    """
    _, steps = build(implementation="deterministic")
    state = steps.initial_state()
    for step in range(WARMUP):
        state, _ = steps.warmup_step(state, step)
    return jax.device_get(state)


def warm_longer(warm: TrainState, **changes) -> Run:
    """A few more steps of the warm start."""
    head, steps = build(**changes)
    state, rows = jax.jit(head.shard, out_shardings=head.shardings(warm))(warm), []
    for step in range(WARMUP, WARMUP + MORE_WARMUP):
        state, metrics = steps.warmup_step(state, step)
        rows.append(metrics)
    return Run(head, state, stacked(rows))


def train(warm: TrainState, **changes) -> Run:
    """A few more steps of the warm start, then GRPO, whose metrics are returned."""
    head, steps = build(**changes)
    state, rows = steps.start_grpo(warm_longer(warm, **changes).final), []
    for step in range(WARMUP + MORE_WARMUP, WARMUP + MORE_WARMUP + GRPO):
        state, metrics = steps.grpo_step(state, step)
        rows.append(metrics)
    return Run(head, state, stacked(rows))


def stacked(rows: list[Metrics]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


SHARDED = {"mesh": "data=1,tensor=2", "implementation": "deterministic"}
"""Two shards of a head that promises bits."""


@pytest.fixture(scope="module")
def sharded(warm) -> Run:
    return warm_longer(warm, **SHARDED)


def assert_policy_acts(run: Run) -> None:
    """Runs in which nothing happens would be equal, too."""
    assert 0 < run.measured["reward"].mean() < 1
    assert np.all(run.measured["kl"] > 0)
    assert run.measured["clip_fraction"].max() > 0


def assert_same_bits(sharded: Run, plain: Run) -> None:
    helpers.assert_same_bits(sharded.measured, plain.measured)
    helpers.assert_same_bits(sharded.head.unshard(sharded.final), plain.final)


def test_a_deterministic_warm_start_has_the_bits_of_the_unsharded_one(warm, sharded):
    """Log-probs, their gradients, the clipped norm and the optimizer: all that a sharded head takes part in."""
    plain = warm_longer(warm, implementation="deterministic")
    assert np.all(plain.measured["loss"] > 0)
    assert_same_bits(sharded, plain)


@pytest.mark.full
def test_deterministic_training_has_the_bits_of_the_unsharded_run(warm):
    """In `make test`, the test above has the warm start. GRPO adds rollouts by whole heads, and another loss."""
    sharded, plain = train(warm, **SHARDED), train(warm, implementation="deterministic")
    assert_policy_acts(plain)
    assert_same_bits(sharded, plain)
    assert_sharded(sharded)


@pytest.mark.full
def test_training_stays_near_the_unsharded_run(warm):
    """The same samples earn the same rewards; a sampled token that flips would make the rest incomparable.

    In `make test`, test_steps.py compares a run on this mesh with one on one device.
    """
    sharded, plain = (train(warm, mesh=mesh) for mesh in ("data=2,tensor=2", "data=1,tensor=1"))
    assert_policy_acts(plain)
    helpers.assert_same_bits(sharded.measured["reward"], plain.measured["reward"])
    for name in ("loss", "kl"):
        helpers.assert_within_contract(
            sharded.measured[name], plain.measured[name], "grpo_sharded", jnp.float32, "forward"
        )


def assert_sharded(run: Run) -> None:
    """Heads are sharded in parameters, reference and both moments; all else is whole on every device."""
    heads = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.final):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        if "lm_head" not in jax.tree_util.keystr(path):
            assert all(shard.shape == leaf.shape for shard in shards)
            continue
        heads += 1
        assert [shard.shape for shard in shards] == [(tiny.SIZES["width"], STORED // 2)] * 2
        assert np.any(shards[0][:, : VOCAB_SIZE - STORED // 2] != shards[1][:, : VOCAB_SIZE - STORED // 2])
        assert not np.any(shards[1][:, VOCAB_SIZE - STORED // 2 :]), "padding is never trained"
    assert heads == 4


def test_each_device_holds_its_own_columns_of_head_and_moments(sharded):
    assert_sharded(sharded)


def test_sharded_heads_are_whole_again_and_one_without_shards_is_left_alone():
    kernel = jnp.arange(3.0 * VOCAB_SIZE).reshape(3, VOCAB_SIZE)
    tree = {"lm_head": kernel, "embed": kernel}
    head, _ = build(mesh="data=2,tensor=4")
    stored = head.shard(tree)
    assert (stored["lm_head"].shape, stored["embed"].shape) == ((3, STORED), kernel.shape)
    helpers.assert_same_bits(head.unshard(stored), tree)
    plain, _ = build()
    assert plain.shard(tree) is tree and plain.unshard(tree) is tree


def test_a_head_that_refuses_to_run_sharded_is_a_bad_input(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RLK_STRICT", "1")
    options = tiny.options(mesh="data=1,tensor=3", implementation="deterministic")
    assert tiny.run_here(*options, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: RLK_STRICT=1: 3 shards of 64 columns")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_command_trains_on_four_devices_and_resumes(tmp_path):
    """In `make test`, test_resume.py resumes such a run in another process."""
    environment = tiny.environment(tmp_path / "cache") | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    out, run = RunFolder(tmp_path / "out"), tiny.run_apart(environment)
    tiny.assert_resumes(out, run, mesh="data=2,tensor=2")
