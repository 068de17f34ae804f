"""linear_kl from the tokens that a teacher lists: each is a bucket, and all others together are one more."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import linear_kl
from tests.support import helpers
from tests.support.divergences import KINDS
from tests.support.helpers import assert_same_bits, assert_within_contract

BETA = 0.3
DTYPES = (jnp.float32, jnp.bfloat16)


@dataclass(frozen=True)
class Case:
    """A problem by its sizes and options."""

    name: str
    tokens: int = 40
    vocab: int = 300
    real: int = 300
    count: int = 6
    bias: bool = False
    temperature: bool = False
    op_class: str = "linear_kl"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


class Problem(NamedTuple):
    """Arrays of one case; the head is `[V, D]`, and what is listed `[N, k]`."""

    hidden: Any
    weight: Any
    bias: Any
    ids: Any
    logps: Any
    temperature: Any
    mask: Any
    upstream: Any


class Found(NamedTuple):
    """The divergence, and the gradients of the student's operands."""

    values: Any
    hidden: Any
    weight: Any
    bias: Any


def make(case: Case, dtype: Any) -> Problem:
    """A teacher whose rows list fewer and fewer tokens; rows that the mask leaves out hold anything."""
    rng, dim = np.random.default_rng(0), 24
    teacher = rng.normal(size=(case.tokens, case.real)) * 2
    teacher -= np.log(np.exp(teacher).sum(axis=1, keepdims=True))
    ids = np.argsort(-teacher, axis=1)[:, : case.count]
    logps = np.take_along_axis(teacher, ids, axis=1)
    if case.count < case.real:
        is_listed = np.arange(case.count) < 1 + np.arange(case.tokens)[:, None] % case.count
        ids, logps = np.where(is_listed, ids, -1), np.where(is_listed, logps, np.nan)
    mask = rng.uniform(size=case.tokens) < 0.8
    return Problem(
        jnp.asarray(rng.normal(size=(case.tokens, dim)), dtype),
        jnp.asarray(rng.normal(size=(case.vocab, dim)) / 3, dtype),
        jnp.asarray(rng.normal(size=case.vocab), dtype) if case.bias else None,
        jnp.asarray(np.where(mask[:, None], ids, 10**6)),
        jnp.asarray(np.where(mask[:, None], logps, np.nan), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 2, case.tokens), jnp.float32) if case.temperature else 1.0,
        jnp.asarray(mask),
        jnp.asarray(rng.normal(size=case.tokens), jnp.float32),
    )


def values_of(problem: Problem, case: Case, kind: str, implementation: str) -> jax.Array:
    return linear_kl(
        problem.hidden,
        problem.weight.T if case.options.get("weight_layout") == "dv" else problem.weight,
        bias=problem.bias,
        teacher_ids=problem.ids,
        teacher_logps=problem.logps,
        completion_mask=problem.mask,
        temperature=problem.temperature,
        kind=kind,
        beta=BETA,
        implementation=implementation,
        **case.options,
    )


def _scanned(op: Any) -> Any:
    """The op on four parts of the tokens, one after the other."""

    def run(problem: Problem) -> jax.Array:
        rows = problem._replace(weight=None, bias=None)
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), rows)
        head = {"weight": problem.weight, "bias": problem.bias}
        return jax.lax.scan(lambda _, own: (None, op(own._replace(**head))), None, parts)[1].reshape(-1)

    return run


