"""linear_logp on a GPU: the same accuracy through XLA, the same promises of `deterministic`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from tests.support import helpers
from tests.support.helpers import Case, assert_same_bits, assert_within_contract


@pytest.mark.parametrize("implementation", helpers.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", [*helpers.OPTION_CASES, helpers.SHAPE_CASES[4]], ids=str)
def test_against_float64(case, dtype, implementation):
    problem = helpers.make(case, dtype)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, implementation), gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp", dtype, "forward")
    for gradient, expected in zip(problem.gradients(case, implementation), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", dtype, "gradient")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_deterministic_do_not_depend_on_the_batch(dtype):
    case = Case("bits", (200,), 40, 2049, bias=True)
    problem = helpers.make(case, dtype)
    values, d_hidden = problem.call(case, "deterministic"), problem.gradients(case, "deterministic")[0]
    for n in (1, 7, 64, 100):
        index = np.random.default_rng(n).permutation(200)[:n]
        part = problem._replace(
            hidden=problem.hidden[index],
            target_ids=problem.target_ids[index],
            upstream=tuple(g[index] for g in problem.upstream),
        )
        assert_same_bits(part.call(case, "deterministic"), [x[index] for x in values])
        assert_same_bits(part.gradients(case, "deterministic")[0], d_hidden[index])


def test_xla_memory_does_not_grow_with_the_tokens():
    def temporary(tokens: int) -> int:
        spec = jax.ShapeDtypeStruct
        shapes = (spec((tokens, 1024), jnp.bfloat16), spec((65536, 1024), jnp.bfloat16), spec((tokens,), jnp.int32))
        loss = jax.value_and_grad(lambda h, w, t: rlk_jax.linear_logp(h, w, t, implementation="xla").sum(), (0, 1))
        return jax.jit(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary(32768) - temporary(8192) <= 3 * 8192 * 64


@pytest.mark.parametrize(
    ("hidden", "weight", "choice"),
    [
        ("bfloat16", "bfloat16", "mosaic"),
        ("float16", "float16", "mosaic"),
        ("float32", "float32", "mosaic"),
        ("bfloat16", "float32", "mosaic"),
        ("bfloat16", "float16", "xla"),
    ],
)
def test_the_choice_here(hidden, weight, choice):
    decision = rlk_jax.explain("linear_logp", jnp.ones((4, 8), hidden), jnp.ones((20, 8), weight), jnp.arange(4))
    assert decision.device.platform == "gpu" and decision.choice == choice
    if choice == "xla":
        assert decision.reasons["mosaic"] == [
            "needs hidden and lm_head_weight both bfloat16 or both float16, not bfloat16 and float16"
        ]
