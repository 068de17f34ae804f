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
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlk_jax import linear_logp, models

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
    """Token for token: ours of all questions at once behind left padding, theirs of each one alone."""
    tokenizer, gold = models.load_tokenizer(DIRECTORY), AutoTokenizer.from_pretrained(DIRECTORY)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.chat(chat) for chat in chats]
    padding = np.array([max(map(len, prompts)) - len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (before, 0)) for prompt, before in zip(prompts, padding, strict=True)])
    limits = {"max_new_tokens": NEW_TOKENS, "stop_ids": tokenizer.stop_ids}

    @nnx.jit
    def answers(model, tokens, padding):
        keys = jax.random.split(jax.random.key(0), len(prompts))
        return models.sample(model, tokens, padding, keys, sampling=models.Sampling(temperature=0), **limits)

    found = answers(ours, jnp.asarray(tokens), jnp.asarray(padding))
    for i, chat in enumerate(chats):
        prompt = gold.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        assert prompts[i] == prompt[0].tolist()
        expected = theirs.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)[0, prompt.shape[1] :]
        assert found.ids[i, : int(found.lengths[i])].tolist() == expected.tolist(), QUESTIONS[i]
    assert int(found.lengths.min()) < int(found.lengths.max()) == NEW_TOKENS, "some answers end, and some are cut off"


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
