"""rlk_jax.nn: a model whose tokens keep their bits alone, in a batch, padded, and decoded one by one."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from rlk_jax import nn
from rlk_jax.core.fixed_order import sum_rows_by_id
from tests.support import helpers, quick
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.invariant_model import Decoder, decode, stock

VOCAB, LENGTH = 64, 11
BATCH = 8
"""Sequences, whose tokens are more than one block of 64 rows."""


@functools.cache
def model(build=Decoder):
    return build(VOCAB, width=32, layers=1, heads=4, groups=2, rngs=nnx.Rngs(0))


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB)


@nnx.jit
def everything(decoder, ids, padding):
    """Logits of every token, and log-probs of the next ones."""
    hidden = decoder(ids, padding)
    return decoder.head.logits(hidden), decoder.head(hidden[:, :-1], ids[:, 1:])


def alone(decoder, ids):
    return everything(decoder, ids[None], jnp.zeros(1, jnp.int32))


@pytest.mark.full
def test_a_sequence_in_a_batch_has_its_own_bits():
    """In `make test`, test_padding_changes_no_bits catches bits that depend on a neighbour or on a row's place: it has
    more than one block of 64 rows too.
    """
    batch = tokens(BATCH, LENGTH)
    together = everything(model(), batch, jnp.zeros(BATCH, jnp.int32))
    for row in (0, 3, BATCH - 1):
        assert_same_bits(tuple(x[row] for x in together), tuple(x[0] for x in alone(model(), batch[row])))


# 64 slots more are a block more, for both sides in one program; shorter padding is inside a block.
@helpers.cover("pad, side", itertools.product([1, 5, 64], ["left", "right"]), lambda pad, side: pad == 64)
def test_padding_changes_no_bits(side, pad):
    ids = tokens(1, LENGTH)[0]
    logits, logps = (x[0] for x in alone(model(), ids))
    noise = tokens(1, pad, seed=9)[0]
    padded = jnp.concatenate([noise, ids] if side == "left" else [ids, noise])
    first = pad if side == "left" else 0
    # Beside a neighbour of other length.
    batch = jnp.stack([padded, tokens(1, LENGTH + pad, seed=3)[0]])
    found = everything(model(), batch, jnp.asarray([first, 0], jnp.int32))
    assert_same_bits(found[0][0, first : first + LENGTH], logits)
    assert_same_bits(found[1][0, first : first + LENGTH - 1], logps)


@helpers.cover("prompt", [(1,), (4,)], lambda prompt: prompt == 4)  # a prompt, and then token by token
def test_decoding_through_the_cache_has_the_bits_of_the_full_forward(prompt):
    batch, padding = tokens(2, LENGTH + 64), jnp.array([0, 2], jnp.int32)  # as in the test above
    whole = everything(model(), batch, padding)[0]
    step_by_step = decode(model(), batch, padding, prompt=prompt, slots=batch.shape[1] + 6)
    real = np.arange(batch.shape[1]) >= np.asarray(padding)[:, None]
    assert_same_bits(np.asarray(step_by_step)[real], np.asarray(whole)[real])


@pytest.mark.full
def test_stock_layers_differ():
    """The same model on nnx's own layers gives other bits in a batch, or decoding, which is what these layers are for.

    This is a control of the comparisons above: no change to rlk_jax can make it fail, so `make test` goes without.
    """
    decoder = model(stock)
    batch = tokens(64, LENGTH)
    padding = jnp.zeros(64, jnp.int32)
    together = everything(decoder, batch, padding)[0]
    one = alone(decoder, batch[0])[0]
    stepped = decode(decoder, batch[:1], padding[:1], prompt=1, slots=LENGTH + 6)
    assert not np.array_equal(together[0], one[0]) or not np.array_equal(stepped[0], one[0])


def test_gradients_flow_to_every_parameter():
    decoder = model()
    ids = tokens(2, LENGTH)

    @nnx.jit
    @nnx.grad
    def gradient(decoder):
        return decoder.head(decoder(ids[:, :-1], jnp.zeros(2, jnp.int32)), ids[:, 1:]).sum()

    with quick.compiled_quickly():
        found = nnx.state(gradient(decoder))
    for path, leaf in jax.tree.leaves_with_path(found):
        assert np.isfinite(leaf).all() and np.any(np.asarray(leaf) != 0), path


@settings(max_examples=3)
@given(st.integers(0, 200), st.integers(0, 200))
def test_ordered_sum_ignores_a_few_zeros_behind(length, more):
    check_zeros_behind(length, more)


@pytest.mark.full  # In `make test`, test_ordered_sum_ignores_a_few_zeros_behind has the first three examples.
@settings(max_examples=10)
@given(st.integers(0, 200), st.integers(0, 200))
def test_ordered_sum_ignores_zeros_behind(length, more):
    check_zeros_behind(length, more)


def check_zeros_behind(length, more):
    x = jax.random.normal(jax.random.key(length), (3, length))
    padded = jnp.pad(x, ((0, 0), (0, more)))
    assert_same_bits(nn.ordered_sum(padded), nn.ordered_sum(x))
    np.testing.assert_array_equal(nn.ordered_sum(jnp.ones((2, length))), np.full(2, length))


# In make test, a row beyond a block of 64; test_ordered_sum_ignores_a_few_zeros_behind has sums of shorter ones.
@helpers.cover("size", [(3,), (7,), (15,), (64,), (100,)], lambda size: size == 100)
def test_layers_have_one_set_of_bits_inside_and_outside_jit(size):
    """And padded: in an eager call XLA would compute each operation by itself."""
    x = 3 * jax.random.normal(jax.random.key(size), (100, size))
    scale = jnp.ones(size)
    norm, alone = jax.jit(nn.rms_norm)(x, scale), nn.rms_norm(x[7:8], scale)
    assert_same_bits((nn.rms_norm(x, scale), alone), (norm, norm[7:8]))
    where = jnp.arange(size + 61) < size
    padded = nn.softmax(jnp.pad(x, ((0, 0), (0, 61))), jnp.broadcast_to(where, (100, size + 61)))
    assert_same_bits((nn.softmax(x), padded[:, :size]), (jax.jit(nn.softmax)(x),) * 2)
    gelu = nn.isolated(jax.nn.gelu)
    assert_same_bits(gelu(x), jax.jit(gelu)(x))
    assert_same_bits(jax.jit(lambda x: gelu(x, approximate=False))(x), gelu(x, approximate=False))


def test_add_rms_norm_is_the_sum_and_its_norm():
    """In bits, inside and outside jit; and its gradient is that of the definition in float64."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, scale = jax.random.normal(keys[0], (2, 5, 24)), jax.random.normal(keys[1], (24,))
    added = jax.random.normal(keys[2], x.shape, jnp.bfloat16)

    def apart(x, added, scale):
        total = nn.isolated(jnp.add)(x, added)
        return total, nn.rms_norm(total, scale, dtype=jnp.bfloat16)

    def together(x, added, scale):
        return nn.add_rms_norm(x, added, scale, dtype=jnp.bfloat16)

    expected = apart(x, added, scale)
    found, pull_back = jax.vjp(together, x, added, scale)
    for result in (found, jax.jit(together)(x, added, scale), jax.vmap(together, (0, 0, None))(x, added, scale)):
        assert_same_bits(result, expected)
    upstream = tuple(jax.random.normal(key, x.shape, y.dtype) for key, y in zip(keys[:2], expected, strict=True))
    total, of_total, of_normalized, wide_scale = (np.asarray(y, np.float64) for y in (found[0], *upstream, scale))
    inverse = 1 / np.sqrt((total**2).mean(axis=-1, keepdims=True) + 1e-6)
    given, unit = of_normalized * wide_scale, total * inverse
    gold = of_total + inverse * (given - unit * (given * unit).mean(axis=-1, keepdims=True))
    for a, e in zip(pull_back(upstream), (gold, gold, (of_normalized * unit).sum(axis=(0, 1))), strict=True):
        assert_within_contract(a, e, "rms_norm", a.dtype, "gradient")
    no_rows = nn.add_rms_norm(x[:0], added[:0], scale, dtype=jnp.bfloat16)
    assert [(y.shape, y.dtype) for y in no_rows] == [((0, 5, 24), jnp.float32), ((0, 5, 24), jnp.bfloat16)]


