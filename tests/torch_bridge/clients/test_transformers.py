"""FusedLMHead in the place of a Hugging Face model's head: the model works as before, and its head gives log-probs."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="the extra `clients` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `clients` is not installed")

import torch_bridge  # noqa: E402


def models():
    """A tiny Qwen2, and a copy of it whose head is fused."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    stock = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
    fused = copy.deepcopy(stock)
    fused.lm_head = torch_bridge.FusedLMHead.of(fused.lm_head)
    return stock, fused


def test_a_model_with_the_head_generates_and_has_a_loss():
    stock, fused = models()
    ids = torch.randint(64, (2, 5))
    sampling = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(ids, **sampling), stock.generate(ids, **sampling))
    losses = [model(input_ids=ids, labels=ids).loss for model in (fused, stock)]
    assert torch.equal(*losses)
    hidden = fused.model(input_ids=ids).last_hidden_state
    expected = stock(input_ids=ids).logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(fused.lm_head(hidden, ids), expected)


def test_a_vocabulary_may_be_resized_around_the_head():
    ids = torch.randint(64, (2, 5))
    logits = []
    for model in models():
        torch.manual_seed(1)
        model.resize_token_embeddings(70, mean_resizing=False)
        logits.append(model(input_ids=ids).logits)
    assert logits[0].shape == (2, 5, 70) and torch.equal(*logits)
