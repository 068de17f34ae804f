"""A real model beside transformers, in float32: what SmolLM2-135M-Instruct answers, and how likely it finds a text.

`make .smollm2/model/config.json` fetches it, and so does `make test-full`. JAX takes a GPU where it finds one, and its
products are of float32 there, too.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from rlk_jax import linear_logp, models
from tests.models.greedy import assert_same_answers

DIRECTORY = Path(__file__).parents[2] / ".smollm2" / "model"
# In `make test`, test_families.py has tiny models of every family.
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not DIRECTORY.exists(), reason="`make .smollm2/model/config.json` fetches the model"),
]

NEW_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 26?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Wie heißt du? 你好!",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):\n    # Complete this function.",
    "List   the planets\n\n1. Mercury\n2.",
    "Why is the sky blue? Answer in one short paragraph, for a child of five years.",
    "Hello",
)
TEXT = """The harbour was quiet in the early morning. A fisherman mended his nets on the quay, and beside him a grey cat
waited for what he might let fall. In 1952 there had been 48 boats here; now there were 5. "They all went to the city,"
he said, "where the work is easier, and the rooms are warm." He did not seem to envy them. When the sun came over the
hills, he folded the nets, gave the cat the head of a mackerel, and rowed out past the lighthouse, as he had done on
every fair day of his life."""


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours():
    with jax.default_matmul_precision("highest"):
        yield models.load(DIRECTORY, dtype=jnp.float32)


def test_answers_are_those_of_transformers(theirs, ours):
    answers = assert_same_answers(ours, theirs, DIRECTORY, QUESTIONS, NEW_TOKENS)
    lengths = [len(answer) for answer in answers]
    assert min(lengths) < max(lengths) == NEW_TOKENS, "some answers end, and some are cut off"


def test_the_perplexity_of_a_text_is_that_of_transformers(theirs, ours):
    tokens = np.array([models.load_tokenizer(DIRECTORY).encode(TEXT)])
    with torch.no_grad():
        expected = float(torch.exp(theirs(torch.tensor(tokens), labels=torch.tensor(tokens)).loss))
    assert 5 < expected < 50, "a model that has learnt something"

    @nnx.jit
    def perplexity(model, tokens):
        logps = linear_logp(model(tokens[:, :-1]), model.lm_head.weight[...], tokens[:, 1:])
        return jnp.exp(-logps.mean())

    assert float(perplexity(ours, jnp.asarray(tokens))) == pytest.approx(expected, rel=1e-3)
