"""linear_kl by its kernels on a Hopper GPU, Mosaic's, Triton's and those in CUDA C++: the definition, bits, equal and
nearly equal heads, memory.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from rlk_jax import linear_kl
from rlk_jax.ops.linear_kl.options import KlOptions
from tests.gpu import golden
from tests.gpu.hopper import HEAD_KERNELS
from tests.ops.linear_kl import test_list_shards, test_shards
from tests.ops.linear_kl import test_top_k as listed
from tests.ops.linear_kl.test_bits import rows_of
from tests.ops.linear_kl.test_values import of_kind, with_anything_where_nothing_counts
from tests.support import divergences
from tests.support.divergences import KINDS, Case, assert_found
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.kl_shards import list_one_rank_after_another, one_rank_after_another

LISTS = (dataclasses.replace(listed.EVERYTHING, tokens=300), dataclasses.replace(listed.CASES[-1], tokens=300))
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: jnp.dtype(x).name)
every_kind = pytest.mark.parametrize("kind", KINDS)
_REAL = {"global_vocab_size": 4999, "teacher_global_vocab_size": 4999}
CASES = (
    Case("plain", (700,), 192, 320, 5056, 5056),
    Case("few rows", (9,), 64, 128, 4096, 4096, bias=True),
    Case("deep", (300,), 4096, 2048, 4096, 4096),
    Case("dv of both", (130,), 128, 64, 4096, 4096, options={"weight_layout": "dv", "teacher_weight_layout": "dv"}),
    Case("two layouts", (130,), 64, 128, 4096, 4096, options={"teacher_weight_layout": "dv"}),
    Case("a teacher of an odd width", (70,), 64, 37, 4096, 4096, options={"teacher_weight_layout": "dv"}),
    Case(
        "everything",
        (20, 35),
        72,
        40,
        5011,
        5000,
        bias=True,
        mask=True,
        temperature="per token",
        teacher_temperature=1.3,
        options={"logit_softcap": 3.0, "teacher_logit_softcap": 4.0, "teacher_weight_layout": "dv", **_REAL},
    ),
)


@pytest.fixture(params=HEAD_KERNELS, scope="module")
def kernels(request):
    return request.param


@DTYPES
@every_kind
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(kernels, case, kind, dtype):
    case = of_kind(case, kind)
    problem = divergences.make(case, dtype)
    expected = divergences.gold(case, problem)
    actual = divergences.found(case, with_anything_where_nothing_counts(problem, case), kernels)
    assert_found(actual, expected, dtype, op_class="linear_kl_wgmma")
    if problem.completion_mask is not None:
        assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


@DTYPES
@every_kind
def test_a_teacher_near_the_student(kernels, kind, dtype):
    """A teacher of the student's arrays and 1e-3 noise, as far as 16 bits hold it. Gradients as small as these are lost
    in float16 but for a loss scale.
    """
    case = of_kind(Case("near", (300,), 512, 512, 8192, 8192, bias=True, noise=1e-3), kind)
    problem = divergences.make(case, dtype)
    names = ("teacher_hidden", "teacher_weight", "teacher_bias")
    problem = problem._replace(**{name: getattr(problem, name).astype(dtype) for name in names})
    problem = problem._replace(upstream=problem.upstream * 2.0**12)
    assert_found(
        divergences.found(case, problem, kernels), divergences.gold(case, problem), dtype, op_class="linear_kl_near"
    )


@DTYPES
@every_kind
def test_identical_student_and_teacher(kernels, kind, dtype):
    """The divergence and every gradient are exactly 0."""
    case = Case("same", (300,), 256, 256, 5000, 5000, bias=True, temperature="per token", noise=0.0)
    problem = divergences.make(of_kind(case, kind), dtype)
    for x in jax.tree.leaves(divergences.found(of_kind(case, kind), problem, kernels)):
        assert not x.any()


@every_kind
def test_far_apart(kernels, kind):
    """Probabilities of one that are 0 in float32 where those of the other are 1."""
    case = of_kind(Case("far apart", (70,), 64, 48, 4096, 4096, scale=60.0), kind)
    problem = divergences.make(case, jnp.bfloat16)
    actual, gold = divergences.found(case, problem, kernels), divergences.gold(case, problem)
    if kind == "jsd":
        # Float32 cannot tell its gradient from 0.
        assert_within_contract(actual.values, gold.values, "linear_kl_peaked_wgmma", jnp.bfloat16, "forward")
    else:
        assert_found(actual, gold, jnp.bfloat16, op_class="linear_kl_peaked_wgmma")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.9, 0.99])
def test_mixtures_of_any_share(kernels, share):
    divergences.assert_mixtures_of_any_share(share, kernels, 300, "linear_kl_wgmma")


@pytest.mark.parametrize(("kind", "who"), [("forward", "bias"), ("reverse", "teacher_bias")])
def test_impossible_tokens(kernels, kind, who):
    """A token that the first distribution can take and the second cannot."""
    case = of_kind(Case("impossible", (70,), 64, 64, 4096, 4096, bias=True), kind)
    problem = divergences.make(case, jnp.bfloat16)
    problem = problem._replace(**{who: getattr(problem, who).at[:3000].set(-jnp.inf)})
    actual = divergences.found(case, problem, kernels)
    is_known = np.isfinite if kind == "forward" else np.isnan
    assert (actual.values == np.inf).all() and is_known(actual.hidden).all()
    both = problem._replace(**{x: getattr(problem, x).at[:3000].set(-jnp.inf) for x in ("bias", "teacher_bias")})
    found, gold = divergences.found(case, both, kernels), divergences.gold(case, both)
    assert_found(found, gold, jnp.bfloat16, op_class="linear_kl_wgmma")


LEAD = 700
BITS = Case("bits", (LEAD,), 192, 128, 5056, 5000, bias=True, options={"logit_softcap": 3.0, "global_vocab_size": 5000})
ARRANGEMENTS = {
    "alone": np.array([333]),
    "few": np.arange(40, 90),
    "reversed": np.arange(LEAD)[::-1],
    "masked before and between": np.concatenate([[-1] * 90, np.insert(np.arange(LEAD), [5, 5, 400], -1)]),
    "masked behind": np.concatenate([np.arange(LEAD), [-1] * 600]),
}


@DTYPES
@every_kind
def test_bits(kernels, kind, dtype):
    """Budgets, other batches, masked rows, values without gradients."""
    made = divergences.make(BITS, dtype)
    temperature = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, LEAD), jnp.float32)
    problem = made._replace(completion_mask=jnp.ones(LEAD, bool), temperature=temperature)
    expected = divergences.found(BITS, problem, kernels, kind=kind)
    for budget in (1, 2**24, 2**26, 4 * 2**30):
        assert_same_bits(divergences.found(BITS, problem, kernels, kind=kind, memory_budget=budget), expected)
    assert_same_bits(jax.jit(lambda x: x.call(BITS, kernels, kind=kind))(problem), expected.values)
    for name, index in ARRANGEMENTS.items():
        actual = divergences.found(BITS, rows_of(problem, index, np.nan), kernels, kind=kind)
        real = index >= 0
        for x, e in ((actual.values, expected.values), (actual.hidden, expected.hidden)):
            assert_same_bits(x[real], e[index[real]])
        if name.startswith("masked"):
            assert_same_bits((actual.weight, actual.bias), (expected.weight, expected.bias))


def golden_outputs(kernels: str) -> dict[str, jax.Array]:
    """Divergences and gradients of both kinds of teachers."""
    found = {}
    for kind, dtype in itertools.product(KINDS, (jnp.bfloat16, jnp.float16)):
        of_head = divergences.found(BITS, divergences.make(BITS, dtype), kernels, kind=kind)
        of_list = listed.found(LISTS[0], listed.make(LISTS[0], dtype), kind, kernels)
        for teacher, outputs in (("head", of_head), ("list", of_list)):
            for name, x in outputs._asdict().items():
                if x is not None:
                    found[f"{kind}, {teacher}, {jnp.dtype(dtype).name} {name}"] = x
    return found


def test_golden_hashes(kernels):
    golden.check("linear_kl", lambda: golden_outputs(kernels), kernels)


_OF_SHARDS = {**test_shards.CASE.options, "global_vocab_size": 8180, "teacher_global_vocab_size": 8180}
SHARDS = dataclasses.replace(
    test_shards.CASE, lead=(300,), dim=192, teacher_dim=128, vocab=8192, teacher_vocab=8192, options=_OF_SHARDS
)


@DTYPES
@every_kind
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_have_the_bits_of_whole_heads(kernels, kind, dtype, count):
    """One after the other on one GPU; and at the same time, where there are as many."""
    case = of_kind(SHARDS, kind)
    problem = divergences.make(case, dtype)
    expected = divergences.found(case, problem, kernels)
    spoilt = with_anything_where_nothing_counts(problem, case)
    assert_same_bits(one_rank_after_another(case, spoilt, kernels, count), expected)
    if jax.device_count() >= count:
        assert_same_bits(test_shards.found(case, spoilt, kernels, count, reduction="canonical"), expected)


@DTYPES
@every_kind
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_have_the_bits_of_a_whole_head_beside_a_list(kernels, kind, dtype, count):
    """One after the other on one GPU."""
    case = dataclasses.replace(test_list_shards.CASE, tokens=300)
    problem = listed.make(case, dtype)
    options = KlOptions(kind=kind, beta=listed.BETA, **case.options)
    expected = listed.found(case, problem, kind, kernels)
    assert_same_bits(list_one_rank_after_another(options, problem, kernels, count), expected)


@every_kind
def test_memory(kernels, kind):
    """Beside the budget are the float32 sum of dH, its rounded rows, and a few numbers per token."""
    tokens, dim, vocab, budget = 4096, 2048, 65536, 256 * 2**20
    spec = jax.ShapeDtypeStruct
    shapes = [spec(x, jnp.bfloat16) for x in ((tokens, dim), (vocab, dim)) * 2]

    def loss(*operands):
        return linear_kl(*operands, kind=kind, implementation=kernels, memory_budget=budget).sum()

    for program, allowed in ((loss, budget), (jax.grad(loss, (0, 1)), budget + 6 * tokens * dim)):
        held = jax.jit(program).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        assert held <= allowed + 1024 * tokens, f"{held / 2**20:.0f} MiB of {allowed / 2**20:.0f}"


def test_it_is_chosen():
    """bfloat16 and float16 go to the kernels, and lists of tokens too; other dtypes go to XLA, which says why."""
    problem = divergences.make(Case("chosen", (4,)), jnp.bfloat16)
    operands = problem[:4]
    assert rlk_jax.explain("linear_kl", *operands).choice == "mosaic"
    assert_same_bits(linear_kl(*operands), linear_kl(*operands, implementation="mosaic"))
    for changed in ((*operands[:2], *(x.astype(jnp.float32) for x in operands[2:])), [x[..., :5] for x in operands]):
        decision = rlk_jax.explain("linear_kl", *changed)
        assert decision.choice == "xla" and decision.reasons["mosaic"]
    listed = {"teacher_ids": jnp.zeros((4, 1), jnp.int32), "teacher_logps": jnp.zeros((4, 1))}
    assert rlk_jax.explain("linear_kl", *operands[:2], **listed).choice == "mosaic"


def test_vmap(kernels):
    problem = divergences.make(dataclasses.replace(BITS, lead=(4, 50)), jnp.bfloat16)
    operands = problem[:4]
    heads = {"implementation": kernels, "global_vocab_size": 5000}
    expected = linear_kl(*operands, **heads)
    found = jax.vmap(lambda h, th: linear_kl(h, operands[1], th, operands[3], **heads))
    assert_same_bits(found(operands[0], operands[2]), expected)


@DTYPES
@every_kind
@pytest.mark.parametrize("case", LISTS, ids=str)
def test_lists(kernels, case, kind, dtype):
    """The definition; and a row has its bits alone, where the budget holds one chunk of columns at a time."""
    problem = listed.make(case, dtype)
    actual, expected = listed.found(case, problem, kind, kernels), listed.gold(case, problem, kind)
    op_class = f"{case.op_class}_wgmma"
    assert_within_contract(actual.values, expected.values, op_class, dtype, "forward")
    for name in ("hidden", "weight", "bias"):
        if getattr(expected, name) is not None:
            assert_within_contract(getattr(actual, name), getattr(expected, name), op_class, dtype, "gradient")
    row = int(np.flatnonzero(problem.mask)[100])
    names = set(problem._fields) - {"weight", "bias"}
    rows = {x: getattr(problem, x)[row : row + 1] for x in names if np.ndim(getattr(problem, x))}
    cut = dataclasses.replace(case, name="cut", options=case.options | {"memory_budget": 1})
    alone = listed.found(cut, problem._replace(**rows), kind, kernels)
    assert_same_bits(alone[:2], (actual.values[row : row + 1], actual.hidden[row : row + 1]))
