"""One of two or four processes: python -m tests.torch_bridge.rank PORT COUNT RANK BACKEND DEVICE.

Any failed check is its exit code. An error that all must raise is printed as `name: message`; the parent compares what
they print.
"""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import torch_bridge
from rlk_jax import cli
from rlk_jax.checker.processes import free_port
from rlk_jax.core import overwriting
from rlk_jax.vocab_parallel import shard_bounds
from tests.support.helpers import HANG_S
from tests.torch_bridge.tensors import assert_close, head, randint, randn, same_bits
from tests.torch_bridge.test_autograd import reference
from torch_bridge import _calls, _exchange

UNEVEN = {2: [0, 7, 16], 4: [0, 3, 7, 12, 16]}
"""Where the shards of 16 columns begin and end, by their number."""
EVERYTHING = {"return_lse": True, "return_entropy": True}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
PROMISES = {
    "cpu": {"deterministic": torch.float32},
    "cuda": {"deterministic": torch.float32, "mosaic": torch.bfloat16},
}
"""Implementations that promise bits on a device, and a dtype of each."""


def cut(vocab: int, count: int) -> list[int]:
    return [start for start, _ in shard_bounds(vocab, count)] + [vocab]


def spread(problem: list[Any], bounds: list[int], rank: int, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """Values and gradients of this rank's part of a problem, beside whole upstream gradients."""
    hidden, weight, ids, bias = problem
    start, end = bounds[rank], bounds[rank + 1]
    own = [x.detach().clone().requires_grad_() for x in (hidden, weight[start:end], bias[start:end])]
    group = options.pop("tp_group", dist.group.WORLD)
    found = torch_bridge.linear_logp(
        own[0], own[1], ids, own[2], tp_group=group, vocab_start_index=start, **EVERYTHING, **options
    )
    return found, torch.autograd.grad(found, own, [randn(*ids.shape, seed=i) for i in range(3)])


def whole(problem: list[Any], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    hidden, weight, ids, bias = problem
    found = torch_bridge.linear_logp(hidden, weight, ids, bias, **EVERYTHING, **options)
    return found, torch.autograd.grad(found, (hidden, weight, bias), [randn(*ids.shape, seed=i) for i in range(3)])


def of_rank_0(rank: int, function: Callable[[], Any]) -> Any:
    """What the function returns on rank 0: the other ranks need not compile the programs of a whole head."""
    found = [tree_map(lambda x: x.detach().cpu(), function()) if rank == 0 else None]
    dist.broadcast_object_list(found)
    return tree_map(lambda x: x.to(torch.get_default_device()), found[0])


def gathered(part: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks as one: the norm of a rank's three numbers says little of their rounding."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts)


def head_class(op: str = "linear_logp") -> str:
    """The contract's class of an op with a head on the default device."""
    on_hopper = torch.get_default_device().type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    return f"{op}_wgmma" if on_hopper else op


def is_make_test(count: int) -> bool:
    """Whether these are the two processes on a CPU that `make test` has."""
    return count == 2 and torch.get_default_device().type == "cpu"


def agrees_with_float64(rank: int, count: int) -> None:
    # In `make test`, `ignores_padding` and `sums_what_it_is_asked_to` catch what is wrong in float32, and test_autocast
    # (test_autograd.py) what is wrong with gradients in float16.
    for dtype in DTYPES[:1] if is_make_test(count) else DTYPES:
        problem = head((8, 25), dim=32, vocab=16, dtype=dtype)
        problem[2][0, 1] = -100
        double = [x.detach().double().requires_grad_() for x in (problem[0], problem[1], problem[3])]
        gold = reference(double[0], double[1], problem[2], double[2], temperature=1.5, softcap=3.0, ignore=-100)
        expected = torch.autograd.grad(gold, double, [randn(8, 25, seed=i).double() for i in range(3)])
        found, gradients = spread(problem, UNEVEN[count], rank, temperature=1.5, logit_softcap=3.0, ignore_index=-100)
        for x, y in zip(found, gold, strict=True):
            assert_close(x, y, head_class(), "forward")
        for x, y in zip((gradients[0], *map(gathered, gradients[1:])), expected, strict=True):
            assert x.dtype == dtype
            assert_close(x, y, head_class(), "gradient")
        everyone = [torch.empty_like(found.logp) for _ in range(count)]
        dist.all_gather(everyone, found.logp.contiguous())
        assert all(same_bits(x, found.logp) for x in everyone)


def keeps_the_bits_of_one_rank(rank: int, count: int) -> None:
    """On the edges of groups, by all ranks and by each half of them, and in any order."""
    half = count // 2
    halves = [dist.new_group(list(range(i, i + half))) for i in range(0, count, half)]
    for implementation, dtype in PROMISES[torch.get_default_device().type].items():
        problem, options = head((33,), dim=24, vocab=1000, dtype=dtype), {"implementation": implementation}
        expected = of_rank_0(rank, functools.partial(whole, problem, **options))
        for bounds, place, group in (
            (cut(1000, count), rank, dist.group.WORLD),
            (cut(1000, count), count - 1 - rank, dist.group.WORLD),
            (cut(1000, half), rank % half, halves[rank // half]),
        ):
            found = spread(problem, bounds, place, tp_group=group, **options)
            assert_same_bits_here(found, expected, slice(*bounds[place : place + 2]))


def assert_same_bits_here(found: Any, expected: Any, here: slice) -> None:
    """The values have the same bits, and so have the gradients of this rank's columns."""
    assert all(map(same_bits, found[0], expected[0]))
    assert all(same_bits(x, y[here]) for x, y in zip(found[1][1:], expected[1][1:], strict=True))


def takes_allowed_tokens(rank: int, count: int) -> None:
    """Lists of ids of the whole vocabulary: the values of one rank for shards that begin inside a word, its bits on the
    edges of groups, and one message for what rank 1 alone gets wrong.
    """
    problem, uneven = head((33,), dim=24, vocab=1000), [0, *(301 * i for i in range(1, count)), 1000]
    hidden, weight, ids, bias = problem
    allowed = torch.stack([ids, ids // 2, 999 - ids, torch.full_like(ids, -1)], dim=-1)
    expected = of_rank_0(rank, functools.partial(whole, problem, allowed_ids=allowed))
    found, gradients = spread(problem, uneven, rank, allowed_ids=allowed)
    for x, y in zip(found, expected[0], strict=True):
        assert_close(x, y.double(), head_class(), "forward")
    for x, y in zip((gradients[0], *map(gathered, gradients[1:])), expected[1], strict=True):
        assert_close(x, y.double(), head_class(), "gradient")
    bounds = cut(1000, count)
    # What shards make of words is the same for all edges: in `make test`, those inside a word catch it.
    for implementation in () if is_make_test(count) else PROMISES[torch.get_default_device().type]:
        options = {"implementation": implementation, "allowed_ids": allowed}
        given = [x if x is ids else x.detach().to(PROMISES[hidden.device.type][implementation]) for x in problem]
        given = [x if x is ids else x.requires_grad_() for x in given]
        expected = of_rank_0(rank, functools.partial(whole, given, **options))
        assert_same_bits_here(spread(given, bounds, rank, **options), expected, slice(*bounds[rank : rank + 2]))
    nothing = torch.where((torch.arange(33) == 4)[:, None], -1, allowed) if rank == 1 else allowed
    words = torch.full((33, 31), -1, dtype=torch.int32)
    start, end = bounds[rank : rank + 2]
    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "validate": True}
    for name, given in {"nothing allowed": {"allowed_ids": nothing}, "few words": {"allowed_mask": words}}.items():
        try:
            torch_bridge.linear_logp(hidden, weight[start:end], ids, bias[start:end], **given, **of_rank)
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            raise AssertionError(f"{name} raised nothing")


def ranks_what_is_equal(rank: int, count: int) -> None:
    """Logits of small integers, equal in several shards, of which some are narrower than the list, and one of four
    holds nothing but padding. Then no token at all, and more than there are.
    """
    hidden, weight, ids, _ = (x.detach() for x in head((9,), dim=8, vocab=16))
    hidden, weight = (x.sign() for x in (hidden, weight))
    padded = torch.cat([weight, weight[:4] * torch.nan])
    start, end = {2: [0, 7, 20], 4: [0, 3, 7, 16, 20]}[count][rank:][:2]
    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "global_vocab_size": 16}
    wanted = {"return_top_k": 13, "return_target_rank": True}
    # Logits far below 0 show a partial softmax that is none of theirs: e^-120 is 0 in float32. Farther below, their
    # log-sum-exp would have too few digits for the contract.
    below = torch.full((20,), -128.0)[start:end]
    found = torch_bridge.linear_logp(hidden, padded[start:end], ids, below, **wanted, **of_rank)
    logits = hidden @ weight.t()
    order = logits.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order[:, :13])
    assert torch.equal(found.target_rank, (order == ids[:, None]).int().argmax(dim=1))
    assert_close(found.top_logps, logits.double().log_softmax(dim=1).gather(1, order[:, :13]), head_class(), "forward")
    for name, field in {"return_top_k": "top_ids", "return_target_rank": "target_rank"}.items():
        alone = torch_bridge.linear_logp(hidden, padded[start:end], ids, below, **{name: wanted[name]}, **of_rank)
        assert torch.equal(getattr(alone, field), getattr(found, field))
    none = torch_bridge.linear_logp(hidden[:0], padded[start:end], ids[:0], **wanted, **of_rank)
    assert none.top_ids.shape == none.top_logps.shape == (0, 13) and none.target_rank.shape == (0,)
    try:
        torch_bridge.linear_logp(hidden, padded[start:end], ids, return_top_k=17, **of_rank)
    except ValueError as error:
        print(f"long list: {error}", flush=True)
    else:
        raise AssertionError("more tokens than there are raised nothing")


def ranks_as_one_rank(rank: int, count: int) -> None:
    """With the bits of one, on the edges of groups, beside padding and lists of allowed tokens: tokens of equal logits
    in two shards, rows that allow fewer than are wanted, that are ignored and that hold NaN. Gradients keep their bits.
    The last rank has the first shard.
    """
    place, bounds = count - 1 - rank, [*cut(990, count)[:-1], 1000]
    here = slice(*bounds[place : place + 2])
    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": here.start}
    wanted = {"return_top_k": 7, "return_target_rank": True}
    for implementation, dtype in PROMISES[torch.get_default_device().type].items():
        call = functools.partial(ranked, implementation, dtype)
        found, gradients = call(here, **wanted, **of_rank)
        expected, whole_gradients = of_rank_0(rank, functools.partial(call, slice(0, 1000), **wanted))
        assert_same_bits_here((found, (None, *gradients)), (expected, (None, *whole_gradients)), here)
        assert found.top_ids.dtype == found.target_rank.dtype == torch.int64 and not found.top_logps.requires_grad
        assert (found.top_ids[3] == -1).sum() == 3 and (found.top_logps[3] == -torch.inf).sum() == 3
        assert (found.top_ids[[1, 5]] == -1).all() and found.target_rank[[1, 5]].tolist() == [-1, -1]
        assert (found.top_logps[1] == 0).all() and found.top_logps[5].isnan().all()
        # What `deterministic` does for one of both alone, `xla` does too, in `ranks_what_is_equal`.
        for one in () if implementation == "deterministic" else ({"return_top_k": 7}, {"return_target_rank": True}):
            alone, of_alone = call(here, **one, **of_rank)
            kept = [(x, y) for x, y in zip(alone, found, strict=True) if x is not None]
            assert len(kept) == 4 + ("return_top_k" in one) and all(same_bits(x, y) for x, y in kept)
            assert all(map(same_bits, of_alone, gradients))


def ranked(implementation: str, dtype: torch.dtype, here: slice, **options: Any) -> tuple[Any, Any]:
    """Values and gradients of weight and bias for these columns of the problem of `ranks_as_one_rank`."""
    hidden, weight, ids, bias = (x.detach() for x in head((33,), dim=24, vocab=1000, dtype=dtype))
    weight[500:], bias[500:], weight[990:], hidden[5] = weight[:500].clone(), bias[:500].clone(), torch.nan, torch.nan
    ids = ids.where(ids < 990, 0)
    ids[1] = -100
    allowed = torch.stack([ids, *(randint(495, 33, seed=i) + 495 * (i % 2) for i in range(20))], dim=-1)
    allowed[3, 4:] = -1
    options |= {
        "allowed_ids": allowed,
        "ignore_index": -100,
        "global_vocab_size": 990,
        "implementation": implementation,
    }
    own = [x[here].clone().requires_grad_() for x in (weight, bias)]
    found = torch_bridge.linear_logp(hidden, own[0], ids, own[1], **EVERYTHING, **options)
    upstream = (torch.arange(33) != 5).float()
    return found, torch.autograd.grad(found[:3], own, [upstream, upstream, upstream])


def ignores_padding(rank: int, count: int) -> None:
    """The vocabulary's last shard holds nothing else."""
    problem = [x.detach() for x in head((33,), dim=24, vocab=1000)]
    expected, *_ = reference(*problem)
    padded = [torch.cat([x, x[:536] * torch.nan]) for x in (problem[1], problem[3])]
    hidden, weight, ids, bias = problem[0], padded[0], problem[2], padded[1]
    start, end = [0, *(512, 1000)[: count - 2], 1024, 1536][rank:][:2]
    options = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "global_vocab_size": 1000}
    found = torch_bridge.linear_logp(hidden, weight[start:end], ids, bias[start:end], **options)
    assert_close(found, expected, head_class(), "forward")


def trains_as_one_rank(rank: int, count: int) -> None:
    """Under a checkpoint and autocast, of a transposed head, with a temperature for each token."""
    hidden, weight, ids, bias = (x.detach() for x in head((6,), dim=8, vocab=1000))
    start, end = cut(1000, count)[rank : rank + 2]
    options = {"temperature": randn(6).abs() + 0.5, "weight_layout": "dv", "implementation": "deterministic"}

    def call(hidden: Any, weight: Any, bias: Any, **of_rank: Any) -> Any:
        return torch_bridge.linear_logp(hidden, weight, ids, bias, **options, **of_rank)

    def gradients(weight: Any, bias: Any, **of_rank: Any) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with torch.autocast(hidden.device.type, torch.bfloat16):
            found = checkpoint(call, *own, **of_rank, use_reentrant=False)
        assert not _calls._kept
        return [found, *torch.autograd.grad(found.sum(), own)]

    parts = gradients(weight[start:end].t(), bias[start:end], tp_group=dist.group.WORLD, vocab_start_index=start)
    found, d_hidden, d_weight, d_bias = of_rank_0(rank, lambda: gradients(weight.t(), bias))
    assert same_bits(parts[0], found) and same_bits(parts[2], d_weight[:, start:end])
    assert same_bits(parts[3], d_bias[start:end])
    # dH is rounded to autocast's dtype, whose contract is wider than of hidden's.
    assert_close(parts[1].bfloat16(), d_hidden.double(), "linear_logp", "gradient")


def reads_a_transposed_head_in_place(rank: int, count: int) -> None:
    hidden, weight, ids, _ = (x.detach() for x in head((6,), dim=8, vocab=1024))
    start, end = cut(1024, count)[rank : rank + 2]
    own, lent, lend = weight[start:end].clone(), [], _exchange.lend
    _exchange.lend = lambda x, *shape: lent.append(x.data_ptr()) or lend(x, *shape)
    options = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "implementation": "deterministic"}
    found = [
        torch_bridge.linear_logp(hidden, own, ids, **options),
        torch_bridge.linear_logp(hidden, own.t(), ids, weight_layout="dv", **options),
        torch_bridge.linear_logp(hidden, own.t().contiguous().t(), ids, **options),
    ]
    _exchange.lend = lend
    assert lent.count(own.data_ptr()) == 2 and all(same_bits(x, found[0]) for x in found)


def sums_what_it_is_asked_to(rank: int, count: int) -> None:
    """dH of each rank's own, or the sum of all; frozen operands; no token at all."""
    problem = head((6,), dim=8, vocab=1000)
    bounds = cut(1000, count)
    _, summed = spread(problem, bounds, rank)
    _, own = spread(problem, bounds, rank, reduce_hidden_grad=False)
    assert not torch.equal(own[0], summed[0])
    dist.all_reduce(own[0])
    assert_close(own[0], summed[0].double(), head_class(), "gradient")
    hidden, weight, ids, bias = (x.detach() for x in problem)
    here = slice(bounds[rank], bounds[rank + 1])
    options = {"tp_group": dist.group.WORLD, "vocab_start_index": bounds[rank]}
    own_rows = weight[here].clone().requires_grad_()
    found = torch_bridge.linear_logp(hidden, own_rows, ids, bias[here], **options, **EVERYTHING)
    for is_retained in (True, False):
        upstream = [randn(6, seed=i) for i in range(3)]
        (d_weight,) = torch.autograd.grad(found, own_rows, upstream, retain_graph=is_retained)
        assert same_bits(d_weight, summed[1])
    nothing = hidden[:0].requires_grad_()
    torch_bridge.linear_logp(nothing, weight[here], ids[:0], bias[here], **options).sum().backward()
    assert nothing.grad.shape == (0, 8)


def waits_for_collectives(rank: int, count: int) -> None:
    """Whose results stand for tensors until somebody waits."""
    problem = [x.detach() for x in head((6,), dim=8, vocab=1000)]
    bounds = cut(1000, count)
    expected, gradients = spread(problem, bounds, rank)
    hidden = collectives.broadcast(problem[0], 0, dist.group.WORLD).requires_grad_()
    weight, bias = (x[bounds[rank] : bounds[rank + 1]] for x in (problem[1], problem[3]))
    options = {"tp_group": dist.group.WORLD, "vocab_start_index": bounds[rank]}
    found = torch_bridge.linear_logp(hidden, weight, problem[2], bias, **options, **EVERYTHING)
    assert isinstance(hidden, collectives.AsyncCollectiveTensor) and all(map(same_bits, found, expected))
    (gradient,) = torch.autograd.grad(found, hidden, [randn(6, seed=i) for i in range(3)])
    assert same_bits(gradient, gradients[0])


def gives_the_loss_of_one_rank(rank: int, count: int) -> None:
    """linear_cross_entropy on edges of groups, and one message for what rank 1 alone gets wrong. In `make test` labels
    are smoothed; without it a loss is linear_logp's, which other checks here have.
    """
    hidden, weight, ids, bias = (x.detach() for x in head((6,), dim=8, vocab=1000))
    here = slice(*cut(1000, count)[rank : rank + 2])
    options: dict[str, Any] = {
        "token_weights": randn(6, seed=3).abs(),
        "z_loss": 1e-2,
        "implementation": "deterministic",
    }

    def loss(*head: torch.Tensor, **of_call: Any) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in (hidden, *head)]
        found = torch_bridge.linear_cross_entropy(own[0], own[1], ids, own[2], **options, **of_call)
        return [found.detach(), *torch.autograd.grad(found, own)]

    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": here.start}
    for smoothing in (0.1,) if is_make_test(count) else (0.0, 0.1):
        found = loss(weight[here], bias[here], label_smoothing=smoothing, **of_rank)
        expected = of_rank_0(rank, functools.partial(loss, weight, bias, label_smoothing=smoothing))
        assert same_bits(found[0], expected[0]) and same_bits(found[2], expected[2][here])
        assert same_bits(found[3], expected[3][here])
        assert_close(found[1], expected[1].double(), head_class(), "gradient")
    wrong: dict[str, dict[str, Any]] = {
        "other z-loss": {"z_loss": 1e-3},
        "other smoothing": {"label_smoothing": 0.1},
        "no reduction": {"reduction": "average"},
    }
    for name, changes in wrong.items():
        given = options | (changes if rank == 1 else {})
        try:
            torch_bridge.linear_cross_entropy(hidden, weight[here], ids, bias[here], **given, **of_rank)
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            raise AssertionError(f"{name} raised nothing")


def divergence(
    here: slice, implementation: str, dtype: torch.dtype, *, listed: bool = False, **options: Any
) -> list[torch.Tensor]:
    """linear_kl and its gradients for these columns of a problem with padding, a masked token and a row of NaN; from
    what a teacher lists, or from its head.
    """
    hidden, weight, _, bias = (x.detach() for x in head((33,), dim=24, vocab=1000, dtype=dtype))
    teacher_weight, teacher_hidden = (
        randn(1000, 16, dtype=dtype, seed=5, scale=0.25),
        randn(33, 16, dtype=dtype, seed=6),
    )
    for x in (weight[990:], teacher_weight[990:], bias[990:], hidden[5], hidden[7]):
        x.fill_(torch.nan)
    mask, upstream = torch.arange(33) != 7, randn(33, seed=3) * (torch.arange(33) != 5)
    teacher: dict[str, Any] = {
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight[here],
        "teacher_temperature": 0.7,
        "teacher_global_vocab_size": 990,
    }
    if listed:
        ids = (torch.arange(33)[:, None] * 31 + torch.arange(8) * 123) % 990
        teacher = {"teacher_ids": ids, "teacher_logps": (randn(33, 8, seed=7) - 2).log_softmax(-1) - 0.5}
    own = [x.clone().requires_grad_() for x in (hidden, weight[here], bias[here])]
    found = torch_bridge.linear_kl(
        *own[:2],
        bias=own[2],
        completion_mask=mask,
        temperature=randn(33, seed=4).abs() + 0.5,
        global_vocab_size=990,
        implementation=implementation,
        **teacher,
        **options,
    )
    return [found.detach(), *torch.autograd.grad(found, own, upstream)]


def diverges_as_one_rank(rank: int, count: int) -> None:
    """linear_kl: its bits on edges of groups, in another order of the ranks; the values of a float64 definition have
    its own tests. For `deterministic`, jsd has the gathers of the other kinds; a list has the same for all kinds.
    """
    place, bounds = count - 1 - rank, [*cut(990, count)[:-1], 1000]
    here = slice(*bounds[place : place + 2])
    of_rank: dict[str, Any] = {"tp_group": dist.group.WORLD, "vocab_start_index": here.start}
    for implementation, dtype in PROMISES[torch.get_default_device().type].items():
        for kind, listed in (("forward", False), ("jsd", False), ("jsd", True))[implementation == "deterministic" :]:
            options = {"implementation": implementation, "dtype": dtype, "kind": kind, "listed": listed}
            found = divergence(here, **options, **of_rank)
            expected = of_rank_0(rank, functools.partial(divergence, slice(0, 1000), **options))
            assert same_bits(found[0], expected[0]) and found[0][7] == 0 and found[0][5].isnan()
            assert all(same_bits(x, y[here]) for x, y in zip(found[2:], expected[2:], strict=True))
            assert_close(found[1], expected[1].double(), head_class("linear_kl"), "gradient")


def diverges_on_any_edges(rank: int, count: int) -> None:
    """linear_kl by xla, whose shards send one softmax each, and one message for what rank 1 alone gets wrong."""
    start, end = UNEVEN[count][rank : rank + 2]
    hidden, weight, *_ = (x.detach().sign() for x in head((6,), dim=8, vocab=16))
    teacher, teacher_weight = randn(6, 4, seed=5).sign(), randn(16, 4, seed=6).sign()
    # Logits far below 0, which are exact here, show a partial softmax that is none of theirs.
    bias = torch.full((16,), -512.0)
    own = [x.clone().requires_grad_() for x in (hidden, weight[start:end], bias[start:end])]
    given: dict[str, Any] = {"teacher_hidden": teacher, "teacher_weight": teacher_weight[start:end]}
    given |= {
        "temperature": torch.ones(6),
        "bias": own[2],
        "teacher_bias": bias[start:end],
        "kind": "reverse",
        "implementation": "xla",
    }
    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "validate": True}
    found = torch_bridge.linear_kl(*own[:2], **given, **of_rank)
    double = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    log_p = (double[0] @ double[1].t() + double[2]).log_softmax(-1)
    expected = (log_p.exp() * (log_p - (teacher.double() @ teacher_weight.double().t()).log_softmax(-1))).sum(-1)
    assert_close(found, expected, "linear_kl", "forward")
    gradients = torch.autograd.grad(found.sum(), own)
    for x, y in zip(
        (gradients[0], *map(gathered, gradients[1:])), torch.autograd.grad(expected.sum(), double), strict=True
    ):
        assert_close(x, y, "linear_kl", "gradient")
    none = torch_bridge.linear_kl(
        own[0][:0], own[1], **given | {"teacher_hidden": teacher[:0], "temperature": 1.0}, **of_rank
    )
    none.sum().backward()
    assert none.shape == (0,) and not own[0].grad.any() and not own[1].grad.any()
    wrong: dict[str, dict[str, Any]] = {
        "other kind": {"kind": "forward"},
        "bad temperature": {"temperature": torch.zeros(6)},
        "other teacher": {"teacher_weight": teacher_weight, "teacher_bias": None},
        "other teacher vocabulary": {"teacher_global_vocab_size": 15},
    }
    for name, changes in wrong.items():
        try:
            torch_bridge.linear_kl(*own[:2], **given | (changes if rank == 1 else {}), **of_rank)
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            raise AssertionError(f"{name} raised nothing")


