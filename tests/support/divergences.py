"""What the tests of linear_kl share: random problems and their independent float64 gold."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import linear_kl
from rlk_jax.checker.gold import divergence_gold
from tests.support.helpers import assert_within_contract

KINDS = ("forward", "reverse", "jsd")
STUDENT = ("hidden", "weight", "bias")
"""The operands that have gradients."""


@dataclass(frozen=True)
class Case:
    """A problem of linear_kl by its sizes and options."""

    name: str
    lead: tuple[int, ...] = (40,)
    dim: int = 80
    teacher_dim: int = 48
    vocab: int = 300
    teacher_vocab: int = 300
    bias: bool = False
    mask: bool = False
    temperature: float | str = 1.0
    """A number, or "per token"."""
    teacher_temperature: float | None = None
    scale: float = 1.0
    noise: float | None = None
    """How far the teacher is from the student, of which it is a copy; None for a teacher of its own. It is float32
    beside any student: a 16-bit copy would round the noise away, or raise it.
    """
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    @property
    def real(self) -> int:
        """The true vocabulary."""
        return self.options.get("global_vocab_size", self.vocab)


class Problem(NamedTuple):
    """Arrays of one case. Heads are `[V, D]`, and stored the other way where the options say so."""

    hidden: jax.Array
    weight: jax.Array
    teacher_hidden: jax.Array
    teacher_weight: jax.Array
    bias: jax.Array | None
    teacher_bias: jax.Array | None
    completion_mask: jax.Array | None
    temperature: Any
    upstream: jax.Array

    def call(self, case: Case, implementation: str | None, **changes: Any) -> jax.Array:
        options = {"teacher_temperature": case.teacher_temperature, **case.options, **changes}
        weight, teacher_weight = (
            x.T if options.get(name) == "dv" else x
            for x, name in ((self.weight, "weight_layout"), (self.teacher_weight, "teacher_weight_layout"))
        )
        return linear_kl(
            self.hidden,
            weight,
            self.teacher_hidden,
            teacher_weight,
            self.bias,
            self.teacher_bias,
            completion_mask=self.completion_mask,
            temperature=self.temperature,
            implementation=implementation,
            **options,
        )


class Found(NamedTuple):
    """The divergence, and the gradients of the student's operands."""

    values: Any
    hidden: Any
    weight: Any
    bias: Any


@functools.cache
def _program(options: tuple[tuple[str, Any], ...], implementation: str | None) -> Any:
    """That of all cases with these options."""
    case = Case("any", options=dict(options))

    @jax.jit
    def program(problem: Problem) -> Found:
        def of_student(*student: Any) -> jax.Array:
            return problem._replace(**dict(zip(STUDENT, student, strict=True))).call(case, implementation)

        values, pull_back = jax.vjp(of_student, *(getattr(problem, name) for name in STUDENT))
        return Found(values, *pull_back(problem.upstream))

    return program


def found(case: Case, problem: Problem, implementation: str | None, **changes: Any) -> Found:
    """What the op gives, by one program for problems of the same options and shapes."""
    options = {"teacher_temperature": case.teacher_temperature, **case.options, **changes}
    return _program(tuple(sorted(options.items())), implementation)(problem)


def make(case: Case, dtype: Any, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(size=shape) * scale

    student = [normal(*case.lead, case.dim), normal(case.vocab, case.dim, scale=case.scale / case.dim**0.5)]
    student.append(normal(case.vocab))
    if case.noise is None:
        teacher = [
            normal(*case.lead, case.teacher_dim),
            normal(case.teacher_vocab, case.teacher_dim, scale=case.scale / case.teacher_dim**0.5),
            normal(case.teacher_vocab),
        ]
    else:
        student = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in student]
        teacher = [x + case.noise * normal(*x.shape) * np.std(x) for x in student]
    teacher_dtype = jnp.float32 if case.noise else dtype
    hidden, weight, bias = (jnp.asarray(x, dtype) for x in student)
    teacher_hidden, teacher_weight, teacher_bias = (jnp.asarray(x, teacher_dtype) for x in teacher)
    mask = jnp.asarray(rng.uniform(size=case.lead) < 0.7) if case.mask else None
    temperature: Any = case.temperature
    if temperature == "per token":
        temperature = jnp.asarray(rng.uniform(0.5, 2.0, case.lead), jnp.float32)
    biases = (bias, teacher_bias) if case.bias else (None, None)
    upstream = jnp.asarray(rng.normal(size=case.lead), jnp.float32)
    return Problem(hidden, weight, teacher_hidden, teacher_weight, *biases, mask, temperature, upstream)


def gold(case: Case, problem: Problem) -> Found:
    """The definition in float64; tokens that the mask leaves out may hold anything."""
    mask = np.ones(case.lead, bool) if problem.completion_mask is None else np.asarray(problem.completion_mask)
    flat = mask.reshape(-1, 1)

    def raw(hidden: Any, weight: Any, bias: Any) -> tuple[np.ndarray, ...]:
        w = np.nan_to_num(np.asarray(weight, np.float64))
        h = np.where(flat, np.asarray(hidden, np.float64).reshape(-1, w.shape[1]), 0)
        return h, w, h @ w.T + (0 if bias is None else np.asarray(bias, np.float64))

    h, w, student = raw(problem.hidden, problem.weight, problem.bias)
    teacher = raw(problem.teacher_hidden, problem.teacher_weight, problem.teacher_bias)[2]
    options = {name: x for name, x in case.options.items() if not name.endswith(("layout", "budget"))}
    options |= {"temperature": problem.temperature, "teacher_temperature": case.teacher_temperature}
    values, d_raw, _ = divergence_gold(student, teacher, np.asarray(problem.upstream) * mask, **options)
    return Found(
        np.where(mask, values.reshape(case.lead), 0),
        (d_raw @ w).reshape(*case.lead, case.dim),
        d_raw.T @ h,
        None if problem.bias is None else d_raw.sum(axis=0),
    )


def assert_mixtures_of_any_share(share: float, implementation: str, tokens: int, op_class: str) -> None:
    """jsd is finite and right for a mixture that is nearly one of both, with tokens that are impossible for either."""
    case = Case("share", (tokens,), 64, 48, 300, 300, bias=True, scale=2.0, options={"kind": "jsd", "beta": share})
    problem = make(case, jnp.bfloat16)
    bias, teacher_bias = problem.bias.at[:50].set(-jnp.inf), problem.teacher_bias.at[30:90].set(-jnp.inf)
    problem = problem._replace(bias=bias, teacher_bias=teacher_bias)
    assert_found(found(case, problem, implementation), gold(case, problem), jnp.bfloat16, op_class)


def assert_found(actual: Found, expected: Found, dtype: Any, op_class: str = "linear_kl") -> None:
    """Values and gradients keep to the contract, and gradients have the dtype of their operands."""
    assert actual.values.dtype == jnp.float32
    assert_within_contract(actual.values, expected.values, op_class, dtype, "forward")
    for a, e in zip(actual[1:], expected[1:], strict=True):
        if e is not None:
            assert a.dtype == dtype
            assert_within_contract(a, e, op_class, dtype, "gradient")
