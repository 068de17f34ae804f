"""DeepSpeed's ZeRO-0 and ZeRO-3 on two processes, with the bridge and without. `make test-deepspeed` has DeepSpeed."""

import importlib.util

import pytest

from tests.support import helpers

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed has an environment of its own: make test-deepspeed", allow_module_level=True)

from tests.torch_bridge.clients.policy import POLICIES, on_processes


@pytest.fixture(scope="module")
def ranks():
    return on_processes("tests.torch_bridge.clients.deepspeed_rank")


@pytest.fixture(params=[0, 3], ids="ZeRO-{}".format)
def stage(request):
    return request.param


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_after_a_step(ranks, policy, stage):
    for rank in ranks:
        found = rank[f"{policy} {stage}"]
        assert (found["elements_left"] == 0) == (stage == 3)
        assert found["moved"] > 1
        helpers.assert_error(found["error"], "sharded_training", "float32", "forward")


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_trainer_counts_on(ranks, policy, stage):
    """Nothing of masked targets, the rollout's own log-probs at the first step, and metrics that all ranks share."""
    for rank in ranks:
        found = rank[f"{policy} {stage}"]
        assert found["masked"] == 0
        helpers.assert_error(found["off_rollout"], "sharded_training", "float32", "forward")
        metrics = found["metrics"]
        assert metrics == ranks[0][f"{policy} {stage}"]["metrics"]
        assert metrics["current_logp_path"] == "torch_bridge.linear_logp"
        assert metrics["current_logp_backend"] == "xla"
        assert metrics["deepspeed_zero_stage"] == stage
        assert abs(metrics["active_advantage_mean_global"]) < metrics["active_advantage_std_global"]
