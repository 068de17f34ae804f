"""linear_logp's low-rank term in kernels: the definition, and bits that budgets, batches and zeros keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import linear_logp
from tests.gpu.hopper import HEAD_KERNELS
from tests.support import low_rank
from tests.support.helpers import assert_same_bits
from tests.support.low_rank import Case

CASES = (
    Case(700, 192, 5056, 16),
    Case(50, 72, 5000, 5, {"logit_softcap": 2.0}),
    Case(300, 128, 4224, 64, {"weight_layout": "dv"}),
    Case(1500, 256, 151936, 128, {"global_vocab_size": 151643}, own_inputs=True),
    Case(129, 64, 1000, 300, {"weight_layout": "dv", "global_vocab_size": 999}),
)
every_implementation = pytest.mark.parametrize("implementation", HEAD_KERNELS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("case", CASES, ids=str)
@every_implementation
def test_against_float64(case, implementation, dtype):
    x = low_rank.make(case, dtype)
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, x, implementation))


@pytest.mark.parametrize("case", CASES, ids=str)
@every_implementation
def test_bits(case, implementation):
    """Budgets, ignored rows among others, rows alone."""
    x = low_rank.make(case, jnp.bfloat16)
    expected = low_rank.outputs(case, x, implementation)
    for budget in (2**20, 2**24, 4 * 2**30):
        assert_same_bits(low_rank.outputs(case, x, implementation, memory_budget=budget), expected)
    n = 2 * case.tokens
    places = np.sort(np.random.default_rng(1).permutation(n)[: case.tokens])

    def spread(rows, fill):
        return None if rows is None else jnp.full((n, *rows.shape[1:]), fill, rows.dtype).at[places].set(rows)

    wide = x._replace(
        hidden=spread(x.hidden, np.nan),
        inputs=spread(x.inputs, np.nan),
        target_ids=spread(x.target_ids, -1),
        upstream=spread(x.upstream, 1),
    )
    logp, gradients = low_rank.outputs(case, wide, implementation, ignore_index=-1)
    assert_same_bits(logp[places], expected[0])
    of_rows = {name: gradients.pop(name)[places] for name in ("hidden", "inputs") if name in gradients}
    assert_same_bits({**gradients, **of_rows}, expected[1])
    few = x._replace(**{name: None if (y := getattr(x, name)) is None else y[:40] for name in
                        ("hidden", "inputs", "target_ids", "upstream")})  # fmt: skip
    logp, gradients = low_rank.outputs(case, few, implementation)
    assert_same_bits(logp, expected[0][:40])
    assert_same_bits(gradients["hidden"], expected[1]["hidden"][:40])


@pytest.mark.parametrize("case", CASES[:3], ids=str)
@every_implementation
def test_b_of_zeros_gives_the_bits_of_no_term(case, implementation):
    x = low_rank.make(case, jnp.bfloat16)
    logp, gradients = low_rank.outputs(case, x._replace(b=jnp.zeros_like(x.b)), implementation)
    is_vd = case.options.get("weight_layout", "vd") == "vd"

    def loss(hidden, weight, bias):
        weight = weight if is_vd else weight.T
        found = linear_logp(hidden, weight, x.target_ids, bias, implementation=implementation, **case.options)
        return (found * x.upstream).sum(), found

    (_, expected), of_operands = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x.hidden, x.weight, x.bias)
    assert_same_bits(logp, expected)
    assert_same_bits([gradients[name] for name in ("hidden", "weight", "bias")], list(of_operands))