def _over_devices(op: Any) -> Any:
    """The op on tokens that lie over four devices."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], ("data",))
    specs = Problem(*[jax.P("data")] * len(Problem._fields))._replace(weight=jax.P(), bias=jax.P())
    return jax.shard_map(op, mesh=mesh, in_specs=(specs,), out_specs=jax.P("data"))


TRANSFORMS = {"none": lambda op: op, "remat": jax.checkpoint, "scan": _scanned, "shard_map": _over_devices}


@functools.partial(jax.jit, static_argnames=("case", "kind", "implementation", "transform"))
def _call(problem: Problem, *, case: Case, kind: str, implementation: str, transform: str) -> Found:
    op = TRANSFORMS[transform](functools.partial(values_of, case=case, kind=kind, implementation=implementation))
    values, pull_back = jax.vjp(lambda *student: op(Problem(*student, *problem[3:])), *problem[:3])
    return Found(values, *pull_back(problem.upstream))


def found(case: Case, problem: Problem, kind: str, implementation: str, transform: str = "none") -> Found:
    call = {"case": case, "kind": kind, "implementation": implementation, "transform": transform}
    return jax.device_get(_call(problem, **call))


def gold(case: Case, problem: Problem, kind: str) -> Found:
    """The definition in float64: distributions over buckets, and the chain rule through the student's."""
    h, w = np.asarray(problem.hidden, np.float64), np.asarray(problem.weight, np.float64)[: case.real]
    raw = h @ w.T + (0 if problem.bias is None else np.asarray(problem.bias, np.float64)[: case.real])
    cap, temperature = case.options.get("logit_softcap"), np.reshape(problem.temperature, (-1, 1))
    z = (cap * np.tanh(raw / cap) if cap else raw) / temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    values, gradient = np.zeros(len(p)), np.zeros_like(p)
    for row in np.flatnonzero(problem.mask):
        ids = np.asarray(problem.ids[row])
        ids, q = ids[ids >= 0], np.exp(np.asarray(problem.logps[row], np.float64)[ids >= 0])
        is_rest = np.ones(case.real, bool)
        is_rest[ids] = False
        if is_rest.any():
            q, own = np.append(q, 1 - q.sum()), np.append(p[row, ids], p[row, is_rest].sum())
        else:
            own = p[row, ids]
        mixture = BETA * q + (1 - BETA) * own
        divergences = {
            "forward": ((q * np.log(q / own)).sum(), -q / own),
            "reverse": ((own * np.log(own / q)).sum(), np.log(own / q)),
            "jsd": (
                BETA * (q * np.log(q / mixture)).sum() + (1 - BETA) * (own * np.log(own / mixture)).sum(),
                (1 - BETA) * np.log(own / mixture),
            ),
        }
        values[row], slope = divergences[kind]
        by_probability = np.full(case.real, slope[-1])
        by_probability[ids] = slope[: len(ids)]
        gradient[row] = p[row] * (by_probability - (own * slope).sum())
    gradient *= np.reshape(problem.upstream, (-1, 1)) / temperature
    gradient *= 1 - np.square(np.tanh(raw / cap)) if cap else 1
    d_weight = np.zeros((case.vocab, h.shape[1]))
    d_weight[: case.real] = gradient.T @ h
    d_bias = None if problem.bias is None else np.pad(gradient.sum(axis=0), (0, case.vocab - case.real))
    return Found(values, gradient @ w, d_weight, d_bias)


EVERYTHING = Case(
    "everything",
    vocab=320,
    real=290,
    bias=True,
    temperature=True,
    options={"logit_softcap": 3.0, "weight_layout": "dv", "global_vocab_size": 290, "memory_budget": 1},
)
ONE = Case("one token", count=1)
CASES = (
    EVERYTHING,
    ONE,
    Case("all tokens", vocab=37, real=37, count=37),
    Case("all but one", vocab=37, real=37, count=36, bias=True),
    # In some rows the rest has 0.999 of probability.
    Case("chunks", vocab=3000, real=3000, count=20),
)


def each_pair_once() -> Iterator[tuple[Case, str, Any, str]]:
    """(case, kind, dtype, implementation): three of them have every pair of two, where a fourth depends on them."""
    for (i, case), (j, kind), (k, dtype) in itertools.product(*map(enumerate, (CASES, KINDS, DTYPES))):
        yield case, kind, dtype, helpers.IMPLEMENTATIONS[(i + j + k) % 3]


# xla has no chunks of columns, and deterministic, of several chunks, has them in make test.
@helpers.cover(
    "case, kind, dtype, implementation",
    each_pair_once(),
    lambda case, kind, dtype, implementation: (
        (case is EVERYTHING and (dtype == jnp.float32 or implementation == "xla"))
        or (dtype == jnp.float32 and implementation == ("deterministic" if case.name == "chunks" else "xla"))
    ),
)
def test_against_float64(case, kind, dtype, implementation):
    """In make test all options stand together in every implementation, and in both dtypes of xla."""
    problem = make(case, dtype)
    actual, expected = found(case, problem, kind, implementation), gold(case, problem, kind)
    assert_within_contract(actual.values, expected.values, case.op_class, jnp.float32, "forward")
    for name in ("hidden", "weight", "bias"):
        if getattr(expected, name) is not None:
            assert getattr(actual, name).dtype == dtype
            assert_within_contract(getattr(actual, name), getattr(expected, name), case.op_class, dtype, "gradient")
    left_out = ~np.asarray(problem.mask)
    assert not actual.values[left_out].any() and not actual.hidden[left_out].any()


