"""`rlk sft`: a run of a tiny checkpoint on prompts and completions, its loss, its files, its bits, and mistakes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlk_jax import cli, dispatch, explain, models
from rlk_jax.checker import relative_norm
from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo import memory, text_steps
from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.sft.steps import SftSteps, build_sft_steps
from rlk_jax.grpo.sft.task import load_sft_task
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.text_steps import rows_of_step
from rlk_jax.grpo.updates import adam
from tests.grpo import tiny, tiny_text
from tests.models.test_tokenizer import change
from tests.support import helpers

INVARIANT = {"invariant": True, "compute_dtype": "bfloat16"}
BITS = {"implementation": "deterministic", "z_loss": 0.02, "max_gradient_norm": 0.1, "micro_batches": 2}
OPTIONS = {"steps": 4, "rows_per_step": 4, "learning_rate": 1e-2, "checkpoint_every": 2, **INVARIANT, **BITS}
OPTIONS |= {"weight_decay": 0.1, "eval_every": 2}
"""Several tests have the programs of a run of these, which promise bits on a mesh."""
ROW = '{"prompt": "ab", "completion": "a"}'
EXAMPLE = (
    '; a line reads {"prompt": "2+2=", "completion": "4"}, where a prompt may be [{"role": "user", "content": "2+2="}]'
)


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{'ab' * (i % 3)}{i}"}]


ROWS = [{"prompt": chat(i), "completion": "ab"[i % 2] * (1 + i % 4), "note": i} for i in range(9)]
ROWS.append({"prompt": "plain", "completion": "text"})


def write_rows(path: Path, rows: list[dict] = ROWS) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint of one layer whose completions one token ends, and a file of rows."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny_text.write_model(folder / "model", eos_token_id=2, num_hidden_layers=1)
    return model, write_rows(folder / "rows.jsonl")


def command(files: tuple[Path, Path], out: Path, **changes) -> list[str]:
    values = {"model": files[0], "data": files[1], **OPTIONS, **changes}
    flags = {name: "--" + name.replace("_", "-") for name in values}
    values = {name: x for name, x in values.items() if x is not None and x is not False}
    return ["sft", *(flags[name] if x is True else f"{flags[name]}={x}" for name, x in values.items()), f"--out={out}"]


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> tuple[RunFolder, Path]:
    """A finished run, and the checkpoint that it saved."""
    folder = tmp_path_factory.mktemp("run")
    with tiny.shared_programs():
        assert cli.main(command(files, folder / "out", save_hf=folder / "hf")) == 0
    return RunFolder(folder / "out", SftConfig), folder / "hf"


def test_a_run_learns_and_writes_its_files(finished):
    folder, _ = finished
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines] == [(i, "sft") for i in range(4)]
    assert lines[-1]["loss"] < lines[0]["loss"] - 1 and all(line["tokens"] >= 8 for line in lines)
    summary = json.loads(folder.summary.read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 1
    assert ["heldout_loss" in line for line in lines] == [False, True, False, True]
    for name, value in summary["after"].items():
        assert lines[-1][f"heldout_{name}"] == value != lines[1][f"heldout_{name}"]
    for measured in summary.values():
        assert measured["perplexity"] == pytest.approx(np.exp(measured["loss"]))
    assert tiny.documented_files("sft.md") == {x.name for x in folder.path.iterdir()} | {"programs"}


def test_the_trained_model_is_a_checkpoint_like_those_of_rlk_grpo(finished, files):
    """It has the tokenizer, and other weights than the given one."""
    before, after = (models.load(path, dtype=jnp.float32) for path in (files[0], finished[1]))
    assert bool((before.embedding[...] != after.embedding[...]).any())
    assert models.load_tokenizer(finished[1]).digest == models.load_tokenizer(files[0]).digest


@pytest.mark.full
def test_rlk_grpo_goes_on_from_the_trained_model(finished, tmp_path):
    """In `make test`, test_the_trained_model_is_a_checkpoint_like_those_of_rlk_grpo loads what rlk grpo would."""
    prompts = tiny_text.write_prompts(tmp_path / "prompts.jsonl")
    given = [f"--model={finished[1]}", f"--prompts={prompts}", "--grpo-steps=1", "--prompts-per-step=2"]
    assert cli.main(["grpo", *given, "--max-new-tokens=4", f"--out={tmp_path / 'out'}"]) == 0


def test_a_resumed_run_has_the_same_bits(finished, files, tmp_path, monkeypatch):
    """It goes on from a checkpoint in the middle, and ends with the same weights and files."""
    folder, saved = finished
    out = RunFolder(Path(shutil.copytree(folder.path, tmp_path / "out")), SftConfig)
    out.summary.unlink()
    shutil.rmtree(out.checkpoints / "4")
    monkeypatch.setattr(text_steps, "load_parameters", lambda *given: pytest.fail("the given model was read again"))
    with tiny.shared_programs():
        assert cli.main([*command(files, out.path, save_hf=tmp_path / "again"), "--resume"]) == 0
    for name in ("metrics", "summary"):
        assert getattr(out, name).read_bytes() == getattr(folder, name).read_bytes(), name
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def config(files: tuple[Path, Path], **changes) -> SftConfig:
    return SftConfig(**{"model": str(files[0]), "data": str(files[1]), **OPTIONS, **changes})


def built(files: tuple[Path, Path], **changes) -> SftSteps:
    chosen = config(files, **changes)
    with tiny.shared_programs():
        return build_sft_steps(chosen, load_sft_task(chosen), make_mesh(chosen))


def ids_of(row: dict) -> tuple[list[int], list[int]]:
    """The tokens of a row's prompt and completion, by a vocabulary of bytes and the template as they are written."""
    letters = {chr(33 + i): 3 + i for i in range(94)}
    prompt = row["prompt"]
    if isinstance(prompt, str):
        ids = [letters[x] for x in prompt]
    else:
        ids = [1, *(letters[x] for x in f"user:{prompt[0]['content']}"), 2, 1, *(letters[x] for x in "assistant:")]
    return ids, [*(letters[x] for x in row["completion"]), 2]


