"""Both heads cut along the vocabulary inside shard_map: every rank right, and the same bits at every degree."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlk_jax import explain, linear_kl
from rlk_jax.core.dispatch import log_once
from tests.ops.linear_kl.test_values import SAME, of_kind, with_anything_where_nothing_counts
from tests.support import divergences, helpers
from tests.support.divergences import KINDS, STUDENT, Case, Found, Problem, assert_found
from tests.support.helpers import assert_same_bits

CASE = Case(
    "shards",
    (10,),
    24,
    16,
    1024,
    1024,
    bias=True,
    mask=True,
    temperature="per token",
    teacher_temperature=1.3,
    options={
        "logit_softcap": 3.0,
        "teacher_logit_softcap": 4.0,
        "teacher_weight_layout": "dv",
        "global_vocab_size": 1000,
        "teacher_global_vocab_size": 1000,
    },
)
"""The padding of both heads lies in the last shard."""


def mesh_of(degree: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:degree]), ("tp",))


VOCABULARY = ("weight", "teacher_weight", "bias", "teacher_bias")
SPECS = Problem(*(P("tp") if name in VOCABULARY else P() for name in Problem._fields))
"""How each array of a problem lies. Problems hold heads `[V, D]`, whatever the layout of the call."""


def in_order(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem whose rank r holds shard number order[r]."""

    def shuffled(x: Any) -> Any:
        shards = np.asarray(x).reshape(len(order), -1, *x.shape[1:])
        return shards[list(order)].reshape(x.shape)

    return problem._replace(**{name: shuffled(getattr(problem, name)) for name in VOCABULARY})


@functools.cache
def program(
    options: tuple[tuple[str, Any], ...], implementation: str, degree: int, check_vma: bool, order: Sequence[int] | None
) -> Any:
    """The values and gradients of heads on so many ranks, for all problems with these options."""
    case = Case("any", options=dict(options))

    def on_rank(problem: Problem) -> jax.Array:
        start = None
        if order is not None:
            start = jnp.asarray(order)[jax.lax.axis_index("tp")] * problem.weight.shape[0]
        return problem.call(case, implementation, axis_name="tp", vocab_start_index=start)

    sharded = jax.shard_map(on_rank, mesh=mesh_of(degree), in_specs=(SPECS,), out_specs=P(), check_vma=check_vma)

    @jax.jit
    def values_and_gradients(problem: Problem) -> Found:
        def of_student(*student: Any) -> jax.Array:
            return sharded(problem._replace(**dict(zip(STUDENT, student, strict=True))))

        values, pull_back = jax.vjp(of_student, *(getattr(problem, name) for name in STUDENT))
        return Found(values, *pull_back(problem.upstream))

    return values_and_gradients


def found(
    case: Case,
    problem: Problem,
    implementation: str,
    degree: int,
    *,
    check_vma: bool = True,
    order: Sequence[int] | None = None,
    **changes: Any,
) -> Found:
    options = {"teacher_temperature": case.teacher_temperature, **case.options, **changes}
    problem = problem if order is None else in_order(problem, order)
    result = program(tuple(sorted(options.items())), implementation, degree, check_vma, order)(problem)
    result = jax.device_get(result)
    if order is None:
        return result
    back = np.argsort(order)
    d_weight, d_bias = (x.reshape(degree, -1, *x.shape[1:])[back].reshape(x.shape) for x in result[2:])
    return result._replace(weight=d_weight, bias=d_bias)


VALUES = [(kind, name, degree) for kind in KINDS for name in ("xla", "deterministic") for degree in (2, 4, 8)]
VALUES_IN_MAKE_TEST = (("forward", "xla", 2), ("reverse", "xla", 4), ("jsd", "xla", 8))


# In make test, every kind and every degree occurs once; test_same_bits_at_every_degree has deterministic.
@helpers.cover("kind, implementation, degree", VALUES, lambda *x: x in VALUES_IN_MAKE_TEST)
def test_against_float64(kind, implementation, degree):
    """With NaN in padding and masked rows; ranks of one degree are checked by JAX, those of the next are not."""
    case = of_kind(CASE, kind)
    problem = divergences.make(case, jnp.float32)
    expected = divergences.gold(case, problem)
    problem = with_anything_where_nothing_counts(problem, case)
    actual = found(case, problem, implementation, degree, check_vma=degree != 4)
    assert_found(actual, expected, jnp.float32)
    assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


SHARDS_OF_PADDING = replace(
    CASE,
    name="shards of padding alone",
    vocab=64,
    teacher_vocab=64,
    options={**CASE.options, "global_vocab_size": 10, "teacher_global_vocab_size": 10},
)


