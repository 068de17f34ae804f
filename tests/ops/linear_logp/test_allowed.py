"""linear_logp over the tokens that each row allows: values, bits, shards, transformations, messages."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rlk_jax
from rlk_jax import linear_logp, vocab_parallel
from rlk_jax.core.allowed import words_from
from tests.support import helpers
from tests.support.allowed import EVERYTHING, allowed_of, ids_of, mask_of
from tests.support.helpers import Case, Problem, assert_same_bits, assert_within_contract

IN_PARTS = ("xla", "deterministic")
every_implementation = pytest.mark.parametrize("implementation", helpers.IMPLEMENTATIONS)
PLAIN = Case("plain", (37,), 24, 301)


def outputs(case: Case, problem: Problem, implementation: str, **given: Any) -> Any:
    return problem.values_and_gradients(case, implementation, **given)


def outside_jit(case: Case, problem: Problem, implementation: str, **given: Any) -> Any:
    """The same outside jit, where every form of a mask leads to one program."""

    def loss(operands: Any) -> Any:
        hidden, weight, bias = operands
        values = problem._replace(hidden=hidden, weight=weight, bias=bias).call(case, implementation, **given)
        return helpers.weighted(values, problem.upstream), values

    gradients, values = jax.grad(loss, has_aux=True)((problem.hidden, problem.weight, problem.bias))
    return values, tuple(x for x in gradients if x is not None)


def assert_gold(case: Case, problem: Problem, allowed: np.ndarray, found: Any, dtype: Any) -> None:
    expected = helpers.gold(helpers.with_options(case, allowed=allowed.reshape(-1, case.vocab)), problem)
    for actual, right in zip(found[0], expected.values, strict=True):
        assert_within_contract(actual, right, "linear_logp", dtype, "forward")
    for actual, right in zip(found[1], expected.gradients, strict=True):
        assert_within_contract(actual, right, "linear_logp", dtype, "gradient")


# Ids and a mask become the same words, whatever the implementation. In `make test` the programs of float32 and a mask
# are those of the tests below.
@helpers.cover(
    "implementation, dtype, form",
    [
        *((x, y, ("ids", "mask")[i % 2]) for i, x in enumerate(helpers.IMPLEMENTATIONS) for y in helpers.DTYPES[1:]),
        *((x, jnp.float32, z) for x in helpers.IMPLEMENTATIONS for z in ("ids", "mask")),
    ],
    lambda x, y, z: (y, z) == (jnp.float32, "mask") or (x, y) == ("xla", jnp.bfloat16),
)
def test_against_float64(implementation, dtype, form):
    """Ignored rows may allow nothing, and hold NaN."""
    problem = helpers.make(EVERYTHING, dtype)
    allowed, ignored = allowed_of(EVERYTHING, problem), np.arange(70) % 5 == 2
    nothing = np.where(ignored[:, None], False, allowed)
    given = problem._replace(
        target_ids=jnp.where(ignored, -1, problem.target_ids),
        hidden=jnp.where(ignored[:, None], jnp.nan, problem.hidden),
    )
    mask = {"allowed_ids": ids_of(nothing)} if form == "ids" else {"allowed_mask": mask_of(nothing)}
    values, (d_hidden, *d_head) = outputs(EVERYTHING, given, implementation, **mask)
    assert not any(np.asarray(x)[ignored].any() for x in (*values, d_hidden))
    kept = np.flatnonzero(~ignored)
    small = Case("kept rows", (len(kept),), 40, 300, options=EVERYTHING.options)
    found = tuple(x[kept] for x in values), (d_hidden[kept], *d_head)
    assert_gold(small, helpers.rows_of(problem, kept), allowed[kept], found, dtype)


SEVERAL = Case("several blocks", (130,), 24, 1000, bias=True)


# In `make test`, the tests of any order and of rows that are anywhere catch what is wrong with calls outside jit and
# with ids, which become the same words.
@helpers.cover(
    "case, implementation, form, called",
    [
        (EVERYTHING, "xla", "mask", "in a program"),
        (EVERYTHING, "deterministic", "mask", "in a program"),
        (SEVERAL, "xla", "ids", "outside jit"),
        (PLAIN, "deterministic", "ids", "outside jit"),
    ],
    lambda case, implementation, form, called: called == "in a program",
)
def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask(case, implementation, form, called):
    problem, run = helpers.make(case, jnp.float32), outputs if called == "in a program" else outside_jit
    every = np.ones((*case.lead, case.vocab), bool)
    given = {"allowed_ids": ids_of(every)} if form == "ids" else {"allowed_mask": mask_of(every) | np.uint32(2**32 - 1)}
    assert_same_bits(run(case, problem, implementation, **given), run(case, problem, implementation))


# What becomes of ids and masks stands before all implementations: in `make test`, xla catches its bug.
@helpers.cover("implementation", [(x,) for x in IN_PARTS], lambda x: x == "xla")
def test_ids_in_any_order_and_masks_give_the_same_bits(implementation):
    problem = helpers.make(EVERYTHING, jnp.bfloat16)
    allowed = allowed_of(EVERYTHING, problem)
    run = functools.partial(outside_jit, EVERYTHING, problem, implementation)
    expected = run(allowed_ids=ids_of(allowed))
    assert_same_bits(run(allowed_ids=ids_of(allowed, seed=1)), expected)
    behind = np.where(np.arange(300) < 290, allowed, True)  # bits behind the vocabulary
    for words in (mask_of(allowed), mask_of(behind, np.int32), mask_of(np.pad(behind, ((0, 0), (0, 20)), mode="edge"))):
        assert_same_bits(run(allowed_mask=words), expected)


# Rows of EVERYTHING that allow their target alone are in the float64 test of every implementation.
@helpers.implementations("xla")
def test_the_target_alone(implementation):
    """K = 1: the only outcome has log-prob 0, and nothing has a gradient."""
    problem = helpers.make(PLAIN, jnp.float32)
    zeros = jnp.zeros(PLAIN.lead)
    problem = problem._replace(upstream=(problem.upstream[0], zeros, problem.upstream[2]))
    values, gradients = outputs(PLAIN, problem, implementation, allowed_ids=problem.target_ids[:, None])
    assert not np.asarray(values.logp).any() and not np.asarray(values.entropy).any()
    assert not any(np.asarray(x).any() for x in gradients)
    logits = np.take_along_axis(helpers.gold(PLAIN, problem).logits, np.asarray(problem.target_ids)[:, None], 1)
    assert_within_contract(values.lse, logits[:, 0], "linear_logp", jnp.float32, "forward")


@every_implementation
def test_what_is_not_allowed_may_be_nan_or_infinite(implementation):
    """The softcap's derivative is formed from the logit, and 0·NaN is NaN. An ignored row is allowed every column."""
    problem = helpers.make(EVERYTHING, jnp.float32)
    allowed = allowed_of(EVERYTHING, problem)
    bad = np.setdiff1d(np.arange(0, 290, 3), np.asarray(problem.target_ids))
    allowed[:, bad] = False
    problem = problem._replace(target_ids=problem.target_ids.at[3].set(-1))
    given = {"allowed_mask": mask_of(allowed), "ignore_index": -1}
    broken = np.asarray(problem.bias).copy()
    broken[bad] = np.resize([np.nan, np.inf, -np.inf], len(bad))
    found, expected = (
        outputs(EVERYTHING, problem._replace(bias=bias), implementation, **given)
        for bias in (jnp.asarray(broken), problem.bias)
    )
    assert_same_bits(found, expected)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found))
    assert not any(np.asarray(x)[bad].any() for x in found[1][1:])