# In make test, inside jit; what it is compared with is outside.
@helpers.cover("in_jit", [(False,), (True,)], lambda in_jit: in_jit)
def test_split_rotary_is_rotary_of_each_part(in_jit):
    heads, groups, size = 4, 2, 6
    projected = jax.random.normal(jax.random.key(0), (2, 9, (heads + 2 * groups) * size), jnp.bfloat16)
    positions = jnp.arange(9)[None] + jnp.array([[0], [70]])

    def split(projected, positions):
        return nn.split_rotary(projected, nn.rotation(positions, size, base=500.0), heads, groups)

    query, key, value = jnp.split(projected.reshape(2, 9, -1, size), (heads, heads + groups), axis=2)
    expected = nn.rotary(query, positions, base=500.0), nn.rotary(key, positions, base=500.0), value
    assert_same_bits((jax.jit(split) if in_jit else split)(projected, positions), expected)
    nothing = split(projected[:, :0], positions[:, :0])
    assert [x.shape for x in nothing] == [(2, 0, heads, size), (2, 0, groups, size), (2, 0, groups, size)]


def test_a_rotation_by_given_frequencies_turns_as_rotary_does():
    x = jax.random.normal(jax.random.key(0), (2, 9, 4, 6), jnp.bfloat16)
    positions, frequencies = jnp.arange(9)[None] + jnp.array([[0], [70]]), jnp.array([1.0, 0.25, 0.0625])
    found = nn.rotation_by(positions, frequencies)
    assert_same_bits(nn.rotated(x, found), nn.rotary(x, positions, base=64.0))
    assert_same_bits(tuple(nn.rotation_by(positions, frequencies, factor=1.25)), tuple(1.25 * y for y in found))