# In make test, xla, where padding is masked; deterministic does not read it, on a device or on ranks.
@pytest.mark.parametrize("implementation", ["xla", pytest.param("deterministic", marks=pytest.mark.full)])
def test_shards_of_padding_alone(implementation):
    case = of_kind(SHARDS_OF_PADDING, "reverse")
    problem = divergences.make(case, jnp.float32)
    spoilt = with_anything_where_nothing_counts(problem, case)
    assert_found(found(case, spoilt, implementation, 8), divergences.gold(case, problem), jnp.float32)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_cut_groups(kind):
    """In make test, test_other_edges_are_said_once traces them; linear_logp merges the same groups."""
    case = of_kind(replace(CASE, vocab=1020, teacher_vocab=1020), kind)
    problem = divergences.make(case, jnp.float32)
    assert_found(found(case, problem, "deterministic", 3), divergences.gold(case, problem), jnp.float32)


BITS = [(kind, degree) for kind in KINDS for degree in (1, 2, 4, 8)]
ORDERS = {4: (2, 0, 3, 1)}
"""Degrees at which ranks hold shards in an order of the caller's."""


# In make test, jsd has the gathers of the other kinds, and two degrees stand for all: groups and ranks are those of
# linear_logp's tests.
@helpers.cover("kind, degree", BITS, lambda *x: x in (("jsd", 4), ("jsd", 8)))
def test_same_bits_at_every_degree(kind, degree):
    """Divergence, dW, db, and dH by the canonical reduction: as on one device, with one program for both."""
    case = of_kind(CASE, kind)
    problem = divergences.make(case, jnp.bfloat16)
    expected = divergences.found(case, problem, "deterministic")
    options = {"reduction": "canonical", "check_vma": degree != 8, "order": ORDERS.get(degree)}
    assert_same_bits(found(case, problem, "deterministic", degree, **options), expected)


def test_identical_student_and_teacher():
    """The divergence and every gradient are exactly 0."""
    case = replace(SAME, vocab=304, teacher_vocab=304, options={**SAME.options, "kind": "forward"})
    for x in jax.tree.leaves(found(case, divergences.make(case, jnp.bfloat16), "xla", 4)):
        assert not x.any()


SMALL = Case("small", (2, 6), 8, 8, 64, 64)


def small_call(problem: Problem, degree: int = 4, **options: Any) -> Any:
    """A call of xla on heads without options, for shard_map."""
    options = {"axis_name": "tp", "implementation": "xla", **options}
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    mesh, specs = mesh_of(degree), (P(), P("tp"), P(), P("tp"))
    call = jax.shard_map(functools.partial(linear_kl, **options), mesh=mesh, in_specs=specs, out_specs=P())
    return call(*(getattr(problem, name) for name in names))


@pytest.mark.parametrize("check_vma", [True, False])
def test_sequence_parallel_hidden(check_vma):
    """hidden gathered over the axis: JAX scatters the sum of the ranks' own parts of dH."""
    problem = divergences.make(replace(SMALL, lead=(12,)), jnp.float32)

    def on_rank(hidden, weight, teacher_weight):
        whole = jax.lax.all_gather(hidden, "tp", tiled=True)
        options = {"axis_name": "tp", "reduce_hidden_grad": False, "implementation": "xla"}
        return linear_kl(whole, weight, problem.teacher_hidden, teacher_weight, **options)

    specs = (P("tp"), P("tp"), P("tp"))
    call = jax.shard_map(on_rank, mesh=mesh_of(4), in_specs=specs, out_specs=P(), check_vma=check_vma)

    def loss(hidden):
        return jnp.vdot(problem.upstream, call(hidden, problem.weight, problem.teacher_weight))

    expected = divergences.gold(replace(SMALL, lead=(12,)), problem)
    actual = jax.jit(jax.grad(loss))(problem.hidden)
    helpers.assert_within_contract(actual, expected.hidden, "linear_kl", jnp.float32, "gradient")


def test_vmap_inside_shard_map():
    """Values and all gradients are each example's own."""
    problem = divergences.make(SMALL, jnp.float32)

    def on_rank(hidden, weight, teacher_hidden, teacher_weight):
        def one(h, t):
            return linear_kl(h, weight, t, teacher_weight, axis_name="tp", implementation="xla")

        return jax.vmap(one)(hidden, teacher_hidden)

    call = jax.shard_map(on_rank, mesh=mesh_of(4), in_specs=(P(), P("tp"), P(), P("tp")), out_specs=P())

    @jax.jit
    def values_and_gradients(hidden, weight):
        teacher = problem.teacher_hidden, problem.teacher_weight
        values, pull_back = jax.vjp(lambda h, w: call(h, w, *teacher), hidden, weight)
        return Found(values, *pull_back(problem.upstream), None)

    assert_found(values_and_gradients(problem.hidden, problem.weight), divergences.gold(SMALL, problem), jnp.float32)


