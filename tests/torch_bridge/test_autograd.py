"""What autograd asks for, and nothing else: gradients that are needed, no input held, no second derivative."""

import itertools
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_bridge
from tests.support import helpers
from tests.torch_bridge.tensors import array, assert_close, head, policies, randint, randn
from torch_bridge import _calls, _programs

DTYPES_AND_OPTIONS = [
    (torch.float32, "everything"),
    (torch.bfloat16, "plain"),
    # Which options a call has, and its dtype, meet in no code of the bridge: in `make test` the two above have each of
    # the options, and test_autocast and test_bits.py the third dtype.
    *[pytest.param(torch.float16, options, marks=pytest.mark.full) for options in ("plain", "everything")],
    pytest.param(torch.float32, "plain", marks=pytest.mark.full),
    pytest.param(torch.bfloat16, "everything", marks=pytest.mark.full),
]


def reference(hidden, weight, ids, bias, temperature=1.0, softcap=None, real=None, ignore=None):
    """(logp, lse, entropy) of float64 logits, by torch alone."""
    z = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z = z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p = z[..., :real].log_softmax(-1)
    counted = torch.ones_like(ids, dtype=torch.bool) if ignore is None else ids != ignore
    logp = log_p.gather(-1, ids.where(counted, 0)[..., None])[..., 0]
    found = logp, z[..., :real].logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
    return [torch.where(counted, x, 0) for x in found]


