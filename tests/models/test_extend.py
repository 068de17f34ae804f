"""Sequences in parts: every slot of a cache, what is beyond it, tokens that there are not, and recomputed layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlk_jax import models
from rlk_jax.models import config_of
from tests.models.tiny import FAMILIES, SIZES
from tests.support.helpers import assert_same_bits, assert_within_contract

SLOTS, PROMPT = 9, 5
every_kind = pytest.mark.parametrize("kind, dtype", [("stock", jnp.float32), ("invariant", jnp.bfloat16)])


def made(kind="stock", dtype=jnp.float32, case="llama", **options):
    fields = {**SIZES, **FAMILIES[case]}
    fields["num_hidden_layers"] = len(fields.get("layer_types", "12"))
    return models.CausalLM(config_of(fields), kind=kind, dtype=dtype, rngs=nnx.Rngs(0), **options)


def drawn(length):
    return jnp.asarray(np.random.default_rng(0).integers(3, SIZES["vocab_size"], (1, length)))


@nnx.jit
def extend(model, tokens, cache, start):
    return model.extend(tokens, jnp.zeros(1, jnp.int32), cache, start)


@nnx.jit
def hidden_of(model, tokens):
    return model(tokens)


def test_decoding_fills_the_cache_to_its_last_slot():
    model, tokens = made(), drawn(SLOTS)
    hidden, cache = extend(model, tokens[:, :PROMPT], model.empty_cache(1, SLOTS), jnp.int32(0))
    found = [hidden]
    for slot in range(PROMPT, SLOTS):
        hidden, cache = extend(model, tokens[:, slot : slot + 1], cache, jnp.int32(slot))
        found.append(hidden)
    assert_within_contract(jnp.concatenate(found, axis=1), hidden_of(model, tokens), "models", jnp.float32, "forward")


@every_kind
@pytest.mark.parametrize("start", [SLOTS - 1, SLOTS, -1])
def test_slots_that_the_cache_does_not_have(kind, dtype, start):
    """What is known to be outside raises, and else poisons what a clamped write of its two tokens would spoil."""
    model, tokens, padding = made(kind, dtype), drawn(2), jnp.zeros(1, jnp.int32)
    cache = model.empty_cache(1, SLOTS)
    message = f"extend got 2 tokens from slot {start} on, and a cache of {SLOTS} slots."
    for concrete in (start, jnp.int32(start)):
        with pytest.raises(ValueError, match=message):
            model.extend(tokens, padding, cache, concrete)
    hidden, cache = extend(model, tokens, cache, jnp.int32(start))
    assert jnp.isnan(hidden).all()
    assert all(jnp.isnan(x).any() for x in jax.tree.leaves(cache))


def test_more_tokens_than_the_cache_has_slots():
    model = made()
    with pytest.raises(ValueError, match=r"extend got 10 tokens from slot .* on, and a cache of 9 slots\."):
        extend(model, drawn(SLOTS + 1), model.empty_cache(1, SLOTS), jnp.int32(0))


@every_kind
@pytest.mark.parametrize("wrong", [-1, SIZES["vocab_size"]])
def test_tokens_that_there_are_not(kind, dtype, wrong):
    """They are NaN, other sequences keep their bits, and the embedding has no gradient of theirs."""
    model = made(kind, dtype)
    tokens = jnp.concatenate([drawn(4), drawn(4)])
    changed = tokens.at[0, 3].set(wrong)
    hidden, expected = hidden_of(model, changed), hidden_of(model, tokens)
    assert jnp.isnan(hidden[0, 3]).all()
    assert_same_bits(hidden[1], expected[1])
    total = jax.jit(jax.grad(lambda table: model.kind.embed(table, changed).astype(jnp.float32).sum()))
    assert total(model.embedding[...]).sum() == 7 * SIZES["hidden_size"]


@pytest.mark.parametrize("case", ["llama", pytest.param("gemma3_text", marks=pytest.mark.full)])
def test_recomputed_layers_have_the_same_gradients(case):
    """`make test` has one family: what is recomputed is a whole layer, whatever is in it."""
    tokens = drawn(SLOTS)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: (model.lm_head(model(tokens)) ** 2).mean())(model)

    kept, again = (nnx.state(gradients(made(case=case, remat=remat))) for remat in (False, True))
    joined = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(state)]) for state in (again, kept)]
    assert_within_contract(*joined, "models", jnp.float32, "gradient")


def test_merged_terms_untie_the_head_once(monkeypatch):
    model, read = made(case="qwen3"), []
    model.merge_low_rank()
    assert model.config.is_tied, "there was nothing to merge"
    model.add_low_rank(2, rngs=nnx.Rngs(0))
    monkeypatch.setattr(models.decoder, "config_of", lambda fields: read.append(fields) or config_of(fields))
    model.merge_low_rank()
    assert len(read) == 1 and not model.config.is_tied
