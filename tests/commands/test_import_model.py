"""`rlk import-model`: a GGUF becomes a checkpoint with the same tensors, and what would be lost is refused."""

import importlib.util
import json
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlk_jax import cli, models
from rlk_jax.commands import import_model
from tests.models import tiny

VOCABULARY = 300


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A tiny Llama of transformers and its tokenizer."""
    tokenizer = tiny.make_tokenizer(chat_template=tiny.CHATML, adds_bos=False)
    model = tiny.make(tmp_path_factory.mktemp("original"), "llama", vocab_size=VOCABULARY)
    return model, tokenizer


def run(*arguments: object) -> int:
    return cli.main(["import-model", *map(str, arguments)])


BAD_PATHS = {
    "no file": ("none.gguf", "new", "none.gguf is no file"),
    "a folder": ("full", "new", "full is no file"),
    "no GGUF": ("text.gguf", "new", "text.gguf is no GGUF: it does not begin with GGUF"),
    "empty file": ("empty.gguf", "new", "empty.gguf is no GGUF: it does not begin with GGUF"),
    "full directory": ("magic.gguf", "full", "full is not empty: name a new directory"),
    "file in its place": ("magic.gguf", "text.gguf", "text.gguf is no directory"),
}


@pytest.mark.parametrize("what", BAD_PATHS)
def test_paths_that_cannot_be(what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "magic.gguf").write_bytes(b"GGUF")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    path, directory, message = BAD_PATHS[what]
    assert run(path, directory) == 2
    assert capsys.readouterr().err == f"rlk import-model: error: {message}\n"
    assert not (tmp_path / "new").exists()


def test_a_package_that_is_missing_names_the_extra(tmp_path, capsys, monkeypatch):
    """Before anything else is asked for."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "torch") else name)
    assert run(tmp_path / "none.gguf", tmp_path / "new") == 2
    said = 'the command needs gguf, torch, of rlk-jax\'s extra `import`: pip install "rlk-jax[import]"'
    assert capsys.readouterr().err == f"rlk import-model: error: {said}\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_written_loads_everywhere(dtype, original, tmp_path):
    model, tokenizer = original
    said = import_model.write_checkpoint(tmp_path, model, tokenizer, dtype, [5])
    assert re.fullmatch(rf"llama, 0\.1 million parameters in {dtype}, 3 layers, 300 tokens, \d+\.\d\d [KM]iB", said)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"] and fields["dtype"] == dtype
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(getattr(torch, dtype))), name
    assert models.load(tmp_path, dtype=dtype).config.vocab_size == VOCABULARY
    found, chat = models.load_tokenizer(tmp_path), [{"role": "user", "content": "17 + 26"}]
    assert found.stop_ids == (2, 5)
    assert found.chat(chat) == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_numbers_that_the_dtype_does_not_hold(tmp_path):
    model = tiny.make(tmp_path / "original", "llama", vocab_size=VOCABULARY)
    model.model.norm.weight.data[0] = 1e5
    with pytest.raises(models.UnsupportedModel, match=r"^model.norm.weight has numbers that are infinite in float16"):
        import_model.write_checkpoint(tmp_path / "new", model, tiny.make_tokenizer(), "float16", [])


def test_a_tied_head_is_left_out(tmp_path):
    model = tiny.make(tmp_path / "original", "llama 3.1, tied, biases", vocab_size=VOCABULARY)
    import_model.write_checkpoint(tmp_path / "new", model, tiny.make_tokenizer(), "float32", [])
    assert "lm_head.weight" not in load_file(tmp_path / "new" / "model.safetensors")
    assert models.load(tmp_path / "new", dtype="float32").config.is_tied


SAYS = {
    "GGUF.version": 3,
    "general.architecture": "llama",
    "context_length": 64,
    "block_count": 3,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 16,
    "rope.freq_base": 10_000.0,
    "vocab_size": VOCABULARY,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}
