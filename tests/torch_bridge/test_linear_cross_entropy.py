"""linear_cross_entropy for tensors: torch's own loss without its logits, and the bits of the JAX op."""

import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

import rlk_jax
import torch_bridge
from tests.support.allowed import allowed_beside, mask_of
from tests.torch_bridge.tensors import array, assert_close, assert_same_bits, head, randn
from torch_bridge import _calls

LEAD = (3, 7)


def batch(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden, weight, ids and bias; some ids are −100."""
    found = head(LEAD, dim=24, vocab=300, dtype=dtype)
    found[2][0, 2] = found[2][2, 6] = -100
    return found


# A dtype and a reduction meet in no code; test_bits has float16.
@pytest.mark.parametrize(
    ("reduction", "dtype", "smoothing"),
    [("mean", torch.float32, 0.1), ("sum", torch.bfloat16, 0.0), ("none", torch.float32, 0.0)],
)
def test_a_drop_in_for_torchs_cross_entropy(reduction, dtype, smoothing):
    hidden, weight, ids, bias = batch(dtype)
    options = {"ignore_index": -100, "reduction": reduction, "label_smoothing": smoothing}
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = doubles[0] @ doubles[1].t() + doubles[2]
    expected = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)
    expected = expected.reshape(LEAD) if reduction == "none" else expected
    found = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **options)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert_close(found, expected, "linear_cross_entropy", "forward")
    upstream = randn(*found.shape, seed=5)
    gradients = torch.autograd.grad(found, (hidden, weight, bias), upstream)
    for x, y in zip(gradients, torch.autograd.grad(expected, doubles, upstream.double()), strict=True):
        assert x.dtype == dtype
        assert_close(x, y, "linear_cross_entropy", "gradient")


def test_weights_of_classes_are_weights_of_their_tokens():
    """As docs/linear_cross_entropy.md tells users of torch's `weight`."""
    hidden, weight, ids, bias = batch()
    of_classes = randn(300, seed=6).abs()
    logits = (hidden.double() @ weight.double().t() + bias.double()).flatten(0, 1)
    expected = functional.cross_entropy(logits, ids.flatten(), of_classes.double(), ignore_index=-100)
    of_tokens = of_classes[ids.clamp(min=0)]
    found = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=-100, token_weights=of_tokens)
    assert_close(found, expected, "linear_cross_entropy", "forward")


# In `make test`, the case of "none" catches an option that is lost, and test_a_drop_in_for_torchs_cross_entropy a mean.
@pytest.mark.parametrize(
    ("reduction", "dtype", "ignore_index"),
    [pytest.param("mean", torch.float32, -100, marks=pytest.mark.full), ("none", torch.float16, None)],
)
def test_bits(reduction, dtype, ignore_index):
    """Those of the JAX op, with every option, although 21 rows are padded to 24."""
    hidden, weight, ids, bias = batch(dtype)
    words = torch.from_numpy(np.array(mask_of(allowed_beside(ids.clamp(min=0).cpu(), 300), np.int32))).to(ids.device)
    words[2, 6] |= 1 << 5
    weights = randn(*LEAD, seed=3).clamp(min=0)
    if ignore_index is None:
        ids[ids < 0], weights[0, 2] = 10**12, 0  # One id out of range, of a token that has no weight.
        ids[2, 6] = 5
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index, "z_loss": 1e-2}
    options |= {"temperature": 0.7, "logit_softcap": 5.0, "implementation": "deterministic"}
    tokens = {"token_weights": weights, "allowed_mask": words}
    found = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **tokens, **options)
    upstream = randn(*found.shape, seed=4)
    gradients = torch.autograd.grad(found, (hidden, weight, bias), upstream)

    def theirs(h: Any, w: Any, b: Any) -> Any:
        arrays = {name: array(x) for name, x in tokens.items()}
        return rlk_jax.linear_cross_entropy(h, w, ids.numpy(), b, **arrays, **options)

    expected, pull_back = jax.vjp(theirs, array(hidden), array(weight), array(bias))
    assert_same_bits([found], [expected])
    assert_same_bits(gradients, pull_back(array(upstream)))


# In `make test`, test_a_drop_in_for_torchs_cross_entropy catches smoothing that is lost.
@pytest.mark.full
def test_bits_of_smoothed_labels():
    hidden, weight, ids, bias = batch()
    options: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.2, "implementation": "deterministic"}
    loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **options)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    operands = array(hidden), array(weight), array(bias)
    expected, pull_back = jax.vjp(
        lambda h, w, b: rlk_jax.linear_cross_entropy(h, w, ids.numpy(), b, **options), *operands
    )
    assert_same_bits([loss], [expected])
    assert_same_bits(gradients, pull_back(np.float32(1)))


def test_smoothed_labels_of_impossible_tokens():
    """As in torch, a logit of −inf makes the loss inf and no gradient NaN. The programs are those of the drop-in."""
    hidden, weight, ids, bias = batch()
    options: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.1}
    with torch.no_grad():
        bias[ids[0, 0] - 1] = -torch.inf
    values = []
    for of_logits in (True, False):
        if of_logits:
            logits = (hidden @ weight.t() + bias).flatten(0, 1)
            loss = functional.cross_entropy(logits, ids.flatten(), **options)
        else:
            loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **options)
        values.append((loss, torch.autograd.grad(loss, bias)[0]))
    assert values[0][0] == values[1][0] == torch.inf
    assert_close(values[1][1], values[0][1], "linear_cross_entropy", "gradient")


