"""Few programs for a batch that varies, and a cache that says so."""

import dataclasses
import functools
import gc
import importlib
import itertools
import resource
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import torch_bridge
from rlk_jax import grpo
from rlk_jax.core import hopper_plan
from rlk_jax.core.dispatch import TABLE
from tests.support.head_configs import head_config
from tests.torch_bridge.tensors import array, head, policies, randint, randn, same_bits
from torch_bridge import _exchange, _programs

linear_logp_module = importlib.import_module("torch_bridge.linear_logp")
"""The package has a function of this name."""


def test_buckets():
    found = sorted({_programs.bucket(n) for n in range(1, 4097)})
    assert len(found) == 24 and found[:8] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(0 <= _programs.bucket(n) - n <= _programs.bucket(n) / 3 for n in range(1, 4097))


def test_there_are_fewer_buckets_where_padding_is_skipped():
    found = [_programs.bucket(n, skips_padding=True) for n in range(1, 8193)]
    assert sorted(set(found)) == [16, 64, 128, 512, 1024, 2048, 3072, 4096, 6144, 8192]
    assert all(n <= size <= max(16, 4 * n) for n, size in enumerate(found, 1))
    assert found[2048:] == [_programs.bucket(n) for n in range(2049, 8193)]


@pytest.mark.parametrize(
    ("first", "last", "step", "most"),
    [(1, 512, 64, 1.0), (513, 1024, 32, 1.05), (1025, 2048, 64, 1.13), (2049, 16384, 509, 1.071)],
)
def test_padding_costs_no_more_than_the_page_says(first, last, step, most):
    """docs/torch_bridge.md: the products of a forward and a backward, where exponentials are planned for the bucket's
    rows, over those of a program of the call's own size. Four products have all logits once more.
    """
    for dim, vocab in itertools.product(range(896, 4097, 128), (131072, 151936, 200000, 256000)):
        config = head_config(vocab, may_ignore=True, keeps=True)
        chunks = hopper_plan.vocabulary_of(config).chunks
        kept = functools.partial(hopper_plan.kept_chunks, config, dim, dtype=jnp.bfloat16)
        for tokens in range(first, last + 1, step):
            products = [4 * chunks - kept(tokens=n) for n in (_programs.bucket(tokens, skips_padding=True), tokens)]
            assert products[0] <= most * products[1], (dim, vocab, tokens)


def test_an_implementation_that_skips_padding_has_few_programs(fresh, monkeypatch):
    """With the bits of other paddings; `deterministic` stands for those that do, which run on a GPU alone."""
    weight, ids = randn(48, 8), randint(48, 64)
    hidden = randn(64, 8)

    def calls() -> list[torch.Tensor]:
        linear_logp_module._skips_padding.cache_clear()
        sizes = (1, 5, 64)
        return [torch_bridge.linear_logp(hidden[:n], weight, ids[:n], implementation="deterministic") for n in sizes]

    expected = calls()
    assert torch_bridge.cache_info().forward == 3
    rows = [dataclasses.replace(x, skips_padding=True) for x in TABLE["linear_logp"]]
    monkeypatch.setitem(TABLE, "linear_logp", rows)
    found = calls()
    linear_logp_module._skips_padding.cache_clear()
    assert torch_bridge.cache_info().forward == 4  # That of 64 rows was there, and the one of 16 is new.
    assert all(map(same_bits, found, expected))


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(_programs, "_programs", type(_programs._programs)())
    monkeypatch.setattr(_programs, "_count", type(_programs._count)())


