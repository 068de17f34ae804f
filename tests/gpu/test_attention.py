"""attention by its kernels on a GPU: accuracy, raw bits at real sizes, NaN beside a sequence, transformations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.ops.attention.api import attention
from tests.support import attention as support
from tests.support.attention import Case
from tests.support.helpers import assert_same_bits, assert_within_contract

SEGMENTS = (*(0,) * 41, *(41,) * 101, *(142,) * 158)
CASES = {
    "odd": Case(length=301, slots=420, start=100, padding=(7, 33)),
    "several": Case(batch=1, length=300, slots=300, segment_starts=(SEGMENTS,)),
    "window": Case(batch=1, length=700, slots=700, groups=1, options={"sliding_window": 150}),
    "softcap": Case(length=200, slots=200, options={"logit_softcap": 1.5, "scale": 0.5}),
    "one query": Case(length=1, start=299, slots=400, heads=16, groups=4, padding=(0, 120)),
    "multi-query": Case(length=129, slots=129, heads=12, groups=1),
}
SIZES = (16, 64, 80, 96, 128, 192, 256)
ALONE = Case(batch=1, length=1300, slots=1300, heads=8, groups=2)
OPTIONS = ({}, {"sliding_window": 300, "logit_softcap": 2.0})


def check(case: Case, dtype, implementation: str = "mosaic") -> None:
    problem = support.make(case, dtype)
    actual, expected = support.found(case, problem, implementation), support.gold(case, problem)
    op_class = "attention" if case.peak == 1 else "attention_peaked"
    assert_within_contract(actual.output, expected.output, op_class, dtype, "forward")
    for a, e in zip(actual[1:], expected[1:], strict=True):
        assert_within_contract(a, e, op_class, dtype, "gradient")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, size):
    check(replace(CASES[name], size=size, value_size=size), jnp.bfloat16)


@pytest.mark.parametrize("changes", [{"peak": 12.0}, {"size": 128, "value_size": 64}, {"size": 64, "value_size": 192}])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_peaked_rows_and_values_of_another_size(dtype, changes):
    check(replace(CASES["odd"], **{"size": 128, "value_size": 128, **changes}), dtype)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=str)
def test_xla_takes_cudnn_for_whole_sequences(size, options):
    """Then it holds no scores, and is as accurate; other calls are XLA's."""
    whole = Case(length=300, slots=300, heads=8, groups=2, size=size, value_size=size, options=options)
    check(whole, jnp.bfloat16, "xla")
    problem = support.make(whole, jnp.bfloat16)

    def text(**places):
        def call(query, key, value):
            return attention(query, key, value, implementation="xla", **options, **places)

        return jax.jit(call).lower(problem.query, problem.key, problem.value).as_text()

    assert "cudnn" in text() and "cudnn" not in text(start=jnp.int32(0))


@pytest.mark.parametrize("length", [1, 150])
def test_places_that_do_not_fit_are_nan_rows(length):
    """Also of a query that is decoded: there is no row of several sequences among those."""
    support.check_places_that_do_not_fit(Case(length=length, slots=300, size=64, value_size=64), jnp.bfloat16, "mosaic")


def of_size(size: int, options) -> Case:
    return replace(ALONE, size=size, value_size=size, options=options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_bits_alone_in_a_batch_and_behind_any_padding(size, options):
    places = ((0, 1300, 0), (1, 1301, 2), (63, 1400, 1))
    support.check_bits_alone_in_a_batch_and_behind_padding(of_size(size, options), jnp.bfloat16, "mosaic", places)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_bits_packed_at_many_offsets(size, options):
    support.check_bits_packed(of_size(size, options), jnp.bfloat16, "mosaic", (7, 100, 129), behind=70)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_bits_in_parts_and_decoded(size, options):
    """Decoding is a kernel of its own, which takes the keys span by span."""
    parts = ((500, 800), (1000, *(1,) * 100, 200), (64, 65, 1, 1170), (1299, 1))
    support.check_bits_in_parts(of_size(size, options), jnp.bfloat16, "mosaic", parts, slots=1500)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 2500}], ids=str)
