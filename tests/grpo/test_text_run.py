"""`rlk grpo --model`: a run of a tiny checkpoint, its files, its bits, and mistakes."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlk_jax import models
from rlk_jax.grpo import memory, text_steps
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.policy import load_parameters
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.text_steps import rows_of_step
from rlk_jax.grpo.text_task import load_text_task
from rlk_jax.grpo.updates import learning_rate_of
from rlk_jax.losses import LossOptions
from tests.grpo import tiny, tiny_text
from tests.models.greedy import assert_same_answers
from tests.models.test_tokenizer import change
from tests.support import helpers

LETTERS = "tests.grpo.tiny_text:letters"
OPTIONS = {
    "grpo_steps": 4,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "updates_per_rollout": 2,
    "max_new_tokens": 6,
    "learning_rate": 1e-2,
    "checkpoint_every": 2,
    "reward": LETTERS,
    "invariant": True,
    "compute_dtype": "bfloat16",
}


HALVES = {"micro_batches": 2, "packing": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and a file of prompts."""
    folder = tmp_path_factory.mktemp("given")
    return tiny_text.write_model(folder / "model"), tiny_text.write_prompts(folder / "prompts.jsonl")


def command(files: tuple[Path, Path], out: Path, **changes) -> list[str]:
    model, prompts = files
    values = {"model": model, "prompts": prompts, **OPTIONS, **changes}
    flags = {name: "--" + name.replace("_", "-") for name in values}
    values = {name: x for name, x in values.items() if x is not None and x is not False}
    return [*(flags[name] if x is True else f"{flags[name]}={x}" for name, x in values.items()), "--out", str(out)]


