"""The most probable tokens through the bridge: those of rlk_jax, as ids that torch's own functions take."""

import numpy as np
import pytest
import torch

import rlk_jax
import torch_bridge
from tests.support import helpers
from tests.torch_bridge.tensors import array, assert_close, head, same_bits
from torch_bridge import _process_groups

EVERYTHING = {"return_top_k": 7, "return_target_rank": True, "return_entropy": True}


def ranked(options, lead=(2, 7)):
    """What the bridge and rlk_jax return for one problem, of which one row is ignored."""
    hidden, weight, ids, bias = head(lead)
    ids[0, 1] = -100
    options = {**options, "ignore_index": -100, "implementation": "deterministic"}
    ours = torch_bridge.linear_logp(hidden, weight, ids, bias, **options)
    return ours, rlk_jax.linear_logp(*map(array, (hidden, weight, ids, bias)), **options)


@pytest.mark.parametrize("options", [{"return_top_k": 7}, {"return_target_rank": True}, EVERYTHING], ids=len)
def test_what_was_asked_for_has_the_bits_of_rlk_jax(options):
    ours, theirs = ranked(options)
    assert isinstance(ours, torch_bridge.RankedLogp) and ours._fields == theirs._fields
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            # JAX has ids in int32.
            found = found.int() if found.dtype == torch.int64 else found
            np.testing.assert_array_equal(helpers.bits(array(found)), helpers.bits(expected))


def test_ids_are_those_that_torch_gathers_by():
    """Log-probs at these ids are those that came with them, and no gradient flows through any of them."""
    hidden, weight, ids, bias = head((2, 7))
    found = torch_bridge.linear_logp(hidden, weight, ids, bias, return_top_k=5, return_target_rank=True)
    logps = torch.log_softmax(hidden.double() @ weight.double().t() + bias.double(), dim=-1)
    assert_close(found.top_logps, logps.gather(-1, found.top_ids), "linear_logp", "forward")
    rank = (logps > logps.gather(-1, ids[..., None])).sum(-1)
    assert torch.equal(found.target_rank, rank)
    assert not (found.top_logps.requires_grad or found.top_ids.requires_grad or found.target_rank.requires_grad)
    gradients = torch.autograd.grad(found.logp.sum(), (hidden, weight))
    alone = torch.autograd.grad(torch_bridge.linear_logp(hidden, weight, ids, bias).sum(), (hidden, weight))
    assert all(map(same_bits, gradients, alone))


def test_a_graph_of_torch_compile_and_no_rows():
    hidden, weight, ids, bias = head((2, 7))

    def call(hidden, ids):
        return torch_bridge.linear_logp(hidden, weight, ids, bias, return_top_k=3, return_target_rank=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(hidden, ids), call(hidden, ids), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
    none = call(hidden[:0], ids[:0])
    assert none.top_ids.shape == none.top_logps.shape == (0, 7, 3) and none.target_rank.shape == (0, 7)
    assert none.top_ids.dtype == none.target_rank.dtype == torch.int64


def test_a_shard_of_a_head_takes_no_adapter(monkeypatch):
    monkeypatch.setattr(_process_groups, "has_other_ranks", lambda *_: True)
    hidden, weight, ids, _ = head((5,))
    with pytest.raises(ValueError, match="low_rank cannot be given beside other ranks"):
        torch_bridge.linear_logp(
            hidden, weight, ids, low_rank=(torch.ones(3, 16), torch.ones(70, 3), 1.0), tp_group=object()
        )


def test_more_tokens_than_there_are():
    hidden, weight, ids, _ = head((5,))
    with pytest.raises(ValueError, match="return_top_k must be"):
        torch_bridge.linear_logp(hidden, weight, ids, return_top_k=71)
