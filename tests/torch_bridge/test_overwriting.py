"""A backward overwrites what the forward kept, unless somebody may ask for it again."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_bridge
from rlk_jax.core import overwriting
from tests.torch_bridge.tensors import head
from torch_bridge import _calls, _programs


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    """On a CPU no op keeps much: here a backward overwrites all that is kept."""
    monkeypatch.setattr(overwriting, "LEAST_BYTES", 1)
    monkeypatch.setattr(_programs, "_programs", type(_programs._programs)())


def call(*, count: int = 1):
    """hidden, weight, and a sum of log-probabilities by as many equal calls."""
    hidden, weight, ids, _ = head((5,))

    def function(hidden, weight):
        return sum((i + 1) * torch_bridge.linear_logp(hidden, weight, ids).sin().sum() for i in range(count))

    return hidden, weight, function


def kept_arrays() -> list[jax.Array]:
    (pending,) = _calls._kept.values()
    return pending.residuals


def test_the_backward_writes_over_what_was_kept():
    """Its result is right although XLA on a CPU fills the room, too."""

    @jax.custom_vjp
    def squares(x):
        return x**2

    def backward(kept, upstream):
        written = jax.new_ref(kept)
        jax.lax.fori_loop(0, len(kept), lambda i, _: written.__setitem__(i, 2 * written[i] * upstream[i]), None)
        return (written[...] + 1,)

    squares.defvjp(lambda x: (x**2, x + 0.5), backward)
    x = jnp.arange(1000, dtype=jnp.float32)
    program = _programs.Program(_programs.Op("squares", lambda x: (squares(x),), differentiable=1), (x,), (), (0,))
    _, (kept,) = program.forward((x,))
    (gradient,) = program.backward([kept], (x,), (jnp.full(1000, 3.0),))
    assert jnp.array_equal(gradient, 6 * (x + 0.5) + 1) and kept.is_deleted() and not x.is_deleted()
    (compiled,) = program._backwards.values()
    assert compiled.memory_analysis().alias_size_in_bytes == x.nbytes


def test_an_input_that_the_backward_reads_is_not_overwritten():
    """A residual that is an input, but none that the caller gives again, is memory of its own."""
    op = _programs.Op("product", lambda x, y: (x * y, y), differentiable=1)
    x, y = jnp.arange(1.0, 9.0), jnp.arange(2.0, 10.0)
    program = _programs.Program(op, (x, y), (), (0,))
    outputs, residuals = program.forward((x, y))
    (gradient,) = program.backward(residuals, (x, y), (jnp.ones(8), None))
    assert residuals[0].is_deleted() and not any(a.is_deleted() for a in (x, y, *outputs))
    assert jnp.array_equal(gradient, y) and jnp.array_equal(outputs[1], y)


def test_a_retained_graph_is_not_overwritten(recwarn):
    hidden, weight, function = call()
    expected = torch.autograd.grad(function(hidden, weight), (hidden, weight))
    loss = function(hidden, weight)
    for is_retained in (True, True, False):
        arrays = kept_arrays()
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=is_retained)
        assert all(map(torch.equal, found, expected))
        assert [x.is_deleted() for x in arrays] == [not is_retained and x.size > 0 for x in arrays]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert not _calls._kept and not recwarn


def test_a_graph_of_the_backward_retains_what_was_kept():
    hidden, weight, function = call()
    loss = function(hidden, weight)
    first = torch.autograd.grad(loss, hidden, create_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, hidden))


def test_a_backward_that_failed_is_not_repeated(monkeypatch):
    hidden, weight, function = call()
    loss = function(hidden, weight)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(_programs.Program, "backward", lambda *_: exec("raise MemoryError"))
        loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("is_retained", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_keeps_its_own(use_reentrant, is_retained):
    hidden, weight, function = call()
    expected = torch.autograd.grad(function(hidden, weight), (hidden, weight))
    loss = checkpoint(function, hidden, weight, use_reentrant=use_reentrant)
    for i in range(1 + is_retained):
        hidden.grad = weight.grad = None
        loss.backward(retain_graph=is_retained and not i)
        assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_a_compiled_graph_may_use_it_twice():
    """torch makes one forward of two equal calls, whose backwards then share what it kept."""
    hidden, weight, function = call(count=2)
    expected = torch.autograd.grad(function(hidden, weight), (hidden, weight))
    found = torch.autograd.grad(
        torch.compile(function, fullgraph=True, backend="aot_eager_decomp_partition")(hidden, weight), (hidden, weight)
    )
    assert all(map(torch.equal, found, expected))