# In make test, test_against_float64 has such a list for xla; the terms of all kinds are formed by the same functions.
@helpers.cover(
    "implementation, kind",
    [("xla", "forward"), ("xla", "reverse"), ("xla", "jsd"), ("deterministic", "jsd")],
    lambda implementation, kind: implementation == "deterministic",
)
def test_all_tokens_are_the_teachers_whole_distribution(kind, implementation):
    """The divergence from a head is that from all of its log-probs; a rest of no tokens gives 0 in both."""
    case = Case("all tokens", vocab=37, real=37, count=37)
    problem = make(case, jnp.float32)._replace(mask=jnp.ones(case.tokens, bool))
    teacher = jax.random.normal(jax.random.key(1), (case.tokens, 16))
    teacher_weight = jax.random.normal(jax.random.key(2), (case.vocab, 16)) / 3
    logps = jax.nn.log_softmax(jnp.matmul(teacher, teacher_weight.T, precision="highest"))
    ids = jax.random.permutation(
        jax.random.key(3), jnp.tile(jnp.arange(37), (case.tokens, 1)), axis=1, independent=True
    )
    listed = {"teacher_ids": ids, "teacher_logps": jnp.take_along_axis(logps, ids, axis=1)}
    options = {"kind": kind, "beta": BETA, "implementation": implementation}
    whole = linear_kl(problem.hidden, problem.weight, teacher, teacher_weight, **options)
    found_of_list = linear_kl(problem.hidden, problem.weight, **listed, **options)
    assert_within_contract(found_of_list, whole, "linear_kl", jnp.float32, "forward")


# In make test, reverse and jsd: forward multiplies the logarithm of the rest by the rest, which is next to 0.
@helpers.cover("kind", [(x,) for x in KINDS], lambda kind: kind != "forward")
def test_a_teacher_that_is_sure_of_what_it_lists(kind):
    """What rounding leaves of 1 − 1 counts as 1e-7: a reverse divergence stays finite, and so do all gradients."""
    problem = make(ONE, jnp.float32)
    problem = problem._replace(ids=problem.ids % ONE.vocab, logps=jnp.zeros((ONE.tokens, 1)))
    for x in jax.tree.leaves(found(ONE, problem, kind, "xla")):
        assert np.isfinite(x).all()


# In make test, reverse, whose divergence is infinite, in every implementation; the terms of all kinds are formed by the
# same functions.
@helpers.cover(
    "kind, implementation",
    itertools.product(KINDS, helpers.IMPLEMENTATIONS),
    lambda kind, implementation: kind == "reverse" or implementation == "xla",
)
def test_a_token_that_the_teacher_calls_impossible(kind, implementation):
    """A listed log-prob of −∞ makes a reverse divergence infinite, and its gradients NaN; others stay finite, and so do
    gradients where the row does not count.
    """
    case = Case("impossible")
    problem, rows = make(case, jnp.float32), np.arange(case.tokens)
    row = np.flatnonzero(problem.mask & (rows % case.count == case.count - 1))[0]  # It lists as many as a row may.
    impossible = problem._replace(logps=problem.logps.at[row, 2].set(-jnp.inf))
    actual = found(case, impossible, kind, implementation)
    if kind != "reverse":
        assert all(np.isfinite(x).all() for x in (actual.values, actual.hidden, actual.weight))
        return
    assert actual.values[row] == np.inf and np.isfinite(actual.values[rows != row]).all()
    assert np.isnan(actual.hidden[row]).all() and np.isfinite(actual.hidden[rows != row]).all()
    assert not np.isfinite(actual.weight).all(axis=1).any()
    for left_out in (
        impossible._replace(mask=problem.mask.at[row].set(False)),
        impossible._replace(upstream=problem.upstream.at[row].set(0)),
        # Among the rest the token has a probability of its own.
        impossible._replace(ids=problem.ids.at[row, 2].set(-1)),
    ):
        without = found(case, left_out, kind, implementation)
        assert all(np.isfinite(x).all() for x in (without.hidden, without.weight))