@pytest.mark.parametrize(("dtype", "options"), DTYPES_AND_OPTIONS)
def test_linear_logp_agrees_with_torch_in_float64(dtype, options):
    hidden, weight, ids, bias = head((3, 7), dim=24, vocab=300, dtype=dtype)
    ours, theirs = {}, {}
    if options == "everything":
        ids[0, 2] = -100
        ids[ids >= 290] = 7
        temperature = randn(3, 7).abs() + 0.5
        ours = {"temperature": temperature, "logit_softcap": 3.0, "global_vocab_size": 290, "ignore_index": -100}
        theirs = {"temperature": temperature, "softcap": 3.0, "real": 290, "ignore": -100}
    tensors, doubles = [hidden, weight, bias], [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    found = torch_bridge.linear_logp(hidden, weight, ids, bias, return_lse=True, return_entropy=True, **ours)
    gold = reference(doubles[0], doubles[1], ids, doubles[2], **theirs)
    upstream = [randn(3, 7, seed=i) for i in range(3)]
    for x, expected in zip(found, gold, strict=True):
        helpers.assert_within_contract(
            x.detach().numpy(), expected.detach().numpy(), "linear_logp", array(hidden).dtype, "forward"
        )
    gradients = torch.autograd.grad(found, tensors, upstream)
    for x, expected in zip(gradients, torch.autograd.grad(gold, doubles, [g.double() for g in upstream]), strict=True):
        assert x.dtype == dtype
        assert_close(x, expected, "linear_logp", "gradient")


@pytest.mark.parametrize(("dtype", "options"), DTYPES_AND_OPTIONS)
def test_logp_agrees_with_torch_in_float64(dtype, options):
    logits, ids = randn(5, 300, dtype=dtype, scale=3.0).requires_grad_(), randint(290, 5)
    double = logits.detach().double().requires_grad_()
    ours, theirs = {}, {}
    if options == "everything":
        ids[2] = -100
        temperature = randn(5).abs() + 0.5
        ours = {"temperature": temperature, "logit_softcap": 5.0, "global_vocab_size": 290, "ignore_index": -100}
        theirs = {"temperature": temperature, "softcap": 5.0, "real": 290, "ignore": -100}
    found = torch_bridge.logp(logits, ids, return_lse=True, return_entropy=True, **ours)
    gold = reference(double, torch.eye(300), ids, None, **theirs)
    upstream = [randn(5, seed=i) for i in range(3)]
    for x, expected in zip(found, gold, strict=True):
        helpers.assert_within_contract(
            x.detach().numpy(), expected.detach().numpy(), "logp", array(logits).dtype, "forward"
        )
    (gradient,) = torch.autograd.grad(found, logits, upstream)
    (expected,) = torch.autograd.grad(gold, double, [g.double() for g in upstream])
    assert gradient.dtype == dtype
    assert_close(gradient, expected, "logp", "gradient")


@pytest.fixture
def last_program(monkeypatch):
    """The program of the last call."""
    monkeypatch.setattr(_programs, "_programs", type(_programs._programs)())
    return lambda: next(reversed(_programs._programs.values()))


@pytest.mark.parametrize("implementation", ["xla", "deterministic"])
def test_residuals_are_a_few_numbers_per_token(last_program, implementation):
    n, dim, vocab = 12, 40, 80
    hidden, weight, ids, bias = head((n,), dim, vocab)
    options = {"return_entropy": True, "ignore_index": -100, "implementation": implementation}
    found = torch_bridge.linear_logp(hidden, weight, ids, bias, temperature=randn(n).abs() + 1, **options)
    (pending,) = _calls._kept.values()
    assert last_program().borrows == {0, 1, 2} and found.entropy.requires_grad
    assert pending.residuals and all(x.size <= n for x in pending.residuals)


def test_residuals_of_logits_hold_no_logits(last_program):
    policy, ref, ids, mask, old = policies((2, 6))
    options = {"implementation": "deterministic"}
    for call in (
        lambda: torch_bridge.logp(policy, ids, **options),
        lambda: torch_bridge.ratio_kl(policy, ref, ids, mask, old, **options).ratio,
        lambda: torch_bridge.grpo_loss(policy, ref, ids, old, None, mask, advantages=old, **options).loss,
    ):
        found = call()
        (pending,) = _calls._kept.values()
        assert all(x.size <= 128 < policy.numel() for x in pending.residuals)
        del found
    assert not _calls._kept


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_launches_no_product(last_program, frozen):
    hidden, weight, ids, _ = head((12,), 40, 80)
    tensors = [hidden, weight]

    def work() -> float:
        torch_bridge.linear_logp(hidden, weight, ids, implementation="xla").sum().backward()
        (backward,) = last_program()._backwards.values()
        return backward.cost_analysis()["flops"]

    whole = work()
    tensors[frozen].requires_grad_(False).grad = None
    assert work() < 0.8 * whole and tensors[frozen].grad is None


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_product_reads_no_operand_whose_partner_is_frozen(last_program, frozen):
    operands = [randn(4, 16, dtype=torch.bfloat16), randn(16, 8, dtype=torch.bfloat16)]
    operands[1 - frozen].requires_grad_()
    torch_bridge.det_gemm(*operands).sum().backward()
    assert last_program().borrows == {frozen} and operands[frozen].grad is None


def test_a_memory_budget_bounds_the_backward(last_program):
    """The logits take 20 MiB."""
    hidden, weight, ids, _ = head((256,), 16, 20000)

    def held(budget: int) -> int:
        torch_bridge.linear_logp(hidden, weight, ids, memory_budget=budget, implementation="xla").sum().backward()
        (backward,) = last_program()._backwards.values()
        return backward.memory_analysis().temp_size_in_bytes

    assert held(2**20) < held(2**26) / 4


def test_an_output_that_is_not_used_costs_nothing(last_program):
    hidden, weight, ids, _ = head((12,), 40, 80)

    def work(*used: int) -> float:
        found = torch_bridge.linear_logp(hidden, weight, ids, return_entropy=True, implementation="xla")
        sum(found[i].sum() for i in used).backward()
        return list(last_program()._backwards.values())[-1].cost_analysis()["flops"]

    assert work(0) < work(0, 2) and len(last_program()._backwards) == 2


def test_no_grad_keeps_nothing(last_program):
    hidden, weight, ids, _ = head((5,))
    with torch.no_grad():
        found = torch_bridge.linear_logp(hidden, weight, ids)
    assert not found.requires_grad and not last_program().borrows and not _calls._kept


def test_nothing_is_kept_after_the_backward():
    hidden, weight, ids, _ = head((5,))
    found = torch_bridge.linear_logp(hidden, weight, ids)
    assert len(_calls._kept) == 1
    found.sum().backward()
    del found
    assert not _calls._kept


def test_a_backward_can_be_repeated():
    hidden, weight, ids, _ = head((5,))
    found = torch_bridge.linear_logp(hidden, weight, ids).sum()
    first = torch.autograd.grad(found, hidden, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(found, hidden))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    hidden, weight, ids, _ = head((5,))
    expected = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids).sum(), (hidden, weight))
    found = checkpoint(torch_bridge.linear_logp, hidden, weight, ids, use_reentrant=use_reentrant)
    found.sum().backward()
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_saved_tensors_may_be_freed_and_filled_again():
    """As FSDP2 does with a gathered weight: its storage is empty between forward and backward, and then elsewhere."""
    hidden, weight, ids, _ = head((5,))
    (expected,) = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids).sum(), hidden)
    found = torch_bridge.linear_logp(hidden, weight, ids)
    values, storage = weight.detach().clone(), weight.untyped_storage()
    size = storage.nbytes()
    with torch.autograd._unsafe_preserve_version_counter(weight):
        storage.resize_(0)
        storage.resize_(size)
        weight.detach().copy_(values)
    assert torch.equal(torch.autograd.grad(found.sum(), hidden)[0], expected)


