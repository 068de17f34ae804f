"""FSDP2 on two processes, with the bridge and without: it frees the head after its forward and gathers it again."""

import pytest

from tests.support import helpers

torch = pytest.importorskip("torch", reason="the extra `clients` is not installed")
pytest.importorskip("trl", reason="the extra `clients` is not installed")

from tests.torch_bridge.clients.policy import on_processes  # noqa: E402

MODULE = "tests.torch_bridge.clients.fsdp2_rank"


@pytest.fixture(scope="module")
def ranks():
    return on_processes(MODULE, "FusedLMHead")


@pytest.fixture(scope="module")
def ranks_of_trl():
    return on_processes(MODULE, "TRL")


# In `make test`, FusedLMHead has a weight that is freed and gathered again, and test_trl.py has calls of TRL's head,
# which gives the weight that it has to the same op.
@pytest.mark.parametrize(
    ("policy", "fixture"), [("FusedLMHead", "ranks"), pytest.param("TRL", "ranks_of_trl", marks=pytest.mark.full)]
)
def test_parameters_after_a_step(request, policy, fixture):
    for found in request.getfixturevalue(fixture):
        assert found[policy]["bytes_left"] == 0
        assert found[policy]["masked"] == 0
        assert found[policy]["moved"] > 1
        helpers.assert_error(found[policy]["error"], "sharded_training", "float32", "forward")


def test_a_sharded_head_is_gathered_for_logits(ranks):
    assert [found["FusedLMHead"]["logits"] for found in ranks] == [0, 0]


def test_a_sharded_head_is_refused(ranks):
    message = "lm_head_weight is a DTensor: pass its full_tensor(), or call this where its module is gathered."
    assert [found["FusedLMHead"]["refused"] for found in ranks] == [message] * len(ranks)
