"""Checkpoints: single files and shards, dtypes, tied heads, and everything that does not fit by its name."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rlk_jax import models
from rlk_jax.models import UnsupportedModel
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


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_stays_in_its_directory(folder, name):
    shard(folder, **{"model.norm.weight": name})
    with pytest.raises(UnsupportedModel, match="names a file out of its directory"):
        models.load(folder)


def test_files_that_do_not_exist(folder):
    shard(folder, **{"model.norm.weight": "model-7.safetensors"})
    with pytest.raises(UnsupportedModel, match="which does not exist"):
        models.load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UnsupportedModel, match="has neither"):
        models.load(folder)