@pytest.mark.parametrize(
    # 4096 rows are cut into buckets by the same rule: test_buckets counts them, and 6 catch the rest in `make test`.
    ("largest", "count", "calls"),
    [(6, 5, 600), pytest.param(4096, 24, 2000, marks=pytest.mark.full)],
)
def test_a_varying_batch_compiles_a_handful(fresh, largest, count, calls):
    weight = randn(48, 8).requires_grad_()
    sizes = randint(largest, calls).add(1).tolist()
    sizes[:count] = sorted({_programs.bucket(n) for n in range(1, largest + 1)})

    def call(n: int) -> None:
        hidden = randn(n, 8).requires_grad_()
        torch_bridge.linear_logp(hidden, weight, randint(48, n)).sum().backward()

    for n in sizes[:200]:
        call(n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in sizes[200:]:
        call(n)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 18 * (calls - 200)  # KiB
    info = torch_bridge.cache_info()
    assert info.size == info.misses == info.forward == info.backward == count and info.hits == calls - count


def test_a_temperature_schedule_needs_one_program(fresh):
    hidden, weight, ids, _ = head((4,))
    found = [torch_bridge.linear_logp(hidden, weight, ids, temperature=0.5 + i / 7) for i in range(10)]
    assert torch_bridge.cache_info().forward == 1 and not torch.equal(found[0], found[9])


def test_groups_of_any_sizes_need_few_programs(fresh):
    """With the bits of `rlk_jax.grpo.group_advantages`, in buckets of B, of groups and of the largest."""
    policy, ref, ids, mask, old = policies((24, 3), vocab=8)

    def call(count: int, **groups: Any) -> None:
        given = [x[:count].detach() for x in (policy, ref, ids, old)]
        rewards = randn(count, seed=count)
        found = torch_bridge.grpo_loss(*given, rewards, mask[:count], **groups)
        advantages = grpo.group_advantages(array(rewards), **groups)
        expected = torch_bridge.grpo_loss(*given, None, mask[:count], advantages=_exchange.to_torch(advantages))
        assert same_bits(found.loss, expected.loss)

    for sizes in ([8, 8, 8], [1, 7, 8, 8], [6, 8, 7, 2], [5, 7, 5, 3], [7, 7, 7]):
        call(sum(sizes), group_boundaries=[0, *itertools.accumulate(sizes)])
    for count in (18, 20, 22, 24):
        call(count, samples_per_prompt=2)
    # The loss, and groups of up to 3 and 4 of up to 8, of 9 to 12 of 2.
    assert torch_bridge.cache_info().forward == 4


def test_the_least_recently_used_is_dropped(fresh, monkeypatch):
    monkeypatch.setattr(_programs, "_MAX_SIZE", 2)
    _, weight, _, _ = head((1,))
    for n in (1, 2, 1, 3, 1, 2):
        torch_bridge.linear_logp(randn(n, 16), weight.detach(), randint(70, n))
    assert torch_bridge.cache_info() == torch_bridge.CacheInfo(2, 4, 2, 2, 4, 0)


def test_jax_does_not_hold_programs_that_were_dropped(fresh, monkeypatch):
    """Those of calls and of their backwards, and those without gradients, each of which is made anew here."""
    monkeypatch.setattr(_programs, "_MAX_SIZE", 1)

    def held_after_calls() -> int:
        for n in (1, 2):
            hidden = randn(n, 8).requires_grad_()
            torch_bridge.linear_logp(hidden, randn(48, 8), randint(48, n)).sum().backward()
            _programs.run("forward", jnp.cos, (jnp.zeros(n),))
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    assert held_after_calls() == held_after_calls() == held_after_calls()
    assert torch_bridge.cache_info() == torch_bridge.CacheInfo(0, 12, 1, 1, 12, 6)


def test_a_dropped_program_still_has_its_backward(fresh, monkeypatch):
    monkeypatch.setattr(_programs, "_MAX_SIZE", 1)
    hidden, weight, ids, _ = head((4,))
    found = torch_bridge.linear_logp(hidden, weight, ids)
    torch_bridge.linear_logp(hidden[:1], weight, ids[:1])
    found.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_a_backward_is_found_by_all_that_its_forward_was_made_for(fresh, monkeypatch, tmp_path):
    """What a backward is called with need not tell the dtype of its gradients."""
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    op = _programs.Op("a sum", lambda x: (x.astype(jnp.float32).sum(),), differentiable=1)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.ones(3, dtype)
        program = _programs.Program(op, (x,), (), (0,))
        _, residuals = program.forward((x,))
        (gradient,) = program.backward(residuals, (x,), (jnp.float32(1),))
        assert gradient.dtype == dtype


def test_another_process_traces_nothing(fresh, monkeypatch, tmp_path):
    """The disk has the programs, and what a caller must know of them. A backward that it lacks is traced."""
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    hidden, weight, ids, _ = head((4,))

    def call(*outputs: str) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        found = torch_bridge.linear_logp(*leaves, ids, return_lse=True)
        sum(getattr(found, name).sum() for name in outputs).backward()
        return [found.logp, found.lse, *(x.grad for x in leaves)]

    expected = call("logp"), call("logp", "lse")
    _programs._programs.clear()
    with monkeypatch.context() as patch:
        patch.setattr(_programs, "_trace", lambda *call: pytest.fail("it was traced again"))
        for found, before in zip((call("logp"), call("logp", "lse")), expected, strict=True):
            assert all(map(same_bits, found, before))
    traced = call("lse")
    assert same_bits(traced[1], expected[0][1]) and not same_bits(traced[2], expected[0][2])


def test_lists_of_allowed_ids_of_any_length_need_few_programs(fresh):
    """Nor do words of another dtype need one."""
    hidden, weight, ids, _ = head((8,))
    options = {"validate": False, "implementation": "xla"}
    for length in (5, 6, 7, 8):
        allowed = ids[:, None].repeat(1, length)
        assert not torch_bridge.linear_logp(hidden, weight, ids, allowed_ids=allowed, **options).any()
    words = torch.full((8, 3), -1, dtype=torch.int32)
    found = [
        torch_bridge.linear_logp(hidden, weight, ids, allowed_mask=x, **options)
        for x in (words, words.view(torch.uint32))
    ]
    assert same_bits(*found) and torch_bridge.cache_info().forward == 3
