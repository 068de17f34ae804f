"""attention under JAX's transformations and over meshes, and what frozen operands do not cost."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax import attention
from tests.support import attention as support
from tests.support import helpers
from tests.support.attention import Case, Found, Problem
from tests.support.helpers import assert_same_bits, assert_within_contract

CASE = Case(batch=4, length=5, slots=8, heads=4, groups=2, size=8, value_size=4, start=2, padding=(0, 1, 3, 0))
PADDING = jnp.asarray(CASE.padding)
PROMISING = "deterministic"


def attend(query: Any, key: Any, value: Any, padding: Any, implementation: str = PROMISING, start: Any = 2) -> Any:
    return attention(query, key, value, start=start, padding=padding, implementation=implementation)


def of_one(query: Any, key: Any, value: Any, padding: Any, **options: Any) -> Any:
    """A sequence without the dimension of the batch."""
    return attend(query[None], key[None], value[None], padding[None], **options)[0]


def by_row(query: Any, key: Any, value: Any, padding: Any) -> Any:
    return jax.lax.map(lambda row: of_one(*row), (query, key, value, padding))


def by_halves(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of each half of the batch, one after the other."""

    def halves(*arrays: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), arrays)
        found = jax.lax.scan(lambda carry, half: (carry, function(*half)), None, cut)[1]
        return found.reshape(4, *found.shape[2:])

    return halves


@functools.partial(jax.jit, static_argnums=0)
def found(function: Callable[..., Any], problem: Problem, padding: Any = PADDING) -> Found:
    """The output of a function of query, key, value and padding, and its gradients."""
    output, pull_back = jax.vjp(lambda *arrays: function(*arrays, padding), *problem[:3])
    return Found(output, *pull_back(problem.upstream))


NAMES = Found._fields[1:]
"""The operands that are differentiated."""


def assert_within_its_contract(actual: Found, expected: Found) -> None:
    for kind, a, e in zip(("forward", *("gradient",) * 3), actual, expected, strict=True):
        assert_within_contract(a, e, "attention", jnp.bfloat16, kind)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return support.make(CASE, jnp.bfloat16)


@pytest.fixture(scope="module")
def expected(problem) -> Found:
    return found(attend, problem)


WRAPPED = {
    "remat": jax.checkpoint(attend),
    "scan": by_halves(attend),
    "map": by_row,
    "vmap": jax.vmap(of_one),
    "all": by_halves(jax.checkpoint(jax.vmap(of_one))),
}


# In `make test`, one program has all of them; `jit` is around each.
@helpers.cover("name", [(name,) for name in WRAPPED], lambda name: name == "all")
def test_transformations_keep_the_bits(name, problem, expected):
    assert_same_bits(found(WRAPPED[name], problem), expected)


def test_vmap_over_starts_and_shared_keys(problem, expected):
    """A start of its own for each sequence makes calls that follow one another; shared keys are one call. What belongs
    to the third sequence is that of the batch.
    """
    query, key, value, _ = problem

    @jax.jit
    def mapped(starts):
        with_own_start = jax.vmap(lambda start, *row: of_one(*row, start=start))(starts, *problem[:3], PADDING)
        return with_own_start, jax.vmap(of_one, (0, None, None, None))(query, key[2], value[2], PADDING[2])

    for output in mapped(jnp.array([0, 3, CASE.start, 1])):
        assert_same_bits(output[2], expected.output[2])
        assert not np.array_equal(output[:2], expected.output[:2])


def mesh_of(data: int, heads: int) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: data * heads]).reshape(data, heads), ("data", "heads"))


ROWS_AND_HEADS = PartitionSpec("data", None, "heads")


# Types of varying axes are checked in one program, which is cut over both axes.
@helpers.cover(
    "shape, check_vma",
    [((2, 2), True), ((4, 1), True), ((1, 2), True), ((2, 2), False)],
    lambda *x: x == ((2, 2), True),
)
def test_shard_map_over_batch_and_heads(shape, check_vma, problem, expected):
    sharded = jax.shard_map(
        attend,
        mesh=mesh_of(*shape),
        in_specs=(*(ROWS_AND_HEADS,) * 3, PartitionSpec("data")),
        out_specs=ROWS_AND_HEADS,
        check_vma=check_vma,
    )
    assert_same_bits(found(sharded, problem), expected)


def test_shard_map_over_heads_that_share_a_key(problem):
    """JAX adds up the gradients of a key that every device has."""
    shared = problem._replace(key=problem.key[:, :, :1], value=problem.value[:, :, :1])
    whole = PartitionSpec()
    sharded = jax.shard_map(
        attend, mesh=mesh_of(1, 2), in_specs=(ROWS_AND_HEADS, whole, whole, whole), out_specs=ROWS_AND_HEADS
    )
    assert_within_its_contract(found(sharded, shared), support.gold(replace(CASE, groups=1), shared))


