"""Checkpoints: single files and shards, dtypes, tied heads, and everything that does not fit by its name."""

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rlk_jax import models
from rlk_jax.models import UnsupportedModel, checkpoint
from rlk_jax.models.checkpoint import tensors_of
from tests.models import tiny

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    tiny.make(tmp_path, "llama")
    return tmp_path


def shard(folder, **changes):
    """Cut the checkpoint in two files with an index, in which some names are changed."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, **changes}}))


def test_shards_give_what_a_single_file_gives(folder):
    expected = tensors_of(models.load(folder, dtype=jnp.float32))
    shard(folder)
    found = tensors_of(models.load(folder, dtype=jnp.float32))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


def test_who_can_read_the_config_can_read_the_weights(folder, tmp_path):
    saved = tmp_path / "saved"
    models.save(models.load(folder, dtype=jnp.float32), saved)
    config, weights = ((saved / name).stat().st_mode for name in ("config.json", SINGLE))
    assert oct(weights) == oct(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints(tmp_path, dtype):
    theirs = tiny.make(tmp_path, "qwen3", dtype)
    found = tensors_of(models.load(tmp_path, dtype=str(dtype).removeprefix("torch.")))
    for name, x in theirs.state_dict().items():
        if name in found:
            np.testing.assert_array_equal(found[name].astype(np.float32), x.float().numpy())
    assert "lm_head.weight" not in found  # it is the embedding


def change(folder, edit):
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def test_tensors_that_do_not_fit_are_named_together(folder):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.gate.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((48, 79), np.float32)

    change(folder, edit)
    message = (
        "the checkpoint does not fit its config.json: missing model.norm.weight; unknown "
        "model.layers.0.self_attn.gate.weight; model.layers.1.mlp.down_proj.weight is (48, 79), not (48, 80)."
    )
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        models.load(folder)


def test_old_buffers_are_no_parameters(folder):
    change(folder, lambda x: x.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}))
    models.load(folder)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "config.json"])
def test_an_index_stays_in_its_directory(folder, name):
    shard(folder, **{"model.norm.weight": name})
    message = f"{folder / INDEX} names a file that is no file of weights in its directory: {name!r}."
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        models.load(folder)


def test_an_index_names_the_file_that_holds_a_tensor(folder):
    shard(folder)
    right = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(right, "model-0.safetensors")}))
    message = f"{re.escape(str(folder / INDEX))} names model-0.safetensors for .*, which is not in it."
    with pytest.raises(UnsupportedModel, match=message):
        models.load(folder)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", " is no JSON: "),
        ("[]", " must hold an object, got a list."),
        ("{}", ": weight_map must be an object, got None."),
        ('{"weight_map": []}', ": weight_map must be an object, got []."),
        ('{"weight_map": {"lm_head.weight": 1}}', ": lm_head.weight must be a string, got 1."),
    ],
)
def test_a_damaged_index(folder, text, message):
    shard(folder)
    (folder / INDEX).write_text(text)
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'{folder / INDEX}{message}')}"):
        models.load(folder)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.float64])
def test_tensors_of_other_dtypes(folder, dtype):
    change(folder, lambda x: x.update({"model.norm.weight": x["model.norm.weight"].astype(dtype)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is (F8_E4M3|I8|F64), not BF16, F16 or F32"):
        models.load(folder)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_numbers_that_another_dtype_does_not_hold(folder, dtype):
    def edit(tensors):
        large = np.array([np.inf, 65504] + [1e5] * 46, np.float32)
        tensors["model.norm.weight"] = large.astype(dtype)

    change(folder, edit)
    models.load(folder)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has numbers that are infinite in float16"):
        models.load(folder, dtype="float16")
    change(folder, lambda x: x.update({"model.norm.weight": np.full(48, np.inf, np.float32)}))
    models.load(folder, dtype="float16")


def test_a_tied_head_is_the_embedding(tmp_path):
    tiny.make(tmp_path, "qwen3")
    change(tmp_path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"]}))
    models.load(tmp_path)
    change(tmp_path, lambda x: x.update({"lm_head.weight": x["lm_head.weight"] + 1}))
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings = True, and lm_head"):
        models.load(tmp_path)


@pytest.mark.parametrize("left", [INDEX, "model-00001-of-00002.safetensors", "adapter_model.safetensors"])
def test_save_leaves_no_weights_of_others_beside_its_own(folder, left):
    model, before = models.load(folder), (folder / SINGLE).read_bytes()
    (folder / left).write_text("{}")
    message = f"{folder} holds the weights of another checkpoint: {left}."
    with pytest.raises(ValueError, match=re.escape(message)):
        models.save(model, folder)
    assert (folder / SINGLE).read_bytes() == before


def test_save_beside_the_files_that_it_takes_along(folder):
    (folder / "generation_config.json").write_text("{}")
    model = models.load(folder, dtype=jnp.float32)
    model.norm.scale[...] *= 2
    models.save(model, folder, like=folder)
    found = models.load(folder, dtype=jnp.float32)
    np.testing.assert_array_equal(found.norm.scale[...], model.norm.scale[...])
    assert (folder / "generation_config.json").read_text() == "{}"
    with pytest.raises(ValueError, match="like must be the directory of a checkpoint, got"):
        models.save(model, folder, like=folder / "elsewhere")


def test_a_save_that_is_cut_off_is_no_checkpoint(folder, monkeypatch):
    """While weights are written, what was there stays; from then on there are none until all else is there."""
    model, before = models.load(folder), (folder / SINGLE).read_bytes()

    def cut_off(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", cut_off)
        with pytest.raises(OSError, match="No space left"):
            models.save(model, folder)
    assert (folder / SINGLE).read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "copy", cut_off)
        (folder / "generation_config.json").write_text("{}")
        with pytest.raises(OSError, match="No space left"):
            models.save(model, folder / "new", like=folder)
    with pytest.raises(UnsupportedModel, match="has neither"):
        models.load(folder / "new")
    models.save(model, folder / "new", like=folder)
    models.load(folder / "new")


def test_files_that_do_not_exist(folder):
    shard(folder, **{"model.norm.weight": "model-7.safetensors"})
    with pytest.raises(UnsupportedModel, match="which does not exist"):
        models.load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UnsupportedModel, match="has neither"):
        models.load(folder)