def test_an_input_changed_in_place_is_noticed():
    hidden, weight, ids, _ = head((5,))
    found = torch_bridge.linear_logp(hidden, weight, ids)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_no_second_derivative():
    hidden, weight, ids, _ = head((5,))
    (gradient,) = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


def test_padding_may_hold_anything():
    """Five rows in a program of six: the sixth is what memory holds, here NaN."""
    hidden, weight, ids, _ = head((5,))
    policy, ref, taken, mask, old = policies((1, 5))

    def gradients() -> list[torch.Tensor]:
        losses = (
            (torch_bridge.linear_logp(hidden, weight, ids), (hidden, weight)),
            (torch_bridge.logp(policy, taken), (policy,)),
            (torch_bridge.ratio_kl(policy, ref, taken, mask, old).kl, (policy,)),
        )
        return [x for loss, tensors in losses for x in torch.autograd.grad(loss.sum(), tensors)]

    expected = gradients()
    torch.use_deterministic_algorithms(True)  # Fills what is allocated.
    try:
        found = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, expected))


def test_rewards_beyond_32_bits():
    policy, ref, ids, mask, old = policies((2, 3))
    rewards = torch.tensor([2**33, 2**34])
    options = {"samples_per_prompt": 2}
    found = torch_bridge.grpo_loss(policy, ref, ids, old, rewards, mask, **options)
    assert found.loss == torch_bridge.grpo_loss(policy, ref, ids, old, rewards.float(), mask, **options).loss != 0


def test_residuals_that_a_hook_has_lost_are_missed():
    hidden, weight, ids, _ = head((5,))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        found = torch_bridge.linear_logp(hidden, weight, ids)
    with pytest.raises(RuntimeError, match="hooks on saved tensors"):
        found.sum().backward()


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_rows(last_program, shape):
    """Zeros that can be differentiated, and no program."""
    hidden, weight, ids, bias = head(shape)
    found = torch_bridge.linear_logp(hidden, weight, ids, bias, return_entropy=True)
    assert found.logp.shape == found.entropy.shape == shape and found.lse is None
    (found.logp.sum() + found.entropy.sum()).backward()
    assert not any(x.grad.any() for x in (hidden, weight, bias)) and hidden.grad.shape == hidden.shape
    logits = randn(*shape, 9).requires_grad_()
    torch_bridge.logp(logits, ids).sum().backward()
    policy, ref, ids, mask, old = policies((2, 0))
    torch_bridge.ratio_kl(policy, ref, ids, mask, old).ratio.sum().backward()
    loss = torch_bridge.grpo_loss(policy, ref, ids, old, torch.ones(2), mask, samples_per_prompt=2)
    loss.loss.backward()
    assert loss.kl == 0 and policy.grad.shape == policy.shape and not _programs._programs
    a, b = randn(0, 8, dtype=torch.bfloat16), randn(8, 4, dtype=torch.bfloat16).requires_grad_()
    torch_bridge.det_gemm(a, b).sum().backward()
    assert not b.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Computes in the autocast dtype, as torch's own product would; gradients come in the inputs' dtypes."""
    hidden, weight, ids, bias = head((5,))
    with torch.autocast("cpu", dtype=dtype):
        found = torch_bridge.linear_logp(hidden, weight, ids, bias)
        c = torch_bridge.det_gemm(hidden, weight, transpose_b=True)
    low = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    expected = torch_bridge.linear_logp(low[0], low[1], ids, low[2])
    assert torch.equal(found, expected) and c.dtype == dtype
    gradients = torch.autograd.grad(found.sum(), (hidden, weight, bias))
    assert all(x.dtype == torch.float32 for x in gradients)
    for x, y in zip(gradients, torch.autograd.grad(expected.sum(), low), strict=True):
        assert torch.equal(x, y.float())


def test_autocast_leaves_float64_alone():
    """As torch's own does; no op takes it."""
    double = randn(4, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="float64"):
        torch_bridge.det_gemm(double, double)


