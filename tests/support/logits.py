"""What the tests of the ops over logits share: problems by their sizes, calls, and their float64 gold."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import LinearLogp, grpo_loss, logp, ratio_kl
from rlk_jax.checker import gold as definitions
from rlk_jax.checker.gold import RatioKlGold, SoftmaxGold
from tests.support import helpers
from tests.support.allowed import allowed_beside, mask_of

DTYPES = helpers.DTYPES


@dataclass(frozen=True)
class Case:
    """A problem of logp by its sizes and options."""

    name: str
    lead: tuple[int, ...]
    vocab: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    temperature: float | str = 1.0
    """A number, or "per token"."""
    scale: float = 3.0
    impossible: int = 0
    """Leading columns of −inf, as a sampler's top-k leaves them."""

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("plain", (40,), 300),
    Case("temperature", (40,), 300, temperature=0.7),
    Case("per-token temperature", (5, 8), 300, temperature="per token"),
    Case("softcap", (40,), 300, {"logit_softcap": 2.0}),
    Case("padded vocabulary", (40,), 300, {"global_vocab_size": 257}),
    Case("everything", (4, 10), 2300, {"logit_softcap": 3.0, "global_vocab_size": 2290}, "per token", 4.0),
    Case("impossible tokens", (9,), 5000, temperature="per token", impossible=4500),
    Case("no lead", (), 70),
    Case("one token of two", (1,), 2),
    Case("odd", (7,), 5),
    Case("unaligned rows", (16,), 2057),
    Case("three leads", (2, 3, 4), 1025),
)
LARGE = (Case("logits of 100", (20,), 1000, scale=35.0), Case("p = 0.999", (20,), 1000, scale=0.01))
"""The second has one logit far above the others."""


class Problem(NamedTuple):
    """`logits [*lead, V]`; upstream gradients of (logp, lse, entropy) are float32 `[*lead]`."""

    logits: jax.Array
    token_ids: jax.Array
    temperature: Any
    upstream: tuple[jax.Array, ...]

    def call(self, case: Case, implementation: str | None, **changes: Any) -> LinearLogp:
        """logp with all outputs."""
        outputs = {"return_lse": True, "return_entropy": True}
        options = {"temperature": self.temperature, **outputs, **case.options, **changes}
        return logp(self.logits, self.token_ids, implementation=implementation, **options)

    def gradient(self, case: Case, implementation: str | None, **changes: Any) -> jax.Array:
        return self.values_and_gradient(case, implementation, **changes)[1]

    def values_and_gradient(
        self, case: Case, implementation: str | None, **changes: Any
    ) -> tuple[LinearLogp, jax.Array]:
        values, (gradient,) = helpers.values_and_gradients(self, ("logits",), case, implementation, changes)
        return values, gradient

    def outputs(self, case: Case, implementation: str | None, **changes: Any) -> tuple[jax.Array, ...]:
        """logp, lse, entropy and the gradient, each a row per token."""
        return (*self.call(case, implementation, **changes), self.gradient(case, implementation, **changes))

    def rows(self, index: Any) -> "Problem":
        """Other tokens, in another order."""
        return jax.tree.map(lambda x: x[index] if jnp.ndim(x) else x, self)


