"""What the tests share: raw bits, checks against the contract, random problems and their independent float64 gold."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import LinearLogp
from rlk_jax.checker import relative_norm, tolerance
from rlk_jax.checker.gold import softmax_gold
from rlk_jax.ops.linear_logp.api import smoothed_linear_logp

HANG_S = 1200
"""A process that a test started hangs if it has not ended after so many seconds. A slow machine took 347."""

measured_errors: dict[str, tuple[float, float]] = {}
"""Per contract entry, the worst error that this process met, and what is allowed."""

IMPLEMENTATIONS = ("xla", "deterministic", "reference")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


IN_FEW_DTYPES = [*((x, jnp.float32) for x in IMPLEMENTATIONS), ("xla", jnp.bfloat16), ("deterministic", jnp.float16)]
"""(implementation, dtype) where an op does the same with a dtype in every implementation."""


def in_dtypes(cases: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(case, dtype): all cases in float32, and those of no option and of all together in every dtype."""
    every = ("plain", "everything")
    return [(case, dtype) for case in cases for dtype in DTYPES if dtype == jnp.float32 or case.name in every]


def cover(argnames: str, values: Iterable[tuple[Any, ...]], in_make_test: Callable[..., bool]) -> pytest.MarkDecorator:
    """Parametrizes by all values; those that `in_make_test` does not take run in make test-full only."""
    params = [
        pytest.param(*x, id="-".join(map(_id_of, x)), marks=() if in_make_test(*x) else pytest.mark.full)
        for x in values
    ]
    return pytest.mark.parametrize(argnames, params)


def asked_for(request: pytest.FixtureRequest, test: str) -> list[Any]:
    """The cases of a test of the fixture's own file that this run of pytest was asked for."""
    here = [x for x in request.session.items if x.path == request.path]
    return [x for x in here if getattr(x, "originalname", None) == test]


def _id_of(x: Any) -> str:
    return np.dtype(x).name if x in DTYPES else str(x)


def implementations(*in_make_test: str) -> pytest.MarkDecorator:
    """Parametrizes by every implementation; those that are not named here run in make test-full only."""
    return cover("implementation", [(x,) for x in IMPLEMENTATIONS], lambda x: x in in_make_test)