@helpers.cover("length", [(3,), (64,), (200,)], lambda length: length == 200)  # several blocks, the last one short
def test_ordered_sum_takes_no_part_in_what_surrounds_it(length):
    y, z = (jax.random.normal(jax.random.key(i), (50, length)) for i in range(2))
    product = jax.jit(lambda y, z: nn.ordered_sum(y * z))
    padded = product(*(jnp.pad(x, ((0, 0), (0, 137))) for x in (y, z)))
    assert_same_bits(padded, product(y, z))
    assert nn.ordered_sum(y.astype(jnp.bfloat16)).dtype == jnp.float32


attention = jax.jit(nn.attention)


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """In NumPy, which compiles nothing."""
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)


def queries_keys_values(slots: int = 9, heads: int = 4) -> list[jax.Array]:
    shapes = (2, 9, heads, 16), (2, slots, 2, 16), (2, slots, 2, 16)
    return [normal(i, shape) for i, shape in enumerate(shapes)]


def test_a_later_value_that_is_not_finite_reaches_no_earlier_token():
    q, k, v = queries_keys_values()
    clean = np.asarray(attention(q, k, v))
    for bad in (jnp.nan, jnp.inf):
        spoilt = v.copy()
        spoilt[:, 6] = bad
        found = np.asarray(attention(q, k, spoilt))
        assert_same_bits(found[:, :6], clean[:, :6])
        assert np.isnan(found[:, 6:]).all()


Q = jnp.zeros((2, 5, 4, 8), jnp.bfloat16)
BAD_ATTENTION = {
    "start": ({"start": 3}, "5 queries from slot 3 on do not fit into 5 slots."),
    "slots": ({"key": Q[:, :3, :2], "value": Q[:, :3, :2]}, "5 queries from slot 0 on do not fit into 3 slots."),
    "value": ({"value": Q[:, :4, :2]}, "key and value their slots and heads."),
    "heads": ({"key": Q[:, :, :3], "value": Q[:, :, :3]}, "4 query heads cannot share 3 key heads evenly."),
    "padding": ({"padding": jnp.ones(1, int)}, "padding must be integers of shape (2,), got int32 of shape (1,)."),
    "padding list": ({"padding": [0, 1]}, "padding must be a JAX or NumPy array, got builtins.list."),
    "mask": (
        {"padding": jnp.ones((2, 5), bool)},
        "segment_starts must be integers of shape (2, 5), got bool of shape (2, 5).",
    ),
    "rank": ({"query": Q[0]}, "query must be [batch, slots, heads, size], got shape (5, 4, 8)."),
    "dtype": ({"query": Q.astype(jnp.float32)}, "query must be bfloat16 or float16, got float32."),
    "implementation": ({"implementation": "xla"}, "attention promises no bits with implementation='xla' here."),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_attention_refuses_what_does_not_fit(name):
    changes, message = BAD_ATTENTION[name]
    arguments = {"query": Q, "key": Q[:, :, :2], "value": Q[:, :, :2], **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        nn.attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8)])
