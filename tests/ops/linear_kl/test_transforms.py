"""linear_kl under JAX's transformations and over meshes; what the compiled program does not do and does not hold."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax import linear_kl
from tests.support import divergences, helpers
from tests.support.divergences import Case
from tests.support.helpers import assert_same_bits, assert_within_contract

CASE = Case("transforms", (12,), 16, 24, 300, 300, options={"kind": "jsd"})


@pytest.fixture(scope="module")
def problem():
    return divergences.make(CASE, jnp.float32)


def kl(*operands: Any, **options: Any) -> jax.Array:
    return linear_kl(*operands, **{"kind": "jsd", **options})


def assert_equal_up_to_rounding(actual, expected, kind="gradient"):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_within_contract(a, e, "linear_kl", jnp.float32, kind)


# The rules of vmap stand in autodiff for all.
@helpers.implementations("xla")
def test_vmap(problem, implementation):
    op = functools.partial(kl, implementation=implementation)
    h, w, th, tw = problem[:4]
    whole = op(h, w, th, tw)
    h3, th3 = h.reshape(3, 4, -1), th.reshape(3, 4, -1)
    over_rows = jax.vmap(op, (0, None, 0, None))
    assert_same_bits(over_rows(h3, w, th3, tw).reshape(-1), whole)
    heads = jnp.stack([w, 2 * w])
    over_heads = jax.vmap(op, (None, 0, None, None))(h, heads, th, tw)
    assert_equal_up_to_rounding(over_heads[1], op(h, 2 * w, th, tw), "forward")
    expected = jax.grad(lambda h, w: op(h, w, th, tw).sum(), (0, 1))(h, w)
    of_sum = jax.grad(lambda h3, w: over_rows(h3, w, th3, tw).sum(), (0, 1))(h3, w)
    assert_equal_up_to_rounding((of_sum[0].reshape(h.shape), of_sum[1]), expected)
    per_example = jax.vmap(jax.grad(lambda h, w, th: op(h, w, th, tw).sum(), (0, 1)), (0, None, 0))(h3, w, th3)
    assert_equal_up_to_rounding((per_example[0].reshape(h.shape), per_example[1].sum(0)), expected)


# In make test, test_rows_keep_their_bits has rows of other batches, and test_against_float64 several lead dimensions.
@pytest.mark.full
def test_multi_token_prediction_is_a_lead_dimension(problem):
    """Three hidden states of a token through one head: each row has the bits of its own call, and dW is that of all."""
    h, w, th, tw = problem[:4]
    heads = h.reshape(3, 2, 2, -1), th.reshape(3, 2, 2, -1)
    op = jax.jit(functools.partial(kl, implementation="deterministic"))
    whole, pull_back = jax.vjp(lambda h, w: op(h, w, heads[1], tw), heads[0], w)
    dh, dw = pull_back(jnp.ones_like(whole))
    rows = [jax.vjp(lambda h, w, k=k: op(h, w, heads[1][k], tw), heads[0][k], w) for k in range(3)]
    assert_same_bits(whole, jnp.stack([values for values, _ in rows]))
    found = [own(jnp.ones_like(values)) for values, own in rows]
    assert_same_bits(dh, jnp.stack([x for x, _ in found]))
    assert_equal_up_to_rounding(dw, sum(x for _, x in found))


# Each is jitted as well, so that jit alone has no rule of its own; remat is a rule of autodiff for all implementations.
@helpers.cover(
    "implementation, wrap",
    itertools.product(("xla", "deterministic"), ("jit", "remat", "scan")),
    lambda implementation, wrap: implementation == "xla" and wrap != "jit",
)
def test_gradients_through_transformations(problem, implementation, wrap):
    def loss(h, w, th, tw):
        return kl(h, w, th, tw, implementation=implementation).sum()

    def scanned(h, w, th, tw):
        def step(total, rows):
            return total + loss(rows[0], w, rows[1], tw), None

        return jax.lax.scan(step, 0.0, (h.reshape(3, 4, -1), th.reshape(3, 4, -1)))[0]

    wrapped = {"jit": jax.jit(loss), "remat": jax.checkpoint(loss), "scan": scanned}[wrap]
    operands = problem[:4]
    expected = jax.grad(loss, (0, 1))(*operands)
    assert_equal_up_to_rounding(jax.grad(wrapped, (0, 1))(*operands), expected)
    assert_equal_up_to_rounding(jax.jit(jax.grad(wrapped, (0, 1)))(*operands), expected)


# Types of varying axes are checked in one program; without their check the same program runs.
@helpers.cover("check_vma", [(True,), (False,)], lambda check_vma: check_vma)
def test_shard_map_over_tokens(problem, check_vma):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], ("data",))
    rows, whole = jax.P("data"), jax.P()
    sharded = jax.shard_map(kl, mesh=mesh, in_specs=(rows, whole, rows, whole), out_specs=rows, check_vma=check_vma)

    def loss(f, h, w):
        return jnp.vdot(problem.upstream, f(h, w, problem.teacher_hidden, problem.teacher_weight))

    actual = jax.jit(jax.value_and_grad(functools.partial(loss, sharded), (0, 1)))(problem.hidden, problem.weight)
    expected = jax.value_and_grad(functools.partial(loss, kl), (0, 1))(problem.hidden, problem.weight)
    assert_equal_up_to_rounding(actual[1], expected[1])


def test_bare_calls_over_auto_axes(problem):
    """XLA partitions the operations; tokens lie over the mesh, and both heads along the vocabulary."""
    mesh = jax.make_mesh((2, 2), ("data", "vocab"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = [PartitionSpec(x) for x in ("data", "vocab", "data", "vocab")]
    operands = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(problem[:4], specs, strict=True)]
    actual = jax.jit(jax.grad(lambda *x: jnp.vdot(problem.upstream, kl(*x)), (0, 1)))(*operands)
    expected = divergences.gold(CASE, problem)
    assert_equal_up_to_rounding(actual, (expected.hidden, expected.weight))


@helpers.implementations("xla")  # the rule stands in autodiff for all
def test_the_teacher_has_no_gradient(problem, implementation):
    def loss(*teacher):
        return kl(*problem[:2], *teacher[:2], None, teacher[2], implementation=implementation).sum()

    for x in jax.grad(loss, (0, 1, 2))(*problem[2:4], jnp.ones(300)):
        assert not x.any()


def test_temperatures_are_constants(problem):
    def loss(temperature, teacher_temperature):
        return kl(*problem[:4], temperature=temperature, teacher_temperature=teacher_temperature).sum()

    assert jax.grad(loss, (0, 1))(jnp.float32(0.7), jnp.float32(1.3)) == (0, 0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_derivatives_that_there_are_not(wrap, problem):
    def loss(hidden):
        return wrap(kl)(hidden, *problem[1:4]).sum()

    with pytest.raises(ValueError, match="linear_kl has no second derivative: its gradient cannot be differentiated"):
        jax.eval_shape(jax.grad(lambda h: jax.grad(loss)(h).sum()), problem.hidden)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(problem.hidden)


def test_calls_outside_jit_compile_once(problem):
    kl(*problem[:4])
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled: list[str] = []
        patch.setattr("logging.Logger.handle", lambda self, record: compiled.append(record.getMessage()))
        kl(*problem[:4])
    assert not [m for m in compiled if "Compiling" in m]


@helpers.implementations("xla", "deterministic")  # the reference has few operations
def test_x64_and_strict_modes(problem, implementation):
    expected = divergences.gold(CASE, problem)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
    ):
        values, pull_back = jax.vjp(lambda h, w: kl(h, w, *problem[2:4], implementation=implementation), *problem[:2])
        gradients = pull_back(problem.upstream)
    assert values.dtype == gradients[0].dtype == jnp.float32
    assert_equal_up_to_rounding(values, expected.values, "forward")
    assert_equal_up_to_rounding(gradients, (expected.hidden, expected.weight))


def test_eval_shape():
    spec = jax.ShapeDtypeStruct
    shapes = (spec((2, 3, 8), jnp.bfloat16), spec((70, 8), jnp.bfloat16), spec((2, 3, 4), jnp.float32))
    found = jax.eval_shape(linear_kl, *shapes, spec((70, 4), jnp.float32))
    assert found.shape == (2, 3) and found.dtype == jnp.float32


def lowered(tokens: int, vocab: int, dtype: Any, argnums: Any, **options: Any) -> Any:
    """The program of loss and gradients, for a student of 64 columns and a teacher of 128."""
    spec = jax.ShapeDtypeStruct
    shapes = [spec(x, dtype) for x in ((tokens, 64), (vocab, 64), (tokens, 128), (vocab, 128))]
    loss = lambda *x: kl(*x, implementation="xla", **options).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums) if argnums else loss).lower(*shapes)


# A mixture has the most terms.
@helpers.cover("kind", [(x,) for x in divergences.KINDS], lambda kind: kind == "jsd")
def test_memory_is_the_budget_and_not_that_of_the_logits(kind):
    """Beyond the budget and dW's float32 sums, a few numbers per token and copies of hidden states stay."""
    tokens, vocab, budget = 4096, 32768, 32 * 2**20
    program = lowered(tokens, vocab, jnp.bfloat16, (0, 1), kind=kind, memory_budget=budget)
    temporary = program.compile().memory_analysis().temp_size_in_bytes - 4 * vocab * 64
    # XLA's CPU backend multiplies in float32, and keeps upcast copies of both heads.
    copies = 4 * vocab * (64 + 128)
    assert temporary <= budget + copies + 64 * tokens < tokens * vocab * 4 / 4
    assert f"{tokens}x{vocab}x" not in program.as_text()


def count_dots(argnums: Any) -> int:
    """Products in a program of several blocks, whose forward and backward share none."""
    return lowered(256, 4096, jnp.float32, argnums, memory_budget=1).as_text().count("stablehlo.dot_general")


def test_what_is_frozen_costs_no_product():
    """The forward takes one for each head, the backward as many once more and one for each gradient."""
    assert count_dots(None) == 2
    assert count_dots((0, 1)) == 6
    assert count_dots((0,)) == 5
    assert count_dots((1,)) == 5


def test_no_gradient_memory_for_the_teacher():
    """No array of the teacher's head is made in a program of the student's gradients."""
    text = lowered(256, 4096, jnp.float32, (0, 1), memory_budget=1).as_text()
    of_head = [line for line in text.splitlines() if "tensor<4096x128xf32>" in line]
    assert of_head and not [line for line in of_head if "stablehlo.broadcast_in_dim" in line]