def diverges_from_a_list(rank: int, count: int) -> None:
    """linear_kl by xla from what a teacher lists, on any edges, and one message for what rank 1 alone gets wrong."""
    start, end = UNEVEN[count][rank : rank + 2]
    hidden, weight, _, bias = (x.detach() for x in head((6,), dim=8, vocab=16))
    ids = torch.tensor([[3, 15, -1], [0, 7, 8]]).repeat(3, 1)
    listed = {"teacher_ids": ids, "teacher_logps": (randn(6, 3, seed=5) - 2).log_softmax(-1) - 0.5}

    def gradients(here: slice, **of_call: Any) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in (hidden, weight[here], bias[here])]
        found = torch_bridge.linear_kl(*own[:2], bias=own[2], implementation="xla", **listed | of_call)
        return [found.detach(), *torch.autograd.grad(found.sum(), own)]

    of_rank = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "validate": True}
    found, expected = gradients(slice(start, end), **of_rank), of_rank_0(rank, lambda: gradients(slice(0, 16)))
    assert_close(found[0], expected[0].double(), head_class("linear_kl"), "forward")
    for x, y in zip(found[1:], (expected[1], *(x[start:end] for x in expected[2:])), strict=True):
        assert_close(x, y.double(), head_class("linear_kl"), "gradient")
    wrong = {"other list": {"teacher_ids": ids[:, :2], "teacher_logps": listed["teacher_logps"][:, :2]}}
    wrong["bad list"] = {"teacher_ids": ids + 1}
    for name, changes in wrong.items():
        try:
            gradients(slice(start, end), **of_rank | (changes if rank == 1 else {}))
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            raise AssertionError(f"{name} raised nothing")