"""What a GGUF of the tiny Llama says."""
FIELDS = {"model_type": "llama", **tiny.SIZES, "vocab_size": VOCABULARY}
LOST = {
    "scaled positions": ({"rope.scaling.type": "linear"}, "rope.scaling.type = 'linear' of m.gguf would be lost"),
    "unknown": ({"attention.turn": 2}, "attention.turn = 2 of m.gguf would be lost"),
    "heads": ({"attention.key_length": 12}, "attention.key_length = 12 of m.gguf would be lost"),
    "base": ({"rope.freq_base": 5e5}, "rope.freq_base = 500000.0 of m.gguf would be lost"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 of m.gguf would be lost"),
    "window": ({"attention.sliding_window": 8}, "attention.sliding_window = 8 of m.gguf would be lost"),
    "split": ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre = 'poro-chat' of m.gguf is not known"),
}


def gguf_of(tensors: tuple[str, ...] = (), **changes: object) -> import_model.Gguf:
    return import_model.Gguf(import_model.Path("m.gguf"), {**SAYS, **changes}, tensors)


@pytest.mark.parametrize("what", LOST)
def test_what_transformers_would_lose_is_refused(what):
    changes, message = LOST[what]
    import_model.check_taken_over(gguf_of(), models.config_of(FIELDS))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        import_model.check_taken_over(gguf_of(**changes), models.config_of(FIELDS))


def test_what_no_gguf_says_is_refused():
    with pytest.raises(ValueError, match=r"^rope_freqs.weight of m.gguf would be lost: .* Llama 3.1 scales positions$"):
        import_model.check_taken_over(gguf_of(("output.weight", "rope_freqs.weight")), models.config_of(FIELDS))
    mistral = models.config_of({**FIELDS, "model_type": "mistral", "sliding_window": 8})
    with pytest.raises(ValueError, match=r"^transformers gives m.gguf a sliding window of 8, which it does not"):
        import_model.check_taken_over(gguf_of(), mistral)
    import_model.check_taken_over(gguf_of(**{"attention.sliding_window": 8}), mistral)
    gemma = models.config_of({**FIELDS, "model_type": "gemma3_text", "sliding_window": 8, "rope_theta": 10_000.0})
    with pytest.raises(ValueError, match=r"^transformers does not know the scale of attention in m.gguf"):
        import_model.check_taken_over(gguf_of(**{"attention.sliding_window": 8}), gemma)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys as llama.cpp has them: the two numbers that are rotated together stand side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""The parts of a tensor's name in a checkpoint, and in a GGUF."""


def write_gguf(path, model, tokenizer, **changes) -> None:
    """Write a model and its tokenizer as llama.cpp's own converter does."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**SAYS, **changes}.items():
        if key.startswith(("GGUF", "general")):
            continue
        key = key if key.startswith("tokenizer") else f"llama.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.add_chat_template(tokenizer.chat_template)
    words = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    writer.add_token_list(words)
    writer.add_token_types([3 if x in tiny.SPECIAL_TOKENS else 1 for x in words])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(x) for x in merges])
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permuted(array, 4 if "q_proj" in name else 2)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_end_to_end(original, tmp_path, capsys):
    model, tokenizer = original
    write_gguf(tmp_path / "m.gguf", model, tokenizer)
    (tmp_path / "new").mkdir()
    assert run(tmp_path / "m.gguf", tmp_path / "new", "--dtype", "float32") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'new'}: llama, 0.1 million parameters in float32, 3 layers")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found[name]), name
    text = models.load_tokenizer(tmp_path / "new")
    assert text.stop_ids == (2, 5), "the tokens that end a text and a turn"
    chat = [{"role": "user", "content": "Was ist 17 + 26? the user\n\n3"}]
    for gold in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "new")):
        assert text.chat(chat) == gold.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["m.gguf", "new"]


def test_digits_stand_apart_where_the_authors_had_them_so(original, tmp_path):
    model, tokenizer = original
    write_gguf(tmp_path / "m.gguf", model, tokenizer, **{"tokenizer.ggml.pre": "smollm"})
    assert run(tmp_path / "m.gguf", tmp_path / "new") == 0
    found = models.load_tokenizer(tmp_path / "new")
    cut = [text for text, _ in found.backend.pre_tokenizer.pre_tokenize_str("a  17")]
    assert cut == ["a", "ĠĠ", "1", "7"]


def test_damaged_and_refused_files_leave_nothing_behind(original, tmp_path, capsys):
    model, tokenizer = original
    write_gguf(tmp_path / "whole.gguf", model, tokenizer)
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "head.gguf").write_bytes(whole[:9])
    write_gguf(tmp_path / "lost.gguf", model, tokenizer, **{"rope.scaling.type": "yarn"})
    capsys.readouterr()
    for name, message in {"half": "cannot be read", "head": "cannot be read", "lost": "would be lost"}.items():
        assert run(tmp_path / f"{name}.gguf", tmp_path / "new") == 2
        printed = capsys.readouterr().err.splitlines()[-1]
        assert printed.startswith("rlk import-model: error: ") and message in printed
    assert sorted(x.name for x in tmp_path.iterdir()) == ["half.gguf", "head.gguf", "lost.gguf", "whole.gguf"]