@pytest.fixture(scope="module")
def tied(files, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint of one layer whose head is its embedding, and the same prompts."""
    fields = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    return tiny_text.write_model(tmp_path_factory.mktemp("tied") / "model", **fields), files[1]


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> tuple[RunFolder, Path]:
    """A finished run, and the checkpoint that it saved."""
    folder = tmp_path_factory.mktemp("run")
    saved = folder / "hf[a]"  # What prints this path may take the brackets for markup.
    assert tiny.run_here(*command(files, folder / "out", save_hf=saved)) == 0
    return RunFolder(folder / "out"), saved


def metrics_of(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_log_probs_of_rollouts_are_those_of_training(finished):
    """Ratios begin at exactly 1, on weights that move."""
    lines = metrics_of(finished[0])
    assert [line["mismatch"] for line in lines] == [0] * 4
    assert [line["first_ratio_min"] for line in lines] == [line["first_ratio_max"] for line in lines] == [1] * 4
    assert max(line["ratio_max"] for line in lines) > 1 and max(line["kl"] for line in lines) > 0


def test_a_run_writes_its_files(finished):
    folder, _ = finished
    assert {x.name for x in folder.path.iterdir()} == {
        "before.json",
        "checkpoints",
        "completions.jsonl",
        "config.json",
        "metrics.jsonl",
        "report.html",
        "report.png",
        "summary.json",
    }
    last = metrics_of(folder)[-1]
    assert last.keys() >= {"reward", "completion_length", "truncated", "entropy", "kl", "mismatch", "tokens"}
    assert 0 < last["completion_length"] <= 6 and 0 <= last["truncated"] <= 1 and last["entropy"] > 0
    samples = [json.loads(line) for line in folder.completions.read_text().splitlines()]
    assert len({x["tokens"] for x in samples}) > 2 and {x["ended"] for x in samples} == {True, False}
    assert [x["step"] for x in samples].count(0) == 8 and {x["step"] for x in samples} == {-1, 0, 1, 2, 3, 4}
    shown = [x for x in samples if x["step"] == 2]
    assert np.mean([x["reward"] for x in shown]) == pytest.approx(metrics_of(folder)[2]["reward"])
    assert json.loads(folder.summary.read_text()).keys() == {"before", "after"}


def test_the_trained_model_is_loaded_by_transformers(finished, files):
    """It has the tokenizer, other weights than the given one, and those of the last checkpoint."""
    _, saved = finished
    theirs = AutoModelForCausalLM.from_pretrained(saved).float()
    ours = models.load(saved, dtype=jnp.float32)
    tokens = np.array([[4, 30, 70, 9]])
    expected = theirs(torch.tensor(tokens)).logits.detach().numpy()
    helpers.assert_within_contract(ours.lm_head(ours(jnp.asarray(tokens))), expected, "models", jnp.float32, "forward")
    before = models.load(files[0], dtype=jnp.float32)
    assert bool((before.embedding[...] != ours.embedding[...]).any())
    assert models.load_tokenizer(saved).digest == models.load_tokenizer(files[0]).digest


def test_transformers_writes_the_same_text_with_the_trained_model(finished):
    """The most probable tokens by float32, of the files that the run saved. Nothing stops them: the first token would,
    almost always.
    """
    _, saved = finished
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype="float32")
    assert theirs.generation_config.eos_token_id == list(models.load_tokenizer(saved).stop_ids)
    theirs.generation_config.eos_token_id = None
    questions = ("0", "ab1", "abab2 + 7", "What is 17 + 26?", "zz", "??", "Name three colours.")
    answers = assert_same_answers(models.load(saved, dtype=jnp.float32), theirs, saved, questions, max_new_tokens=24)
    assert len(set(map(tuple, answers))) > 3, "they are not all the same"


def test_a_resumed_run_has_the_same_bits(finished, files, tmp_path, monkeypatch):
    """It goes on from a checkpoint in the middle, and ends with the same weights and files. What the run began with is
    not made again: states would be in memory twice.
    """
    folder, saved = finished
    again = RunFolder(Path(shutil.copytree(folder.path, tmp_path / "out")))
    tiny.lose_the_end(again, 4)
    monkeypatch.setattr(text_steps, "load_parameters", lambda *given: pytest.fail("the given model was read again"))
    assert tiny.run_here(*command(files, again.path, save_hf=tmp_path / "again"), "--resume") == 0
    for name in ("metrics", "completions", "summary"):
        assert getattr(again, name).read_bytes() == getattr(folder, name).read_bytes(), name
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_a_finished_run_may_write_its_model_again(finished, files, tmp_path, capsys):
    """Another run may not, nor may it write to another directory that holds something."""
    folder, saved = finished
    weights = saved / "model.safetensors"
    trained = weights.read_bytes()
    weights.write_bytes(b"damaged")
    assert tiny.run_here(*command(files, folder.path, save_hf=f"{saved}/"), "--resume") == 0
    assert weights.read_bytes() == trained
    assert tiny.run_here(*command(files, tmp_path / "out", save_hf=saved)) == 2
    assert tiny.run_here(*command(files, folder.path, save_hf=files[0]), "--resume") == 2
    printed, said = capsys.readouterr()
    assert f"\ntrained model: {saved}/\n" in printed
    full = "is not empty: name a new directory"
    assert said.splitlines() == [f"rlk grpo: error: --save-hf: {path} {full}" for path in (saved, files[0])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "--model needs --prompts, a JSONL file (rlk prompts arithmetic writes one)"),
        ({"width": 8}, "--width is of the built-in policy: it has no meaning beside --model"),
        ({"warmup_steps": 3}, "--warmup-steps is of the built-in policy: it has no meaning beside --model"),
        ({"rollout_buckets": 2}, "--rollout-buckets is of the built-in policy: it has no meaning beside --model"),
        ({"model": "absent"}, "absent"),
        ({"model": None}, "is of a given model: it has no meaning without --model"),
        ({"max_prompt_tokens": 3}, "has no prompt to train on of at most 3 tokens"),
        ({"eval_prompts": "absent.jsonl"}, "absent.jsonl"),
        ({"top_p": 1.5}, "--top-p must be greater than 0 and at most 1, got 1.5."),
        ({"temperature": 0}, "--temperature must be greater than 0, got 0.0"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, got 0"),
        ({"schedule": "steep"}, "--schedule must be constant, linear or cosine, got 'steep'"),
        ({"schedule_warmup": 9}, "--schedule-warmup (9) must be at most --grpo-steps (4)"),
        ({"loss_type": "ppo"}, "--loss-type must be one of ('dapo', "),
        (
            {"loss_type": "grpo", "packing": True, "micro_batches": 2},
            "--packing does not go with --normaliser sequence_mean",
        ),
        ({"reward": "absent_module:f"}, "absent_module"),
        ({"reward": "tests.grpo.test_text_run:absent"}, "absent"),
        ({"lora_rank": 0}, "--lora-rank must be at least 1, got 0"),
        (
            {"lora_rank": 2, "mesh": "data=1,tensor=2"},
            "--lora-rank needs a whole head, as in --mesh data=N,tensor=1, got data=1,tensor=2",
        ),
        ({"save_hf": "."}, "--save-hf: . is not empty"),
        ({"invariant": True, "compute_dtype": "float32"}, "--invariant needs --compute-dtype bfloat16, got float32"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(files, tmp_path, capsys, changes, message):
    assert tiny.run_here(*command(files, tmp_path / "out", **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: ") and error.count("\n") == 1
    assert message in error


@pytest.fixture
def smaller(files, tmp_path) -> tuple[Path, Path]:
    """A checkpoint whose tokenizer has one token more than its model, which it pads with, and prompts without it."""
    size = models.load_tokenizer(files[0]).vocab_size
    model = tiny_text.write_model(tmp_path / "model", vocab_size=size - 1)
    change(model / "generation_config.json", pad_token_id=size - 1)
    change(model / "tokenizer_config.json", pad_token=None)
    return model, files[1]


@pytest.mark.full
def test_a_tokenizer_with_more_tokens_than_the_model(smaller, tmp_path):
    """Gemma 3 1B has such a one, and old fine-tunes of Llama pad with it. `make test` reads it, in the next test."""
    assert tiny.run_here(*command(smaller, tmp_path / "out", grpo_steps=1)) == 0


def test_a_prompt_with_a_token_that_the_model_does_not_have(smaller, tmp_path, capsys):
    """No other is refused."""
    model, prompts = smaller[0], tmp_path / "prompts.jsonl"
    config = GrpoConfig(**OPTIONS, model=str(model), prompts=str(smaller[1]))
    size = load_text_task(config).tokenizer.vocab_size
    prompts.write_text(json.dumps({"prompt": "\u00ad", "answer": "a"}))
    assert tiny.run_here(*command((model, prompts), tmp_path / "out")) == 2
    error = f"{prompts}: the text has token {size - 1}, 'Ń', of a model of {size - 1} tokens."
    assert capsys.readouterr().err == f"rlk grpo: error: {error}\n"


def test_too_little_memory_names_what_helps_a_given_model(files, tmp_path, capsys, monkeypatch):
    """In one line, with the prompt that has the most tokens, not the most characters."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": x, "answer": "a"}) + "\n" for x in ("ü" * 20, "a" * 39, "b")))
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)
    assert tiny.run_here(*command((files[0], prompts), tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: out of memory: the policy with its optimizer needs about ")
    assert error.endswith(
        f"; the longest prompt has 40 tokens ('{'ü' * 20}'), the longest completion 6; --max-prompt-tokens, "
        "--max-new-tokens, --micro-batches, --prompts-per-step and --remat make a step smaller\n"
    )


def test_a_tokenizer_that_is_missing(files, tmp_path, capsys):
    model = shutil.copytree(files[0], tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert tiny.run_here(*command((model, files[1]), tmp_path / "out")) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["prompts", "tokenizer", "model", "reward"])
def test_what_a_resumed_run_reads_may_not_change(finished, files, tmp_path, capsys, what):
    model, prompts, changes = shutil.copytree(files[0], tmp_path / "model"), files[1], {}
    said = {
        "prompts": f"the run began with other rows of {tmp_path / 'other.jsonl'}",
        "tokenizer": f"the run began with another tokenizer of {model}",
        "model": f"the run began with other weights of {model}",
        "reward": f"--reward was '{LETTERS}', now '{LETTERS}=2'",
    }
    if what == "prompts":
        prompts = tiny_text.write_prompts(tmp_path / "other.jsonl", count=12)
    elif what == "tokenizer":
        (model / "chat_template.jinja").write_text(tiny_text.TEMPLATE + " ")
    elif what == "model":
        tiny_text.write_model(model, seed=1)
    else:
        changes["reward"] = "tests.grpo.tiny_text:letters=2"
    assert tiny.run_here(*command((model, prompts), finished[0].path, **changes), "--resume") == 2
    assert capsys.readouterr().err == f"rlk grpo: error: cannot resume {finished[0].path}: {said[what]}\n"


def test_every_row_is_taken_once_before_any_comes_again():
    """Whatever the number of rows of a step; equal steps take equal rows."""
    taken = np.concatenate([rows_of_step(3, step, 10, 4) for step in range(5)])
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10].tolist() != taken[10:].tolist()
    np.testing.assert_array_equal(rows_of_step(3, 2, 3, 7), rows_of_step(3, 2, 3, 7))
    assert len(rows_of_step(3, 2, 3, 7)) == 7


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [5, 10, 10, 10, 10, 10]), ("linear", [5, 10, 10, 7.5, 5, 2.5])]
)
def test_schedules_of_the_learning_rate(schedule, expected):
    """Over updates, of which a step has two: a rise over one step, then the schedule over the others."""
    config = GrpoConfig(grpo_steps=3, updates_per_rollout=2, schedule=schedule, schedule_warmup=1, learning_rate=10.0)
    np.testing.assert_array_equal([learning_rate_of(config)(i) for i in range(6)], expected)


