"""A head spread over a mesh: every rank right, the same bits at every degree, one message for a mistake on one rank."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import LinearLogp, linear_logp, vocab_parallel
from rlk_jax.core.dispatch import log_once
from tests.support import helpers
from tests.support.helpers import Case, Problem, assert_same_bits, assert_within_contract, weighted

PARALLEL = ("xla", "deterministic")
SMALL = Case("small", (4, 6), 24, 1000, bias=True, temperature="per token", options={"logit_softcap": 5.0})


def mesh_of(kind: str, **axes: int) -> Mesh:
    devices = jax.devices("cpu")[: np.prod(list(axes.values()))]
    if kind == "explicit":
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    return Mesh(np.asarray(devices).reshape(*axes.values()), tuple(axes))


def whole_call(case: Case, problem: Problem, mesh: Mesh, implementation: str, **changes) -> LinearLogp:
    """vocab_parallel.linear_logp on a padded head, with all outputs."""
    options = {"return_lse": True, "return_entropy": True, "global_vocab_size": case.vocab, **case.options, **changes}
    layout, n = options.get("weight_layout", "vd"), mesh.shape["tp"]
    weight = problem.weight.T if layout == "dv" else problem.weight
    bias = None if problem.bias is None else vocab_parallel.pad_lm_head(problem.bias, n)
    return vocab_parallel.linear_logp(
        problem.hidden,
        vocab_parallel.pad_lm_head(weight, n, weight_layout=layout),
        problem.target_ids,
        bias,
        mesh=mesh,
        vocab_axis="tp",
        token_axes="data" if "data" in mesh.shape else None,
        temperature=problem.temperature,
        implementation=implementation,
        **options,
    )


def gradients_of_a_sum(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """The gradients of hidden and a whole head, on one device."""
    logp = functools.partial(linear_logp, target_ids=problem.target_ids)
    return jax.jit(jax.grad(lambda h, w: logp(h, w).sum(), (0, 1)))(problem.hidden, problem.weight)


def operands_of(problem: Problem) -> tuple[jax.Array, ...]:
    return tuple(x for x in (problem.hidden, problem.weight, problem.bias) if x is not None)


def values_and_gradients(call, problem: Problem) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """What `call(problem)` gives, all outputs, and the gradients of hidden, weight and bias."""

    def loss(operands):
        values = call(problem._replace(**dict(zip(("hidden", "weight", "bias"), operands, strict=False))))
        return weighted(values, problem.upstream), tuple(values)

    gradients, values = jax.jit(jax.grad(loss, has_aux=True))(operands_of(problem))
    return values, gradients


def assert_gold(case: Case, problem: Problem, call) -> None:
    gold, (values, gradients) = helpers.gold(case, problem), values_and_gradients(call, problem)
    for actual, expected in zip(values, gold.values, strict=True):
        assert_within_contract(actual, expected, "linear_logp", jnp.float32, "forward")
    for actual, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(actual, expected, "linear_logp", jnp.float32, "gradient")


UNEVEN = {"data": 2, "tp": 3}
GOLD_CASES = (
    (SMALL, UNEVEN, {}),
    (Case("qwen3", (6,), 8, 151936, bias=True), {"tp": 8}, {}),
    (Case("gpt2", (8,), 12, 50257), {"tp": 4}, {}),
    (SMALL, {"data": 2, "tp": 4}, {"weight_layout": "dv"}),
    (Case("mostly padding", (5,), 8, 10, bias=True), {"tp": 8}, {}),
    (Case("no tokens", (0,), 8, 40, bias=True), {"data": 2, "tp": 2}, {}),
)


# In `make test`, `deterministic` has uneven shards and xla the other cases, but for gpt2's: its vocabulary ends within
# a shard, as qwen3's does. What `deterministic` does on shards of padding, test_shards_keep_all_bits (test_top_k.py)
# catches, and on a shard in general test_same_bits_at_every_degree.
@helpers.cover(
    "case, axes, options, implementation",
    [(*x, name) for x in GOLD_CASES for name in PARALLEL],
    lambda case, axes, options, name: case.name != "gpt2" and (name == "deterministic") == (axes == UNEVEN),
)
def test_values_and_gradients(implementation, case, axes, options):
    mesh = mesh_of("auto", **axes)
    call = functools.partial(
        lambda p: whole_call(case, p, mesh, implementation, **options),
    )
    assert_gold(case, helpers.make(case, jnp.float32), call)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        ("explicit", "xla"),
        ("auto", "xla"),
        # Remat and scan call the rules of autodiff, which are the same for all: in `make test`, the two cases above
        # catch their bug.
        pytest.param("auto", "deterministic", marks=pytest.mark.full),
        pytest.param("explicit", "deterministic", marks=pytest.mark.full),
    ],
)
def test_transformations(kind, implementation):
    """Gradients come back as their inputs lie, through remat and scan, over Auto and Explicit axes."""
    case, mesh = SMALL, mesh_of(kind, data=2, tp=4)
    problem = helpers.make(case, jnp.float32)
    weight = jax.device_put(vocab_parallel.pad_lm_head(problem.weight, 4), NamedSharding(mesh, P("tp", None)))
    hidden = jax.device_put(problem.hidden, NamedSharding(mesh, P("data", None, None)))
    call = functools.partial(
        vocab_parallel.linear_logp,
        target_ids=problem.target_ids,
        mesh=mesh,
        vocab_axis="tp",
        token_axes="data",
        global_vocab_size=1000,
        implementation=implementation,
    )

    @jax.checkpoint
    def step(total, h, w):
        return total + call(h, w).sum()

    def loss(h, w):
        return jax.lax.scan(lambda total, _: (step(total, h, w), None), 0.0, None, length=2)[0]

    d_hidden, d_weight = jax.jit(jax.grad(loss, (0, 1)))(hidden, weight)
    assert d_hidden.sharding.is_equivalent_to(hidden.sharding, 3)
    assert d_weight.sharding.is_equivalent_to(weight.sharding, 2)

    for actual, e in zip((d_hidden, np.asarray(d_weight)[:1000]), gradients_of_a_sum(problem), strict=True):
        assert_within_contract(actual, 2 * e, "linear_logp", jnp.float32, "gradient")


BITS_CASES = (SMALL, Case("2048", (20,), 16, 2048, bias=True), Case("gpt2", (3,), 4, 50257, temperature=0.7))


# All cases and degrees in full. In `make test`, test_inside_shard_map catches what is wrong with four shards and eight,
# test_one_shard_is_the_whole_head_with_any_edge with one, and test_values_and_gradients with large vocabularies. Bits
# of a call without a gradient are compared by test_processes_have_the_bits_of_one.
@pytest.mark.parametrize(
    ("case", "degrees"),
    [(SMALL, (2,)), *(pytest.param(case, (1, 2, 4, 8), marks=pytest.mark.full) for case in BITS_CASES)],
    ids=str,
)
def test_same_bits_at_every_degree(case, degrees):
    """logp, lse, entropy, dW, db, and dH by the canonical reduction: as without a mesh."""
    problem = helpers.make(case, jnp.bfloat16)
    expected, expected_gradients = problem.values_and_gradients(case, "deterministic")
    for degree in degrees:
        mesh = mesh_of("auto", tp=degree)
        call = functools.partial(
            lambda p, mesh: whole_call(case, p, mesh, "deterministic", reduction="canonical"), mesh=mesh
        )
        assert_same_bits(values_and_gradients(call, problem), (tuple(expected), expected_gradients))
    if len(degrees) > 1:
        assert_same_bits(call(problem), expected)


def ranks(case: Case, problem: Problem, *, degree: int, check_vma: bool = True, order=None, **options):
    """linear_logp inside shard_map, with all outputs; `order` says which shard each rank holds."""
    mesh = mesh_of("auto", tp=degree)
    width = case.vocab // degree
    held = jnp.arange(degree) if order is None else jnp.asarray(order)

    def on_rank(hidden, weight, bias, target_ids, held):
        start = None if order is None else held[jax.lax.axis_index("tp")] * width
        return linear_logp(
            hidden,
            weight,
            target_ids,
            bias,
            temperature=problem.temperature,
            axis_name="tp",
            vocab_start_index=start,
            return_lse=True,
            return_entropy=True,
            **{"implementation": "deterministic", "reduction": "canonical", **options},
        )

    def shuffled(x):
        if order is None:
            return x
        return x.reshape(-1, width, *x.shape[1:])[held].reshape(degree * width, *x.shape[1:])

    specs = (P(), P("tp"), P("tp"), P(), P())
    sharded = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    return sharded(problem.hidden, shuffled(problem.weight), shuffled(problem.bias), problem.target_ids, held)


POWER = Case("power of two", (13,), 24, 1024, bias=True)


@pytest.mark.parametrize(
    ("check_vma", "degree", "order"),
    [
        (False, 8, None),
        (True, 4, [2, 0, 3, 1]),
        # In `make test`, the case of another order catches what check_vma=True breaks, and
        # test_same_bits_at_every_degree what a degree of 2 does.
        pytest.param(True, 2, None, marks=pytest.mark.full),
    ],
)
def test_inside_shard_map(check_vma, degree, order):
    problem = helpers.make(POWER, jnp.float32)
    call = functools.partial(ranks, POWER, degree=degree, check_vma=check_vma, order=order)
    expected, expected_gradients = problem.values_and_gradients(POWER, "deterministic")
    assert_same_bits(values_and_gradients(call, problem), (tuple(expected), expected_gradients))


# The sum stands in shard.py for all. In `make test`, that under check_vma=True is in the next test.
@helpers.cover(
    "implementation, check_vma",
    [(name, check_vma) for name in PARALLEL for check_vma in (True, False)],
    lambda implementation, check_vma: (implementation, check_vma) == ("xla", False),
)
def test_sum_of_hidden_gradients(implementation, check_vma):
    problem, options = helpers.make(POWER, jnp.float32), {"implementation": implementation, "reduction": "sum"}
    assert_gold(POWER, problem, functools.partial(ranks, POWER, degree=8, check_vma=check_vma, **options))


def test_bfloat16_hidden_gradients_are_summed_in_float32():
    """The parts of one half of the ranks nearly cancel those of the other half in the first dimension of dlse/dhidden.
    Rounded to bfloat16 before the sum, they would leave much of their rounding.
    """
    problem = helpers.make(POWER, jnp.bfloat16)
    problem = problem._replace(
        hidden=problem.hidden.at[:, 0].set(0),
        weight=problem.weight.at[:, 0].set(jnp.where(jnp.arange(POWER.vocab) < POWER.vocab // 2, 8, -8)),
        upstream=tuple(g if i == 1 else 0 * g for i, g in enumerate(problem.upstream)),
    )
    gold = helpers.gold(POWER, problem).gradients[0]
    (d_hidden, *_) = values_and_gradients(functools.partial(ranks, POWER, degree=8, reduction="sum"), problem)[1]
    assert_within_contract(d_hidden, gold, "linear_logp", jnp.bfloat16, "gradient")


@pytest.mark.parametrize("check_vma", [True, False])
def test_sequence_parallel_hidden(check_vma):
    """hidden gathered over the axis: JAX scatters the sum of the ranks' own parts of dH."""
    problem = helpers.make(Case("sequence", (16,), 24, 1024), jnp.float32)
    mesh = mesh_of("auto", tp=4)

    def on_rank(hidden, weight, target_ids):
        whole = jax.lax.all_gather(hidden, "tp", tiled=True)
        return linear_logp(whole, weight, target_ids, axis_name="tp", reduce_hidden_grad=False, implementation="xla")

    call = jax.shard_map(on_rank, mesh=mesh, in_specs=(P("tp"), P("tp"), P()), out_specs=P(), check_vma=check_vma)

    def loss(f, h):
        return jnp.vdot(problem.upstream[0], f(h, problem.weight, problem.target_ids))

    plain = functools.partial(linear_logp, implementation="xla")
    actual, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(problem.hidden) for f in (call, plain))
    assert_within_contract(actual, expected, "linear_logp", jnp.float32, "gradient")


