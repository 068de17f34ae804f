"""What the tests of logp's as_linear_logp share: heads whose logits are sampled from, and what is recorded of them."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import LinearLogp, det_gemm, linear_logp, logp
from tests.support.allowed import allowed_beside, mask_of
from tests.support.helpers import assert_same_bits


@dataclass(frozen=True)
class Case:
    """Tokens `[n]` of a head `[vocab, dim]` with a bias, with options that both ops have, at their own temperatures."""

    name: str
    n: int
    dim: int
    vocab: int
    options: dict[str, Any] = field(default_factory=dict)
    allowed: bool = False
    """Whether each token was drawn from some tokens alone."""

    def __str__(self) -> str:
        return self.name


EVERYTHING = {"return_lse": True, "return_entropy": True}
CASES = (
    Case("groups of several chunks", 9, 64, 17000, EVERYTHING),
    Case("fewer columns than groups", 3, 16, 5, EVERYTHING),
    Case("softcap, two row tiles", 70, 64, 700, {**EVERYTHING, "logit_softcap": 2.0}),
    Case("padding and ignored tokens", 20, 64, 2050, {"global_vocab_size": 1900, "ignore_index": -100}),
    Case("allowed tokens of few rows", 5, 16, 300, EVERYTHING, allowed=True),
    Case("allowed tokens, softcap", 70, 64, 520, {**EVERYTHING, "logit_softcap": 2.0}, allowed=True),
)


def check(case: Case, implementation: str, *, of_integers: bool = False) -> None:
    """The log-probs of det_gemm's logits have the bits of linear_logp.

    of_integers: products are of small integers, so that their sums are exact in whatever order an interpreter has.
    """
    rng, options = np.random.default_rng(0), {**case.options, "implementation": implementation}

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-2, 3, shape) if of_integers else rng.normal(size=shape), jnp.bfloat16)

    hidden, weight, bias = draw(case.n, case.dim), draw(case.vocab, case.dim) / 4, draw(case.vocab)
    target_ids = jnp.asarray(rng.integers(0, case.options.get("global_vocab_size", case.vocab), case.n))
    allowed = mask_of(allowed_beside(target_ids, case.vocab)) if case.allowed else None
    if "ignore_index" in case.options:
        target_ids = target_ids.at[1::3].set(case.options["ignore_index"])
    temperature = jnp.asarray(rng.uniform(0.5, 2, case.n), jnp.float32)

    def recorded(logits: jax.Array, rows: slice = slice(None)) -> Any:
        mask = None if allowed is None else allowed[rows]
        of_rows = {"temperature": temperature[rows], "allowed_mask": mask, **options}
        found = logp(logits[rows], target_ids[rows], as_linear_logp=True, **of_rows)
        return tuple(x for x in found if x is not None) if isinstance(found, LinearLogp) else (found,)

    how = {"temperature": temperature, "allowed_mask": allowed, **options}
    trained = linear_logp(hidden, weight, target_ids, bias, **how)
    trained = tuple(x for x in trained if x is not None) if isinstance(trained, LinearLogp) else (trained,)
    logits = det_gemm(hidden, weight, transpose_b=True, out_dtype=jnp.float32, implementation=implementation)
    logits = logits + bias.astype(jnp.float32)
    assert_same_bits(recorded(logits), trained)
    assert_same_bits(recorded(logits, slice(1, 3)), tuple(x[1:3] for x in trained))