def test_no_queries(shape):
    assert nn.attention(jnp.zeros(shape, jnp.bfloat16), Q[: shape[0]], Q[: shape[0]]).shape == shape


def test_other_bad_inputs():
    with pytest.raises(ValueError, match="of an even E"):
        nn.rotary(jnp.ones((1, 2, 3, 5)), jnp.zeros((1, 2), int))
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16"):
        nn.DetDense(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16"):
        nn.LMHead(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0)).logits(jnp.ones(4))


ROW = jnp.ones((2, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.rms_norm(jnp.ones((2, 4), int), ROW[0]), "rms_norm needs floats [*lead, size], got int32"),
        (lambda: nn.rms_norm(ROW, jnp.ones(1)), "rms_norm needs a scale of shape (4,), got (1,)."),
        (lambda: nn.rms_norm(ROW, ROW), "rms_norm needs a scale of shape (4,), got (2, 4)."),
        (lambda: nn.add_rms_norm(ROW, ROW, jnp.ones(1)), "add_rms_norm needs a scale of shape (4,), got (1,)."),
        (
            lambda: nn.add_rms_norm(ROW, ROW[0], ROW[0]),
            "add_rms_norm needs floats of shape (2, 4) to add, got float32 of shape (4,).",
        ),
        (
            lambda: nn.rotation(jnp.zeros((2, 3), int), 5),
            "rotation needs integer positions [B, T] and an even size, got int32 of shape (2, 3) and 5.",
        ),
        (
            lambda: nn.rotation_by(jnp.zeros((2, 3)), jnp.ones(2)),
            "rotation needs integer positions [B, T] and an even size, got float32 of shape (2, 3) and 4.",
        ),
        (
            lambda: nn.rotated(jnp.ones((2, 3, 1, 6)), nn.rotation(jnp.zeros((2, 3), int), 4)),
            "rotated needs x [B, T, H, E] of an even E and a rotation of [B, T, E/2], got shape (2, 3, 1, 6) and a "
            "rotation of (2, 3, 2).",
        ),
        (
            lambda: nn.split_rotary(jnp.ones((2, 3, 24)), nn.rotation(jnp.zeros((2, 3), int), 4), 3, 2),
            "split_rotary needs projected [B, T, (heads + 2·groups)·E] and a rotation of [B, T, E/2], got shape "
            "(2, 3, 24), a rotation of (2, 3, 2), 3 heads and 2 groups.",
        ),
        (
            lambda: nn.split_rotary(jnp.ones((2, 3, 12)), nn.rotation(jnp.zeros((2, 3), int), 4), 5, -1),
            "(2, 3, 12), a rotation of (2, 3, 2), 5 heads and -1 groups.",
        ),
        (lambda: nn.ordered_sum(jnp.float32(1)), "ordered_sum needs floats [*lead, size], got float32 of shape ()."),
        (lambda: nn.softmax(jnp.ones(4, int)), "softmax needs floats [*lead, size], got int32 of shape (4,)."),
        (
            lambda: nn.softmax(ROW, ROW[0] > 0),
            "softmax needs bool where of shape (2, 4), got bool of shape (4,).",
        ),
        (lambda: nn.rotary(jnp.ones((1, 2, 3, 4), int), jnp.zeros((1, 2), int)), "rotary needs floats"),
    ],
)
def test_rows_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_queries_behind_the_cache_are_nan():
    """Where the slot is known to the device alone."""
    attend = jax.jit(lambda start: nn.attention(Q[:, :2] + 1, Q + 1, Q + 1, start=start))
    for start, fits in ((0, True), (3, True), (4, False), (-1, False)):
        found = np.asarray(attend(start), np.float32)
        assert np.isfinite(found).all() == fits and np.isnan(found).all() != fits, start