@pytest.mark.parametrize("kind", ["reverse", pytest.param("forward", marks=pytest.mark.full)])
def test_bits_of_a_row(kind):
    """A row has its bits alone and in another order; dW has them with masked rows anywhere.

    In make test one kind stands for both: their terms are of the same buckets.
    """
    problem = make(EVERYTHING, jnp.float32)
    whole = found(EVERYTHING, problem, kind, "deterministic")

    def rows(index: Any) -> Problem:
        taken = {
            name: np.asarray(getattr(problem, name))[index]
            for name in problem._fields
            if name not in ("weight", "bias")
        }
        return problem._replace(**taken)

    for index in (np.array([3]), np.arange(40)[::-1]):
        own = found(EVERYTHING, rows(index), kind, "deterministic")
        assert_same_bits(own[:2], (whole.values[index], whole.hidden[index]))
    order = np.argsort(np.asarray(problem.mask), kind="stable")
    assert_same_bits(found(EVERYTHING, rows(order), kind, "deterministic")[2:], whole[2:])


def test_padding_and_narrow_dtypes_change_no_bit():
    """More ids of −1 behind a row, ids of 64 bits in NumPy, and log-probs that bfloat16 holds."""
    case = Case("padded list")
    problem = make(case, jnp.float32)
    problem = problem._replace(logps=problem.logps.astype(jnp.bfloat16).astype(jnp.float32))
    options = {"completion_mask": problem.mask, "implementation": "deterministic"}
    plain = linear_kl(*problem[:2], teacher_ids=problem.ids, teacher_logps=problem.logps, **options)
    ids = np.pad(np.asarray(problem.ids, np.int64), ((0, 0), (0, 2)), constant_values=-1)
    logps = jnp.pad(problem.logps, ((0, 0), (0, 2))).astype(jnp.bfloat16)
    assert_same_bits(linear_kl(*problem[:2], teacher_ids=ids, teacher_logps=logps, **options), plain)


def test_vmap_over_tokens():
    case = Case("vmap")
    problem = make(case, jnp.float32)

    def call(hidden: Any, ids: Any, logps: Any, mask: Any) -> Any:
        listed = {"teacher_ids": ids, "teacher_logps": logps, "completion_mask": mask}
        return linear_kl(hidden, problem.weight, **listed, implementation="deterministic")

    rows = problem.hidden, problem.ids, problem.logps, problem.mask
    batches = [x.reshape(4, 10, *x.shape[1:]) for x in rows]
    assert_same_bits(jax.vmap(call)(*batches).reshape(-1), call(*rows))


# In make test, the implementation that promises bits, which a transformation may not change. There tokens over devices
# catch what is wrong with parts of them; test_gradients_through_transformations (test_transforms.py) has a scan.
@helpers.cover(
    "transform, implementation",
    itertools.product(("remat", "scan", "shard_map"), ("deterministic", "xla")),
    lambda transform, implementation: implementation == "deterministic" and transform != "scan",
)
def test_transformations(transform, implementation):
    """Tokens in parts and over devices have the bits of the plain call; sums over them are in another order then."""
    problem = make(EVERYTHING, jnp.float32)
    actual, expected = (found(EVERYTHING, problem, "jsd", implementation, x) for x in (transform, "none"))
    if implementation == "deterministic":
        assert_same_bits(actual[:2], expected[:2])
    else:
        assert_within_contract(actual.values, expected.values, "linear_kl", jnp.float32, "forward")
        assert_within_contract(actual.hidden, expected.hidden, "linear_kl", jnp.float32, "gradient")
    for x, y in zip(actual[2:], expected[2:], strict=True):
        assert_within_contract(x, y, "linear_kl", jnp.float32, "gradient")
    if (transform, implementation) == ("remat", "deterministic"):
        assert_same_bits(actual[2:], expected[2:])