@pytest.mark.parametrize(
    ("implementation", "reduction", "check_vma"),
    [
        ("xla", "sum", True),
        # vmap batches the carrier of hidden's gradient for both reductions alike: in `make test`, the case above
        # catches its bug, and test_inside_shard_map a wrong canonical order.
        pytest.param("deterministic", "canonical", False, marks=pytest.mark.full),
    ],
)
def test_vmap_inside_shard_map(implementation, reduction, check_vma):
    """Values and all gradients are each example's own, where ranks hold shards in an order of the caller's, too."""
    problem = helpers.make(Case("vmapped", (3, 5), 24, 1024), jnp.float32)
    mesh = mesh_of("auto", tp=4)

    def on_rank(hidden, weight, target_ids):
        def one(h, t):
            options = {"implementation": implementation, "reduction": reduction}
            start = jax.lax.axis_index("tp") * 256 if check_vma else None
            return linear_logp(h, weight, t, axis_name="tp", vocab_start_index=start, **options)

        return jax.vmap(one)(hidden, target_ids)

    call = jax.shard_map(on_rank, mesh=mesh, in_specs=(P(), P("tp"), P()), out_specs=P(), check_vma=check_vma)
    plain = functools.partial(linear_logp, implementation=implementation)

    def results(f):
        def loss(hidden, weight):
            logp = f(hidden, weight, problem.target_ids)
            return jnp.vdot(problem.upstream[0], logp), logp

        gradients, logp = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(problem.hidden, problem.weight)
        return logp, *gradients

    for actual, expected in zip(results(call), results(plain), strict=True):
        assert_within_contract(actual, expected, "linear_logp", jnp.float32, "gradient")