def test_softmax_of_nothing_is_zero():
    assert_same_bits(nn.softmax(jnp.ones((2, 3)), jnp.zeros((2, 3), bool)), jnp.zeros((2, 3)))


def test_sequences_that_share_a_row_have_the_bits_of_being_alone():
    """And one that holds what is not finite spoils no other."""
    shape, first, end = (1, 100, 4, 16), 50, 100
    q, k, v = (normal(i, shape) for i in range(3))
    padding = np.where(np.arange(end) < first, 0, first)[None]
    alone = [np.asarray(attention(*(x[:, part] for x in (q, k, v)))) for part in (slice(first), slice(first, end))]
    assert_same_bits(attention(q, k, v, padding=padding), np.concatenate(alone, axis=1))
    k[:, 3], v[:, 5] = np.nan, np.inf
    spoilt = np.asarray(attention(q, k, v, padding=padding), np.float32)
    assert_same_bits(spoilt[:, first:], alone[1].astype(np.float32))
    assert not np.isfinite(spoilt[:, first - 1]).any()


def test_unused_slots_may_hold_anything():
    """And calls inside and outside jit have the same bits."""
    q, k, v = queries_keys_values(slots=12)
    full = attention(q, k[:, :9], v[:, :9])
    k[:, 9:], v[:, 9:] = np.nan, np.nan
    dirty = nn.attention(*map(jnp.asarray, (q, k, v)))
    assert_same_bits(dirty, full)


@helpers.cover("heads", [(2,), (4,)], lambda heads: heads == 4)  # heads that share keys
def test_attention_is_jax_s(heads):
    q, k, v = queries_keys_values(heads=heads)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(*wide)
    assert_within_contract(attention(q, k, v), expected, "invariant_layers", jnp.bfloat16, "forward")


def test_drop_in_for_nnx_linear():
    x = jax.random.normal(jax.random.key(0), (3, 5, 16), jnp.bfloat16)
    dense = nn.DetDense(16, 7, rngs=nnx.Rngs(0))
    linear = nnx.Linear(16, 7, dtype=jnp.bfloat16, dot_general=nn.det_dot_general, rngs=nnx.Rngs(0))
    assert_same_bits(dense(x), linear(x))
    assert_same_bits(dense(x)[1], dense(x[1]))


@pytest.mark.parametrize("numbers", [(((0,), (0,)), ((), ())), (((2,), (1,)), ((), ())), (((2,), (1,)), ((0,), (0,)))])
def test_other_contractions_are_refused(numbers):
    with pytest.raises(ValueError, match="det_dot_general contracts"):
        nn.det_dot_general(jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16), numbers)


sum_rows = jax.jit(sum_rows_by_id, static_argnums=2)


@settings(max_examples=10)
@given(st.sampled_from([0, 1, 40]).flatmap(lambda n: st.lists(st.integers(-9, 9), min_size=n, max_size=n)))
def test_rows_are_added_up_by_id(ids):
    """Ids below 0 and beyond the table's 7 are dropped."""
    rows = np.random.default_rng(0).integers(-9, 9, (len(ids), 3)).astype(np.float32)  # whose sums are exact
    expected = np.zeros((7, 3), np.float32)
    for i, row in zip(ids, rows, strict=True):
        if 0 <= i < 7:
            expected[i] += row
    np.testing.assert_array_equal(sum_rows(jnp.array(ids, jnp.int32), rows, 7), expected)


def test_a_sum_of_rows_has_its_bits_whatever_others_there_are():
    rng = np.random.default_rng(0)
    ids, rows = jnp.asarray(rng.integers(0, 20, 500)), rng.normal(size=(500, 3)).astype(np.float32)
    own = np.flatnonzero(ids == 7)
    alone = sum_rows(ids[own], rows[own], 20)
    assert_same_bits(sum_rows(ids, rows, 20)[7], alone[7])


