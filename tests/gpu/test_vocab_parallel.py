"""linear_logp's kernels for Hopper with the head spread over GPUs; degrees beyond this machine's GPUs are skipped."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import vocab_parallel
from tests import helpers
from tests.gpu.hopper import every_implementation
from tests.helpers import Case, assert_same_bits, assert_within_contract, weighted

CASES = (
    Case("131072", (300,), 4096, 131072),
    Case("kept", (300,), 4096, 131072, options={"return_entropy": False}),
    Case("151936", (300,), 4096, 151936, bias=True, options={"logit_softcap": 30.0}),
    Case("gpt2", (130,), 768, 50257, bias=True, temperature="per token"),
    Case("gpt2, kept", (130,), 768, 50257, bias=True, options={"return_entropy": False}),
    Case("dv", (70,), 256, 65536, options={"weight_layout": "dv"}),
)


def mesh_of(degree: int) -> jax.sharding.Mesh:
    if jax.device_count() < degree:
        pytest.skip(f"needs {degree} GPUs; this machine has {jax.device_count()}")
    return jax.sharding.Mesh(jax.devices()[:degree], ("tp",))


def outputs(case: Case, problem: helpers.Problem, mesh: jax.sharding.Mesh, reduction: str, implementation: str):
    """Values, then gradients of hidden, weight and bias, on a padded head."""
    layout, n = case.options.get("weight_layout", "vd"), mesh.size
    pad = functools.partial(vocab_parallel.pad_lm_head, n=n)

    def call(operands):
        hidden, weight, *bias = operands
        weight = pad(weight.T if layout == "dv" else weight, weight_layout=layout)
        spec = P("tp", None) if layout == "vd" else P(None, "tp")
        weight = jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))
        return vocab_parallel.linear_logp(
            hidden,
            weight,
            problem.target_ids,
            pad(bias[0]) if bias else None,
            mesh=mesh,
            vocab_axis="tp",
            temperature=problem.temperature,
            global_vocab_size=case.vocab,
            reduction=reduction,
            implementation=implementation,
            **{"return_lse": True, "return_entropy": True, **case.options},
        )

    operands = tuple(x for x in (problem.hidden, problem.weight, problem.bias) if x is not None)
    gradients = jax.jit(jax.grad(lambda operands: weighted(call(operands), problem.upstream)))(operands)
    return tuple(jax.jit(call)(operands)), gradients


@pytest.fixture(scope="module")
def unsharded():
    """Each case's problem, its values and gradients on one GPU, and dH summed one group at a time."""

    @functools.cache
    def make(name):
        case = next(x for x in CASES if x.name == name)
        return case, helpers.make(case, jnp.bfloat16)

    @functools.cache
    def of(name, implementation):
        case, problem = make(name)
        whole = tuple(problem.call(case, implementation)), problem.gradients(case, implementation)
        return problem, whole, outputs(case, problem, mesh_of(1), "canonical", implementation)

    return of


# With pytest -n 6 --dist loadgroup, one process draws a case's numbers, which takes as long as all else.
@every_implementation
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.xdist_group(x.name), id=x.name) for x in CASES])
def test_same_bits_at_every_degree(case, degree, implementation, unsharded):
    mesh = mesh_of(degree)
    problem, (values, gradients), one_group_at_a_time = unsharded(case.name, implementation)
    own_values, (d_hidden, *d_head) = (
        one_group_at_a_time if degree == 1 else outputs(case, problem, mesh, "canonical", implementation)
    )
    assert_same_bits(own_values, values)
    assert_same_bits(tuple(d_head), gradients[1:])
    assert_same_bits(d_hidden, one_group_at_a_time[1][0])
    # Rounded to bfloat16 from float32 sums in another order.
    assert_within_contract(d_hidden, gradients[0], "linear_logp_wgmma", jnp.bfloat16, "gradient")


@every_implementation
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_against_float64(degree, implementation):
    case = Case("gold", (64,), 256, 50257, bias=True, temperature="per token")
    problem = helpers.make(case, jnp.bfloat16)
    gold = helpers.gold(case, problem)
    for reduction in ("sum", "canonical"):
        values, gradients = outputs(case, problem, mesh_of(degree), reduction, implementation)
        for actual, expected in zip(values, gold.values, strict=True):
            assert_within_contract(actual, expected, "linear_logp_wgmma", jnp.bfloat16, "forward")
        for actual, expected in zip(gradients, gold.gradients, strict=True):
            assert_within_contract(actual, expected, "linear_logp_wgmma", jnp.bfloat16, "gradient")


@every_implementation
@pytest.mark.parametrize("spec", [P("tp", None), P(None, "tp"), P()], ids=str)
def test_bare_calls_under_jit(spec, implementation):
    """On a head spread along V, along D, or whole, over the GPUs there are; tokens over them too where it is whole."""
    case = Case("bare", (256,), 512, 50432, bias=True)
    degree = 4 if jax.device_count() >= 4 else 2
    mesh, problem = mesh_of(degree), helpers.make(case, jnp.bfloat16)
    rows = P() if any(spec) else P("tp")
    hidden, weight = (
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((problem.hidden, rows), (problem.weight, spec))
    )
    target_ids = jax.device_put(problem.target_ids, NamedSharding(mesh, rows))
    upstream = tuple(jax.device_put(x, NamedSharding(mesh, rows)) for x in problem.upstream)
    here = problem._replace(
        hidden=hidden,
        weight=weight,
        target_ids=target_ids,
        upstream=upstream,
        bias=jax.device_put(problem.bias, NamedSharding(mesh, P())),
    )
    gold = helpers.gold(case, problem)
    values = jax.jit(lambda p: p.call(case, implementation))(here._replace(temperature=jnp.float32(1)))
    for actual, expected in zip(values, gold.values, strict=True):
        assert_within_contract(actual, expected, "linear_logp_wgmma", jnp.bfloat16, "forward")
    for actual, expected in zip(here.gradients(case, implementation), gold.gradients, strict=True):
        assert_within_contract(actual, expected, "linear_logp_wgmma", jnp.bfloat16, "gradient")
