"""Which tensors are read where they are, which are copied, and which are refused: ecosystem facts, one by one."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

import torch_bridge
from tests.torch_bridge.tensors import array, head, randn
from torch_bridge import _exchange, _padding


def pointer(x) -> int:
    return x.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_contiguous_tensors_are_read_in_place(dtype):
    tensor = randn(16, 32).to(dtype)
    found = _exchange.to_jax(tensor)
    assert pointer(found) == tensor.data_ptr() and found.shape == (16, 32) and found.dtype == _exchange.DTYPES[dtype]


def test_aligned_row_slices_are_read_in_place():
    tensor = randn(16, 32)[4:]
    assert pointer(_exchange.to_jax(tensor)) == tensor.data_ptr()


def test_parameters_are_read_in_place():
    tensor = torch.nn.Parameter(randn(16, 32))
    assert pointer(_exchange.to_jax(tensor)) == tensor.data_ptr()


def test_results_are_given_in_place():
    found = _exchange.to_jax(randn(16, 32)) + 1
    assert _exchange.to_torch(found).data_ptr() == pointer(found)


@pytest.mark.parametrize(
    "tensor",
    [
        randn(16, 32)[:, ::2],
        randn(1, 32).expand(5, 32),
        randn(16, 32).t(),
        randn(64)[1:33],
        torch._neg_view(randn(16)),
        randn(0, 5),
        torch.tensor(1.0),
    ],
    ids=["strided", "expanded", "transposed", "unaligned", "negated", "empty", "scalar"],
)
def test_others_are_copied(tensor):
    np.testing.assert_array_equal(np.asarray(_exchange.to_jax(tensor)), tensor.resolve_neg().numpy())


@pytest.mark.parametrize("n", [8, 5])
def test_the_result_of_a_collective_is_waited_for(n):
    """Its tensor has no memory of its own until then; RowwiseParallel returns such ones."""
    given = head((n,))
    expected = torch_bridge.linear_logp(*given)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensors = [collectives.all_reduce(x, "sum", dist.group.WORLD) for x in given]
        assert all(isinstance(x, collectives.AsyncCollectiveTensor) for x in tensors)
        found = torch_bridge.linear_logp(*tensors)
        assert torch.equal(found, expected)
        gradients = torch.autograd.grad(found.sum(), [tensors[0], tensors[1], tensors[3]])
    finally:
        dist.destroy_process_group()
    for x, y in zip(gradients, torch.autograd.grad(expected.sum(), [given[0], given[1], given[3]]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16, torch.uint16, torch.uint32])
def test_other_integers_become_int32(dtype):
    found = _exchange.as_int32(torch.tensor([1, 2, 100]).to(dtype))
    assert found.dtype == torch.int32 and found.tolist() == [1, 2, 100]


LARGE = torch.tensor([2**40, -(2**40), 2**31 - 1, 2**32 + 5, -(2**31), -(2**31) - 1, -1, 0, 2**63 - 1, -(2**63)])


def test_large_integers_saturate():
    low, high = -(2**31), 2**31 - 1
    expected = [high, low, high, high, low, low, -1, 0, high, low]
    assert _exchange.as_int32(LARGE).tolist() == expected
    assert _exchange.as_int32(LARGE.to(torch.uint64)).tolist() == [
        x if y >= 0 else high for x, y in zip(expected, LARGE, strict=True)
    ]
    for shape in [(10,), (2, 5)]:
        ids = LARGE.reshape(shape)
        assert _exchange.ids_of(_exchange.lend(ids), shape).reshape(-1).tolist() == expected
        assert _exchange.ids_of(_exchange.lend(ids.int()), shape).shape == shape


def test_int64_ids_are_read_in_place():
    ids = torch.arange(64)
    assert pointer(_padding.flat((64,)).ids(ids)) == ids.data_ptr()
    np.testing.assert_array_equal(_exchange.ids_of(_exchange.lend(ids[1:]), (63,)), ids[1:])


def test_one_id_of_any_stride():
    """torch calls it contiguous, whatever the stride of its one element."""
    prompts = torch.arange(10).reshape(1, 10)
    hidden, weight, *_ = head((1,))
    for column in range(10):
        expected = torch_bridge.linear_logp(hidden, weight, prompts[:, column].clone())
        assert torch.equal(torch_bridge.linear_logp(hidden, weight, prompts[:, column]), expected)


@pytest.mark.parametrize("n", [8, 5])
@pytest.mark.parametrize("bad", [-(2**63), -(2**31), 2**31, 2**32 + 1])
def test_no_id_of_a_user_is_taken_for_padding(n, bad):
    hidden, weight, ids, _ = head((n,))
    ids[1] = bad
    of_hidden = torch_bridge.linear_logp(hidden, weight, ids, validate=False)
    of_logits = torch_bridge.logp(hidden @ weight.T, ids, validate=False)
    assert of_hidden.isnan().tolist() == of_logits.isnan().tolist() == [i == 1 for i in range(n)]


@pytest.mark.parametrize(
    ("ignore_index", "bad"),
    [(-(2**31), torch.tensor(-(2**40))), (2**31 - 1, torch.tensor(2**40)), (-100, torch.tensor(-100).to(torch.uint64))],
)
def test_no_id_beyond_int32_is_taken_for_an_ignored_one(ignore_index, bad):
    hidden, weight, _, _ = head((2,))
    ids = torch.stack([bad, bad.new_ones(())])
    found = torch_bridge.linear_logp(hidden, weight, ids, ignore_index=ignore_index, validate=False)
    assert found.isnan().tolist() == [True, False]
    ids = torch.tensor([ignore_index, 1])
    assert torch_bridge.linear_logp(hidden, weight, ids, ignore_index=ignore_index)[0] == 0


def test_rows_of_a_bucket_are_read_in_place():
    hidden = randn(2, 12, 32)
    assert pointer(_padding.flat((2, 12)).rows(hidden, columns=1)) == hidden.data_ptr()


def test_a_transposed_head_is_read_in_place(monkeypatch):
    """As the other layout: no [V, D] copy."""
    seen = []
    to_jax = _exchange.to_jax
    monkeypatch.setattr(_exchange, "lend", lambda x, *_: seen.append(x.data_ptr()) or to_jax(x))
    hidden, weight, ids, _ = head((4,))
    expected = torch_bridge.linear_logp(hidden, weight, ids)
    found = torch_bridge.linear_logp(hidden, weight.t(), ids, weight_layout="dv")
    assert seen.count(weight.data_ptr()) == 2 and torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert gradient.shape == weight.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_is_imported_once_and_read_where_it_is(dtype):
    weight = torch.nn.Parameter(randn(16, 32, dtype=dtype))
    found = _exchange.lend(weight)
    assert _exchange.lend(weight) is found and pointer(found) == weight.data_ptr()
    hidden, ids = randn(4, 32, dtype=dtype, seed=1), torch.arange(4)
    before = torch_bridge.linear_logp(hidden, weight, ids)
    with torch.no_grad():
        weight.mul_(2)
    after = torch_bridge.linear_logp(hidden, weight, ids)
    assert not torch.equal(before, after) and torch.equal(after, torch_bridge.linear_logp(hidden * 2, weight / 2, ids))


def test_what_was_lent_is_let_go_of_with_the_first_result():
    weight = torch.nn.Parameter(randn(16, 32))
    _exchange.to_torch(_exchange.lend(weight) + 1)
    storage = weakref.ref(weight.untyped_storage())
    weight.data = torch.empty(0)
    gc.collect()
    assert storage() is None


def test_nothing_is_lent_after_a_call_without_results():
    a = randn(16, 32).bfloat16()
    storage = weakref.ref(a.untyped_storage())
    assert torch_bridge.det_gemm(a, a.new_empty(32, 0)).shape == (16, 0)
    del a
    gc.collect()
    assert storage() is None


def test_a_parameter_that_jax_would_copy_is_never_kept():
    base = randn(65)
    weight = base[1:]
    found = _exchange.lend(weight)
    weight.add_(1)
    np.testing.assert_array_equal(np.asarray(_exchange.lend(weight)), np.asarray(found) + 1)


def test_an_input_is_let_go_of():
    hidden, weight, ids, _ = head((4,))
    kept = hidden.detach() + 1
    storage = weakref.ref(kept.untyped_storage())
    torch_bridge.linear_logp(kept, weight, ids).sum().backward()
    del kept
    gc.collect()
    assert storage() is None


def test_outputs_can_be_written_into():
    hidden, weight, ids, _ = head((5,))
    found = torch_bridge.linear_logp(hidden, weight, ids)
    expected = array(found) * 2
    found.mul_(2)
    np.testing.assert_array_equal(array(found), expected)
    found.sum().backward()


def test_nothing_is_lent_after_an_error(monkeypatch):
    hidden, weight, ids, _ = head((4,))
    ids[1] = 99
    with pytest.raises(ValueError, match="target_ids out of range"):
        torch_bridge.linear_logp(hidden, weight, ids, validate=True)
    assert not _exchange._launch.lent
    ids[1] = 0
    found = torch_bridge.linear_logp(hidden, weight, ids)
    monkeypatch.setattr(_exchange, "to_torch", lambda array: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.sum().backward()
    assert not _exchange._launch.lent