def make(case: Case, dtype: Any, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    real = case.options.get("global_vocab_size", case.vocab)
    logits = rng.normal(size=(*case.lead, case.vocab)) * case.scale
    if case.name == "p = 0.999":
        logits[..., 17] += np.log(999 * case.vocab)
    logits[..., : case.impossible] = -np.inf
    temperature: Any = case.temperature
    if temperature == "per token":
        temperature = jnp.asarray(rng.uniform(0.5, 2.0, case.lead), jnp.float32)
    return Problem(
        jnp.asarray(logits, dtype),
        jnp.asarray(rng.integers(case.impossible, real, case.lead), jnp.int32),
        temperature,
        tuple(jnp.asarray(rng.normal(size=case.lead), jnp.float32) for _ in range(3)),
    )


def gold(case: Case, problem: Problem) -> SoftmaxGold:
    """With values `[*lead]` and the gradient `[*lead, V]`."""
    flat = problem.logits.reshape(-1, case.vocab)
    found = definitions.softmax_gold(flat, problem.token_ids, problem.temperature, problem.upstream, case.options)
    shape = problem.logits.shape
    return SoftmaxGold(
        tuple(x.reshape(case.lead) for x in found.values), found.d_raw.reshape(shape), found.logits.reshape(shape)
    )


def check_against_gold(case: Case, dtype: Any, implementation: str) -> None:
    problem = make(case, dtype)
    expected = gold(case, problem)
    values, gradient = problem.values_and_gradient(case, implementation)
    for value, x in zip(values, expected.values, strict=True):
        assert value.dtype == jnp.float32 and value.shape == case.lead
        helpers.assert_within_contract(value, x, "logp", dtype, "forward")
    assert gradient.dtype == dtype
    helpers.assert_within_contract(gradient, expected.d_raw, "logp", dtype, "gradient")


def allowed_of(case: Case, problem: Problem) -> np.ndarray:
    """`allowed_beside` of a problem's tokens, in the true vocabulary."""
    real = case.options.get("global_vocab_size", case.vocab)
    allowed = allowed_beside(problem.token_ids, real)
    return np.pad(allowed, (*((0, 0),) * len(case.lead), (0, case.vocab - real)))


def check_allowed(case: Case, dtype: Any, implementation: str) -> None:
    """Over allowed tokens, beside logits of other tokens that are NaN and infinite."""
    problem = make(case, dtype)
    allowed = allowed_of(case, problem)
    expected = gold(helpers.with_options(case, allowed=allowed.reshape(-1, case.vocab)), problem)
    garbage = jnp.asarray(np.resize([np.nan, np.inf, -np.inf], allowed.shape), dtype)
    broken = problem._replace(logits=jnp.where(allowed, problem.logits, garbage))
    values, gradient = broken.values_and_gradient(case, implementation, allowed_mask=mask_of(allowed))
    for value, x in zip(values, expected.values, strict=True):
        helpers.assert_within_contract(value, x, "logp", dtype, "forward")
    helpers.assert_within_contract(gradient, expected.d_raw, "logp", dtype, "gradient")
    assert not np.asarray(gradient)[~allowed].any()


def check_everything_allowed(case: Case, dtype: Any, implementation: str) -> None:
    """A mask that allows everything gives the bits of no mask."""
    problem = make(case, dtype)
    every = jnp.full((*case.lead, -(-case.vocab // 32)), -1, jnp.int32)
    found = problem.values_and_gradient(case, implementation, allowed_mask=every)
    helpers.assert_same_bits(found, problem.values_and_gradient(case, implementation))


def check_large(case: Case, dtype: Any, implementation: str) -> None:
    """Errors of the values over the largest |logit|."""
    problem = make(case, dtype)
    expected = gold(case, problem)
    size = np.abs(expected.logits).max()
    values, gradient = problem.values_and_gradient(case, implementation)
    for value, x in zip(values, expected.values, strict=True):
        helpers.assert_error(np.abs(np.asarray(value, np.float64) - x).max() / size, "logp_large", dtype, "forward")
    helpers.assert_within_contract(gradient, expected.d_raw, "logp_large", dtype, "gradient")


def check_lowest(dtype: Any, implementation: str) -> None:
    lowest = float(jnp.finfo(dtype).min)
    logits = jnp.full((2, 300), lowest, dtype).at[1, 7].set(1.0)
    found = logp(logits, jnp.array([3, 7]), return_entropy=True, implementation=implementation)
    helpers.assert_within_contract(found.logp[0], -np.log(300), "logp", dtype, "forward")
    helpers.assert_within_contract(found.entropy[0], np.log(300), "logp", dtype, "forward")
    assert found.logp[1] == 0 and found.entropy[1] == 0
    gradient = jax.grad(lambda x: logp(x, jnp.array([3, 7]), implementation=implementation).sum())(logits)
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[1])


class Policies(NamedTuple):
    """What ratio_kl takes, of some active and some masked tokens."""

    policy_logits: Any
    ref_logits: Any
    action_ids: Any
    completion_mask: Any
    old_logps: Any

    def ratio_kl(self, implementation: str | None = None, **options: Any) -> Any:
        return ratio_kl(*self, implementation=implementation, **options)

    def grpo_loss(self, rewards: Any, implementation: str | None = None, **options: Any) -> Any:
        policy, ref, ids, mask, old = self
        return grpo_loss(policy, ref, ids, old, rewards, mask, implementation=implementation, **options)


def make_policies(dtype: Any, lead: tuple[int, ...] = (4, 6), vocab: int = 300, seed: int = 0) -> Policies:
    rng = np.random.default_rng(seed)
    policy = rng.normal(size=(*lead, vocab)) * 2
    ref = policy + 0.3 * rng.normal(size=policy.shape)
    policy, ref = jnp.asarray(policy, dtype), jnp.asarray(ref, dtype)
    ids = jnp.asarray(rng.integers(0, vocab, lead), jnp.int32)
    mask = jnp.asarray(rng.random(lead) < 0.7)
    old = definitions.logps(policy, ids) + 0.2 * rng.normal(size=lead)
    return Policies(policy, ref, ids, mask, jnp.asarray(old, jnp.float32))


def ratio_kl_gold(p: Policies, upstream: tuple[Any, Any], temperature: float = 1.0) -> RatioKlGold:
    return definitions.ratio_kl_gold(*p, upstream, temperature)