def ranks_that_differ(problem: Problem, *, masks: bool = False, starts: bool = False) -> Any:
    """A function whose ranks have masks that differ in token 5, or starts that are no partition."""

    def on_rank(hidden, weight, teacher_hidden, teacher_weight):
        rank = jax.lax.axis_index("tp")
        return linear_kl(
            hidden.reshape(12, -1),
            weight,
            teacher_hidden.reshape(12, -1),
            teacher_weight,
            completion_mask=(jnp.arange(12) != 5) | (rank == 2) if masks else None,
            axis_name="tp",
            vocab_start_index=jnp.minimum(rank, 2) * 16 if starts else None,
            implementation="xla",
        )[None]

    specs = (P(), P("tp"), P(), P("tp"))
    call = jax.shard_map(on_rank, mesh=mesh_of(4), in_specs=specs, out_specs=P("tp"), check_vma=False)
    return jax.jit(lambda: call(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight))


@pytest.mark.parametrize(
    ("what", "bad", "message"),
    [
        ("masks", np.arange(12) == 5, "completion_mask must be the same on every rank of 'tp'."),
        ("starts", np.full(12, True), "TP vocab shards must form a contiguous [0, 64) partition"),
    ],
)
def test_what_differs_between_ranks_is_nan_and_says_so(what, bad, message):
    """Every rank ends, with the same values."""
    call = ranks_that_differ(divergences.make(SMALL, jnp.float32), **{what: True})
    assert (np.isnan(call()) == bad).all()
    error, _ = checkify.checkify(call)()
    assert message in error.get()


WITHOUT_AXIS = {"axis_name": None}
BAD = {
    "no such axis": ({"axis_name": "dp"}, "axis_name 'dp' is no mesh axis of a surrounding jax.shard_map."),
    "axis type": ({"axis_name": 3}, "axis_name must be the name of a mesh axis, or a tuple of different ones, got 3."),
    "start without axis": ({**WITHOUT_AXIS, "vocab_start_index": 0}, "vocab_start_index requires axis_name"),
    "order without axis": ({**WITHOUT_AXIS, "reduction": "canonical"}, "reduction='canonical' requires axis_name"),
    "sum without axis": ({**WITHOUT_AXIS, "reduce_hidden_grad": False}, "reduce_hidden_grad=False requires axis_name"),
    "one start": ({"vocab_start_index": 16}, "vocab_start_index 16 is the same on all 4 ranks of 'tp'"),
    "heads cut otherwise": (
        {"teacher_weight": jnp.ones((18, 8))},
        "student and teacher must be cut alike, got shards of 16 and 18 tokens: rlk_jax.vocab_parallel.pad_lm_head",
    ),
    "vocabulary": ({"global_vocab_size": 65}, "global_vocab_size must be in [1, V=64], got 65."),
    "two vocabularies": (
        {"teacher_global_vocab_size": 60},
        "student and teacher must share one vocabulary, got 64 and 60 tokens",
    ),
    "canonical xla": ({"reduction": "canonical"}, "promises no bits, which reduction='canonical' asks for"),
    "reference": ({"implementation": "reference"}, "needs the whole head, not a shard of its vocabulary"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_raises(name):
    changes, message = BAD[name]
    arguments = {"hidden": jnp.ones((2, 6, 8)), "lm_head_weight": jnp.ones((16, 8))}
    arguments |= {"teacher_hidden": jnp.ones((2, 6, 8)), "teacher_weight": jnp.ones((16, 8))}
    arguments |= {"axis_name": "tp", "implementation": "xla", **changes}
    call = jax.shard_map(lambda: linear_kl(**arguments), mesh=mesh_of(4), in_specs=(), out_specs=P())
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_other_edges_are_said_once(monkeypatch, caplog):
    problem = divergences.make(replace(SMALL, vocab=96, teacher_vocab=96), jnp.float32)
    log_once.cache_clear()
    for kind in KINDS:
        jax.eval_shape(functools.partial(small_call, kind=kind, implementation="deterministic", degree=3), problem)
    assert sum("pad_lm_head makes shards that keep them" in r.message for r in caplog.records) == 1
    monkeypatch.setenv("RLK_STRICT", "1")
    with pytest.raises(ValueError, match="RLK_STRICT=1: 3 shards of 32 columns"):
        jax.eval_shape(functools.partial(small_call, implementation="deterministic", degree=3), problem)
    jax.eval_shape(functools.partial(small_call, degree=3), problem)


def test_explain_says_what_runs_on_a_shard():
    said = []

    def on_rank(hidden, weight, teacher_hidden, teacher_weight, **options):
        said.append(explain("linear_kl", hidden, weight, teacher_hidden, teacher_weight, axis_name="tp", **options))

    arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((2, 8), (64, 8), (2, 4), (64, 4))]
    specs = (P(), P("tp"), P(), P("tp"))
    call = jax.shard_map(on_rank, mesh=mesh_of(4), in_specs=specs, out_specs=None)
    jax.eval_shape(call, *arrays)
    assert said[0].choice == "xla" and said[0].by_name == ("deterministic",)
    assert said[0].reasons["reference"] == ["needs the whole head, not a shard of its vocabulary"]