def test_logits_keep_their_dtype_under_autocast():
    logits, ids = randn(4, 9), randint(9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch_bridge.logp(logits, ids)
    assert torch.equal(found, torch_bridge.logp(logits, ids))


@pytest.mark.parametrize("view", ["strided", "expanded", "transposed", "slice"])
def test_views(view):
    base = randn(10, 10).requires_grad_()
    hidden = {
        "strided": lambda x: x[:, ::2],
        "expanded": lambda x: x[0, :5].expand(4, 5),
        "transposed": lambda x: x[:5].t(),
        "slice": lambda x: x[3:7, :5],
    }[view]
    weight, ids = randn(7, 5), randint(7, len(hidden(base)))
    torch_bridge.linear_logp(hidden(base), weight, ids).sum().backward()
    found, base.grad = base.grad, None
    torch_bridge.linear_logp(hidden(base).contiguous(), weight, ids).sum().backward()
    assert torch.equal(found, base.grad)


def test_fused_lm_head():
    linear = torch.nn.Linear(16, 70)
    lm_head = torch_bridge.FusedLMHead.of(linear)
    assert lm_head.weight is linear.weight and lm_head.bias is linear.bias
    hidden, _, ids, _ = head((5,))
    found = lm_head(hidden, ids, return_entropy=True)
    assert torch.equal(found.logp, torch_bridge.linear_logp(hidden, linear.weight, ids, linear.bias))
    assert torch.equal(lm_head.logits(hidden), linear(hidden)) and torch.equal(lm_head(hidden), linear(hidden))
    torch_bridge.FusedLMHead(16, 70).load_state_dict(linear.state_dict())
    assert lm_head.training and not torch_bridge.FusedLMHead.of(linear.eval()).training


# What breaks dynamo's graph breaks it under both backends: in `make test`, the case of "aot_eager" catches it, and
# traces the backward, too.
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), "aot_eager"])
def test_torch_compile_takes_every_op_whole(backend):
    policy, ref, ids, mask, old = policies((5, 7), vocab=16)
    weight, words = randn(70, 16).requires_grad_(), torch.full((5, 7, 3), -2, dtype=torch.int32).view(torch.uint32)
    a, b = randn(4, 16, dtype=torch.bfloat16).requires_grad_(), randn(16, 8, dtype=torch.bfloat16).requires_grad_()

    def loss(policy, weight, a, b):
        options = {"return_entropy": True, "temperature": 0.5, "allowed_mask": words}
        found = torch_bridge.linear_logp(policy, weight, ids + 1, **options)
        total = (found.logp * 2 + found.entropy).sum() + torch_bridge.logp(policy, ids).sum()
        total = total + torch_bridge.ratio_kl(policy, ref, ids, mask, old).kl.sum()
        total = total + torch_bridge.grpo_loss(policy, ref, ids, old, None, mask, advantages=old).loss
        return total + torch_bridge.det_gemm(a, b).float().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    tensors = (policy, weight, a, b)
    expected = loss(*tensors)
    found = compiled(*tensors)
    assert torch.equal(found, expected)
    for x, y in zip(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors), strict=True):
        assert torch.equal(x, y)


def policy_loss(policy, ref, ids, old, mask):
    return torch_bridge.grpo_loss(torch.sin(policy), ref, ids, old, None, mask, advantages=old).loss


def test_gradients_are_contiguous_where_two_dimensions_are_padded():
    policy, ref, ids, mask, old = policies((5, 7), vocab=16)
    loss = torch_bridge.grpo_loss(policy, ref, ids, old, None, mask, advantages=old).loss
    assert torch.autograd.grad(loss, policy)[0].is_contiguous()


# In `make test` its bug, a gradient whose strides inductor does not expect, is caught by
# test_gradients_are_contiguous_where_two_dimensions_are_padded.
@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_takes_two_padded_dimensions():
    policy, ref, ids, mask, old = policies((5, 7))
    loss = policy_loss(policy, ref, ids, old, mask)
    compiled = torch.compile(policy_loss, fullgraph=True, backend="inductor")(policy, ref, ids, old, mask)
    (expected,), (found,) = (torch.autograd.grad(x, policy) for x in (loss, compiled))
    assert_close(found, expected, "grpo_loss", "gradient")