def test_ids_that_differ_between_ranks_are_nan_and_say_so():
    """Each is valid; together no rank owns the target, or two do."""
    problem = helpers.make(POWER, jnp.float32)

    def on_rank(hidden, weight, target_ids):
        other = jnp.where(jax.lax.axis_index("tp") == 0, 1000, 10)
        ids = jnp.where(jnp.arange(13) == 5, other, target_ids)
        return linear_logp(hidden, weight, ids, axis_name="tp", implementation="xla")[None]

    specs = (P(), P("tp"), P())
    call = jax.shard_map(on_rank, mesh=mesh_of("auto", tp=4), in_specs=specs, out_specs=P("tp"), check_vma=False)
    values = np.asarray(jax.jit(call)(problem.hidden, problem.weight, problem.target_ids))
    assert (np.isnan(values) == (np.arange(13) == 5)).all()
    error, _ = checkify.checkify(jax.jit(call))(problem.hidden, problem.weight, problem.target_ids)
    assert "target_ids must be covered by exactly one TP vocab shard" in error.get()


# Whether shards cover a token is counted in shard.py for all implementations: in `make test`, the case of xla catches
# its bug.
@pytest.mark.parametrize("implementation", ["xla", pytest.param("deterministic", marks=pytest.mark.full)])
def test_a_token_that_one_rank_ignores_makes_all_nan_and_says_so(implementation):
    """That rank may send what belongs to other tokens. Token 3's target is of rank 1."""
    problem = helpers.make(POWER, jnp.float32)
    target_ids = problem.target_ids.at[3].set(300)

    def on_rank(hidden, weight, target_ids, bad_rank):
        is_ignored = (jax.lax.axis_index("tp") == bad_rank) & (jnp.arange(13) == 3)
        ids = jnp.where(is_ignored, -100, target_ids)
        return linear_logp(hidden, weight, ids, axis_name="tp", ignore_index=-100, implementation=implementation)[None]

    specs = (P(), P("tp"), P(), P())
    call = jax.shard_map(on_rank, mesh=mesh_of("auto", tp=4), in_specs=specs, out_specs=P("tp"), check_vma=False)

    def loss(hidden, weight, *others):
        logp = call(hidden, weight, *others)
        return logp.sum(), logp

    gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    checked = checkify.checkify(jax.jit(call))
    for bad_rank in (0, 1, 3):
        arguments = (problem.hidden, problem.weight, target_ids, jnp.int32(bad_rank))
        (d_hidden, d_weight), logp = gradients(*arguments)
        assert np.isnan(np.asarray(logp)).all()
        assert np.isnan(np.asarray(d_hidden)).all() and np.isnan(np.asarray(d_weight)).any()
        error, _ = checked(*arguments)
        assert "target_ids must be covered by exactly one TP vocab shard" in error.get()


