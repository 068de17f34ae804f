"""Outputs and gradients have the raw bits of the JAX op on the same arrays, whatever bucket the rows are padded to."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

import rlk_jax
import torch_bridge
from tests.support.allowed import allowed_beside, ids_of, mask_of
from tests.torch_bridge.tensors import array, assert_same_bits, head, policies, randint, randn, same_bits

# One row, a padded bucket, a full one, a large one. All ops pad rows by the same code, so that in `make test` each has
# some of the sizes, and all of them together have all: one row test_ratio_kl, a padded bucket test_logp, a full one
# test_grpo_loss, a large one test_det_gemm.
SIZES = (1, 5, 8, 33)


def sizes(*sharp: int) -> list[Any]:
    """SIZES, of which `make test` has these."""
    return [n if n in sharp else pytest.param(n, marks=pytest.mark.full) for n in SIZES]


def check(ours: Any, theirs: Any, tensors: list[Tensor], upstream: list[Tensor | None]) -> None:
    """Both take the differentiable tensors, in which gradients are compared too. An output whose upstream gradient is
    None has no gradient.
    """
    outputs = [x for x in ours(*tensors) if x is not None]
    arrays, pull_back = jax.vjp(lambda *x: tuple(y for y in theirs(*x) if y is not None), *map(array, tensors))
    assert_same_bits(outputs, arrays)
    assert [x.requires_grad for x in outputs] == [g is not None for g in upstream]
    gradients = torch.autograd.grad(
        [x for x in outputs if x.requires_grad], tensors, [g for g in upstream if g is not None]
    )
    zeros = [array(g) if g is not None else jax.numpy.zeros_like(x) for g, x in zip(upstream, arrays, strict=True)]
    assert_same_bits(gradients, pull_back(tuple(zeros)))


# In `make test`, test_linear_logp_with_every_option catches what is wrong in float32, and test_det_gemm and
# test_ratio_kl what is wrong with many rows and with one.
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(5, torch.bfloat16), *(pytest.param(n, torch.float32, marks=pytest.mark.full) for n in SIZES)],
)
def test_linear_logp(n, dtype):
    hidden, weight, ids, bias = head((n,), dtype=dtype)
    options = {"temperature": 0.7, "return_lse": True, "return_entropy": True, "implementation": "deterministic"}
    check(
        lambda h, w, b: torch_bridge.linear_logp(h, w, ids, b, **options),
        lambda h, w, b: rlk_jax.linear_logp(h, w, array(ids), b, **options),
        [hidden, weight, bias],
        [randn(n, seed=i) for i in range(3)],
    )


def test_linear_logp_with_every_option():
    """Lists of allowed ids are among the options. An ignored row allows nothing."""
    hidden, weight, ids, bias = head((2, 7))
    ids = ids.clamp(max=65)
    allowed = allowed_beside(ids.numpy(), 66)
    ids[0, 3] = ids[1, 0] = -100
    allowed[0, 3] = allowed[1, 0] = False
    listed = torch.from_numpy(np.array(ids_of(allowed)))
    options = {"logit_softcap": 3.0, "ignore_index": -100, "global_vocab_size": 66, "weight_layout": "dv"}
    options |= {"return_entropy": True, "implementation": "deterministic"}
    temperature = randn(2, 7).abs() + 0.5
    ours = {"temperature": temperature, "allowed_ids": listed.long(), **options}
    theirs = {"temperature": array(temperature), "allowed_ids": listed.numpy(), **options}
    check(
        lambda h, w, b: torch_bridge.linear_logp(h, w, ids, b, **ours),
        lambda h, w, b: rlk_jax.linear_logp(h, w, array(ids), b, **theirs),
        [hidden, weight.detach().t().contiguous().requires_grad_(), bias],
        [randn(2, 7), randn(2, 7, seed=1)],
    )


@pytest.mark.parametrize("is_transposed", [pytest.param(False, marks=pytest.mark.full), True])
def test_linear_logp_with_a_low_rank_term(is_transposed):
    """A in float32 beside a bfloat16 head, rows of its own, rows that are padded, and a head that is a transposed view,
    whose term is turned with it.

    In `make test`, the turned term catches all but a term that is turned for a head that is not. That one has
    test_log_probs_under_an_adapter_are_those_of_the_adapted_head (clients/test_peft.py).
    """
    hidden, weight, ids, bias = head((5,), dtype=torch.bfloat16)
    (vocab, dim), options = weight.shape, {"ignore_index": -100, "implementation": "deterministic"}
    a, b = randn(3, dim), randn(vocab, 3, seed=1).to(torch.bfloat16)
    tensors = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias, a, b, hidden * 0.5)]

    def ours(h, w, bias, a, b, x):
        w = w.t().contiguous().t() if is_transposed else w
        return [torch_bridge.linear_logp(h, w, ids, bias, low_rank=(a, b, 0.5, x), **options)]

    def theirs(h, w, bias, a, b, x):
        w, a, b, layout = (w.T, a.T, b.T, "dv") if is_transposed else (w, a, b, "vd")
        term = rlk_jax.LowRank(a, b, 0.5, x)
        return [rlk_jax.linear_logp(h, w, array(ids), bias, low_rank=term, weight_layout=layout, **options)]

    check(ours, theirs, tensors, [randn(5, seed=2)])


ALLOWED = {
    "int32 ids": lambda allowed: {"allowed_ids": torch.from_numpy(np.array(ids_of(allowed)))},
    "int64 ids": lambda allowed: {"allowed_ids": torch.from_numpy(np.array(ids_of(allowed))).long()},
    "int32 words": lambda allowed: {"allowed_mask": torch.from_numpy(np.array(mask_of(allowed, np.int32)))},
    "uint32 words": lambda allowed: {"allowed_mask": torch.from_numpy(np.array(mask_of(allowed)))},
}


# In `make test`, test_linear_logp_with_every_option has ids of int64, test_bits (test_linear_cross_entropy.py) words of
# int32, and test_lists_of_allowed_ids_of_any_length_need_few_programs (test_programs.py) words of uint32. What is wrong
# with ids of int32 alone is left to `make test-full`.
@pytest.mark.full
@pytest.mark.parametrize("form", ALLOWED)
def test_linear_logp_over_allowed_tokens(form):
    """Rows and lists are padded. An ignored row allows nothing."""
    hidden, weight, ids, bias = head((3, 7))
    allowed = allowed_beside(ids.numpy(), 70)
    ids[0, 3], allowed[0, 3] = -100, False
    options = {"temperature": 0.7, "ignore_index": -100, "return_entropy": True, "implementation": "deterministic"}
    given = {name: x.to(ids.device) for name, x in ALLOWED[form](allowed).items()}
    arrays = {name: x.numpy() for name, x in given.items()}
    check(
        lambda h, w, b: torch_bridge.linear_logp(h, w, ids, b, **given, **options),
        lambda h, w, b: rlk_jax.linear_logp(h, w, array(ids), b, **arrays, **options),
        [hidden, weight, bias],
        [randn(3, 7), randn(3, 7, seed=1)],
    )


def of_two_policies(module: Any, op: str, policy: Any, others: list[Any], **allowed: Any) -> Any:
    """The outputs of an op on logits by torch_bridge or rlk_jax, the differentiable ones first."""
    ref, ids, mask, old, rewards = others
    options = {"implementation": "deterministic", "temperature": 0.7, **allowed}
    if op == "logp":
        return (module.logp(policy, ids, **options),)
    if op == "ratio_kl":
        return tuple(module.ratio_kl(policy, ref, ids, mask, old, **options))
    return module.grpo_loss(policy, ref, ids, old, rewards, mask, samples_per_prompt=3, beta=0.1, **options)[:1]


# A form of lists and one of masks meet each number of lead dimensions of a program.
@pytest.mark.parametrize(
    ("op", "form"), [("logp", "uint32 words"), ("ratio_kl", "int64 ids"), ("grpo_loss", "int64 ids")]
)
def test_logits_over_allowed_tokens(op, form):
    """Rows, sequences and lists are padded. A masked row allows nothing."""
    policy, ref, ids, mask, old = policies((3, 7))
    allowed = allowed_beside(ids.numpy(), 70)
    if op != "logp":
        mask[0, 3], allowed[0, 3] = 0, False
    others = [ref, ids, mask, old, randn(3)]
    given = {name: x.to(ids.device) for name, x in ALLOWED[form](allowed).items()}
    arrays = {name: x.numpy() for name, x in given.items()}
    upstream = {"ratio_kl": [randn(3, 7), randn(3, 7, seed=1)], "logp": [randn(3, 7)], "grpo_loss": [torch.tensor(1.5)]}
    check(
        lambda x: of_two_policies(torch_bridge, op, x, others, **given),
        lambda x: of_two_policies(rlk_jax, op, x, list(map(array, others)), **arrays),
        [policy],
        upstream[op],
    )


@pytest.fixture(
    # That each option counts is a check of the test: a bridge that loses one gives other bits than the JAX op in
    # `make test`.
    params=["bits", pytest.param("each option counts", marks=pytest.mark.full)]
)
def check_options(request):
    """`check` with options, or that each of them changes an output."""

    def run(ours: Any, theirs: Any, tensor: Tensor, upstream: list[Tensor], options: dict[str, Any]) -> None:
        if request.param == "bits":
            arrays = {k: array(v) if isinstance(v, Tensor) else v for k, v in options.items()}
            check(lambda x: ours(x, **options), lambda x: theirs(x, **arrays), [tensor], upstream)
            return
        whole = ours(tensor, **options)
        for name in options:
            fewer = ours(tensor, **{k: v for k, v in options.items() if k != name})
            assert not all(map(same_bits, whole, fewer)), name

    return run


def test_logp_with_every_option(check_options):
    logits, ids = randn(2, 7, 70, scale=3.0).requires_grad_(), randint(66, 2, 7)
    ids[0, 3] = ids[1, 0] = -100
    common = {"return_lse": True, "return_entropy": True, "validate": False, "implementation": "deterministic"}
    check_options(
        lambda x, **options: torch_bridge.logp(x, ids, **common, **options),
        lambda x, **options: rlk_jax.logp(x, array(ids), **common, **options),
        logits,
        [randn(2, 7, seed=i) for i in range(3)],
        {
            "temperature": randn(2, 7).abs() + 0.5,
            "logit_softcap": 3.0,
            "ignore_index": -100,
            "global_vocab_size": 66,
        },
    )


# In `make test`, test_linear_logp and test_grpo_loss catch a temperature that is lost or rounded as a number.
@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.6, id="number", marks=pytest.mark.full), pytest.param(randn(2, 7).abs() + 0.5, id="per token")],
)
def test_ratio_kl_with_every_option(temperature, check_options):
    policy, *others = policies((2, 7))
    check_options(
        lambda x, **options: torch_bridge.ratio_kl(x, *others, implementation="deterministic", **options),
        lambda x, **options: rlk_jax.ratio_kl(x, *map(array, others), implementation="deterministic", **options),
        policy,
        [randn(2, 7), randn(2, 7, seed=1)],
        {"temperature": temperature, "log_ratio_bound": 0.5},
    )


def test_grpo_loss_with_every_option(check_options):
    policy, ref, ids, mask, old = policies((6, 7))
    tensors, groups = (ref, ids, old, randn(6), mask), {"samples_per_prompt": 3, "implementation": "deterministic"}
    check_options(
        lambda x, **options: torch_bridge.grpo_loss(x, *tensors, **groups, **options)[:1],
        lambda x, **options: rlk_jax.grpo_loss(x, *map(array, tensors), **groups, **options)[:1],
        policy,
        [torch.tensor(1.5)],
        {
            "eps": 3.0,
            "clip_eps": 0.5,
            "clip_eps_high": 0.9,
            "beta": 0.1,
            "log_ratio_bound": 0.5,
            "temperature": randn(6, 7).abs() + 0.5,
        },
    )


@pytest.mark.parametrize("n", sizes(5))
def test_logp(n):
    logits, ids = randn(n, 70, scale=3.0).requires_grad_(), randint(70, n)
    rows = torch.arange(0, n, 2)
    options = {"return_lse": True, "return_entropy": True, "implementation": "deterministic"}
    check(
        lambda x: torch_bridge.logp(x, ids, row_indices=rows, **options),
        lambda x: rlk_jax.logp(x, array(ids), row_indices=array(rows), **options),
        [logits],
        [randn(n, seed=i) for i in range(3)],
    )


@pytest.mark.parametrize("lead", sizes(1))
def test_ratio_kl(lead):
    """More dimensions have test_ratio_kl_with_every_option."""
    policy, *others = policies((lead,))
    check(
        lambda x: torch_bridge.ratio_kl(x, *others, implementation="deterministic"),
        lambda x: rlk_jax.ratio_kl(x, *map(array, others), implementation="deterministic"),
        [policy],
        [randn(lead), randn(lead, seed=1)],
    )


@pytest.mark.parametrize(
    ("lead", "kind"),
    [
        ((2, 1), "per token"),
        ((4, 8), "per sequence"),
        # In `make test`, test_groups_of_any_sizes_need_few_programs (test_programs.py) catches wrong boundaries of
        # groups, and test_grpo_loss_with_every_option a wrong padding of both dimensions.
        pytest.param((5, 7), "rewards", marks=pytest.mark.full),
        # One token or five of a sequence are padded by the same code: (2, 1) and (6, 7), which
        # test_grpo_loss_with_every_option has, catch it in `make test`.
        pytest.param((6, 5), "per token", marks=pytest.mark.full),
    ],
)
def test_grpo_loss(lead, kind):
    policy, ref, ids, mask, old = policies(lead)
    boundaries = (0, 1, lead[0])
    given = {
        "rewards": {"rewards": randn(lead[0]), "group_boundaries": boundaries},
        "per sequence": {"rewards": None, "advantages": randn(lead[0])},
        "per token": {"rewards": None, "advantages": randn(*lead)},
    }[kind]
    options = {"beta": 0.1, "temperature": 0.9, "implementation": "deterministic"}
    arrays = {k: array(v) if isinstance(v, Tensor) else v for k, v in given.items()}
    check(
        lambda x: torch_bridge.grpo_loss(x, ref, ids, old, completion_mask=mask, **given, **options),
        lambda x: rlk_jax.grpo_loss(
            x, array(ref), array(ids), array(old), completion_mask=array(mask), **arrays, **options
        ),
        [policy],
        [torch.tensor(1.5), None, None],
    )


# All ops pad rows by the same code. In `make test`, test_ratio_kl catches what is wrong with one row, test_grpo_loss
# with a full bucket, and the two other cases with either B.
@pytest.mark.parametrize(
    ("m", "transpose_b"),
    [(5, True), (33, False), *(pytest.param(*x, marks=pytest.mark.full) for x in ((1, False), (8, True)))],
)
def test_det_gemm(m, transpose_b):
    a, b = randn(2, m, 20, dtype=torch.bfloat16), randn(20, 30, dtype=torch.bfloat16, seed=1)
    b = b.t().contiguous() if transpose_b else b
    start = randn(2, m, 30)
    tensors = [x.requires_grad_() for x in (a, b, start)]
    check(
        lambda a, b: (torch_bridge.det_gemm(a, b, transpose_b=transpose_b),),
        lambda a, b: (rlk_jax.det_gemm(a, b, transpose_b=transpose_b),),
        tensors[:2],
        [randn(2, m, 30, dtype=torch.bfloat16)],
    )
    check(
        lambda a, b, c: (torch_bridge.det_gemm(a, b, transpose_b=transpose_b, accumulate_into=c),),
        lambda a, b, c: (rlk_jax.det_gemm(a, b, transpose_b=transpose_b, accumulate_into=c),),
        tensors,
        [randn(2, m, 30)],
    )


def test_det_gemm_padding_is_zero():
    """A row of padding reaches no gradient of b, whatever memory held."""
    a, b = randn(5, 20, dtype=torch.float16), randn(20, 30, dtype=torch.float16).requires_grad_()
    torch.full((6, 20), torch.nan, dtype=torch.float16)
    torch_bridge.det_gemm(a, b, out_dtype=torch.float32).sum().backward()
    assert torch.isfinite(b.grad).all()