def arguments(op: str) -> dict[str, Any]:
    """Good ones, of shapes that are no bucket."""
    policy, ref, ids, mask, old = policies((5, 7), vocab=16)
    both = {"policy_logits": policy, "ref_logits": ref, "action_ids": ids, "completion_mask": mask, "old_logps": old}
    low = {"a": policy[0].detach().bfloat16(), "b": randn(16, 8, dtype=torch.bfloat16)}
    return {
        "linear_logp": {
            "hidden": policy,
            "lm_head_weight": randn(70, 16).requires_grad_(),
            "target_ids": ids,
            "allowed_ids": torch.stack([ids, ids + 1, ids + 20], dim=-1),
        },
        "logp": {"logits": policy, "token_ids": ids, "row_indices": torch.tensor([3, 1, 30, 4, 9])},
        "ratio_kl": both,
        "grpo_loss": {**both, "rewards": None, "advantages": old},
        "det_gemm": {name: x.requires_grad_() for name, x in low.items()},
    }[op]


WRONG = [
    ("linear_logp", "target_ids", torch.zeros(7, 5, dtype=torch.int64)),
    ("linear_logp", "temperature", torch.ones(5, 7, dtype=torch.float64)),
    ("linear_logp", "allowed_ids", torch.zeros(7, 5, 2, dtype=torch.int32)),
    ("logp", "row_indices", torch.tensor([1.7])),
    ("ratio_kl", "completion_mask", torch.ones(7, 5)),
    ("grpo_loss", "clip_eps", -1.0),
    ("det_gemm", "accumulate_into", torch.zeros(7, 8, dtype=torch.bfloat16)),
]
ALSO_WRONG = [
    ("linear_logp", "hidden", randn(5, 7, 16).double()),
    ("linear_logp", "lm_head_weight", randn(70, 17)),
    ("linear_logp", "target_ids", torch.zeros(5, 7)),
    ("linear_logp", "target_ids", torch.zeros(5, 7, dtype=torch.bool)),
    ("linear_logp", "temperature", torch.ones(5, 7, dtype=torch.int64)),
    ("logp", "logits", torch.ones(5, 7, 16, dtype=torch.int64)),
    ("logp", "logits", randn(5, 7, 16).double()),
    ("logp", "token_ids", torch.zeros(5, 7)),
    ("ratio_kl", "action_ids", torch.zeros(5, 7)),
    ("ratio_kl", "old_logps", torch.zeros(5, 7, dtype=torch.float64)),
    ("grpo_loss", "action_ids", torch.zeros(5, 7)),
    ("grpo_loss", "old_logps", torch.zeros(7, 5)),
    ("det_gemm", "a", randn(7, 16)),
]


# In `make test`, the case of each op that is in WRONG catches an op that a graph does not check, and
# test_linear_logp_raises_what_rlk_jax_does and test_the_other_ops_raise_what_rlk_jax_does (test_errors.py) wrong words.
# An argument in ALSO_WRONG that a graph alone does not check is left to `make test-full`.
@pytest.mark.parametrize(
    ("op", "name", "wrong"), [*WRONG, *[pytest.param(*x, marks=pytest.mark.full) for x in ALSO_WRONG]]
)
def test_torch_compile_raises_what_eager_does(op, name, wrong):
    function, given = getattr(torch_bridge, op), {**arguments(op), name: wrong}
    with pytest.raises(ValueError) as expected:
        function(**given)
    torch._dynamo.reset()
    with pytest.raises(ValueError) as found:
        torch.compile(function, fullgraph=True, backend="aot_eager")(**given)
    assert str(found.value) == str(expected.value)


# The others are made by the same function. What is wrong with one of them alone,
# test_torch_compile_takes_every_op_whole catches in `make test`.
IN_FULL = [pytest.param(op, marks=pytest.mark.full) for op in ("logp", "ratio_kl", "grpo_loss", "det_gemm")]