def test_a_scalar_lead():
    h, w = jnp.ones(8), jax.random.normal(jax.random.key(0), (64, 8))
    actual = vocab_parallel.linear_logp(h, w, jnp.int32(3), mesh=mesh_of("auto", tp=2), vocab_axis="tp")
    assert_within_contract(actual, linear_logp(h, w, jnp.int32(3)), "linear_logp", jnp.float32, "forward")


def test_a_variable_s_head_over_explicit_axes():
    mesh = mesh_of("explicit", tp=4)
    weight = jax.random.normal(jax.random.key(0), (64, 8))
    variable = nnx.Param(jax.device_put(weight, NamedSharding(mesh, P("tp"))))
    ids = jnp.arange(3)
    expected = linear_logp(jnp.ones((3, 8)), weight, ids)
    with jax.set_mesh(mesh):
        actual = linear_logp(jnp.ones((3, 8)), variable, ids)
    assert_within_contract(actual, expected, "linear_logp", jnp.float32, "forward")


def test_calls_outside_jit_over_explicit_axes():
    """Values are checked on arrays that JAX does not mix with others, and gradients come back as arrays lie."""
    mesh = mesh_of("explicit", data=2, tp=2)
    rng = np.random.default_rng(0)
    arrays = (
        rng.normal(size=(4, 6, 8)),
        rng.normal(size=(64, 8)),
        rng.integers(0, 64, (4, 6)),
        rng.uniform(1, 2, (4, 6)),
    )
    hidden, weight, ids, temperature = (
        jnp.asarray(x, jnp.int32 if i == 2 else jnp.float32) for i, x in enumerate(arrays)
    )
    expected = linear_logp(hidden, weight, ids, temperature=temperature)
    laid = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (hidden, ids, temperature)]
    cut = jax.device_put(weight, NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        call = functools.partial(vocab_parallel.linear_logp, mesh=mesh, vocab_axis="tp", token_axes="data")
        for op, scale in ((linear_logp, laid[2]), (linear_logp, temperature), (call, temperature)):
            actual = op(laid[0], cut, laid[1], temperature=scale, validate=True)
            assert_within_contract(actual, expected, "linear_logp", jnp.float32, "forward")
            with pytest.raises(ValueError, match="target_ids"):
                op(laid[0], cut, laid[1] + 64)
        gradient = jax.grad(lambda hidden: linear_logp(hidden, cut, laid[1], ignore_index=-100).sum())(laid[0])
    assert gradient.sharding.is_equivalent_to(laid[0].sharding, 3)


def test_bare_calls_off_the_edges_are_refused_if_strict(monkeypatch):
    monkeypatch.setenv("RLK_STRICT", "1")
    mesh = mesh_of("auto", tp=8)
    weight = jax.device_put(jnp.ones((1000, 8)), NamedSharding(mesh, P("tp")))
    call = jax.jit(functools.partial(linear_logp, implementation="deterministic"))
    with pytest.raises(Exception, match="8 shards of 125 columns do not end where"):
        call(jnp.ones((3, 8)), weight, jnp.arange(3))


def test_shards_that_are_no_partition_give_nan_and_say_so():
    """One program, which is given each set of starts."""
    problem, options = helpers.make(POWER, jnp.float32), {"implementation": "xla", "reduction": "sum"}
    padded = problem._replace(
        weight=jnp.tile(problem.weight, (2, 1)), bias=jnp.tile(problem.bias, 2), target_ids=problem.target_ids
    )

    @jax.jit
    def values_and_gradient(padded, order):
        def loss(hidden):
            values = ranks(POWER, padded._replace(hidden=hidden), degree=4, order=order, **options)
            return weighted(values, padded.upstream), tuple(values)

        return jax.grad(loss, has_aux=True)(padded.hidden)

    checked = checkify.checkify(jax.jit(lambda padded, order: ranks(POWER, padded, degree=4, order=order, **options)))
    for order in ([0, 0, 1, 2], [1, 2, 3, 4], [0, 1, 2, 5]):
        d_hidden, values = values_and_gradient(padded, jnp.asarray(order))
        assert all(np.isnan(x).all() for x in (*values, d_hidden))
        error, _ = checked(padded, jnp.asarray(order))
        assert "TP vocab shards must form a contiguous [0, 1024) partition" in error.get()


def test_a_bad_target_on_one_rank_is_nan_on_every_rank():
    problem = helpers.make(POWER, jnp.float32)
    mesh = mesh_of("auto", tp=4)

    def on_rank(hidden, weight, target_ids):
        bad = jnp.where((jax.lax.axis_index("tp") == 2) & (jnp.arange(13) == 5), -1, target_ids)
        return linear_logp(hidden, weight, bad, axis_name="tp", implementation="xla")[None]

    specs = (P(), P("tp"), P())
    call = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
    values = np.asarray(jax.jit(call)(problem.hidden, problem.weight, problem.target_ids))
    assert (np.isnan(values) == (np.arange(13) == 5)).all()


BAD_CALLS = {
    "indivisible": ({"weight": jnp.ones((1001, 8))}, "a vocabulary of 1001 cannot be spread evenly over the 4 devices"),
    "tokens": ({"hidden": jnp.ones((5, 8)), "target_ids": jnp.zeros(5, int)}, "5 tokens cannot be spread evenly"),
    "axis": ({"vocab_axis": "model"}, "'model' is no axis of the mesh, whose axes are ('data', 'tp')."),
    "twice": ({"token_axes": "tp"}, "mesh axis 'tp' is named twice among vocab_axis and token_axes."),
    "lead": ({"token_axes": P("data", None, None)}, "has more entries than target_ids has dimensions"),
    "bias": ({"bias": jnp.ones(3)}, "bias must have V=1000 elements, got shape (3,)."),
    "target": ({"target_ids": jnp.full(6, 1000)}, "target_ids out of range: expected [0, 999], got [1000, 1000]."),
    "reduction": ({"reduction": "mean"}, "reduction must be one of ('sum', 'canonical'), got 'mean'."),
    "canonical xla": ({"reduction": "canonical"}, "promises no bits, which reduction='canonical' asks for"),
    "reference": ({"implementation": "reference"}, "needs the whole head, not a shard of its vocabulary"),
    "mesh": ({"mesh": None}, "mesh must be a jax.sharding.Mesh, got builtins.NoneType."),
    "axis type": (
        {"vocab_axis": 3},
        "vocab_axis must be the name of a mesh axis, or a tuple of different ones, got 3.",
    ),
    "no axis": ({"vocab_axis": ()}, "vocab_axis must be the name of a mesh axis"),
    "token axis type": ({"token_axes": 3}, "token_axes must be the name of a mesh axis"),
    "vocabulary": ({"global_vocab_size": 1001}, "global_vocab_size must be in [1, V=1000], got 1001."),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_does_not_fit_raises(name):
    changes, message = BAD_CALLS[name]
    arguments = {
        "hidden": jnp.ones((6, 8)),
        "weight": jnp.ones((1000, 8)),
        "target_ids": jnp.zeros(6, int),
        "mesh": mesh_of("auto", data=2, tp=4),
        "vocab_axis": "tp",
        "token_axes": "data",
        "implementation": "xla",
        **changes,
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        vocab_parallel.linear_logp(arguments.pop("hidden"), arguments.pop("weight"), **arguments)


INSIDE = {
    "start without axis": ({"vocab_start_index": 0}, "vocab_start_index requires axis_name"),
    "canonical without axis": ({"reduction": "canonical"}, "reduction='canonical' requires axis_name"),
    "unreduced without axis": ({"reduce_hidden_grad": False}, "reduce_hidden_grad=False requires axis_name"),
    "no such axis": ({"axis_name": "tp"}, "axis_name 'tp' is no mesh axis of a surrounding jax.shard_map."),
}


@pytest.mark.parametrize("name", INSIDE)
def test_axis_options_need_their_axis(name):
    options, message = INSIDE[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logp(jnp.ones((2, 8)), jnp.ones((10, 8)), jnp.zeros(2, int), **options)


def test_an_axis_of_vmap_is_no_mesh_axis():
    with pytest.raises(ValueError, match=r"axis_name 'tp' is no mesh axis of a surrounding jax\.shard_map"):
        jax.vmap(
            lambda weight: linear_logp(jnp.ones((2, 8)), weight, jnp.zeros(2, int), axis_name="tp"), axis_name="tp"
        )(jnp.ones((2, 10, 8)))


def test_a_hidden_that_varies_needs_its_own_reduction():
    def on_rank(hidden, weight):
        return linear_logp(hidden, weight, jnp.zeros(2, int), axis_name="tp", implementation="xla")

    call = jax.shard_map(on_rank, mesh=mesh_of("auto", tp=2), in_specs=(P("tp"), P("tp")), out_specs=P())
    with pytest.raises(ValueError, match=r"hidden varies over 'tp'.*pass reduce_hidden_grad=False"):
        call(jnp.ones((4, 8)), jnp.ones((10, 8)))


@pytest.mark.parametrize("axis", [["tp"], 3, (), ("tp", "tp")])
def test_axis_name_is_a_name(axis):
    with pytest.raises(ValueError, match="axis_name must be the name of a mesh axis"):
        linear_logp(jnp.ones((2, 8)), jnp.ones((10, 8)), jnp.zeros(2, int), axis_name=axis)


@pytest.mark.parametrize(("ranks", "start"), [(4, 0), (4, -1), (1, 5)])
def test_a_start_that_all_ranks_share_is_refused(ranks, start):
    def on_rank(weight):
        return linear_logp(jnp.ones((2, 8)), weight, jnp.zeros(2, int), axis_name="tp", vocab_start_index=start)

    with pytest.raises(ValueError, match=f"vocab_start_index {start} is the same on all {ranks} ranks"):
        jax.shard_map(on_rank, mesh=mesh_of("auto", tp=ranks), in_specs=P("tp"), out_specs=P())(jnp.ones((64, 8)))


def test_options_of_a_shard_are_refused_over_explicit_axes():
    weight = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh_of("explicit", tp=4), P("tp")))
    for option in ({"vocab_start_index": 5}, {"reduction": "canonical"}, {"reduce_hidden_grad": False}):
        with pytest.raises(ValueError, match="requires axis_name"):
            linear_logp(jnp.ones((2, 8)), weight, jnp.zeros(2, int), **option)


# In `make test`, test_transformations has a head over an Explicit axis. That axis beside an Auto one of the tokens is
# left to `make test-full` alone; "EA" has them the other way round.
@pytest.mark.parametrize("kinds", ["EA", pytest.param("AE", marks=pytest.mark.full)])
def test_vocab_parallel_takes_axes_of_both_kinds(kinds):
    kind_of = {"E": jax.sharding.AxisType.Explicit, "A": jax.sharding.AxisType.Auto}
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=tuple(map(kind_of.get, kinds)), devices=jax.devices("cpu"))
    problem = helpers.make(Case("both kinds", (8,), 16, 1024), jnp.float32)
    hidden, ids = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (problem.hidden, problem.target_ids))
    weight = jax.device_put(problem.weight, NamedSharding(mesh, P("tp")))

    @jax.jit
    def gradients(hidden, weight):
        def loss(hidden, weight):
            options = {"mesh": mesh, "vocab_axis": "tp", "token_axes": "data"}
            return vocab_parallel.linear_logp(hidden, weight, ids, **options).sum()

        return jax.grad(loss, (0, 1))(hidden, weight)

    expected = gradients_of_a_sum(problem)
    for found, gold in zip(gradients(hidden, weight), expected, strict=True):
        assert_within_contract(found, gold, "linear_logp", jnp.float32, "gradient")


