"""verl's fused forward with the bridge in it against verl's own in plain torch. `make test-verl` has verl.

`make test` has one forward and backward. What the others test is tested there without verl: dtypes and heads between
ranks in tests/torch_bridge, what is installed where in test_install.py.
"""

import os
import re
from typing import Any

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")

from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from verl.models.transformers.monkey_patch import patch_forward_with_backends  # noqa: E402
from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: E402
from verl.utils.kernel import linear_cross_entropy as entry  # noqa: E402

import torch_bridge  # noqa: E402
from rlk_jax.checker.processes import free_port, run_together  # noqa: E402
from tests.support import helpers  # noqa: E402

VOCAB, TEMPERATURE = 300, 0.7


@pytest.fixture(autouse=True)
def installed():
    torch_bridge.install("verl")
    yield
    torch_bridge.uninstall("verl")


def assert_close(actual: Any, expected: Any, kind: Any) -> None:
    """The bounds are well within those of verl's own tests."""
    assert expected.dtype == torch.float32
    dtype = str(actual.dtype).removeprefix("torch.")
    helpers.assert_within_contract(actual.detach().float(), expected.detach().float(), "verl", dtype, kind)


def trained(backend: str) -> tuple[Any, dict[str, Any]]:
    """Output of verl's forward with a backend, and the gradients of all weights, of one random model and batch."""

    class Model(Qwen2ForCausalLM):
        """A class of its own, whose forward verl replaces."""

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB}
    model = Model(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes))
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    ids = torch.randint(0, VOCAB, (3, 9))
    found = model(input_ids=ids, temperature=TEMPERATURE, return_dict=True)
    (found.log_probs.mean() - 2 * found.entropy.mean()).backward()
    return found, {name: x.grad for name, x in model.named_parameters()}


def test_fused_forward():
    found, gradients = trained("triton")
    expected, expected_gradients = trained("torch")
    assert_close(found.log_probs, expected.log_probs.flatten(), "forward")
    assert_close(found.entropy, expected.entropy.flatten(), "forward")
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], "gradient")


@pytest.mark.full
def test_a_bfloat16_call():
    """The result is compared with that of verl's torch function on the same numbers in float32.

    In `make test`, test_fused_forward catches a wrong call of the op, and test_linear_logp_agrees_with_torch_in_float64
    (tests/torch_bridge/test_autograd.py) what is wrong in bfloat16.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 16).bfloat16().requires_grad_(), torch.randn(70, 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 70, (2, 5))
    found = entry.linear_cross_entropy(hidden, weight, labels, TEMPERATURE, "none")
    upcast = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected = FusedLinearForPPO()(*upcast, labels, TEMPERATURE)
    for logp, entropy in (found, expected):
        (logp.mean() - 2 * entropy.mean()).backward()
    for actual, gold in zip(found, expected, strict=True):
        assert_close(actual, gold.flatten(), "forward")
    for actual, gold in zip((hidden, weight), upcast, strict=True):
        assert_close(actual.grad, gold.grad, "gradient")


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_head_between_ranks(count):
    """In `make test`, test_two_processes (tests/torch_bridge/test_tensor_parallel.py) catches wrong values and
    gradients of linear_logp between ranks. A wrong start or group that the client passes is left to `make test-full`
    alone.
    """
    port = free_port()
    ranks = (["-m", "tests.torch_bridge.clients.verl_rank", str(port), str(count), str(i)] for i in range(count))
    for process in run_together(list(ranks), timeout_s=helpers.HANG_S):
        assert process.code == 0, process.stderr[-3000:]


@pytest.mark.full
def test_what_cannot_be_supplied_raises():
    """In `make test`, test_fused_forward has the reduction that verl asks for. Another one that is taken without an
    error is left to `make test-full` alone.
    """
    message = "reduction must be 'none', the one that verl asks for, got 'mean'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        entry.linear_cross_entropy(torch.randn(3, 8), torch.randn(5, 8), torch.arange(3), 1.0, "mean", None)


@pytest.mark.full
def test_uninstalled_it_is_verl_s_again():
    """In `make test`, test_uninstall_restores_the_object (test_install.py) catches what is not restored, on a stand-in
    for verl.
    """
    ours = entry.linear_cross_entropy
    torch_bridge.uninstall("verl")
    assert entry.linear_cross_entropy is not ours
    assert entry.linear_cross_entropy.__self__ is entry.LinearCrossEntropy
