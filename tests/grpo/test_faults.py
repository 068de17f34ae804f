"""Updates that are not finite: which token is named, and what a run that skips them keeps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlk_jax.grpo import faults
from rlk_jax.grpo.run_config import Diverged
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.sequences import join_completions, pack
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.tasks import load_task
from tests.grpo import tiny
from tests.support import helpers

LENGTH = 5
MASK = np.arange(LENGTH) < np.array([5, 2, 4, 0, 3, 5])[:, None]
WILD = {**tiny.LEARNING, "grpo_steps": 3, "updates_per_rollout": 2, "learning_rate": 1e4, "checkpoint_every": 42}
"""A learning rate after whose first update the KL of a token overflows, while parameters are finite."""


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("bad", [[(2, 3)], [(4, 0), (1, 1), (5, 4)], [(0, 0), (0, 4)], []])
def test_the_first_bad_token_of_the_batch_is_named(bad, is_packed):
    marks = np.zeros(MASK.shape)
    for place in bad:
        marks[place] = np.nan
    ids = jnp.full(MASK.shape, 7)
    rows = join_completions(jnp.full((6, 3), 5), jnp.array([0, 1, 2, 0, 1, 2]), ids, MASK)
    numbers = faults.number_targets(rows.mask)
    if is_packed:
        rows, (numbers, marks) = pack(rows, (numbers, jnp.asarray(marks)), shards=1)
    is_bad = rows.mask & np.isnan(marks)
    found = jax.jit(lambda loss: faults.fault_metrics(loss, lambda: is_bad, numbers, LENGTH))(jnp.nan)
    assert (found["nonfinite_sequence"], found["nonfinite_token"]) == (min(bad) if bad else (-1, -1))
    assert found["nonfinite_updates"] == 1
    fine = faults.fault_metrics(jnp.float32(0), lambda: is_bad, numbers, LENGTH)
    assert {name: int(x) for name, x in fine.items()} == {
        "nonfinite_updates": 0,
        "nonfinite_sequence": -1,
        "nonfinite_token": -1,
    }


def test_messages_name_the_first_number_and_its_token():
    def message(**metrics):
        with pytest.raises(Diverged) as caught:
            faults.logged(metrics, 7, "grpo", skips=False)
        return str(caught.value)

    place = {"nonfinite_updates": 2.0, "nonfinite_sequence": 3.0, "nonfinite_token": 5.0}
    assert message(kl=float("nan"), loss=float("inf"), **place) == (
        "training diverged: loss is inf at step 7 (grpo), first at token 5 of sequence 3"
    )
    nowhere = {**place, "nonfinite_sequence": -1.0, "nonfinite_token": -1.0}
    assert (
        message(first_ratio_max=float("inf"), loss=0.5, **nowhere)
        == "training diverged: the gradient is not finite at step 7 (grpo)"
    )


def test_a_log_has_no_number_that_json_lacks():
    well = {"nonfinite_updates": 0.0, "nonfinite_sequence": -1.0, "nonfinite_token": -1.0}
    found = faults.logged({"loss": 1.0, "ratio_max": float("inf"), **well}, 0, "grpo", skips=False)
    assert found == {"loss": 1.0, "ratio_max": None, "nonfinite_updates": 0.0}


def counts(opt_state):
    """How many updates Adam has counted."""
    return [
        int(x.count)
        for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(x, optax.ScaleByAdamState)
    ]


@helpers.cover("skips", [(False,), (True,)], lambda skips: skips)
def test_a_skipped_update_leaves_parameters_and_optimizer_as_they_were(skips):
    """In `make test`, the skipped update checks the metrics of both, and all other tests apply their updates."""
    config = tiny.config(**WILD, skip_nonfinite=skips)
    steps = tiny.shared_steps(config, load_task(config), make_mesh(config))
    state = steps.initial_state()
    for step in range(40):
        state, _ = steps.warmup_step(state, step)
    state, metrics = steps.grpo_step(steps.start_grpo(state), 40)
    assert metrics["nonfinite_updates"] == 1 and not np.isfinite(metrics["loss"])
    assert 0 <= metrics["nonfinite_sequence"] < 16 and 0 <= metrics["nonfinite_token"] < 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params)) == skips
    assert counts(state.opt_state) == [1 if skips else 2]


def test_a_run_that_skips_goes_on_and_resumes_with_the_same_bits(tmp_path):
    out, command = RunFolder(tmp_path / "out"), tiny.options(**WILD, skip_nonfinite=True)
    assert tiny.run_here(*command, "--out", out.path) == 0
    lines = [json.loads(line) for line in out.metrics.read_text().splitlines()]
    assert lines[40]["nonfinite_updates"] == 1 and lines[40]["loss"] is None and lines[40]["nonfinite_sequence"] >= 0
    assert "nonfinite_sequence" not in lines[0] and lines[0]["nonfinite_updates"] == 0
    changes = {**WILD, "skip_nonfinite": True}
    (state, _), files = tiny.final_state(out, **changes), (out.metrics.read_bytes(), out.summary.read_bytes())
    tiny.lose_the_end(out, steps=43)
    assert tiny.run_here(*command, "--out", out.path, "--resume") == 0
    helpers.assert_same_bits(tiny.final_state(out, **changes)[0], state)
    assert (out.metrics.read_bytes(), out.summary.read_bytes()) == files