@pytest.mark.parametrize("slots", [4500, 34000])
def test_bits_decoded_over_many_spans(slots, options):
    """Four spans are merged at a time, and of more than 32 in several rounds."""
    case = Case(batch=1, length=slots, slots=slots, heads=4, groups=1, size=128, value_size=128, options=options)
    query, key, value, _ = support.make(case, jnp.bfloat16)
    whole = attention(query, key, value, implementation="mosaic", **options)
    decode = jax.jit(lambda query, start: attention(query, key, value, start=start, implementation="mosaic", **options))
    for at in (0, 1024, 3071, 3072, 4095, 4499, slots // 2, slots - 1500, slots - 1):
        assert_same_bits(decode(query[:, at : at + 1], jnp.int32(at)), whole[:, at : at + 1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_bits_of_query_gradients_in_parts(size, options):
    """The softmax totals of decoding are used there, too."""
    parts = (1000, 1, 63, *(1,) * 5, 231)
    support.check_query_gradients_in_parts(of_size(size, options), jnp.bfloat16, "mosaic", parts, slots=1500)


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_bits_in_a_batch_of_any_size_and_run_to_run(batch):
    case = Case(batch=batch, length=130, slots=130, heads=4, groups=2, size=128, value_size=128)
    problem = support.make(case, jnp.bfloat16)
    together = support.found(case, problem, "mosaic")
    assert_same_bits(support.found(case, problem, "mosaic"), together)
    rows = [support.Problem(*(x[i : i + 1] for x in problem)) for i in (0, batch // 2, batch - 1)]
    for i, row in zip((0, batch // 2, batch - 1), rows, strict=True):
        assert_same_bits(support.found(replace(case, batch=1), row, "mosaic"), [x[i : i + 1] for x in together])


@pytest.mark.parametrize("size", [64, 256])
def test_slots_that_no_query_sees_may_hold_anything(size):
    case = replace(CASES["odd"], size=size, value_size=size)
    problem = support.make(case, jnp.bfloat16)
    unseen = np.zeros((2, 420, 1, 1), bool)
    unseen[:, 401:], unseen[0, :7], unseen[1, :33] = True, True, True
    spoilt = problem._replace(
        key=jnp.where(unseen, jnp.nan, problem.key), value=jnp.where(unseen, jnp.inf, problem.value)
    )
    assert_same_bits(support.found(case, spoilt, "mosaic"), support.found(case, problem, "mosaic"))


@pytest.mark.parametrize(("name", "bad"), [("key", np.nan), ("value", np.inf), ("value", np.nan)])
def test_what_is_not_finite_reaches_its_own_sequence_alone(name, bad):
    case = replace(CASES["several"], size=64, value_size=64)
    problem = support.make(case, jnp.bfloat16)
    spoilt = problem._replace(**{name: getattr(problem, name).at[0, 60, 1].set(bad)})
    actual, clean = (support.found(case, x, "mosaic") for x in (spoilt, problem))
    assert np.isnan(np.asarray(actual.output[0, 60:142, 2:], np.float32)).all()
    others = np.r_[0:41, 142:300]
    assert_same_bits([x[0, others] for x in actual], [x[0, others] for x in clean])


def test_transformations_keep_the_bits():
    case = replace(CASES["odd"], size=64, value_size=64)
    problem = support.make(case, jnp.bfloat16)
    expected = support.found(case, problem, "mosaic")
    assert_same_bits(jax.jit(lambda x: support.found(case, x, "mosaic"))(problem), expected)

    def one(query, key, value, padding):
        return attention(query[None], key[None], value[None], start=100, padding=padding[None])[0]

    def loss(*arrays):
        return jnp.vdot(jax.vmap(one)(*arrays, jnp.asarray(case.padding)), problem.upstream)

    assert_same_bits(jax.vmap(one)(*problem[:3], jnp.asarray(case.padding)), expected.output)
    assert_same_bits(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*problem[:3]), expected[1:])
