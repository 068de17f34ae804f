"""DeepSpeed's ZeRO-0 and ZeRO-3 on two processes, with the bridge and without. `make test-deepspeed` has DeepSpeed."""

import importlib.util

import pytest

from tests.support import helpers

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed has an environment of its own: make test-deepspeed", allow_module_level=True)

from tests.torch_bridge.clients.policy import POLICIES, on_processes

MODULE = "tests.torch_bridge.clients.deepspeed_rank"


def assert_trains_like_stock(ranks, case: str) -> None:
    """The parameters after a step are those of the policy without the bridge."""
    for rank in ranks:
        found = rank[case]
        assert (found["elements_left"] == 0) == case.endswith("3")
        assert found["moved"] > 1
        helpers.assert_error(found["error"], "sharded_training", "float32", "forward")


def test_a_sharded_policy():
    """The smoke test of `make test`; there, test_trl.py has calls of the other policy's head."""
    case = "FusedLMHead 3"
    assert_trains_like_stock(on_processes(MODULE, case), case)


@pytest.fixture(scope="module")
def ranks():
    return on_processes(MODULE)


@pytest.fixture(params=[0, 3], ids="ZeRO-{}".format)
def stage(request):
    return request.param


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_after_a_step(ranks, policy, stage):
    """In `make test`, `test_a_sharded_policy` has one of these cases."""
    assert_trains_like_stock(ranks, f"{policy} {stage}")


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_trainer_counts_on(ranks, policy, stage):
    """Masked targets count for nothing, the first step has the rollout's own log-probs, and all ranks share metrics.

    In `make test`, test_fsdp2.py has masked targets.
    """
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
