"""The most probable tokens behind chats, by transformers and by rlk_jax.models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import AutoTokenizer

from rlk_jax import models


def assert_same_answers(
    ours: models.CausalLM, theirs: Any, directory: Path, questions: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Both models answer with the same tokens, which are returned: theirs each question alone, ours all at once behind
    left padding. The tokenizers of both read the directory, and answers end where theirs says.
    """
    tokenizer, their_tokenizer = models.load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.chat(chat) for chat in chats]
    padding = np.array([max(map(len, prompts)) - len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (before, 0)) for prompt, before in zip(prompts, padding, strict=True)])
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": theirs.generation_config.eos_token_id or ()}

    @nnx.jit
    def sampled(model: models.CausalLM, tokens: jax.Array, padding: jax.Array) -> models.Completions:
        keys = jax.random.split(jax.random.key(0), len(prompts))
        return models.sample(model, tokens, padding, keys, sampling=models.Sampling(temperature=0), **limits)

    found = sampled(ours, jnp.asarray(tokens), jnp.asarray(padding))
    answers = [ids[:length].tolist() for ids, length in zip(found.ids, found.lengths, strict=True)]
    for question, chat, prompt, answer in zip(questions, chats, prompts, answers, strict=True):
        given = their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        assert prompt == given[0].tolist(), question
        whole = theirs.generate(given, do_sample=False, max_new_tokens=max_new_tokens)[0].tolist()
        assert answer == whole[len(prompt) :], question
        assert "".join(tokenizer.stream(answer)) == their_tokenizer.decode(answer, skip_special_tokens=True), question
    return answers
