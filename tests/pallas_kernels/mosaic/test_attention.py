"""attention's Mosaic kernels in Pallas' interpreter: values, and bits wherever a sequence stands."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, AttentionTile, SequencePlaces
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic import attention as kernels
from rlk_jax.ops.attention.api import attention
from tests.support.helpers import assert_same_bits, assert_within_contract

MACHINE = Machine(4, plgpu.InterpretGPUParams(detect_races=True))
SIZE = 16
BEFORE, AFTER, START = 7, 20, 100
"""Slots before and behind the keys of a sequence, and the slot of its first query."""


def made():
    rng = np.random.default_rng(0)
    shapes = (1, 300, 2, SIZE), (1, 420, 1, SIZE), (1, 420, 1, SIZE)
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def run(query, key, value, start, first_slots, **options):
    """The output of the kernel, and the definition's."""
    first_slots = np.asarray(first_slots)
    several = first_slots.shape[1] > 1
    is_first = np.diff(first_slots, axis=1, prepend=-1) != 0
    runs = np.maximum.accumulate(np.where(is_first, np.arange(first_slots.shape[1]), 0), axis=1)
    window, cap = options.get("sliding_window"), options.get("logit_softcap")
    shape = AttentionShape(SIZE**-0.5, window, cap, query.shape[2] // key.shape[2], several)
    places = SequencePlaces(*(jnp.asarray(x, jnp.int32) for x in ([start], first_slots, runs)))
    output, _ = kernels.attend(shape, MACHINE, query, key, value, places)
    where = {"segment_starts": jnp.asarray(first_slots)} if several else {"padding": jnp.asarray(first_slots[:, 0])}
    gold = attention(query, key, value, start=start, implementation="reference", **where, **options)
    assert_within_contract(output, gold, "attention", jnp.bfloat16, "forward")
    return output


@pytest.fixture(params=[8, 1], ids=["one span", "spans of a block"])
def spans(request, monkeypatch):
    tile = AttentionTile(keys=128, stages=2, span_blocks=request.param)
    monkeypatch.setattr(kernels, "attention_tile", lambda size: tile)


def test_moved_and_decoded_beside_nan(spans):
    query, key, value = made()
    own = slice(BEFORE, 400)
    expected = run(query, key[:, own], value[:, own], START - BEFORE, [[0]])
    outside = np.ones((1, 420, 1, 1), bool)
    outside[:, own] = False
    spoilt = jnp.where(outside, jnp.nan, key), jnp.where(outside, jnp.inf, value)
    assert_same_bits(run(query, *spoilt, START, [[BEFORE]]), expected)
    decoded = run(query[:, 130:131], key[:, own], value[:, own], START - BEFORE + 130, [[0]])
    assert_same_bits(decoded, expected[:, 130:131])


def test_packed(spans):
    query, key, value = (x[:, :300] for x in made())
    starts = [[0] * 40 + [40] * 101 + [141] * 159]
    packed = run(query, key, value, 0, starts)
    own = slice(40, 141)
    assert_same_bits(packed[:, own], run(query[:, own], key[:, own], value[:, own], 0, [[0]]))


@pytest.mark.parametrize("options", [{"sliding_window": 50}, {"logit_softcap": 1.0}], ids=str)
def test_options(options):
    run(*made(), START, [[BEFORE]], **options)