def refuses_second_derivatives(rank: int, count: int) -> None:
    """With the programs of `spread`, which differentiates the same operands and outputs."""
    hidden, weight, ids, bias = head((6,), dim=8, vocab=1000)
    start, end = cut(1000, count)[rank : rank + 2]
    options = {"tp_group": dist.group.WORLD, "vocab_start_index": start}
    found = torch_bridge.linear_logp(hidden, weight[start:end], ids, bias[start:end], **options, **EVERYTHING)
    (gradient,) = torch.autograd.grad(sum(x.sum() for x in found), hidden, create_graph=True)
    try:
        gradient.pow(2).sum().backward()
    except RuntimeError as error:
        print(f"second derivative: {error}", flush=True)
    else:
        raise AssertionError("a second derivative raised nothing")


def mistakes(rank: int, count: int) -> None:
    """Rank 1 alone makes them, and all ranks raise with one message."""
    hidden, weight, ids, bias = (x.detach() for x in head((5,), dim=8, vocab=16))
    start, end = UNEVEN[count][rank : rank + 2]
    good = {"hidden": hidden, "lm_head_weight": weight[start:end], "target_ids": ids, "bias": bias[start:end]}
    good |= {"vocab_start_index": start, "validate": True}
    bad_ids = ids.clone()
    bad_ids[2] = 16
    freed = weight[start:end].clone()
    freed.untyped_storage().resize_(0)
    wrong: dict[str, dict[str, Any]] = {
        "bad target": {"target_ids": bad_ids},
        "wrong bias": {"bias": bias[:2]},
        "empty shard": {"lm_head_weight": weight[:0], "bias": bias[:0]},
        "gap": {"vocab_start_index": start + 1},
        "other vocabulary": {"global_vocab_size": 15},
        "other tokens": {"target_ids": ids[:3], "hidden": hidden[:3]},
        "other options": {"temperature": 2.0},
        "other mask": {"allowed_ids": ids[:, None]},
        "other ranking": {"return_top_k": 2},
        "other validate": {"validate": False},
        "other reduction": {"reduce_hidden_grad": False},
        "no flag": {"reduce_hidden_grad": 1},
        "other dtype": {"lm_head_weight": weight[start:end].bfloat16()},
        "no tensor": {"hidden": hidden.cpu().numpy()},
        "other implementation": {"implementation": "deterministic"},
        "unknown implementation": {"implementation": "fast"},
        "freed weight": {"lm_head_weight": freed},
        "float start": {"vocab_start_index": float(start)},
    }
    if hidden.is_cuda:
        wrong["other device"] = {name: x.cpu() for name, x in good.items() if isinstance(x, torch.Tensor)}
    for name, changes in wrong.items():
        try:
            torch_bridge.linear_logp(**{**good, **(changes if rank == 1 else {})}, tp_group=dist.group.WORLD)
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            raise AssertionError(f"{name} raised nothing")
    good |= {"vocab_start_index": np.int64(start), "global_vocab_size": np.int64(16)}
    assert torch.isfinite(torch_bridge.linear_logp(**good, tp_group=dist.group.WORLD)).all()