def gold(model: Path, rows: list[dict], z_loss: float = 0.0, smoothing: float = 0.0) -> float:
    """The mean loss of the tokens of completions, in float64 by transformers and optax, each row alone."""
    theirs = AutoModelForCausalLM.from_pretrained(model).double()
    logits, targets = [], []
    for row in rows:
        prompt, completion = ids_of(row)
        logits.append(theirs(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].detach().numpy())
        targets.extend(completion)

    @jax.jit
    def mean(logits: jax.Array, targets: jax.Array) -> jax.Array:
        smoothed = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[1]), smoothing)
        own = optax.softmax_cross_entropy(logits, smoothed)
        return (own + z_loss * jax.nn.logsumexp(logits, axis=1) ** 2).mean()

    with jax.enable_x64():
        return float(mean(np.concatenate(logits), np.array(targets)))


def test_losses_are_those_of_transformers_and_optax(files):
    """The loss of the first step has a z-loss and smoothed labels, that of held-out rows has neither."""
    chosen = config(files, label_smoothing=0.1, invariant=False, compute_dtype="float32", implementation=None)
    task = load_sft_task(chosen)
    steps = build_sft_steps(chosen, task, make_mesh(chosen))
    raw = {json.dumps(row["prompt"]): row for row in ROWS}
    train, heldout = ([raw[json.dumps(row.prompt)] for row in part] for part in (task.train, task.heldout))
    assert len(train) == 8 and len(heldout) == 2
    state = steps.initial_state()
    before = float(steps.heldout_loss(state.params)["loss"])
    _, metrics = steps.sft_step(state, 0)
    taken = [train[i] for i in rows_of_step(chosen.seed, 0, 8, 4)]
    found = np.array([metrics["loss"], before])
    expected = [gold(files[0], taken, chosen.z_loss, 0.1), gold(files[0], heldout)]
    helpers.assert_within_contract(found, np.array(expected), "models", jnp.float32, "forward")
    assert metrics["tokens"] == sum(len(ids_of(row)[1]) for row in taken)


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_labels_are_smoothed_as_far_as_the_op_smooths_them(files, smoothing):
    """At 1 a target has no more of the loss than any other token."""
    assert config(files, label_smoothing=smoothing).label_smoothing == smoothing
    hidden, head, ids = jnp.ones((2, 8)), jnp.ones((16, 8)), jnp.zeros(2, jnp.int32)
    assert explain("linear_cross_entropy", hidden, head, ids, label_smoothing=smoothing).choice == "xla"


