"""rlk_jax.nn: a model whose tokens keep their bits alone, in a batch, padded, and decoded one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from rlk_jax import nn
from tests.helpers import assert_same_bits, assert_within_contract
from tests.invariant_model import Decoder, decode, stock

VOCAB, LENGTH = 64, 11


@functools.cache
def model(build=Decoder):
    return build(VOCAB, width=32, layers=2, heads=4, groups=2, rngs=nnx.Rngs(0))


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB)


@nnx.jit
def everything(decoder, ids, padding):
    """Logits of every token, and log-probs of the next ones."""
    hidden = decoder(ids, padding)
    return decoder.head.logits(hidden), decoder.head(hidden[:, :-1], ids[:, 1:])


def alone(decoder, ids):
    return everything(decoder, ids[None], jnp.zeros(1, jnp.int32))


def test_a_sequence_in_a_batch_has_its_own_bits():
    batch = tokens(64, LENGTH)
    together = everything(model(), batch, jnp.zeros(64, jnp.int32))
    for row in (0, 17, 63):
        assert_same_bits(tuple(x[row] for x in together), tuple(x[0] for x in alone(model(), batch[row])))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [1, 5, 64])
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


@pytest.mark.parametrize("prompt", [1, 4])
def test_decoding_through_the_cache_has_the_bits_of_the_full_forward(prompt):
    batch = tokens(3, LENGTH)
    padding = jnp.asarray([0, 1, 0], jnp.int32)
    whole = everything(model(), batch, padding)[0]
    step_by_step = decode(model(), batch, padding, prompt=prompt, slots=LENGTH + 6)
    real = np.arange(LENGTH) >= np.asarray(padding)[:, None]
    assert_same_bits(np.asarray(step_by_step)[real], np.asarray(whole)[real])


def test_stock_layers_differ():
    """What the layers are for: the same model on nnx's own layers gives other bits in a batch, or decoding."""
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

    for path, leaf in jax.tree.leaves_with_path(nnx.state(gradient(decoder))):
        assert np.isfinite(leaf).all() and np.any(np.asarray(leaf) != 0), path


@given(st.integers(0, 200), st.integers(0, 200))
def test_ordered_sum_ignores_zeros_behind(length, more):
    x = jax.random.normal(jax.random.key(length), (3, length))
    padded = jnp.pad(x, ((0, 0), (0, more)))
    assert_same_bits(nn.ordered_sum(padded), nn.ordered_sum(x))
    np.testing.assert_array_equal(nn.ordered_sum(jnp.ones((2, length))), np.full(2, length))


def test_softmax_of_nothing_is_zero():
    assert_same_bits(nn.softmax(jnp.ones((2, 3)), jnp.zeros((2, 3), bool)), jnp.zeros((2, 3)))


def test_unused_slots_may_hold_anything():
    shape = (1, 8, 2, 8)
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3))
    full = nn.attention(q[:, :5], k[:, :5], v[:, :5])
    unused = jnp.arange(8)[:, None, None] >= 5
    dirty = nn.attention(q[:, :5], jnp.where(unused, jnp.nan, k), jnp.where(unused, jnp.nan, v))
    assert_same_bits(dirty, full)


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_is_jax_s(heads):
    q = jax.random.normal(jax.random.key(0), (2, 9, heads, 16), jnp.bfloat16)
    k, v = (jax.random.normal(jax.random.key(i), (2, 9, 2, 16), jnp.bfloat16) for i in (1, 2))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = jax.nn.dot_product_attention(*wide, is_causal=True)
    assert_within_contract(nn.attention(q, k, v), expected, "invariant_layers", jnp.bfloat16, "forward")


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