def bad_inputs(bad: dict[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes by the names of bad inputs and by every implementation, None first.

    The checks come before the choice of an implementation: in `make test` every message stands once, each with the next
    implementation.
    """
    asked_for, names = (None, *IMPLEMENTATIONS), list(bad)
    return cover(
        "what, implementation",
        [(name, x) for name in names for x in asked_for],
        lambda name, x: asked_for.index(x) == names.index(name) % len(asked_for),
    )


def bits(x: Any) -> np.ndarray:
    """The raw bits of a float array: equality that tells −0 from 0 and one NaN from another."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(actual: Any, expected: Any) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(a), bits(e))


def assert_error(error: float, op_class: str, dtype: Any, kind: Any) -> None:
    # A plain float: pytest's workers cannot send NumPy's.
    error, allowed = float(error), tolerance(op_class, dtype, kind)
    entry = f"{op_class} {np.dtype(dtype).name} {kind}"
    measured_errors[entry] = (max(error, measured_errors.get(entry, (0.0, 0.0))[0]), allowed)
    assert error <= allowed, f"{entry}: error {error:.2e} is above {allowed:.2e}"


def assert_within_contract(actual: Any, gold: Any, op_class: str, dtype: Any, kind: Any) -> None:
    assert_error(relative_norm(actual, gold), op_class, dtype, kind)


@dataclass(frozen=True)
class Case:
    """A problem of linear_logp by its sizes and options."""

    name: str
    lead: tuple[int, ...]
    dim: int
    vocab: int
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    temperature: float | str = 1.0
    """A number, or "per token"."""
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name


class Problem(NamedTuple):
    """Arrays of one case. `weight` is `[V, D]`; upstream gradients of (logp, lse, entropy) are float32 `[*lead]`."""

    hidden: jax.Array
    weight: jax.Array
    target_ids: jax.Array
    bias: jax.Array | None
    temperature: Any
    upstream: tuple[jax.Array, ...]

    def call(self, case: Case, implementation: str, **changes: Any) -> LinearLogp:
        """linear_logp with all outputs, of smoothed targets where the options say so."""
        outputs = {"return_lse": True, "return_entropy": True}
        options = {"temperature": self.temperature, **outputs, **case.options, **changes}
        weight = self.weight.T if options.get("weight_layout") == "dv" else self.weight
        options = {"label_smoothing": 0.0, "implementation": implementation, **options}
        return smoothed_linear_logp(self.hidden, weight, self.target_ids, self.bias, **options)

    def gradients(self, case: Case, implementation: str, **changes: Any) -> tuple[jax.Array, ...]:
        """Gradients of hidden, weight and, where there is one, bias under the problem's upstream gradients."""
        return self.values_and_gradients(case, implementation, **changes)[1]

    def values_and_gradients(
        self, case: Case, implementation: str, **changes: Any
    ) -> tuple[LinearLogp, tuple[jax.Array, ...]]:
        names = ("hidden", "weight") if self.bias is None else ("hidden", "weight", "bias")
        return values_and_gradients(self, names, case, implementation, changes)


def with_padding(case: Case, problem: Problem, value: float = np.nan) -> Problem:
    """The problem with this value in the head's padding, which must not change a result."""
    padding = slice(case.options.get("global_vocab_size", case.vocab), None)
    bias = None if problem.bias is None else problem.bias.at[padding].set(value)
    return problem._replace(weight=problem.weight.at[padding].set(value), bias=bias)


def values_and_gradients(
    problem: Any, names: tuple[str, ...], case: Any, implementation: str | None, changes: dict[str, Any]
) -> Any:
    """What `problem.call` gives, and gradients of the fields `names` under `problem.upstream`: by one program, which
    problems of the same case, options and shapes share.
    """
    arrays = {name: x for name, x in changes.items() if isinstance(x, jax.Array)}
    constants = {name: x for name, x in changes.items() if name not in arrays}
    if not isinstance(problem.temperature, jax.Array):
        constants["temperature"], problem = problem.temperature, problem._replace(temperature=None)
    return _program(names, with_options(case, **constants), implementation, problem, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _program(names: tuple[str, ...], case: Any, implementation: str | None, problem: Any, arrays: Any) -> Any:
    def loss(*operands: jax.Array) -> tuple[jax.Array, LinearLogp]:
        changed = problem._replace(**dict(zip(names, operands, strict=True)))
        values = changed.call(case, implementation, **arrays)
        return weighted(values, problem.upstream), values

    operands = tuple(getattr(problem, name) for name in names)
    gradients, values = jax.grad(loss, tuple(range(len(names))), has_aux=True)(*operands)
    return values, gradients


def weighted(values: LinearLogp, upstream: tuple[jax.Array, ...]) -> jax.Array:
    """A scalar whose upstream gradients of logp, lse and entropy are `upstream`."""
    return sum(jnp.vdot(g, x) for g, x in zip(upstream, values[:3], strict=True) if x is not None)


def make(case: Case, dtype: Any, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    real = case.options.get("global_vocab_size", case.vocab)
    temperature: Any = case.temperature
    if temperature == "per token":
        temperature = jnp.asarray(rng.uniform(0.5, 2.0, case.lead), jnp.float32)
    return Problem(
        hidden=jnp.asarray(rng.normal(size=(*case.lead, case.dim)), dtype),
        weight=jnp.asarray(rng.normal(size=(case.vocab, case.dim)) * case.scale / case.dim**0.5, dtype),
        target_ids=jnp.asarray(rng.integers(0, real, case.lead), jnp.int32),
        bias=jnp.asarray(rng.normal(size=case.vocab), dtype) if case.bias else None,
        temperature=temperature,
        upstream=tuple(jnp.asarray(rng.normal(size=case.lead), jnp.float32) for _ in range(3)),
    )


def assert_largest_logits_between_integers(implementation: str, dtype: Any) -> None:
    """The largest logit of each row is, over ln 2, half-way between two integers, to which it may be rounded either
    way, or next to there. No other logit counts.
    """
    half_way = np.float32((np.arange(-40, 40) + 0.5) * np.log(2))[:, None]
    largest = np.ravel(half_way + np.abs(np.spacing(half_way)) * np.arange(-2, 3, dtype=np.float32))
    case = Case("between integers", (len(largest),), 64, 300, options={"return_entropy": False})
    # Three 16-bit numbers hold a float32 one.
    hidden, rest = np.zeros((len(largest), 64), np.float32), largest
    for column in range(3):
        hidden[:, column] = np.asarray(jnp.asarray(rest, dtype), np.float32)
        rest = rest - hidden[:, column]
    hidden[:, 3] = 1
    weight = np.zeros((300, 64), np.float32)
    weight[0, :3], weight[1:, 3] = 1, -60
    ids, zeros = jnp.zeros(len(largest), jnp.int32), jnp.zeros(len(largest))
    problem = Problem(jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), ids, None, 1.0, (zeros, zeros, zeros))
    found, expected = problem.call(case, implementation), gold(case, problem).values
    for value, right in zip(found[:2], expected[:2], strict=True):
        error = float(np.abs(value - right).max() / 60)
        assert_error(error, "linear_logp_peaked_wgmma", dtype, "forward")


def rows_of(problem: Problem, index: Any) -> Problem:
    """The same problem with other tokens, in another order."""
    per_token = isinstance(problem.temperature, jax.Array)
    return problem._replace(
        hidden=problem.hidden[index],
        target_ids=problem.target_ids[index],
        temperature=problem.temperature[index] if per_token else problem.temperature,
        upstream=tuple(g[index] for g in problem.upstream),
    )


def outputs(case: Case, problem: Problem, implementation: str, **changes: Any) -> tuple[tuple[jax.Array, ...], ...]:
    """(logp, lse, entropy, dH) of every row, and (dW, db)."""
    values = problem.call(case, implementation, **changes)
    d_hidden, *d_head = problem.gradients(case, implementation, **changes)
    return (*(x for x in values if x is not None), d_hidden), tuple(d_head)


class Gold(NamedTuple):
    values: tuple[np.ndarray, ...]
    gradients: tuple[np.ndarray, ...]
    logits: np.ndarray


def gold(case: Case, problem: Problem) -> Gold:
    """The same for linear_logp, with the gradients of its operands."""
    h, w = (np.asarray(x, np.float64) for x in (problem.hidden.reshape(-1, case.dim), problem.weight))
    b = 0.0 if problem.bias is None else np.asarray(problem.bias, np.float64)
    found = softmax_gold(h @ w.T + b, problem.target_ids, problem.temperature, problem.upstream, case.options)
    values, d_raw, z = found
    gradients = ((d_raw @ w).reshape(problem.hidden.shape), d_raw.T @ h)
    if problem.bias is not None:
        gradients += (d_raw.sum(axis=0),)
    return Gold(tuple(x.reshape(case.lead) for x in values), gradients, z.reshape(*case.lead, z.shape[-1]))


MODEL_SHAPES = {
    "gpt2": (768, 50257, None),
    "llama2-7b": (4096, 32000, None),
    "llama3-8b": (4096, 128256, None),
    "qwen3-8b": (4096, 151936, None),
    "qwen3-8b-padded": (4096, 152064, None),
    "gemma2-2b": (2304, 256000, 30.0),
}
"""Hidden size, vocabulary and softcap of heads in use."""


def model_case(name: str, lead: tuple[int, ...], shrink: int) -> Case:
    """A real vocabulary with the hidden size divided by `shrink`, for a 2-core machine."""
    dim, vocab, softcap = MODEL_SHAPES[name]
    options = {} if softcap is None else {"logit_softcap": softcap}
    if name.endswith("padded"):
        options["global_vocab_size"] = 151936
    return Case(name, lead, dim // shrink, vocab, options=options)


_EVERYTHING = {"logit_softcap": 3.0, "global_vocab_size": 290}
OPTION_CASES = (
    Case("plain", (40,), 80, 300),
    Case("bias", (40,), 80, 300, bias=True),
    Case("temperature", (40,), 80, 300, temperature=0.7),
    Case("per-token temperature", (5, 8), 80, 300, temperature="per token"),
    Case("softcap", (40,), 80, 300, options={"logit_softcap": 2.0}, scale=4.0),
    Case("padded vocabulary", (40,), 80, 300, bias=True, options={"global_vocab_size": 257}),
    Case("everything", (4, 10), 80, 300, bias=True, temperature="per token", options=_EVERYTHING),
)
SHAPE_CASES = (
    Case("one of each", (1,), 1, 2),
    Case("no lead", (), 64, 70),
    Case("odd", (7,), 3, 5),
    Case("three leads", (2, 3, 4), 17, 63, bias=True),
    Case("one past a chunk", (33,), 48, 2049),
    Case("several blocks", (130,), 24, 1000, bias=True),
    *(model_case(name, (3,), shrink=64) for name in MODEL_SHAPES),
)


def with_options(case: Any, **options: Any) -> Any:
    return replace(case, options={**case.options, **options})


def without_entropy(case: Case, problem: Problem) -> tuple[Case, Problem]:
    """The same with no upstream gradient of an entropy: a backward may then use what the forward kept."""
    g_logp, g_lse, g_entropy = problem.upstream
    return with_options(case, return_entropy=False), problem._replace(upstream=(g_logp, g_lse, 0 * g_entropy))
