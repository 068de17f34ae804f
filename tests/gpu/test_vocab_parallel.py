"""linear_logp's kernels for Hopper with the head spread over GPUs; degrees beyond this machine's GPUs are skipped, but
the kernels of their ranks run one after the other on one.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import LinearLogp, dispatch, vocab_parallel
from rlk_jax.core import shard as sharding
from rlk_jax.core.fixed_order import ascending_sum
from rlk_jax.core.head import Needs, Operands
from rlk_jax.ops.linear_logp.call import facts_of_call, tokens_of
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadFunctions, HeadInputs, HeadOptions
from tests.gpu.hopper import HEAD_KERNELS, every_implementation
from tests.support import helpers
from tests.support.allowed import allowed_beside, mask_of
from tests.support.helpers import Case, assert_same_bits, assert_within_contract, weighted

CASES = (
    Case("131072", (300,), 4096, 131072),
    Case("kept", (300,), 4096, 131072, options={"return_entropy": False}),
    Case("151936", (300,), 4096, 151936, bias=True, options={"logit_softcap": 30.0}),
    Case("gpt2", (130,), 768, 50257, bias=True, temperature="per token"),
    Case("gpt2, kept", (130,), 768, 50257, bias=True, options={"return_entropy": False}),
    Case("dv", (70,), 256, 65536, options={"weight_layout": "dv"}),
)

# With pytest -n 6 --dist loadgroup, one process draws a case's numbers, which takes as long as all else.
BY_CASE = [pytest.param(x, marks=pytest.mark.xdist_group(x.name), id=x.name) for x in CASES]


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


def one_rank_after_another(case: Case, problem: helpers.Problem, count: int, implementation: str, allowed_mask=None):
    """Values of every one of `count` ranks, and gradients as of `outputs` with the canonical reduction, on one GPU."""
    layout, pad = case.options.get("weight_layout", "vd"), functools.partial(vocab_parallel.pad_lm_head, n=count)
    axis = 0 if layout == "vd" else 1
    weight = pad(problem.weight if layout == "vd" else problem.weight.T, weight_layout=layout)
    bias = None if problem.bias is None else pad(problem.bias)
    asked = {"return_lse": True, "return_entropy": True, **case.options, "global_vocab_size": case.vocab}
    options = HeadOptions(**asked, implementation=implementation, validate=False)
    arrays = problem.hidden, weight, problem.target_ids, bias, problem.temperature
    inputs, config, _ = check_call(HeadInputs(*arrays, allowed_mask=allowed_mask), options)
    functions = dispatch.choose(facts_of_call(inputs, config), implementation).functions
    functions = functions.on_device if isinstance(functions, HeadFunctions) else functions
    shard = sharding.Shard("tp", count, weight.shape[axis] // count, case.vocab, "canonical", True)
    of_shard = replace(shard.config(config), keeps=True)
    whole = tokens_of(inputs, case.vocab, options)

    def here(hidden, weight, bias, start):
        operands = Operands(hidden, weight, bias, real_columns=sharding.real_columns_of_shard(shard, start))
        return operands, sharding.local_tokens(shard, whole, sharding.ShardPosition(start, None, None))

    # One program for all ranks.
    @jax.jit
    def partials(*own):
        return functions.partials(of_shard, *here(*own))

    @jax.jit
    def values_and_gradients(own, groups, state):
        operands, tokens = here(*own)
        values, residual, kept = functions.merge(of_shard, groups, state)
        upstream = LinearLogp(*(None if x is None else g for x, g in zip(values, problem.upstream, strict=True)))
        needs, tokens = Needs(True, True, bias is not None), tokens.with_upstream(upstream)
        return values, functions.gradients(of_shard, needs, operands, tokens, residual, kept, upstream)

    weights = jnp.split(weight, count, axis)
    biases = [None] * count if bias is None else jnp.split(bias, count)
    ranks = [(problem.hidden, weights[i], biases[i], jnp.int32(i * shard.columns)) for i in range(count)]
    found = [partials(*own) for own in ranks]
    groups = jax.tree.map(lambda *x: jnp.concatenate(x), *(groups for groups, _ in found))
    by_rank = [values_and_gradients(own, groups, state) for own, (_, state) in zip(ranks, found, strict=True)]
    parts = [gradients for _, gradients in by_rank]
    d_hidden = ascending_sum(jnp.concatenate([x.hidden for x in parts])).astype(problem.hidden.dtype)
    d_weight = jnp.concatenate([x.weight for x in parts], axis)
    d_bias = () if bias is None else (jnp.concatenate([x.bias for x in parts])[: case.vocab],)
    gradients = (d_hidden, (d_weight.T if axis else d_weight)[: case.vocab], *d_bias)
    return [values for values, _ in by_rank], gradients


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


@every_implementation
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("case", BY_CASE)
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
@pytest.mark.parametrize("case", BY_CASE)
def test_kernels_of_every_degree_on_one_gpu(case, degree, implementation, unsharded):
    problem, (values, _), one_group_at_a_time = unsharded(case.name, implementation)
    by_rank, gradients = one_rank_after_another(case, problem, degree, implementation)
    for own_values in by_rank:
        assert_same_bits(tuple(own_values), values)
    assert_same_bits(gradients, one_group_at_a_time[1])


@pytest.mark.parametrize("implementation", HEAD_KERNELS)
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"return_entropy": False}], ids=["computed again", "kept"])
def test_masked_kernels_of_every_degree_on_one_gpu(options, degree, implementation):
    """The mask spans the whole vocabulary on every rank, whose columns may begin inside a word: those of eight do."""
    case = Case("masked", (130,), 256, 151936, bias=True, temperature="per token", options=options)
    assert (case.vocab // 8) % 32
    problem = helpers.make(case, jnp.bfloat16)
    mask = mask_of(allowed_beside(problem.target_ids, case.vocab))
    values, gradients = problem.values_and_gradients(case, implementation, allowed_mask=mask)
    by_rank, of_ranks = one_rank_after_another(case, problem, degree, implementation, mask)
    for own_values in by_rank:
        assert_same_bits(tuple(own_values), tuple(values))
    assert_same_bits(of_ranks, gradients)


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
