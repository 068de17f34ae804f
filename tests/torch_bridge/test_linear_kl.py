"""linear_kl for tensors: the divergence of torch's own softmaxes without their logits, and the bits of the JAX op."""

import re
from typing import Any

import jax
import pytest
import torch

import rlk_jax
import torch_bridge
from tests.torch_bridge.tensors import array, assert_close, assert_same_bits, head, randn
from torch_bridge import _calls

LEAD = (3, 7)
VOCAB = 300


def student(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden, weight and bias, which require gradients."""
    hidden, weight, _, bias = head(LEAD, dim=24, vocab=VOCAB, dtype=dtype)
    return [hidden, weight, bias]


def teacher(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A wider teacher."""
    weight = randn(VOCAB, 40, dtype=dtype, seed=7, scale=40**-0.5)
    return {
        "teacher_hidden": randn(*LEAD, 40, dtype=dtype, seed=6),
        "teacher_weight": weight,
        "teacher_bias": randn(VOCAB, dtype=dtype, seed=8),
    }


def mask() -> torch.Tensor:
    return randn(*LEAD, seed=4) < 1.0


def listed(k: int = 5) -> dict[str, torch.Tensor]:
    """The most probable tokens of a teacher; one row has one fewer."""
    logps, ids = torch.log_softmax(randn(*LEAD, VOCAB, seed=9), dim=-1).topk(k)
    ids[0, 1, -1] = -1
    return {"teacher_ids": ids, "teacher_logps": logps}


def found_and_gradients(ours: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    hidden, weight, bias = ours
    found = torch_bridge.linear_kl(hidden, weight, bias=bias, **options)
    return found, torch.autograd.grad(found, ours, randn(*found.shape, seed=5))


def expected_kl(ours: list[torch.Tensor], theirs: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The divergence in float64, by torch, at temperatures 0.7 and 1.3."""
    doubles = [x.double() for x in theirs.values()]
    a = torch.log_softmax((ours[0] @ ours[1].t() + ours[2]) / 0.7, dim=-1)
    q = torch.log_softmax((doubles[0] @ doubles[1].t() + doubles[2]) / 1.3, dim=-1)
    one, other = (q, a) if kind == "forward" else (a, q)
    return (one.exp() * (one - other)).sum(-1).where(mask(), 0.0)


@pytest.mark.parametrize(("kind", "dtype"), [("forward", torch.float32), ("reverse", torch.bfloat16)])
def test_the_divergence_of_two_softmaxes(kind, dtype):
    ours, theirs = student(dtype), teacher(dtype)
    doubles = [x.detach().double().requires_grad_() for x in ours]
    expected = expected_kl(doubles, theirs, kind)
    options = {"kind": kind, "completion_mask": mask(), "temperature": 0.7, "teacher_temperature": 1.3}
    found, gradients = found_and_gradients(ours, **theirs, **options)
    assert found.dtype == torch.float32 and found.shape == LEAD
    assert_close(found, expected, "linear_kl", "forward")
    wanted = torch.autograd.grad(expected, doubles, randn(*LEAD, seed=5).double())
    for x, y in zip(gradients, wanted, strict=True):
        assert x.dtype == dtype
        assert_close(x, y, "linear_kl", "gradient")


OPTIONS: dict[str, Any] = {"kind": "jsd", "beta": 0.3, "logit_softcap": 5.0, "implementation": "deterministic"}


@pytest.mark.parametrize("which", ["head", "list"])
def test_bits(which):
    """Those of the JAX op, although 21 rows are padded to 24, and lists of 5 to 6. The heads of "head" are views of
    their transposes.
    """
    ours, scale = student(torch.float16), randn(*LEAD, seed=3).abs() + 0.5
    tokens = {"completion_mask": mask().int(), "temperature": scale}
    if which == "head":
        theirs: dict[str, Any] = {**teacher(torch.bfloat16), "teacher_temperature": 1.5}
        ours[1] = ours[1].detach().t().contiguous().t().requires_grad_()
        theirs["teacher_weight"] = theirs["teacher_weight"].t().contiguous().t()
    else:
        theirs = listed()
    found, gradients = found_and_gradients(ours, **theirs, **tokens, **OPTIONS)
    plain = {name: array(x) if isinstance(x, torch.Tensor) else x for name, x in (theirs | tokens).items()}
    if which == "list":
        plain["teacher_ids"] = theirs["teacher_ids"].cpu().numpy()

    def jax_op(h: Any, w: Any, b: Any) -> Any:
        return rlk_jax.linear_kl(h, w, bias=b, **plain, **OPTIONS)

    expected, pull_back = jax.vjp(jax_op, *map(array, ours))
    assert_same_bits([found], [expected])
    assert_same_bits(gradients, pull_back(array(randn(*LEAD, seed=5))))


def test_a_frozen_head_and_masked_rows_that_hold_nan():
    """A gradient that is not needed is None, and that of a masked row is exactly 0."""
    hidden, weight, bias = student()
    with torch.no_grad():
        hidden[~mask()] = torch.nan
    theirs, frozen = teacher(), weight.detach()
    theirs["teacher_hidden"][~mask()] = torch.nan
    found = torch_bridge.linear_kl(hidden, frozen, bias=bias.detach(), completion_mask=mask(), **theirs)
    found.sum().backward()
    assert weight.grad is None and bias.grad is None
    assert not found[~mask()].any() and not hidden.grad[~mask()].any() and hidden.grad[mask()].all()


@pytest.mark.parametrize("which", ["no tokens", "all masked"])
def test_nothing_counts(which):
    ours, theirs = student(), teacher()
    counts = torch.zeros(LEAD, dtype=torch.bool)
    if which == "no tokens":
        ours[0], theirs["teacher_hidden"] = ours[0][:0], theirs["teacher_hidden"][:0]
        counts = counts[:0]
    found, gradients = found_and_gradients(ours, **theirs, completion_mask=counts)
    assert found.shape == counts.shape and not found.any() and not any(x.any() for x in gradients)


def test_nothing_is_kept_without_a_gradient():
    hidden, weight, bias = student()
    with torch.no_grad():
        found = torch_bridge.linear_kl(hidden, weight, bias=bias, **teacher())
    assert not found.requires_grad and not _calls._kept


def test_under_autocast():
    """Student and teacher are both cast."""
    ours, theirs = student(), teacher()
    short = {name: x.bfloat16() for name, x in theirs.items()}
    expected, _ = found_and_gradients([x.detach().bfloat16().requires_grad_() for x in ours], **short)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = found_and_gradients(ours, **theirs)
    assert torch.equal(found, expected) and all(x.dtype == torch.float32 and x.any() for x in gradients)


@pytest.mark.parametrize("which", ["head", "list"])
def test_torch_compile_takes_it_whole(which):
    hidden, weight, bias = student()
    theirs = listed() if which == "list" else {**teacher(), "teacher_temperature": torch.full(LEAD, 1.5)}

    def divergences(hidden: torch.Tensor, scale: torch.Tensor, **more: Any) -> torch.Tensor:
        options = {"temperature": scale, "kind": "reverse", **more}
        return torch_bridge.linear_kl(hidden, weight, bias=bias, **theirs, **options)

    scale = torch.full(LEAD, 0.8)
    compiled = torch.compile(divergences, fullgraph=True, backend="aot_eager")
    found, expected = (f(hidden, scale) for f in (compiled, divergences))
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(x.sum(), (hidden, weight, bias)) for x in (found, expected))
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        compiled(hidden, -scale)
    with pytest.raises(ValueError, match="kind must be one of"):
        compiled(hidden, scale, kind="tv")


def test_there_is_no_second_derivative():
    hidden, weight, bias = student()
    found = torch_bridge.linear_kl(hidden, weight, bias=bias, **teacher())
    (gradient,) = torch.autograd.grad(found.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


WRONG: dict[str, dict[str, Any]] = {
    "kind": {"kind": "tv"},
    "beta": {"beta": 2.0},
    "a head beside a list": listed(),
    "no teacher": {"teacher_hidden": None, "teacher_weight": None},
    "widths": {"teacher_hidden": torch.ones(*LEAD, 3)},
    "vocabularies": {"teacher_weight": torch.ones(4, 40), "teacher_bias": None},
    "mask": {"completion_mask": torch.ones(7)},
    "temperature": {"temperature": torch.zeros(LEAD)},
    "teacher's temperature": {"teacher_temperature": -1.0},
    "twice": {"teacher_hidden": None, "teacher_weight": None, "teacher_bias": None}
    | {"teacher_ids": torch.ones(*LEAD, 2, dtype=torch.int64), "teacher_logps": torch.full((*LEAD, 2), -2.0)},
    "id": {"teacher_hidden": None, "teacher_weight": None, "teacher_bias": None}
    | {"teacher_ids": torch.full((*LEAD, 1), 300), "teacher_logps": torch.full((*LEAD, 1), -2.0)},
    "implementation": {"implementation": "cuda"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_it_raises_what_rlk_jax_does(wrong):
    hidden, weight, bias = student()
    given = {"hidden": hidden, "lm_head_weight": weight, "bias": bias, **teacher(), **wrong}
    arrays = {name: array(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    if "teacher_ids" in wrong:
        arrays["teacher_ids"] = given["teacher_ids"].cpu().numpy()
    with pytest.raises(ValueError) as expected:
        rlk_jax.linear_kl(**arrays)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        torch_bridge.linear_kl(**given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"teacher_weight": [1.0]}, "teacher_weight must be a torch.Tensor, got builtins.list"),
        ({"teacher_temperature": "hot"}, "teacher_temperature must be a number or a torch.Tensor, got str"),
        (
            {"teacher_weight": teacher()["teacher_weight"].requires_grad_()},
            "teacher_weight requires a gradient, which linear_kl does not give it: pass teacher_weight.detach()",
        ),
    ],
)
def test_what_only_torch_can_get_wrong(wrong, message):
    hidden, weight, bias = student()
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_bridge.linear_kl(hidden, weight, bias=bias, **{**teacher(), **wrong})