def agreed_ports() -> list[Any]:
    """A port for each of the two runs of `checks_itself`.

    A rank that left a group early would find the store of that group, which is about to close, on a port used twice.
    """
    ports: list[Any] = [free_port(), free_port()]
    dist.broadcast_object_list(ports)
    return ports


def checks_itself(rank: int, count: int, ports: list[Any]) -> None:
    """`rlk check-tp --bridge` in processes that have what torchrun would give them."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    command = ["check-tp", "--bridge", "--uneven-shards", "--no-bias"]
    command += ["--tokens", "16", "--hidden-size", "16", "--vocab-size", "100"]
    stress = ["--run-stress", "--stress-tokens", "16", "--stress-hidden-size", "16", "--stress-vocab-size", "100"]
    runs = ((stress, 0, "PASS"), (["--atol", "0", "--rtol", "0"], 1, "FAIL"))
    for port, (options, status, result) in zip(ports, runs, strict=True):
        os.environ |= {name: str(x) for name, x in given.items()} | {"MASTER_PORT": str(port)}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main([*command, *options]) == status
        sections = [line for line in printed.getvalue().splitlines() if line.startswith("[")]
        expected = ["[env]", "[correctness]", *(["[stress]"] if options == stress else []), "[result]"]
        assert [line.split()[0] for line in sections] == (expected if rank == 0 else [])
        assert rank or sections[-1] == f"[result] {result}"


CHECKS = (
    mistakes,
    agrees_with_float64,
    keeps_the_bits_of_one_rank,
    takes_allowed_tokens,
    ranks_what_is_equal,
    ranks_as_one_rank,
    ignores_padding,
    trains_as_one_rank,
    reads_a_transposed_head_in_place,
    sums_what_it_is_asked_to,
    waits_for_collectives,
    gives_the_loss_of_one_rank,
    diverges_as_one_rank,
    diverges_on_any_edges,
    diverges_from_a_list,
    refuses_second_derivatives,
)


def main(port: int, count: int, rank: int, backend: str, device: str) -> None:
    limit = timedelta(seconds=HANG_S / 4)  # A collective that hangs says so before its rank is killed.
    overwriting.LEAST_BYTES = 1  # A rank's backward overwrites whatever it is given here.
    if device == "cuda":  # Each of NCCL's processes has one of its own.
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count, timeout=limit)
    for check in CHECKS:
        print(check.__name__, file=sys.stderr, flush=True)  # a process that is ended shows where it was
        check(rank, count)
    ports = agreed_ports()
    dist.destroy_process_group()
    if device == "cpu" and not torch.cuda.is_available():  # The command would take a GPU.
        checks_itself(rank, count, ports)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