@pytest.mark.parametrize("what", ["ignored", "no weight", "no tokens"])
def test_nothing_counts(what):
    hidden, weight, ids, bias = batch()
    options: dict[str, Any] = {"ignore_index": -100, "z_loss": 1e-2}
    if what == "ignored":
        ids = torch.full_like(ids, -100)
    elif what == "no weight":
        options["token_weights"] = torch.zeros(LEAD, dtype=torch.bool)
    else:
        hidden, ids = hidden[:0], ids[:0]
    loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **options)
    assert loss == 0
    assert not any(x.any() for x in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_nothing_is_kept_without_a_gradient():
    hidden, weight, ids, bias = batch()
    with torch.no_grad():
        loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=-100, z_loss=1e-2)
    assert not loss.requires_grad and not _calls._kept


def test_under_autocast():
    hidden, weight, ids, bias = batch()
    rounded = [x.detach().bfloat16() for x in (hidden, weight, bias)]
    expected = torch_bridge.linear_cross_entropy(rounded[0], rounded[1], ids, rounded[2], ignore_index=-100)
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=-100)
    assert loss == expected
    loss.backward()
    assert hidden.grad.dtype == torch.float32 and hidden.grad.any()


def test_torch_compile_takes_it_whole():
    hidden, weight, ids, bias = batch()
    weights = randn(*LEAD, seed=3).abs()

    def loss(hidden, ids, weights, z_loss=1e-2):
        options = {"ignore_index": -100, "token_weights": weights, "z_loss": z_loss}
        return torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (f(hidden, ids, weights) for f in (compiled, loss))
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(x, (hidden, weight, bias)) for x in (found, expected))
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match="token_weights must be finite and not negative"):
        compiled(hidden, ids, -weights)
    with pytest.raises(ValueError, match="z_loss must be 0 or a positive finite number"):
        compiled(hidden, ids, weights, z_loss=float("inf"))
    with pytest.raises(Exception, match="check"):
        compiled(hidden, ids, weights[0])


def test_there_is_no_second_derivative():
    hidden, weight, ids, bias = batch()
    loss = torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=-100)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


WRONG: dict[str, dict[str, Any]] = {
    "reduction": {"reduction": "average"},
    "z-loss": {"z_loss": -1.0},
    "smoothing": {"label_smoothing": 2.0},
    "smoothing of allowed tokens": {"label_smoothing": 0.1, "allowed_ids": torch.zeros(*LEAD, 1, dtype=torch.int64)},
    "shape of weights": {"token_weights": torch.ones(7)},
    "bad weight": {"token_weights": torch.full(LEAD, -1.0)},
    "ids": {"target_ids": torch.zeros(LEAD)},
    "float ids beside weights": {"target_ids": torch.zeros(LEAD), "token_weights": torch.ones(LEAD)},
    "ignore_index": {"ignore_index": 2**40, "token_weights": torch.ones(LEAD)},
    "bad id": {"target_ids": torch.full(LEAD, 300), "token_weights": torch.ones(LEAD)},
    "the id of left out tokens": {"ignore_index": None, "token_weights": torch.ones(LEAD)},
    "validate": {"validate": "yes"},
    "bias": {"bias": torch.ones(3)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_it_raises_what_rlk_jax_does(wrong):
    hidden, weight, ids, bias = batch()
    given = {"hidden": hidden, "lm_head_weight": weight, "target_ids": ids, "bias": bias, "ignore_index": -100} | wrong
    arrays = {name: array(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(ValueError) as expected:
        rlk_jax.linear_cross_entropy(**arrays)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        torch_bridge.linear_cross_entropy(**given)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "token_weights must be a torch.Tensor, got builtins.list"),
        (
            torch.ones(LEAD, requires_grad=True),
            "token_weights requires a gradient, which linear_cross_entropy does not",
        ),
        (torch.ones(LEAD, dtype=torch.complex64), "token_weights has dtype torch.complex64"),
        (torch.ones(LEAD, device="meta"), "token_weights must be on a CPU or a CUDA device, got meta"),
    ],
)
def test_weights_that_only_torch_can_get_wrong(weights, message):
    hidden, weight, ids, bias = batch()
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_bridge.linear_cross_entropy(hidden, weight, ids, bias, ignore_index=-100, token_weights=weights)


def test_an_option_that_does_not_exist():
    """In the words of Python, of this op; a label_smoothing of `linear_logp` is none of its options."""
    hidden, weight, ids, _ = head((4,))
    with pytest.raises(TypeError, match=r"^linear_cross_entropy\(\) got an unexpected keyword argument 'axis_name'"):
        torch_bridge.linear_cross_entropy(hidden, weight, ids, axis_name="tp")
    with pytest.raises(TypeError, match="label_smoothing"):
        torch_bridge.linear_logp(hidden, weight, ids, label_smoothing=0.1)