def test_targets_are_the_tokens_of_completions_and_their_end(files):
    """Rows end in the last slot; a prompt has no target, nor has a row that fills a batch up."""
    task = load_sft_task(config(files))
    rows = [*task.train, *task.heldout]
    sequences = task.sequences([*rows, None])
    raw = {json.dumps(row["prompt"]): row for row in ROWS}
    for i, row in enumerate(rows):
        prompt, completion = ids_of(raw[json.dumps(row.prompt)])
        whole = [*prompt, *completion]
        assert sequences.token_ids[i, sequences.padding[i] :].tolist() == whole[:-1]
        targets = sequences.target_ids[i]
        assert targets[targets != IGNORED].tolist() == targets[-len(completion) :].tolist() == completion
    assert (sequences.target_ids[-1] == IGNORED).all() and sequences.padding[-1] < sequences.token_ids.shape[1]
    assert sequences.target_ids.shape[1] == 5, "the longest completion has four letters and its end"


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ({}, {"mesh": "data=2,tensor=1", "micro_batches": 1}),
        pytest.param({"micro_batches": 1}, {"mesh": "data=1,tensor=2", "micro_batches": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_mesh_has_the_bits_of_one_device(files, one, many):
    """States and metrics after two steps, without the rows that a cut head is padded with. `make test` has a mesh over
    data; the cut head's loss is in the next test.
    """
    found = []
    for how in (one, many):
        steps = built(files, **how)
        state, measured = steps.initial_state(), []
        for step in range(2):
            state, metrics = steps.sft_step(state, step)
            measured.append(metrics)
        found.append([np.asarray(x) for x in jax.tree.leaves((state, measured))])
    expected, stored = found
    real = [x[tuple(map(slice, of_one.shape))] for x, of_one in zip(stored, expected, strict=True)]
    helpers.assert_same_bits(expected, real)


def test_weight_decay_is_that_of_adamw_on_matrices():
    """Two updates, the first of which leaves moments behind."""
    head = MeshHead(make_mesh(tiny.config()), 97, "deterministic", jnp.float32)
    params = {"matrix": jnp.linspace(-1, 1, 12).reshape(3, 4), "scale": jnp.ones(4)}
    gradients = jax.tree.map(lambda x: 0.01 * jnp.cos(x), params)
    of_optax = optax.adamw(0.1, b2=0.95, weight_decay=0.5, mask={"matrix": True, "scale": False})
    found, expected = (_after_two_updates(x, params, gradients) for x in (adam(0.1, head, 1.0, 0.5), of_optax))
    assert relative_norm(found["matrix"], params["matrix"]) > 0.1
    for name, x in found.items():
        np.testing.assert_array_almost_equal_nulp(np.asarray(x), np.asarray(expected[name]), nulp=4)


def _after_two_updates(optimizer, params, gradients):
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_a_head_that_is_cut_has_the_loss_of_a_whole_one(files):
    found = []
    for mesh in ("data=1,tensor=1", "data=1,tensor=2"):
        steps = built(files, mesh=mesh)
        found.append(steps.heldout_loss(steps.initial_state().params)["loss"])
    helpers.assert_same_bits(*found)


def test_a_run_of_many_options(files, tmp_path, capsys):
    """Low-rank terms, packed micro-batches, a schedule, held-out rows of their own and rows that are too long."""
    data = write_rows(tmp_path / "data.jsonl", [*ROWS[:6], {"prompt": "x" * 90, "completion": "a"}])
    held = write_rows(tmp_path / "held.jsonl", ROWS[6:])
    given = {"lora_rank": 2, "micro_batches": 2, "packing": True, "schedule": "cosine", "schedule_warmup": 1}
    given |= {"eval_data": held, "max_tokens": 60, "steps": 2, "invariant": False, "implementation": None}
    assert cli.main(command((files[0], data), tmp_path / "out", **given)) == 0
    said = capsys.readouterr().out
    assert "left out rows of more than 60 tokens: 1" in said and "held out" in said and "perplexity" in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', '"completion" is missing'),
        ('{"completion": "a"}', '"prompt" is missing'),
        ('{"prompt": "a", "completion": ""}', '"completion" must not be empty'),
        ('{"prompt": "", "completion": "a"}', '"prompt" must not be empty'),
        ('{"prompt": "a", "completion": ["b"]}', '"completion" must be a string, got an array'),
        ('{"prompt": [{"role": "user"}], "completion": "a"}', 'message 1 of "prompt": "content" is missing'),
        ('{"prompt": "a", "completion": "\\ud83d"}', "\"completion\" holds '\\ud83d', a lone surrogate"),
        (
            '{"prompt": "a", "completion": "b<end>"}',
            "the completion holds '<end>', which ends it: leave it out, as it is added at the end.",
        ),
        ("[1]", "a JSON array, where each line must hold one object of its own"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(files, tmp_path, capsys, line, message):
    data = tmp_path / "bad.jsonl"
    data.write_text(f"{ROW}\n\n{line}\n")
    assert cli.main(command((files[0], data), tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rlk sft: error: {data}, line 3: {message}") and error.endswith(f"{EXAMPLE}\n")
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_token_that_the_model_does_not_have_is_named_with_its_line(tmp_path, capsys):
    """In prompts and in completions alike."""
    model = tiny_text.write_model(tmp_path / "model", eos_token_id=2)
    size = models.load_tokenizer(model).vocab_size
    tiny_text.write_model(model, eos_token_id=2, vocab_size=size - 1)
    for row in ({"prompt": "\u00ad", "completion": "a"}, {"prompt": "a", "completion": "\u00ad"}):
        data = write_rows(tmp_path / "rows.jsonl", [json.loads(ROW), row])
        assert cli.main(command((model, data), tmp_path / "out")) == 2
        error = f"{data}, line 2: the text has token {size - 1}, 'Ń', of a model of {size - 1} tokens."
        assert capsys.readouterr().err == f"rlk sft: error: {error}{EXAMPLE}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "--model is missing: a Hugging Face checkpoint's directory"),
        ({"data": None}, "--data is missing: a JSONL file of completions"),
        ({"model": "absent"}, "absent is no directory: that of a checkpoint is wanted."),
        ({"data": "absent.jsonl"}, "cannot read file absent.jsonl: "),
        ({"eval_data": "absent.jsonl"}, "cannot read file absent.jsonl: "),
        ({"max_tokens": 3}, "rows.jsonl has no row to train on of at most 3 tokens"),
        ({"max_tokens": 2}, "--max-tokens must be at least 3, got 2"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"rows_per_step": 0}, "--rows-per-step must be at least 1, got 0"),
        ({"weight_decay": -1}, "--weight-decay must be at least 0, got -1.0"),
        ({"eval_every": 0}, "--eval-every must be at least 1, got 0"),
        ({"z_loss": -1}, "--z-loss must be at least 0, got -1.0"),
        ({"z_loss": "nan"}, "--z-loss must be finite, got nan"),
        ({"z_loss": 1e39}, "--z-loss must be 0 or a positive finite number, got 1e+39."),
        ({"label_smoothing": 1.1}, "--label-smoothing must be a number in [0, 1], got 1.1."),
        ({"label_smoothing": -0.1}, "--label-smoothing must be a number in [0, 1], got -0.1."),
        ({"label_smoothing": "nan"}, "--label-smoothing must be finite, got nan"),
        ({"learning_rate": 0}, "--learning-rate must be greater than 0, got 0.0"),
        ({"schedule_warmup": 9}, "--schedule-warmup (9) must be at most --steps (4)"),
        ({"micro_batches": 3}, "--micro-batches (3) must divide a device's 4 samples of a step"),
        ({"mesh": "data=3,tensor=1"}, "--rows-per-step (4) must be a multiple of the data axis (3)"),
        ({"compute_dtype": "float32"}, "--invariant needs --compute-dtype bfloat16, got float32"),
        ({"implementation": "magic"}, "implementation"),
        ({"save_hf": "."}, "--save-hf: . is not empty"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(files, tmp_path, capsys, changes, message):
    assert cli.main(command(files, tmp_path / "out", **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk sft: error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


def test_one_row_cannot_be_trained_on_and_held_out(files, tmp_path, capsys):
    data = write_rows(tmp_path / "one.jsonl", ROWS[:1])
    assert cli.main(command((files[0], data), tmp_path / "out")) == 2
    said = f"rlk sft: error: {data} has one prompt alone, which is held out: give other prompts, or --eval-data\n"
    assert capsys.readouterr().err == said


def test_a_row_longer_than_the_model_was_made_for_is_named_with_its_line(files, tmp_path, capsys):
    model = shutil.copytree(files[0], tmp_path / "model")
    change(model / "config.json", max_position_embeddings=25)
    assert cli.main(command((model, files[1]), tmp_path / "out")) == 2
    line, tokens = next((i, n) for i, row in enumerate(ROWS, 1) if (n := sum(map(len, ids_of(row)))) > 25)
    error = f"{files[1]}, line {line}: the row has {tokens} tokens, and the model was made for 25; "
    assert capsys.readouterr().err == f"rlk sft: error: {error}--max-tokens 25 leaves such rows out\n"


def test_too_little_memory_names_what_helps(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: 0)
    assert cli.main(command(files, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk sft: error: out of memory: the policy with its optimizer needs about ")
    assert error.endswith("--max-tokens, --micro-batches, --rows-per-step and --remat make a step smaller\n")


def test_a_plan_has_the_programs_of_a_run(files, tmp_path, capsys):
    """It writes nothing, and needs no weights."""
    model = shutil.copytree(files[0], tmp_path / "model")
    (model / "model.safetensors").unlink()
    with tiny.shared_programs():
        assert cli.main([*command((model, files[1]), tmp_path / "out"), "--plan"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("the policy with its", "a step", "the evaluation"))
    assert "peak memory of a device: " in shown and not (tmp_path / "out").exists()


def test_a_run_resumes_as_itself_only(finished, files, tmp_path, capsys):
    """With its own rows, model and options; and the folder is of no other command."""
    folder, out = finished[0].path, finished[0].path
    other = write_rows(tmp_path / "other.jsonl", ROWS[1:])
    assert cli.main([*command((files[0], other), out), "--resume"]) == 2
    assert (
        "cannot resume" in (error := capsys.readouterr().err) and f": the run began with other rows of {other}" in error
    )
    assert cli.main([*command(files, out, z_loss=0.1), "--resume"]) == 2
    assert f"cannot resume {folder}: --z-loss was 0.02, now 0.1" in capsys.readouterr().err
    assert cli.main(["grpo", "--warmup-steps=1", f"--out={out}", "--overwrite"]) == 2
    assert f"{folder} holds no run of rlk grpo: " in capsys.readouterr().err
    assert cli.main(command(files, out)) == 2
    assert f"{folder} is not empty: --resume continues its run, --overwrite starts again" in capsys.readouterr().err


def test_an_implementation_that_takes_no_smoothing_is_not_chosen(monkeypatch):
    """Nor is it run where it is named."""
    rows = dispatch.TABLE["linear_logp"]
    refusing = dispatch.Implementation("triton", rows[-2].functions, _refuses_smoothing, promises_bits=True)
    monkeypatch.setitem(dispatch.TABLE, "linear_logp", (refusing, *(x for x in rows if x.name != "triton")))
    head = MeshHead(make_mesh(GrpoConfig()), 64, None, jnp.bfloat16, weight_layout="vd")
    assert head.with_promised_bits(32).implementation == "triton"
    smoothing = replace(head, smooths=True)
    assert smoothing.with_promised_bits(32).implementation == "deterministic"
    replace(head, implementation="triton").check(32)
    for ask in (MeshHead.check, MeshHead.with_promised_bits):
        with pytest.raises(BadInput, match="'triton' here"):
            ask(replace(smoothing, implementation="triton"), 32)


def _refuses_smoothing(facts):
    return ["takes no label_smoothing yet"] if facts.config.smoothing else []
