"""What is differentiated now must not depend on what was differentiated before, in the same process."""

import itertools

import jax
import jax.numpy as jnp

from rlk_jax import linear_logp
from tests.support import helpers
from tests.support.helpers import Case, assert_same_bits

CASE = Case("patterns", (8,), 16, 50, bias=True)
PROBLEM = helpers.make(CASE, jnp.float32)
OPERANDS = (PROBLEM.hidden, PROBLEM.weight, PROBLEM.bias)
PATTERNS = [(0, 1, 2), (0,), (1,), (0, 1)]
SOME_PATTERNS = [(0, 1, 2), (0,)]


def loss(hidden, weight, bias, outputs=("logp",), implementation="xla"):
    values = linear_logp(
        hidden, weight, PROBLEM.target_ids, bias, return_entropy=True, return_lse=True, implementation=implementation
    )
    return sum(jnp.vdot(PROBLEM.upstream[0], getattr(values, name)) for name in outputs)


def scanned(*operands, **options):
    return jax.lax.scan(lambda c, _: (c + loss(*operands, **options), None), 0.0, None, length=1)[0]


WRAPS = {"plain": loss, "jit": jax.jit(loss, static_argnums=(3, 4)), "remat": None, "scan": scanned}
WRAPS["remat"] = lambda *a, **k: jax.checkpoint(lambda *x: loss(*x, **k))(*a)


# Each wrapper remembers linearisations by itself. That of jit is the one that all programs use; those of remat and scan
# are compared with a plain gradient in test_transforms.py.
@helpers.cover(
    "wrap, implementation, patterns",
    [("jit", "xla", SOME_PATTERNS), *((x, "xla", PATTERNS) for x in WRAPS), ("plain", "deterministic", PATTERNS)],
    lambda *x: x == ("jit", "xla", SOME_PATTERNS),
)
def test_every_order_of_gradients_gives_the_same_gradients(wrap, implementation, patterns):
    def gradient(argnums, outputs):
        function = WRAPS[wrap]
        return jax.grad(lambda *x: function(*x, outputs=outputs, implementation=implementation), argnums)(*OPERANDS)

    combinations = list(itertools.product(patterns, [("logp",), ("logp", "entropy")]))
    jax.clear_caches()
    first = [gradient(*c) for c in combinations]
    for c, expected in reversed(list(zip(combinations, first, strict=True))):
        assert_same_bits(gradient(*c), expected)
    whole = dict(zip(combinations, first, strict=True))
    for (argnums, outputs), part in whole.items():
        for i, g in zip(argnums, part, strict=True):
            assert jnp.any(g != 0)
            helpers.assert_within_contract(g, whole[(0, 1, 2), outputs][i], "linear_logp", jnp.float32, "gradient")


def test_a_kept_pullback_survives_a_frozen_gradient():
    _, pull_back = jax.vjp(loss, *OPERANDS)
    expected = pull_back(1.0)
    _, kept = jax.vjp(loss, *OPERANDS)
    jax.grad(loss)(*OPERANDS)
    assert_same_bits(kept(1.0), expected)