@pytest.fixture(params=["in order of ids", "as on GPUs"])
def adds_up(request, monkeypatch):
    """Both ways in which a gradient of embed is added up; in programs of their own."""
    if request.param == "as on GPUs":
        monkeypatch.setattr(lax, "platform_dependent", lambda *x, default, **others: default(*x))


def lookup_gradient(lookup, table, ids):
    """In a program of its own."""
    return jax.jit(jax.grad(lambda table: (lookup(table, ids).astype(jnp.float32) ** 2).sum()))(table)


take = functools.partial(jnp.take, axis=0)


# `make test` has a dtype that cannot count the table, and one that has no negative ids; the others add nothing to them.
@pytest.mark.parametrize(
    "ids_dtype",
    [
        pytest.param(jnp.int32, marks=pytest.mark.full),
        jnp.int8,
        pytest.param(jnp.uint8, marks=pytest.mark.full),
        jnp.uint32,
    ],
)
def test_embed_is_jnp_take(adds_up, ids_dtype):
    """With ids that come twice, in either order of sums; also where the table is longer than a dtype counts."""
    table = jax.random.normal(jax.random.key(0), (300, 4))
    ids = jnp.array([[0, 8, 3], [3, 127, 100]], ids_dtype)
    assert_same_bits(nn.embed(table, ids), take(table, ids))
    assert_same_bits(lookup_gradient(nn.embed, table, ids), lookup_gradient(take, table, ids))


def test_ids_below_the_table_and_beyond(adds_up):
    table, ids = jnp.ones((9, 4)), jnp.array([-1, 8, 9, -10, 0])
    found = jax.jit(jax.grad(lambda table: nn.embed(table, ids).sum()))(table)
    assert_same_bits(found, jnp.zeros((9, 4)).at[jnp.array([0, 8])].set(1.0))
    assert np.isnan(nn.embed(table, ids)).all(axis=1).tolist() == [True, False, True, True, False]


def test_gradients_of_16_bit_tables_are_added_up_in_float32(adds_up):
    table = jnp.ones((3, 2), jnp.bfloat16)
    ids = jnp.ones(5000, jnp.int32)
    found = jax.jit(jax.grad(lambda table: nn.embed(table, ids).astype(jnp.float32).sum()))(table)
    assert_same_bits(found, jnp.zeros((3, 2), jnp.bfloat16).at[1].set(5000))


@pytest.mark.parametrize("table_spec", [PartitionSpec(), PartitionSpec("x")])
def test_embed_inside_shard_map(adds_up, table_spec):
    """Tokens on other devices than each other, of one table and of a table each."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    # The numbers are integers, whose sums are exact in any order.
    table, ids = jnp.round(4 * jax.random.normal(jax.random.key(0), (10, 4))), jnp.array([[0, 4, 3], [3, 3, 1]])

    def loss(table):
        shard = jax.shard_map(
            lambda table, ids: jax.lax.psum((nn.embed(table, ids) ** 2).sum(), "x"),
            mesh=mesh,
            in_specs=(table_spec, PartitionSpec("x")),
            out_specs=PartitionSpec(),
        )
        return shard(table, ids)

    whole = ids if table_spec == PartitionSpec() else ids + jnp.array([[0], [5]])
    assert_same_bits(jax.jit(jax.grad(loss))(table), lookup_gradient(take, table, whole))


@pytest.mark.parametrize(
    ("table", "ids", "message"),
    [
        (
            np.ones(3, np.float32),
            np.zeros(2, int),
            "embed needs a float table [V, D], D at least 1, got float32 of",
        ),
        (np.ones((3, 0), np.float32), np.zeros(2, int), "of shape (3, 0)."),
        (np.ones((3, 2), int), np.zeros(2, int), "embed needs a float table [V, D], D at least 1, got int"),
        (np.ones((3, 2), np.float32), np.zeros(2), "embed needs integer ids, got float"),
        (np.ones((3, 2), np.float32), np.zeros(2, bool), "embed needs integer ids, got bool."),
    ],
)
def test_embed_refuses_what_does_not_fit(table, ids, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nn.embed(table, ids)