@pytest.mark.parametrize("op", ["linear_logp", *IN_FULL])
def test_custom_ops_are_what_they_say(op, monkeypatch):
    """To torch: their schema, gradients and shapes. It compares handles, too: here all calls share one."""

    class Kept(dict):
        def pop(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(_calls, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(_calls, "_kept", Kept())
    module, called = sys.modules[f"torch_bridge.{op}"], []
    call = getattr(module, f"_{op}")
    monkeypatch.setattr(module, f"_{op}", lambda *given: called.append(given) or call(*given))
    getattr(torch_bridge, op)(**arguments(op))
    fields = getattr(module, "_OPTIONS", None)
    given = [x if fields is None else tuple(fields.spread(x)) for x in called]
    torch.library.opcheck(getattr(torch.ops.rlk_jax, op).default, *given)


def test_torch_compile_takes_a_temperature_schedule_as_a_tensor():
    hidden, weight, ids, _ = head((5,))
    compiled = torch.compile(
        lambda t: torch_bridge.linear_logp(hidden, weight, ids, temperature=t), fullgraph=True, backend="aot_eager"
    )
    for i in range(12):
        expected = torch_bridge.linear_logp(hidden, weight, ids, temperature=0.5 + i / 8)
        assert torch.equal(compiled(torch.tensor(0.5 + i / 8)), expected)


def test_compiled_autograd():
    hidden, weight, ids, _ = head((5,))
    (expected,) = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids).sum(), hidden)
    loss = torch_bridge.linear_logp(hidden, weight, ids).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    assert torch.equal(hidden.grad, expected)


def test_torch_compile_with_a_varying_batch():
    _, weight, _, _ = head((1,))
    compiled = torch.compile(torch_bridge.linear_logp, fullgraph=True, backend="aot_eager")
    for n in (5, 7, 6, 0):
        hidden, ids = randn(n, 16).requires_grad_(), randint(70, n)
        found = torch.autograd.grad(compiled(hidden, weight, ids).sum(), (hidden, weight))
        expected = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids).sum(), (hidden, weight))
        assert all(map(torch.equal, found, expected))


def product(rows, matrix, bias):
    """torch's own product, with the sum over log-probabilities that `linear_logp` of ids 0 has."""
    return (torch.nn.functional.linear(rows, matrix, bias).log_softmax(-1)[..., 0]).sum()


FLOPS = {
    "linear_logp": (
        product,
        lambda x, w, b: torch_bridge.linear_logp(x, w, torch.zeros(x.shape[:-1], dtype=torch.long), b).sum(),
    ),
    "det_gemm": (
        product,
        lambda x, w, b: torch_bridge.det_gemm(x.bfloat16(), w.bfloat16(), transpose_b=True).float().sum(),
    ),
    "logp": (
        lambda x, w, b: x.log_softmax(-1)[..., 0].sum(),
        lambda x, w, b: torch_bridge.logp(x, torch.zeros(x.shape[:-1], dtype=torch.long)).sum(),
    ),
}


@pytest.mark.parametrize("op", FLOPS)
@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["all", "frozen hidden", "frozen weight"])
def test_flops_are_those_of_torch_s_own_ops(op, frozen):
    """A forward and the gradients that are needed, in FlopCounterMode; under a checkpoint, the forward twice."""

    def count(function, is_checkpointed):
        tensors = [randn(3, 4, 8), randn(16, 8), randn(16)]
        for i, x in enumerate(tensors):
            x.requires_grad_(i != frozen)
        with FlopCounterMode(display=False) as counter:
            out = checkpoint(function, *tensors, use_reentrant=False) if is_checkpointed else function(*tensors)
            if out.requires_grad:
                out.backward()
        return counter.get_total_flops()

    theirs, ours = FLOPS[op]
    for is_checkpointed in (False, True):
        assert count(ours, is_checkpointed) == count(theirs, is_checkpointed)
    assert count(ours, False) > 0 or op == "logp"


def test_flops_are_counted_by_a_module_that_is_imported_later():
    """`import torch_bridge` waits neither for that module and the Triton that it imports, nor for Pallas, which
    jax.extend imports. Somebody may look for the module first, and load it again.
    """
    code = """
import importlib, importlib.util, sys, torch, torch_bridge
assert not {"triton", "torch.utils.flop_counter", "jax._src.pallas.core"} & set(sys.modules)
assert importlib.util.find_spec("torch.utils.flop_counter")
from torch.utils import flop_counter
FlopCounterMode = importlib.reload(flop_counter).FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch_bridge.det_gemm(torch.ones(3, 8).bfloat16(), torch.ones(8, 16).bfloat16())
assert counter.get_total_flops() == 2 * 3 * 8 * 16, counter.get_total_flops()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