def test_rows_keep_their_bits_in_any_batch_and_budget():
    problem = helpers.make(EVERYTHING, jnp.float32)
    mask, few = mask_of(allowed_of(EVERYTHING, problem)), np.asarray([40, 3, 3, 69])
    values, (d_hidden, *_) = outputs(EVERYTHING, problem, "deterministic", allowed_mask=mask)
    small = Case("few", (4,), 40, 300, options=EVERYTHING.options)
    found = outputs(small, helpers.rows_of(problem, few), "deterministic", allowed_mask=mask[few], memory_budget=1)
    assert_same_bits((*found[0], found[1][0]), [x[few] for x in (*values, d_hidden)])


def test_ids_become_words_in_slices_within_the_budget():
    """60 000 ids in each of 64 rows take 61 MB at once, and an expanded mask 4 MB in bytes."""
    shapes = [(64, 8), (60000, 8), (64,), (64, 60000)]
    arrays = [jax.ShapeDtypeStruct(x, kind) for x, kind in zip(shapes, ("f", "f", "i", "i"), strict=True)]
    call = lambda h, w, t, ids: linear_logp(h, w, t, allowed_ids=ids, memory_budget=2**22)  # noqa: E731
    found = jax.jit(call).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert found < 26 * 2**20
    case = Case("slices", (100,), 8, 300)
    problem = helpers.make(case, jnp.float32)
    ids = ids_of(allowed_of(case, problem))
    expected = problem.call(case, "xla", allowed_ids=ids)
    sliced = problem.call(case, "xla", allowed_ids=ids, memory_budget=16 * ids.size // 2)
    assert_within_contract(sliced.lse, expected.lse, "linear_logp", jnp.float32, "forward")


def test_words_from_any_column():
    allowed = np.random.default_rng(0).random((3, 1000)) < 0.5
    for start in (0, 1, 31, 32, 125, 990, 2000):
        found = words_from(mask_of(allowed), jnp.asarray(start), 125)
        assert found.shape == (3, 4)
        here = np.pad(allowed, ((0, 0), (0, 2125)))[:, start : start + 125]
        unpacked = np.unpackbits(np.asarray(found).view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(unpacked[:, :125], here)


def sharded(case: Case, problem: Problem, mesh: Mesh, implementation: str, **given: Any) -> Any:
    """Values and gradients of vocab_parallel.linear_logp on a padded head."""

    def loss(operands: Any) -> Any:
        hidden, weight, bias = operands
        values = vocab_parallel.linear_logp(
            hidden,
            vocab_parallel.pad_lm_head(weight, mesh.shape["tp"]),
            problem.target_ids,
            None if bias is None else vocab_parallel.pad_lm_head(bias, mesh.shape["tp"]),
            mesh=mesh,
            vocab_axis="tp",
            token_axes="data" if "data" in mesh.shape else None,
            temperature=problem.temperature,
            implementation=implementation,
            **{"return_lse": True, "return_entropy": True, "global_vocab_size": case.vocab, **case.options, **given},
        )
        return helpers.weighted(values, problem.upstream), values

    operands = (problem.hidden, problem.weight, problem.bias)
    gradients, values = jax.jit(jax.grad(loss, has_aux=True))(operands)
    return values, tuple(x for x in gradients if x is not None)


QWEN = Case("qwen3", (6,), 8, 151936, bias=True), {"tp": 8}, "deterministic"
SMALL = (
    *(Case("small", (8,), 24, 1000, temperature="per token", options={"logit_softcap": 5.0}), {"data": 2, "tp": 4}),
    "xla",
)


# Shards of xla end inside words in test_bare_calls_over_a_mesh. The kind of the axes and the implementation meet in no
# code: in `make test`, each of them is there once.
@helpers.cover(
    "case, axes, implementation, kind",
    [(*x, kind) for x in (QWEN, SMALL) for kind in (AxisType.Auto, AxisType.Explicit)],
    lambda case, axes, implementation, kind: (implementation == "xla") == (kind == AxisType.Explicit),
)
def test_a_head_spread_over_a_mesh(case, axes, implementation, kind):
    """Groups of 151936 columns begin inside a word: 18992 = 32 · 593.5."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=jax.devices()[:8])
    problem = helpers.make(case, jnp.float32)
    allowed = allowed_of(case, problem)
    found = sharded(
        case,
        problem,
        mesh,
        implementation,
        allowed_mask=mask_of(allowed),
        reduction="canonical" if implementation == "deterministic" else "sum",
    )
    assert_gold(case, problem, allowed, found, jnp.float32)
    if implementation == "deterministic":
        assert_same_bits(found, outputs(case, problem, implementation, allowed_mask=mask_of(allowed)))


# In `make test`, one case cuts the vocabulary over both axes, one of which has the tokens, and one cuts D.
@helpers.cover(
    "head",
    [(P("x"),), (P(None, "x"),), (P(("x", "y")),), (P(),)],
    lambda head: head in (P(None, "x"), P(("x", "y"))),
)
def test_bare_calls_over_a_mesh(head):
    """XLA cuts the call along tokens and columns; 1000 columns over four devices begin inside words."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    case = Case("bare", (24,), 40, 1000, bias=True)
    problem = helpers.make(case, jnp.float32)
    allowed = allowed_of(case, problem)
    lay = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    laid = problem._replace(
        hidden=lay(problem.hidden, P("y")), target_ids=lay(problem.target_ids, P("y")), weight=lay(problem.weight, head)
    )
    found = outputs(case, laid, "xla", allowed_ids=lay(ids_of(allowed), P("y")))
    assert_gold(case, problem, allowed, found, jnp.float32)


def test_bare_calls_over_explicit_axes():
    """Allowed tokens lie as the ids do, by their types."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    case = Case("bare", (24,), 40, 1000)
    problem = helpers.make(case, jnp.float32)
    allowed = allowed_of(case, problem)
    lay = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    hidden, ids = lay(problem.hidden, "data"), lay(problem.target_ids, "data")
    with jax.set_mesh(mesh):
        logp = linear_logp(hidden, lay(problem.weight, "tensor"), ids, allowed_mask=lay(mask_of(allowed), "data"))
        with pytest.raises(ValueError, match="target_ids must be allowed"):
            linear_logp(
                hidden, lay(problem.weight, "tensor"), ids, allowed_ids=lay(problem.target_ids[:, None] ^ 1, "data")
            )
    expected = helpers.gold(helpers.with_options(case, allowed=allowed), problem).values[0]
    assert_within_contract(logp, expected, "linear_logp", jnp.float32, "forward")


def test_lead_dimensions_jit_vmap_and_shards_of_tokens():
    problem = helpers.make(PLAIN, jnp.float32)
    allowed = mask_of(allowed_of(PLAIN, problem))[:36]
    flat = problem.hidden[:36], problem.target_ids[:36], allowed
    folded = [x.reshape(4, 3, 3, *x.shape[1:]) for x in flat]

    def of_rows(h: Any, t: Any, words: Any) -> Any:
        return linear_logp(h, problem.weight, t, allowed_mask=words, implementation="deterministic")

    def with_gradient(f: Any) -> Any:
        def loss(*x: Any) -> Any:
            logp = f(*x)
            return logp.sum(), logp

        return jax.jit(jax.grad(loss, has_aux=True))

    d_hidden, expected = with_gradient(of_rows)(*flat)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = jax.shard_map(jax.vmap(of_rows), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = with_gradient(spread)(*folded)
    assert_same_bits((found[0].reshape(36, -1), found[1].reshape(36)), (d_hidden, expected))


def test_no_tokens_and_no_ids():
    assert linear_logp(H[:0], W, IDS[:0], allowed_ids=ALL[:0]).shape == (0,)
    none = linear_logp(H, W, jnp.full(3, -1), allowed_ids=ALL[:, :0], ignore_index=-1)
    assert not np.asarray(none).any()


def test_no_implementation_refuses_a_mask():
    assert rlk_jax.explain("linear_logp", H, W, IDS, allowed_ids=ALL) == rlk_jax.explain("linear_logp", H, W, IDS)


H, W, IDS = jnp.ones((3, 8)), jnp.ones((40, 8)), jnp.asarray([0, 1, 39])
ALL = jnp.tile(jnp.arange(40), (3, 1))
WORDS = jnp.full((3, 2), -1, jnp.int32)
SHAPE_OF_IDS = "allowed_ids must be [*lead, K] with target_ids' lead shape (3,), got shape "
SHAPE_OF_MASK = "allowed_mask must be [*lead, ceil(V / 32)] with target_ids' lead shape (3,) and 2 words, got shape "
STATIC = {
    "both": (
        {"allowed_ids": ALL, "allowed_mask": WORDS},
        "allowed_ids and allowed_mask say the same: give one of them.",
    ),
    "ids without K": ({"allowed_ids": IDS}, SHAPE_OF_IDS + "(3,)."),
    "ids of other rows": ({"allowed_ids": ALL[:2]}, SHAPE_OF_IDS + "(2, 40)."),
    "float ids": ({"allowed_ids": ALL.astype(float)}, "allowed_ids must be integers, got float32."),
    "list of ids": ({"allowed_ids": [[0]]}, "allowed_ids must be a JAX or NumPy array, got builtins.list."),
    "words of another width": ({"allowed_mask": WORDS[:, :1]}, SHAPE_OF_MASK + "(3, 1)."),
    "words of neither vocabulary": (
        {"allowed_mask": WORDS[:, [0, 0, 0]], "global_vocab_size": 20},
        "(3,) and 1 or 2 words, got shape (3, 3).",
    ),
    "words of other rows": ({"allowed_mask": WORDS[0]}, SHAPE_OF_MASK + "(2,)."),
    "bytes": ({"allowed_mask": WORDS.astype(jnp.uint8)}, "token 32·j + i, got uint8."),
    "bools": ({"allowed_mask": WORDS.astype(bool)}, "allowed_mask must be int32 or uint32, of which"),
    "float words": ({"allowed_mask": WORDS.astype(float)}, "token 32·j + i, got float32."),
    "list of words": ({"allowed_mask": [[0]]}, "allowed_mask must be a JAX or NumPy array, got builtins.list."),
}
OUT_OF_RANGE = "allowed_ids out of range: expected [0, 39], or -1 as padding, got values in "
NOTHING = "every token that counts needs an allowed id: rows 1 to 1 of the flat tokens have none."
NO_TARGET = "target_ids must be allowed: they are not in rows 1 to 1 of the flat tokens."
VALUES = {
    "id V": ({"allowed_ids": ALL.at[1, 7].set(40)}, OUT_OF_RANGE + "[0, 40]."),
    "id below -1": ({"allowed_ids": ALL.at[1, 7].set(-2)}, OUT_OF_RANGE + "[-2, 39]."),
    "id that would wrap": (
        {"allowed_ids": np.asarray(ALL) + np.asarray([[0], [2**32], [0]])},
        OUT_OF_RANGE + "[0, 2147483647].",
    ),
    "id in the padding": (
        {"allowed_ids": (ALL % 38).at[1].set(38), "global_vocab_size": 38, "target_ids": IDS % 38},
        "allowed_ids out of range: expected [0, 37], or -1 as padding, got values in [0, 38].",
    ),
    "nothing": ({"allowed_ids": ALL.at[1].set(-1)}, NOTHING),
    "no bits": ({"allowed_mask": WORDS.at[1].set(0)}, NOTHING),
    "bits behind the vocabulary": ({"allowed_mask": WORDS.at[1].set(jnp.asarray([0, -256]))}, NOTHING),
    "another target": ({"allowed_ids": ALL.at[1].set(5)}, NO_TARGET),
    "another bit": ({"allowed_mask": WORDS.at[1].set(~2)}, NO_TARGET),
}


def call_of(given: dict[str, Any], **options: Any) -> Any:
    return linear_logp(H, W, **{"target_ids": IDS, **given, **options})


@pytest.mark.parametrize("what", [*STATIC, *VALUES])
def test_messages(what):
    given, message = (STATIC | VALUES)[what]
    for validate in (None, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            call_of(given, validate=validate)
    if what in STATIC:
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(lambda: call_of(given, validate=False))


def test_masks_under_jit_cannot_be_validated():
    call = jax.jit(lambda words: linear_logp(H, W, IDS, allowed_mask=words, validate=True))
    with pytest.raises(ValueError, match="validate=True needs concrete target_ids"):
        call(WORDS)


def of_given(implementation: str, vocab: int, given: dict[str, Any]) -> Any:
    """The gradients and values of a call, and its error under checkify."""
    call = functools.partial(
        linear_logp, **{"target_ids": IDS, **given}, global_vocab_size=vocab, implementation=implementation
    )

    def loss(hidden: Any, weight: Any) -> Any:
        values = call(hidden, weight, return_lse=True, return_entropy=True, validate=False)
        return sum(x.sum() for x in values), values

    return jax.grad(loss, (0, 1), has_aux=True)(H, W), checkify.checkify(call)(H, W)[0]


jitted_of_given = jax.jit(of_given, static_argnums=(0, 1))


# What marks a row stands in core, for all implementations: in `make test`, xla catches its bug. An id in the padding is
# found as an id V is, and test_messages has its message.
@helpers.cover(
    "what, implementation",
    [*((x, "xla") for x in VALUES), *((x, helpers.IMPLEMENTATIONS[1 + i % 2]) for i, x in enumerate(VALUES))],
    lambda what, implementation: implementation == "xla" and what != "id in the padding",
)
def test_a_bad_row_is_nan_and_reported(what, implementation):
    given, message = VALUES[what]
    arrays = {name: x for name, x in given.items() if name != "global_vocab_size"}
    call = functools.partial(jitted_of_given, implementation, given.get("global_vocab_size", 40), arrays)
    if what == "id that would wrap":  # An argument of a program has 32 bits.
        call = jax.jit(functools.partial(of_given, *call.args))
    ((d_hidden, d_weight), values), error = call()
    for x in (*values, d_hidden):
        np.testing.assert_array_equal(np.isnan(np.asarray(x)).reshape(3, -1).all(1), [False, True, False])
        assert np.isfinite(np.asarray(x)[[0, 2]]).all()
    assert np.isnan(np.asarray(d_weight[:38])).all()
    assert message in str(error.get())


def test_ignored_rows_may_hold_anything():
    """Under jax_debug_nans, too."""
    bad = ALL.at[1].set(99).at[2].set(-1)
    ids = jnp.asarray([0, -1, -1])
    with jax.debug_nans(True):
        found = linear_logp(H, W, ids, allowed_ids=bad, ignore_index=-1, return_entropy=True)
    assert not np.asarray(found.logp)[1:].any() and np.isfinite(found.logp[0])


OUT_OF_RANGE = "ids out of range: expected [0, 2147483647], or -1 as padding, got values in"


def test_rows_that_vllm_gives():
    found = rlk_jax.padded_allowed_ids(np.asarray([7, 3, 9, 4]), jnp.asarray([0, 2, 2, 3, 4]))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, [[7, 3], [-1, -1], [9, -1], [4, -1]])
    padded = rlk_jax.padded_allowed_ids(np.asarray([7, -1, 9]), jnp.asarray([0, 2, 3]))
    np.testing.assert_array_equal(padded, [[7, -1], [9, -1]])
    np.testing.assert_array_equal(rlk_jax.padded_allowed_ids(IDS[:0], jnp.zeros(3, int)), [[-1], [-1]])


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (IDS, jnp.asarray([0, 2]), "offsets must ascend from 0 to the number of ids, 3."),
        (IDS, jnp.asarray([1, 3]), "offsets must ascend from 0 to the number of ids, 3."),
        (IDS, jnp.asarray([0, 2, 1, 3]), "offsets must ascend from 0 to the number of ids, 3."),
        (IDS, IDS[:0], "offsets must ascend from 0 to the number of ids, 3."),
        (IDS[None], jnp.asarray([0, 3]), "ids must be 1-D, got shape (1, 3)."),
        (IDS, jnp.asarray([0.0, 3.0]), "offsets must be integers, got float32."),
        ([1], jnp.asarray([0, 1]), "ids must be a JAX or NumPy array, got builtins.list."),
        (np.asarray([5, 2**32 + 3]), jnp.asarray([0, 2]), f"{OUT_OF_RANGE} [5, 4294967299]."),
        (np.asarray([-(2**31) - 1]), IDS[:2], f"{OUT_OF_RANGE} [-2147483649, -2147483649]."),
        (jnp.asarray([3, -2]), jnp.asarray([0, 2]), f"{OUT_OF_RANGE} [-2, 3]."),
        (IDS, np.asarray([2**32, 3]), "offsets must ascend from 0 to the number of ids, 3."),
    ],
)
def test_messages_of_padded_allowed_ids(ids, offsets, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rlk_jax.padded_allowed_ids(ids, offsets)


def test_padded_allowed_ids_needs_values():
    with pytest.raises(ValueError, match=r"ids must be concrete: the width of the result depends on their values\."):
        jax.jit(lambda x: rlk_jax.padded_allowed_ids(x, jnp.asarray([0, 3])))(IDS)