# XLA partitions the operations of `deterministic` and `xla`; the reference's are those of `xla`.
@helpers.cover(
    "implementation, shape",
    [(x, shape) for x in ("deterministic", "xla") for shape in ((2, 2), (4, 1), (1, 2))],
    lambda implementation, shape: shape == (2, 2),
)
def test_bare_calls_over_auto_axes(implementation, shape, problem, expected):
    """Operands lie over the mesh along the batch and the heads, and so does what the call gives."""
    mesh = mesh_of(*shape)
    arrays = jax.device_put(problem, NamedSharding(mesh, ROWS_AND_HEADS))
    padding = jax.device_put(PADDING, NamedSharding(mesh, PartitionSpec("data")))
    actual = found(functools.partial(attend, implementation=implementation), arrays, padding)
    for x in actual:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, ROWS_AND_HEADS), x.ndim)
    if implementation == PROMISING:
        assert_same_bits(actual, expected)
        return
    assert_within_its_contract(actual, support.gold(CASE, problem))


def loss(query: Any, key: Any, value: Any) -> Any:
    return attend(query, key, value, PADDING).astype(jnp.float32).sum()


def loops(jaxpr: Jaxpr) -> int:
    """How many loops a program has, those within others too."""

    def count(x: Any) -> Iterator[int]:
        if isinstance(x, ClosedJaxpr | Jaxpr):
            yield loops(getattr(x, "jaxpr", x))
        elif isinstance(x, tuple | list):
            for part in x:
                yield from count(part)

    inner = sum(n for equation in jaxpr.eqns for x in equation.params.values() for n in count(x))
    return inner + sum(equation.primitive.name in ("while", "scan") for equation in jaxpr.eqns)


def test_frozen_operands_cost_no_work(problem):
    """dQ, dK and dV take a loop each; dQ and dK need one more for the gradients of the weights."""

    def of_gradient(argnums: Any) -> int:
        return loops(jax.make_jaxpr(jax.grad(loss, argnums))(*problem[:3]).jaxpr)

    whole = of_gradient((0, 1, 2))
    saved = {argnums: whole - of_gradient(argnums) for argnums in (0, 1, 2, (0, 1), (0, 2), (1, 2))}
    assert saved == {0: 2, 1: 2, 2: 3, (0, 1): 1, (0, 2): 1, (1, 2): 1}


# An operand that is frozen is left out by the same code, whichever it is.
@helpers.cover(
    "implementation, name",
    [(implementation, name) for implementation in (PROMISING, "xla") for name in NAMES],
    lambda *x: x in ((PROMISING, "key"), ("xla", "value")),
)
def test_the_gradient_of_one_operand_is_that_beside_the_others(implementation, name, problem, expected):
    @jax.jit
    def gradient(problem):
        def of_one_operand(x: Any) -> Any:
            return attend(*problem._replace(**{name: x})[:3], PADDING, implementation)

        return jax.vjp(of_one_operand, getattr(problem, name))[1](problem.upstream)[0]

    actual = gradient(problem)
    if implementation == PROMISING:
        assert_same_bits(actual, getattr(expected, name))
    else:
        gold = getattr(support.gold(CASE, problem), name)
        assert_within_contract(actual, gold, "attention", jnp.bfloat16, "gradient")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_derivatives_that_there_are_not(wrap, problem):
    def gradient(query: Any) -> Any:
        return jax.grad(wrap(loss))(query, *problem[1:3]).astype(jnp.float32).sum()

    with pytest.raises(ValueError, match="attention has no second derivative: its gradient cannot be differentiated"):
        jax.eval_shape(jax.grad(gradient), problem.query)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(lambda x: jax.jvp(wrap(loss), x, x)).lower(tuple(problem[:3]))


def test_calls_outside_jit_compile_once(problem):
    """The start of a cache may be a number, as in a loop that decodes."""

    def call(start: int) -> None:
        attend(*problem[:3], PADDING, "xla", start=start)

    call(1)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled: list[str] = []
        patch.setattr("logging.Logger.handle", lambda self, record: compiled.append(record.getMessage()))
        call(2)
    assert not [m for m in compiled if "Compiling" in m]


def test_x64_and_strict_modes(problem, expected):
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_same_bits(found(attend, problem, np.array(CASE.padding)), expected)


def test_eval_shape():
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6))]
    output = jax.eval_shape(attention, *shapes)
    assert output.shape == (2, 3, 4, 6) and output.dtype == jnp.bfloat16
