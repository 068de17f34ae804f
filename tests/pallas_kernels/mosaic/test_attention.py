"""attention's Mosaic kernels in Pallas' interpreter: values, and bits wherever a sequence stands."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, AttentionTile, SequencePlaces
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic import attention as kernels
from pallas_kernels.mosaic import attention_decode as decoding
from rlk_jax.ops.attention import hopper
from rlk_jax.ops.attention.api import attention
from rlk_jax.ops.attention.checks import check_call, checked_operands
from rlk_jax.ops.attention.options import AttentionInputs, AttentionOptions, Needs
from tests.support import attention as support
from tests.support.helpers import assert_same_bits, assert_within_contract

MACHINE = Machine(4, plgpu.InterpretGPUParams(detect_races=True))
SIZE = 16
BEFORE, AFTER, START = 7, 20, 100
"""Slots before and behind the keys of a sequence, and the slot of its first query."""


def made():
    rng = np.random.default_rng(0)
    shapes = (1, 300, 2, SIZE), (1, 420, 1, SIZE), (1, 420, 1, SIZE)
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def run(query, key, value, start, first_slots, kernel=kernels.attend, **options):
    """The output of the kernel, which is near the definition's."""
    first_slots = np.asarray(first_slots)
    several = first_slots.shape[1] > 1
    is_first = np.diff(first_slots, axis=1, prepend=-1) != 0
    runs = np.maximum.accumulate(np.where(is_first, np.arange(first_slots.shape[1]), 0), axis=1)
    window, cap = options.get("sliding_window"), options.get("logit_softcap")
    shape = AttentionShape(SIZE**-0.5, window, cap, query.shape[2] // key.shape[2], several)
    places = SequencePlaces(*(jnp.asarray(x, jnp.int32) for x in ([start], first_slots, runs)))
    output, _ = kernel(shape, MACHINE, query, key, value, places)
    where = {"segment_starts": jnp.asarray(first_slots)} if several else {"padding": jnp.asarray(first_slots[:, 0])}
    gold = attention(query, key, value, start=start, implementation="reference", **where, **options)
    assert_within_contract(output, gold, "attention", jnp.bfloat16, "forward")
    return output


@pytest.fixture(params=[8, 1], ids=["one span", "spans of a block"])
def spans(request, monkeypatch):
    tile = AttentionTile(keys=128, stages=2, span_blocks=request.param)
    monkeypatch.setattr(kernels, "attention_tile", lambda size, slots: tile)
    decode_tile = replace(tile, warpgroups=1, heads_are_rows=True)
    monkeypatch.setattr(decoding, "decode_tile", lambda size, slots: decode_tile)


def test_moved_and_decoded_beside_nan(spans):
    query, key, value = made()
    own = slice(BEFORE, 400)
    expected = run(query, key[:, own], value[:, own], START - BEFORE, [[0]])
    outside = np.ones((1, 420, 1, 1), bool)
    outside[:, own] = False
    spoilt = jnp.where(outside, jnp.nan, key), jnp.where(outside, jnp.inf, value)
    assert_same_bits(run(query, *spoilt, START, [[BEFORE]]), expected)
    decoded = query[:, 130:131], key[:, own], value[:, own], START - BEFORE + 130, [[0]]
    for kernel in (kernels.attend, decoding.decode):
        assert_same_bits(run(*decoded, kernel=kernel), expected[:, 130:131])


@pytest.mark.parametrize("at_once", [2, 4])
@pytest.mark.parametrize("spans", [1], indirect=True)
def test_more_spans_than_are_merged_in_a_round(spans, at_once, monkeypatch):
    """A round merges three of four spans, and the next one the last."""
    monkeypatch.setattr(decoding, "_ROWS_IN_FLIGHT", 3 * 8)
    monkeypatch.setattr(decoding, "_SPANS_AT_ONCE", at_once)
    query, key, value = made()
    decoded = jnp.swapaxes(query[:, :4], 0, 1), *(jnp.tile(x, (4, 1, 1, 1)) for x in (key, value)), 419, [[0]] * 4
    assert_same_bits(run(*decoded, kernel=decoding.decode), run(*decoded))


@pytest.mark.parametrize("kernel", [kernels.attend, decoding.decode], ids=["attend", "decode"])
def test_rows_whose_results_are_to_be_nan(kernel):
    query, key, value = (jnp.concatenate([x[:, :1], x[:, 1:2]]) for x in made())
    places = SequencePlaces(*(jnp.array(x, jnp.int32) for x in ([0], [[0], [0]], [[-1], [0]])))
    output, log_total = kernel(AttentionShape(1.0, None, None, 2, False), MACHINE, query, key, value, places)
    for x in (output, log_total[:, :, :1]):
        assert jnp.isnan(x[0]).all() and not jnp.isnan(x[1]).any()


def test_packed(spans):
    query, key, value = (x[:, :300] for x in made())
    starts = [[0] * 40 + [40] * 101 + [141] * 159]
    packed = run(query, key, value, 0, starts)
    own = slice(40, 141)
    assert_same_bits(packed[:, own], run(query[:, own], key[:, own], value[:, own], 0, [[0]]))


@pytest.mark.parametrize("options", [{"sliding_window": 50}, {"logit_softcap": 1.0}], ids=str)
def test_options(options):
    run(*made(), START, [[BEFORE]], **options)


@pytest.mark.parametrize("size", [16, 192], ids=["both gradients in a warpgroup", "one in each"])
def test_gradients(size):
    """Rows hold several sequences, at the widths of both forms of the kernel of dK and dV."""
    functions = hopper.mosaic(MACHINE)
    starts = ((0,) * 40 + (40,) * 61 + (101,) * 9,)
    case = support.Case(
        batch=1, length=110, slots=130, heads=2, groups=1, size=size, value_size=size, segment_starts=starts
    )
    problem = support.make(case, jnp.bfloat16)
    inputs = AttentionInputs(*problem[:3], 0, None, jnp.asarray(starts))
    inputs, config = check_call(inputs, AttentionOptions())
    operands = checked_operands(inputs, False)
    output, kept = functions.forward(config, operands)
    found = functions.gradients(config, Needs(True, True, True), operands, kept, problem.upstream)
    for kind, a, e in zip(("forward", *("gradient",) * 3), (output, *found), support.gold(case, problem), strict=True):
        assert_within_contract(a, e, "attention", jnp.bfloat16, kind)