def test_every_option_of_the_loss_is_one_of_a_run():
    assert {x.name for x in fields(LossOptions)} <= {x.name for x in fields(GrpoConfig)}


def test_entropies_and_importance_weights(tied, tmp_path):
    """Weights lie between what tokens were drawn with and training before its updates. With stock layers, a forward
    alone rounds otherwise than one that has a gradient, so ratios begin near 1. How otherwise depends on the processor:
    on some, the mean weight of the first step rounds to 1.
    """
    given = {"invariant": False, "entropy_coef": 0.5, "importance_cap": 1.5, "importance_level": "sequence"}
    assert tiny.run_here(*command(tied, tmp_path / "out", **given, **HALVES, grpo_steps=2)) == 0
    lines = metrics_of(RunFolder(tmp_path / "out"))
    assert any(line["importance_weight_mean"] != 1 for line in lines)
    for line in lines:
        assert line["first_ratio_min"] == pytest.approx(1, abs=0.05) and line["mismatch"] > 0
        assert line["importance_weight_mean"] == pytest.approx(1, abs=0.05)
        assert 0 < line["entropy_bonus"] < np.log(263)
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.01 * line["kl"] - 0.5 * line["entropy_bonus"])


@pytest.fixture(scope="module", params=[pytest.param("files", marks=pytest.mark.full), "tied"])
def adapted(request, tmp_path_factory) -> tuple[RunFolder, Path, Path]:
    """A finished run of low-rank terms, the checkpoint that it saved, and the one that it began from. `make test` has a
    tied head, which becomes one of its own.
    """
    folder = tmp_path_factory.mktemp("adapted")
    given = request.getfixturevalue(request.param)
    assert tiny.run_here(*command(given, folder / "out", lora_rank=4, learning_rate=3e-2, save_hf=folder / "hf")) == 0
    return RunFolder(folder / "out"), folder / "hf", given[0]


