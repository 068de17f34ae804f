"""Models beside transformers' own, in float32: logits, gradients, left padding, the KV cache, and files both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from rlk_jax import models
from rlk_jax.models.checkpoint import tensors_of
from tests.models import tiny
from tests.support import quick
from tests.support.helpers import assert_within_contract

every_family = pytest.mark.parametrize("case", tiny.FAMILIES)
LENGTH = 20


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    with quick.compiled_quickly():
        yield


@pytest.fixture
def both(tmp_path, case):
    theirs = tiny.make(tmp_path, case)
    return theirs, models.load(tmp_path, dtype=jnp.float32), tmp_path


def drawn(rows: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(3, tiny.SIZES["vocab_size"], (rows, length))


@every_family
def test_logits_and_gradients(both):
    theirs, ours, _ = both
    tokens = drawn(2)
    expected = theirs(torch.tensor(tokens)).logits
    picked = torch.log_softmax(expected, -1)[:, :-1].gather(2, torch.tensor(tokens[:, 1:, None]))
    (-picked.mean()).backward()

    def loss(model):
        logits = model.lm_head(model(jnp.asarray(tokens)))
        logps = jax.nn.log_softmax(logits)[:, :-1]
        return -jnp.take_along_axis(logps, jnp.asarray(tokens[:, 1:, None]), axis=2).mean(), logits

    as_model = nnx.clone(ours)
    state, logits = nnx.jit(nnx.grad(loss, has_aux=True))(ours)
    assert_within_contract(logits, expected.detach(), "models", jnp.float32, "forward")
    nnx.update(as_model, state)
    found = tensors_of(as_model)
    gradients = {name: x.grad for name, x in theirs.named_parameters()}
    assert found.keys() == gradients.keys()
    joined = [np.concatenate([x[name].ravel() for name in gradients]) for x in (found, gradients)]
    assert_within_contract(*joined, "models", jnp.float32, "gradient")


DECODED = ("llama 3.1, tied, biases", "qwen3", "gemma2", "gemma3_text")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=() if x in DECODED else pytest.mark.full) for x in tiny.FAMILIES]
)
def test_greedy_decoding_through_the_cache_behind_left_padding(both):
    """Token for token, in rows of two lengths; transformers has no cache here. `make test` has four cases,
    with all that reads the places of tokens: windows, head norms and both kinds of ropes.
    """
    theirs, ours, _ = both
    padding, steps = (0, 6), 12
    tokens = drawn(2, 14)
    cache = ours.empty_cache(2, 14 + steps)

    @nnx.jit
    def extend(model, new, cache, start):
        hidden, cache = model.extend(new, jnp.array(padding), cache, start)
        return jnp.argmax(model.lm_head(hidden[:, -1]), axis=-1), cache

    new, cache = extend(ours, jnp.asarray(tokens), cache, 0)
    found = [new]
    for i in range(1, steps):
        new, cache = extend(ours, new[:, None], cache, jnp.int32(13 + i))
        found.append(new)
    for row, before in enumerate(padding):
        expected = torch.tensor(tokens[row : row + 1, before:])
        for _ in range(steps):
            next_token = theirs(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, next_token], dim=1)
        assert [int(x[row]) for x in found] == expected[0, -steps:].tolist()


@every_family
def test_saved_models_are_loaded_by_transformers(both):
    theirs, ours, folder = both
    models.save(ours, folder / "saved", like=folder)
    again = AutoModelForCausalLM.from_pretrained(folder / "saved", attn_implementation="eager").eval()
    tokens = torch.tensor(drawn(1))
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text"])
def test_the_scale_of_an_embedding_is_rounded(both):
    """√48 = 6.928 is 6.9375 in bfloat16; float32 would not show it."""
    theirs, ours, folder = both
    ours = models.load(folder, dtype=jnp.bfloat16)
    tokens = drawn(1, 5)
    inner = theirs.to(torch.bfloat16).model
    expected = inner.embed_tokens(torch.tensor(tokens))
    found = ours.embedded(jnp.asarray(tokens))
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected.detach().float().numpy())
