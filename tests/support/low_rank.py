"""linear_logp with a low-rank term of the head: a problem, its float64 definition, and one call's outputs."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import LowRank, linear_logp
from tests.support.helpers import assert_within_contract

SCALE = 0.5


@dataclass(frozen=True)
class Case:
    """A problem by its sizes and the options of the call."""

    tokens: int
    dim: int
    vocab: int
    rank: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    own_inputs: bool = False
    """Whether A is applied to rows of their own, as under dropout."""


class Arrays(NamedTuple):
    """The arrays of a case, stored "vd"."""

    hidden: Any
    weight: Any
    a: Any
    b: Any
    bias: Any
    inputs: Any
    target_ids: Any
    upstream: Any
    allowed_ids: Any = None
    allowed_mask: Any = None


DIFFERENTIATED = ("hidden", "weight", "a", "b", "bias", "inputs")


def make(case: Case, dtype: Any, seed: int = 0) -> Arrays:
    """Random arrays; those of hidden·Aᵀ have so few bits that every sum of their products is exact in float32."""
    rng = np.random.default_rng(seed)
    n, dim, vocab, rank = case.tokens, case.dim, case.vocab, case.rank

    def coarse(*shape: int) -> Any:
        return jnp.asarray(np.clip(np.round(4 * rng.normal(size=shape)) / 4, -4, 4), dtype)

    hidden, inputs, a = coarse(n, dim), coarse(n, dim), coarse(rank, dim)
    weight, b = rng.normal(size=(vocab, dim)) / dim**0.5, rng.normal(size=(vocab, rank)) / (dim * rank) ** 0.5
    return Arrays(
        hidden,
        jnp.asarray(weight, dtype),
        a,
        jnp.asarray(b, dtype),
        jnp.asarray(rng.normal(size=vocab), dtype),
        inputs if case.own_inputs else None,
        jnp.asarray(rng.integers(0, case.options.get("global_vocab_size", vocab), n), jnp.int32),
        jnp.asarray(rng.normal(size=n), jnp.float32),
    )


def call(case: Case, x: Arrays, implementation: str, op: Any = linear_logp, **options: Any) -> Any:
    """The log-probs of a case, or what else its options ask for."""
    layout = case.options.get("weight_layout", "vd")
    weight, a, b = (y if layout == "vd" else y.T for y in (x.weight, x.a, x.b))
    given = {**case.options, "implementation": implementation, **options}
    given |= {"allowed_ids": x.allowed_ids, "allowed_mask": x.allowed_mask}
    return op(x.hidden, weight, x.target_ids, x.bias, low_rank=LowRank(a, b, SCALE, x.inputs), **given)


def outputs(case: Case, x: Arrays, implementation: str, op: Any = linear_logp, **options: Any) -> Any:
    """What `call` gives, and the gradients of everything that has one, by name: by one program, which arrays of the
    same shapes share.
    """
    given = {name: getattr(x, name) for name in DIFFERENTIATED if getattr(x, name) is not None}
    (_, values), gradients = _program(case, implementation, op, tuple(options.items()), given, x)
    return values, gradients


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _program(case: Case, implementation: str, op: Any, options: Any, given: dict[str, Any], x: Arrays) -> Any:
    def loss(given: dict[str, Any]) -> Any:
        values = call(case, x._replace(**given), implementation, op, **dict(options))
        logp = values.logp if isinstance(values, tuple) else values
        return (logp * x.upstream).sum(), values

    return jax.value_and_grad(loss, has_aux=True)(given)


class Definition(NamedTuple):
    """Log-probs, gradients by name, and logits of the true vocabulary."""

    logp: np.ndarray
    gradients: dict[str, np.ndarray]
    logits: np.ndarray


def definition(case: Case, x: Arrays, allowed: np.ndarray | None = None) -> Definition:
    """In float64, from scale·x·Aᵀ rounded to the inputs' dtype. `allowed [N, V]` says what each row may take."""
    h, w, a, b, bias = (np.asarray(y, np.float64) for y in x[:5])
    own = h if x.inputs is None else np.asarray(x.inputs, np.float64)
    u = np.asarray(jnp.asarray(SCALE * own @ a.T, x.hidden.dtype), np.float64)
    real = case.options.get("global_vocab_size", case.vocab)
    logits = (h @ w.T + u @ b.T + bias)[:, :real]
    cap = case.options.get("logit_softcap")
    z = logits if cap is None else cap * np.tanh(logits / cap)
    slope = 1 if cap is None else 1 - (z / cap) ** 2
    z = z if allowed is None else np.where(allowed[:, :real], z, -np.inf)
    rows, ids = np.arange(len(z)), np.asarray(x.target_ids)
    log_p = z - z.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    g = -np.exp(log_p)
    g[rows, ids] += 1
    g *= np.asarray(x.upstream, np.float64)[:, None]
    g = np.pad(g * slope, ((0, 0), (0, case.vocab - real)))
    d_x = SCALE * (g @ b) @ a
    gradients = {"hidden": g @ w, "weight": g.T @ h, "a": SCALE * (g @ b).T @ own, "b": g.T @ u, "bias": g.sum(0)}
    if x.inputs is None:
        gradients["hidden"] += d_x
    else:
        gradients["inputs"] = d_x
    return Definition(log_p[rows, ids], gradients, z)


def assert_is_definition(case: Case, x: Arrays, found: Any, allowed: np.ndarray | None = None) -> None:
    """Outputs within the contract of their float64 definition."""
    logp, gradients, _ = definition(case, x, allowed)
    dtype = x.hidden.dtype
    assert_within_contract(found[0], logp, "linear_logp", dtype, "forward")
    for name, gradient in found[1].items():
        assert gradient.dtype == dtype, name
        assert_within_contract(gradient, gradients[name], "linear_logp_low_rank", dtype, "gradient")