# What check_vma=False could break, test_inside_shard_map and test_sum_of_hidden_gradients catch in `make test`.
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_shard_map_that_is_manual_over_the_head_s_axis_alone(check_vma):
    """On a mesh whose other axis is Explicit; all gradients."""
    problem, mesh = helpers.make(Case("partly manual", (8,), 16, 1024), jnp.float32), mesh_of("explicit", data=2, tp=4)
    weight = jax.device_put(problem.weight, NamedSharding(mesh, P("tp")))

    def on_rank(hidden, weight):
        return linear_logp(hidden, weight, problem.target_ids, axis_name="tp")

    with jax.set_mesh(mesh):
        call = jax.shard_map(on_rank, in_specs=(P(), P("tp")), out_specs=P(), axis_names={"tp"}, check_vma=check_vma)
        found = jax.jit(jax.grad(lambda h, w: call(h, w).sum(), (0, 1)))(problem.hidden, weight)
    expected = gradients_of_a_sum(problem)
    for actual, gold in zip(found, expected, strict=True):
        assert_within_contract(actual, gold, "linear_logp", jnp.float32, "gradient")


def test_explicit_axes_beside_a_manual_one_are_refused():
    def on_rank(hidden, weight):
        return linear_logp(hidden, weight, jnp.zeros(4, int), axis_name="tp")

    mesh = mesh_of("explicit", data=2, tp=4)
    call = jax.shard_map(on_rank, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), axis_names={"tp"})
    hidden = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data")))
    weight = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("tp")))
    with pytest.raises(ValueError, match="beside axis_name 'tp' no input may lie over Explicit mesh axes"):
        jax.jit(call)(hidden, weight)


