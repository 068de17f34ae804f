"""Models of invariant layers: a token's bits alone, in a batch, padded, packed and decoded; layers are lowered once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlk_jax import models
from rlk_jax.models import config_of
from tests.models.tiny import FAMILIES, SIZES
from tests.support.helpers import assert_same_bits

CASES = ("llama 3.1, tied, biases", "gemma3_text", "gemma2", "qwen3")
IN_MAKE_TEST = ("gemma3_text",)
LENGTH = 9


def made(case, **changes):
    fields = {**SIZES, **FAMILIES[case], "num_hidden_layers": 2}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:2]
    fields |= changes
    return models.CausalLM(config_of(fields), kind="invariant", rngs=nnx.Rngs(0))


# In make test, one has all but biases, which order no sums, as softcaps do not; tests/test_nn.py has biases and a head
# of its own.
@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in IN_MAKE_TEST else pytest.mark.full) for x in CASES])
def test_a_token_keeps_its_bits(case):
    model, tokens = made(case), np.random.default_rng(0).integers(3, 131, (1, LENGTH))

    @nnx.jit
    def whole(model, tokens, padding):
        hidden = model(tokens, padding)
        return hidden, model.lm_head(hidden)

    @nnx.jit
    def extended(model, tokens, padding, cache, start):
        hidden, cache = model.extend(tokens, padding, cache, start)
        return hidden, model.lm_head(hidden), cache

    expected = whole(model, jnp.asarray(tokens), None)
    beside = np.random.default_rng(1).integers(3, 131, (2, LENGTH + 4))
    batch = np.concatenate([beside[:1], np.pad(tokens, ((0, 0), (4, 0))), beside[1:]])
    padded = whole(model, jnp.asarray(batch), jnp.array([2, 4, 0]))
    assert_same_bits([x[1:2, 4:] for x in padded], list(expected))
    row = np.concatenate([beside[:1, :3], tokens, beside[1:, :2]], axis=1)
    starts = jnp.asarray([[0] * 3 + [3] * LENGTH + [3 + LENGTH] * 2])
    packed = whole(model, jnp.asarray(row), starts)
    assert_same_bits([x[:, 3 : 3 + LENGTH] for x in packed], list(expected))
    *first, cache = extended(model, jnp.asarray(tokens[:, :5]), jnp.zeros(1, int), model.empty_cache(1, 12), 0)
    parts = [first]
    for i in range(5, LENGTH):
        *found, cache = extended(model, jnp.asarray(tokens[:, i : i + 1]), jnp.zeros(1, int), cache, jnp.int32(i))
        parts.append(found)
    assert_same_bits([jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)], list(expected))


def test_layers_are_lowered_once():
    """As many functions for two layers as for nine, of each of which there are two kinds."""

    def functions(layers):
        kinds = ["sliding_attention", "full_attention"] * layers
        model = made("gemma3_text", num_hidden_layers=2 * layers, layer_types=kinds)
        text = jax.jit(lambda tokens: model(tokens)).lower(jnp.zeros((1, 4), int)).as_text()
        return text.count("func.func")

    assert functions(1) == functions(3)