def test_low_rank_terms_are_trained_from_the_given_model_on(adapted):
    """Ratios begin at exactly 1; the reference, which is the given model, is left behind."""
    lines = metrics_of(adapted[0])
    assert [line["mismatch"] for line in lines] == [0] * 4
    assert [line["first_ratio_max"] for line in lines] == [1] * 4
    assert lines[0]["first_ratio_min"] == 1 and lines[-1]["kl"] > 0 and lines[-1]["ratio_max"] > 1


def test_what_is_frozen_is_saved_as_it_was(adapted):
    """Norms and embedding are; matrices beside low-rank terms differ by matrices of that rank, the head among them."""
    before, after = (models.load(path, dtype=jnp.float32) for path in (adapted[2], adapted[1]))
    rounded = jnp.asarray(before.embedding[...], jnp.bfloat16)
    np.testing.assert_array_equal(after.embedding[...], rounded)
    np.testing.assert_array_equal(after.norm.scale[...], before.norm.scale[...])
    for changed in (after.lm_head.weight[...] - before.lm_head.weight[...],):
        sizes = np.linalg.svd(np.asarray(changed), compute_uv=False)
        assert sizes[3] > 3 * sizes[4], sizes


def moves(files: tuple[Path, Path], folder: Path, **changes) -> np.ndarray:
    """By how much two steps move the float32 weights."""
    plain = {"invariant": False, "compute_dtype": "float32", "grpo_steps": 2, "learning_rate": 1e-3}
    assert tiny.run_here(*command(files, folder / "out", save_hf=folder / "hf", **{**plain, **changes})) == 0
    before, after = load_parameters(files[0]), load_parameters(folder / "hf")
    moved = jax.tree.map(lambda x, y: np.ravel(np.asarray(x) - np.asarray(y)), after, before)
    return np.concatenate(jax.tree.leaves(moved))