def test_whole_arrays_stand_outside_shard_map():
    mesh = mesh_of("auto", data=2, tp=4)

    def on_rank(hidden):
        ids = jnp.zeros(hidden.shape[0], int)
        return vocab_parallel.linear_logp(hidden, jnp.ones((64, 8)), ids, mesh=mesh, vocab_axis="tp")

    call = jax.shard_map(on_rank, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    with pytest.raises(ValueError, match=r"inside jax.shard_map call rlk_jax.linear_logp\(..., axis_name=...\)"):
        jax.jit(call)(jnp.ones((4, 8)))


@pytest.mark.parametrize("option", ["no_such_option", "axis_name", "reduce_hidden_grad", "vocab_start_index"])
def test_whole_arrays_have_no_such_option(option):
    p, mesh = helpers.make(Case("option", (4,), 8, 16), jnp.float32), Mesh(np.asarray(jax.devices()[:2]), ("tp",))
    with pytest.raises(
        TypeError, match=rf"^vocab_parallel.linear_logp\(\) got an unexpected keyword argument '{option}'"
    ):
        vocab_parallel.linear_logp(p.hidden, p.weight, p.target_ids, mesh=mesh, vocab_axis="tp", **{option: 1})


@pytest.mark.parametrize("start", [1.5, jnp.zeros(2, int)])
def test_start_index_is_an_integer(start):
    def on_rank(weight):
        return linear_logp(jnp.ones((2, 8)), weight, jnp.zeros(2, int), axis_name="tp", vocab_start_index=start)

    with pytest.raises(ValueError, match="vocab_start_index must be an integer scalar"):
        jax.shard_map(on_rank, mesh=mesh_of("auto", tp=2), in_specs=P("tp"), out_specs=P())(jnp.ones((10, 8)))


def test_other_edges_are_said_once_and_refused_if_strict(monkeypatch, caplog):
    problem = helpers.make(SMALL, jnp.float32)
    call = functools.partial(whole_call, SMALL, problem, mesh_of("auto", tp=3), "deterministic")
    log_once.cache_clear()
    for entropy in (True, False):
        jax.eval_shape(functools.partial(call, return_entropy=entropy))
    assert sum("pad_lm_head makes shards that keep them" in r.message for r in caplog.records) == 1
    monkeypatch.setenv("RLK_STRICT", "1")
    with pytest.raises(ValueError, match="RLK_STRICT=1: 3 shards of 384 columns"):
        call(return_lse=False)


@pytest.mark.parametrize(
    # A few columns of padding, or none, are in the groups that much padding fills: 600 catches them in `make test`.
    "columns",
    [pytest.param(97, marks=pytest.mark.full), pytest.param(105, marks=pytest.mark.full), 600],
)
def test_one_shard_is_the_whole_head_with_any_edge(monkeypatch, columns):
    monkeypatch.setenv("RLK_STRICT", "1")
    hidden, weight, ids = jnp.ones((4, 8)), jax.random.normal(jax.random.key(0), (columns, 8)), jnp.arange(4)
    options = {"global_vocab_size": 97, "implementation": "deterministic"}
    found = vocab_parallel.linear_logp(hidden, weight, ids, mesh=mesh_of("auto", tp=1), vocab_axis="tp", **options)
    assert_same_bits(found, linear_logp(hidden, weight[:97], ids, implementation="deterministic"))


@pytest.mark.parametrize(
    ("vocab", "n", "expected"),
    [
        (1024, 4, [(0, 256), (256, 512), (512, 768), (768, 1024)]),
        (1000, 2, [(0, 512), (512, 1000)]),
        (10, 8, [(0, 8), (8, 10), *[(10, 10)] * 6]),
        (1000, 3, [(0, 384), (384, 768), (768, 1000)]),
    ],
)
def test_shard_bounds(vocab, n, expected):
    assert vocab_parallel.shard_bounds(vocab, n) == expected
    padded = vocab_parallel.pad_lm_head(jnp.ones((8, vocab)), n, weight_layout="dv")
    assert padded.shape == (8, n * expected[0][1]) and (padded[:, vocab:] == 0).all() and (padded[:, :vocab] == 1).all()


@pytest.mark.parametrize(("vocab", "n"), [(0, 2), (10, 0), (10.0, 2), (10, True)])
def test_shard_bounds_refuse(vocab, n):
    with pytest.raises(ValueError, match="must be a positive integer"):
        vocab_parallel.shard_bounds(vocab, n)


@pytest.mark.parametrize(("shape", "layout"), [((2, 3, 4), "vd"), ((), "vd"), ((4, 4), "xx")])
def test_pad_lm_head_takes_heads_and_biases(shape, layout):
    with pytest.raises(ValueError, match=r"weight must be a head|weight_layout must be one of"):
        vocab_parallel.pad_lm_head(jnp.ones(shape), 2, weight_layout=layout)


BARE = {
    "vocab-sharded": (P("tp", None), P("data"), 1024),
    "hidden-sharded": (P(None, "tp"), P("data"), 1000),
    "both": (P("tp", "data"), P("data"), 1024),
    "fsdp": (P(None, "data"), P("data"), 1000),
    "replicated": (P(None, None), P("data"), 1000),
}


def gathered_sizes(hlo: str) -> list[int]:
    """Elements of every array that an all-gather of a compiled program yields, alone or in a tuple."""
    results = re.findall(r"= (.*?) all-gather(?:-start)?\(", hlo)
    shapes = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


def test_gathered_sizes():
    hlo = """
      %a = f32[64,128]{1,0} all-gather(%x), dimensions={0}
      %b = (f32[8,2]{1,0}, bf16[16,2]{1,0}) all-gather-start(%y), dimensions={0}
      %c = f32[999]{0} all-reduce(%z)"""
    assert gathered_sizes(hlo) == [64 * 128, 8 * 2, 16 * 2]


AUTO, EXPLICIT = ("auto", "vd"), ("explicit", "dv")
BARE_CALLS = [
    ("vocab-sharded", *AUTO),
    ("hidden-sharded", *EXPLICIT),
    ("both", *AUTO),
    ("fsdp", *EXPLICIT),
    ("replicated", *AUTO),
]
# HeadLayout cuts a head over both kinds of axes, so that in `make test` each way to lie has one kind. A head whose
# vocabulary lies over Explicit axes has test_a_variable_s_head_over_explicit_axes and test_transformations there.
OTHER_BARE_CALLS = [
    pytest.param(name, *(EXPLICIT if kind == "auto" else AUTO), marks=pytest.mark.full) for name, kind, _ in BARE_CALLS
]


@pytest.mark.parametrize(("name", "kind", "layout"), [*BARE_CALLS, *OTHER_BARE_CALLS])
def test_bare_calls_on_sharded_heads(name, kind, layout):
    """Right, with gradients that lie as their operands, and no collective as large as the weight's gather."""
    weight_spec, rows, vocab = BARE[name]
    mesh = mesh_of(kind, data=2, tp=4)
    problem = helpers.make(Case(name, (16,), 64, vocab, bias=True), jnp.float32)

    def lie(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    weight, spec = (problem.weight, weight_spec) if layout == "vd" else (problem.weight.T, weight_spec[::-1])
    operands = (lie(problem.hidden, *rows, None), lie(weight, *spec), lie(problem.bias))
    target_ids, upstream = lie(problem.target_ids, *rows), lie(problem.upstream[0], *rows)

    def loss(operands, target_ids, upstream):
        hidden, weight, bias = operands
        logp = linear_logp(hidden, weight, target_ids, bias, weight_layout=layout, implementation="xla")
        return (upstream * logp).sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(operands, target_ids, upstream).compile()
    value, gradients = compiled(operands, target_ids, upstream)
    whole = (problem.hidden, problem.weight, problem.bias)

    def plain(operands):
        logp = linear_logp(operands[0], operands[1], problem.target_ids, operands[2], implementation="reference")
        return jnp.vdot(problem.upstream[0], logp)

    expected_value, expected = jax.jit(jax.value_and_grad(plain))(whole)
    expected = (expected[0], expected[1] if layout == "vd" else expected[1].T, expected[2])
    assert_within_contract(value, expected_value, "linear_logp", jnp.float32, "gradient")
    for actual, e, operand in zip(gradients, expected, operands, strict=True):
        assert_within_contract(actual, e, "linear_logp", jnp.float32, "gradient")
        assert actual.sharding.is_equivalent_to(operand.sharding, actual.ndim)
    gathered = gathered_sizes(compiled.as_text())
    assert all(size < vocab * 64 / 8 for size in gathered), gathered


def test_a_head_that_cannot_be_cut_says_so():
    mesh = mesh_of("explicit", tp=2, data=4)
    weight = jax.device_put(jnp.ones((10, 8)), NamedSharding(mesh, P("tp", "data")))
    with pytest.raises(ValueError, match=r"a head of 10 x 8 that lies as .* cannot be cut into equal shards"):
        linear_logp(jnp.ones((2, 8)), weight, jnp.zeros(2, int))