def said(folder: Path) -> np.ndarray:
    """What the model of a run in `moves` said."""
    lines = metrics_of(RunFolder(folder / "out"))
    return np.array([line[name] for line in lines for name in ("reward", "entropy", "completion_length")])


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "data=2,tensor=2", **HALVES},
        pytest.param({"mesh": "data=2,tensor=2"}, marks=pytest.mark.full),
        pytest.param({"mesh": "data=2,tensor=1", **HALVES}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_mesh_trains_like_one_device(tied, tmp_path, changes):
    """The head that is cut is the embedding, whose rows are looked up, too. `make test` has the mesh that cuts rows and
    the head, with packed rows in micro-batches.
    """
    found = [moves(tied, tmp_path / name, **own) for name, own in (("one", {}), ("two", changes))]
    helpers.assert_within_contract(*found, "grpo_training", jnp.float32, "gradient")
    helpers.assert_within_contract(
        *map(said, (tmp_path / "one", tmp_path / "two")), "grpo_training", jnp.float32, "forward"
    )


@pytest.mark.full
def test_log_probs_of_rollouts_are_those_of_training_with_a_cut_head(files, tmp_path):
    """Rollouts multiply with the head once more there. `make test` has the whole head."""
    assert tiny.run_here(*command(files, tmp_path / "out", mesh="data=2,tensor=2", implementation="deterministic")) == 0
    lines = metrics_of(RunFolder(tmp_path / "out"))
    assert [line["mismatch"] for line in lines] == [0] * 4
    assert [line["first_ratio_max"] for line in lines] == [1] * 4


@pytest.mark.full
def test_a_head_that_is_cut_has_the_bits_of_a_whole_one(files, tmp_path):
    """In `make test`, test_sharded.py has this of the built-in policy, and test_a_mesh_trains_like_one_device trains
    with a cut head.
    """
    found = [
        moves(files, tmp_path / mesh, mesh=mesh, implementation="deterministic")
        for mesh in ("data=1,tensor=1", "data=1,tensor=2")
    ]
    helpers.assert_same_bits(*found)
