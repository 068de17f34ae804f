"""Runs of a given model in which something goes wrong midway, or at their end: what is done is kept."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlk_jax import cli
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.models import chat_template
from tests.grpo import tiny, tiny_text
from tests.grpo.test_text_run import HALVES, command, metrics_of
from tests.models.test_tokenizer import change

FAULTS = {
    "raises": ("raise KeyError('x')", "raised KeyError: 'x'"),
    "nan": ("return [float('nan')] * len(completions)", "must return finite numbers, got nan"),
    "too few": ("return [1.0]", "must return a number for each completion: 8, got 1"),
}
REWARD = """
from tests.grpo.tiny_text import letters
calls = 0

def late(prompts, completions, answer, **columns):
    global calls
    calls += 1
    if calls == 5:  # Two are of the evaluation before the run, and one of each step.
        {fault}
    return letters(prompts, completions, answer)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("given")
    model = tiny_text.write_model(folder / "model", num_hidden_layers=1)
    return model, tiny_text.write_prompts(folder / "prompts.jsonl")


SHORT = {"grpo_steps": 1}
"""Runs of one step call the programs of longer ones. One compilation serves them all where JAX keeps a cache on disk,
as in `make test`.
"""


@pytest.fixture(scope="module")
def short(files, tmp_path_factory) -> Path:
    """The folder of a finished run of one step."""
    out = tmp_path_factory.mktemp("short") / "out"
    assert tiny.run_here(*command(files, out, **SHORT)) == 0
    return out


def test_the_documentation_names_all_files_of_a_run(short):
    """A CPU keeps no programs."""
    assert tiny.documented_files("grpo.md") == {x.name for x in short.iterdir()} | {"programs"}


def test_the_folder_of_a_run_is_no_checkpoint(files, short, tmp_path, capsys):
    """Whoever names it is told what writes the run's model, which does."""
    way = "that run's command with --resume --save-hf DIR writes its model to DIR"
    said = f"error: {short} is the folder of a run and no checkpoint: {way}\n"
    assert cli.main(["generate", f"--model={short}", "--prompt=a"]) == 2
    assert capsys.readouterr().err == f"rlk generate: {said}"
    assert tiny.run_here(*command((short, files[1]), tmp_path / "out", **SHORT)) == 2
    assert capsys.readouterr().err == f"rlk grpo: {said}"
    out = shutil.copytree(short, tmp_path / "copy")
    assert tiny.run_here(*command(files, out, save_hf=tmp_path / "hf", **SHORT), "--resume") == 0
    assert cli.main(["generate", f"--model={tmp_path / 'hf'}", "--prompt=a", "--max-new-tokens=1"]) == 0
    change(out / "config.json", model=None)
    capsys.readouterr()
    assert cli.main(["generate", f"--model={out}", "--prompt=a"]) == 2
    assert "is the folder of a run of the built-in policy, which is no" in capsys.readouterr().err


def run(files: tuple[Path, Path], out: Path, reward: Path, *more: str, **changes) -> int:
    options = {"checkpoint_every": 100, "reward": f"{reward}:late", **changes}
    return tiny.run_here(*command(files, out, **options), *more)


@pytest.mark.parametrize("fault", ["nan", *(pytest.param(x, marks=pytest.mark.full) for x in ("raises", "too few"))])
def test_a_reward_that_fails_midway_loses_nothing(files, tmp_path, capsys, fault):
    """The steps before it are saved, and the run goes on with the mended reward to the bits of one that never failed.
    `make test` has one fault: test_rewards.py tells the others from it.
    """
    source, message = FAULTS[fault]
    reward, mended, out = tmp_path / "reward.py", tmp_path / "mended.py", tmp_path / "out"
    reward.write_text(REWARD.format(fault=source))
    mended.write_text(REWARD.format(fault="pass"))
    assert run(files, out, reward) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"rlk grpo: error: .*{re.escape(message)}.*; --resume goes on from step 2 .*\n", error)
    assert [line["step"] for line in metrics_of(RunFolder(out))] == [0, 1]
    shutil.copy(mended, reward)
    assert run(files, out, reward, "--resume") == 0
    if fault != "nan":
        return
    assert run(files, tmp_path / "whole", mended) == 0
    for name in ("metrics", "summary"):
        found, expected = (getattr(RunFolder(x), name).read_bytes() for x in (out, tmp_path / "whole"))
        assert found == expected, name
    reward.write_text(mended.read_text() + "# Changed again, in a run that has not failed since.\n")
    assert run(files, out, reward, "--resume") == 2
    assert f": the run began with another source of {reward}:" in capsys.readouterr().err


def test_a_reward_that_fails_at_once_says_no_more(files, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(fault="return None").replace("calls == 5", "calls == 1"))
    assert run(files, tmp_path / "out", reward) == 2
    assert "resume" not in capsys.readouterr().err


def test_a_template_that_writes_another_date(files, tmp_path, capsys, monkeypatch):
    """Prompts with another date are other prompts."""
    model = shutil.copytree(files[0], tmp_path / "model")
    assert tiny_text.TEMPLATE.endswith("<s>assistant:")
    written = tiny_text.TEMPLATE.removesuffix("nt:") + "{{ strftime_now('%d') }}:"
    (model / "chat_template.jinja").write_text(written)
    monkeypatch.setattr(chat_template, "_strftime_now", lambda form: "26")
    chat_template._compiled.cache_clear()
    out, found = tmp_path / "out", (model, files[1])
    assert tiny.run_here(*command(found, out, **SHORT)) == 0
    monkeypatch.setattr(chat_template, "_strftime_now", lambda form: "27")
    chat_template._compiled.cache_clear()
    assert tiny.run_here(*command(found, out, **SHORT), "--resume") == 2
    assert f": the run began with other tokens of {files[1]}\n" in capsys.readouterr().err
    chat_template._compiled.cache_clear()


@pytest.mark.parametrize("lengths", [(2,), (2, 60)])
def test_one_prompt_cannot_be_trained_on_and_held_out(files, tmp_path, capsys, lengths):
    """Whether it is the only one of its file, or the only one that is short enough."""
    prompts, most = tmp_path / "one.jsonl", None if len(lengths) == 1 else 50
    prompts.write_text("".join(json.dumps({"prompt": "a" * n, "answer": "b"}) + "\n" for n in lengths))
    assert tiny.run_here(*command((files[0], prompts), tmp_path / "out", max_prompt_tokens=most)) == 2
    one = "one prompt alone" if most is None else "one prompt alone of at most 50 tokens"
    said = f"rlk grpo: error: {prompts} has {one}, which is held out: give other prompts, or --eval-prompts\n"
    assert capsys.readouterr().err == said


def test_where_a_trained_model_cannot_be_written(files, tmp_path, capsys):
    """It is said before the run, and nothing is left behind."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "hf"
    assert tiny.run_here(*command(files, tmp_path / "out", save_hf=place)) == 2
    assert capsys.readouterr().err == f"rlk grpo: error: --save-hf: cannot write to {tmp_path / 'file'}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["missing", "damaged", "of another model"])
def test_weights_that_cannot_be_read_lose_no_run(files, short, tmp_path, capsys, what):
    """They are looked at before --overwrite deletes anything."""
    model, out = shutil.copytree(files[0], tmp_path / "model"), shutil.copytree(short, tmp_path / "out")
    kept = {x: x.stat().st_mtime_ns for x in out.rglob("*")}
    weights = model / "model.safetensors"
    if what == "missing":
        weights.unlink()
    elif what == "damaged":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        wider = {name: np.repeat(x, 2, axis=0) for name, x in load_file(weights).items()}
        save_file(wider, weights)
    assert tiny.run_here(*command((model, files[1]), out, **SHORT), "--overwrite") == 2
    assert re.search("has neither|is damaged|does not fit", capsys.readouterr().err)
    assert {x: x.stat().st_mtime_ns for x in out.rglob("*")} == kept


def test_an_index_that_is_damaged(files, tmp_path, capsys):
    model = shutil.copytree(files[0], tmp_path / "model")
    (model / "model.safetensors.index.json").write_text("{")
    assert tiny.run_here(*command((model, files[1]), tmp_path / "out", **SHORT)) == 2
    assert re.fullmatch("rlk grpo: error: .*index.json is no JSON: .*\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_files_that_no_model_reads_may_come(files, short, tmp_path):
    """The digest of a model is that of its own files."""
    model, out = shutil.copytree(files[0], tmp_path / "model"), shutil.copytree(short, tmp_path / "out")
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert tiny.run_here(*command((model, files[1]), out, **SHORT), "--resume") == 0


def test_a_run_of_many_options(files, tmp_path, capsys):
    """Several rewards with weights, held-out prompts of their own, a temperature, truncated sampling whose ids updates
    replay for packed rows in micro-batches, another loss, entropies of the ids, a schedule, clipping, prompts that are
    too long, and completions shown at every step.
    """
    model, prompts = files
    rows = prompts.read_text().splitlines()
    longer = json.dumps({"prompt": [{"role": "user", "content": "x" * 60}], "answer": "a"})
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    train.write_text("\n".join([*rows[:8], longer]))
    held.write_text("\n".join(rows[8:]))
    rewards = "tests.grpo.tiny_text:letters,tests.grpo.test_text_faults:shortness=0.5"
    given = {
        "reward": rewards,
        "eval_prompts": held,
        "max_prompt_tokens": 50,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        **HALVES,
        "loss_type": "cispo",
        "cispo_ratio_cap": 3.0,
        "entropy_coef": 0.01,
        "schedule": "cosine",
        "schedule_warmup": 1,
        "max_gradient_norm": 0.1,
        "show_every": 1,
        "grpo_steps": 3,
        "updates_per_rollout": 1,
    }
    assert tiny.run_here(*command((model, train), tmp_path / "out", **given)) == 0
    said, warned = capsys.readouterr()
    assert "warning" not in warned  # Updates replay what tokens were drawn among.
    assert "left out prompts of more than 50 tokens: 1" in said and said.count("┃ completion") == 3
    folder = RunFolder(tmp_path / "out")
    lines = metrics_of(folder)
    assert lines[0]["kl"] == 0 < lines[1]["kl"]
    for line in lines:
        assert line["mismatch"] == 0 and line["first_ratio_min"] == line["first_ratio_max"] == 1
        assert 0 < line["entropy_bonus"] < np.log(50)
        parts = line["reward/tests.grpo.tiny_text:letters"] + line["reward/tests.grpo.test_text_faults:shortness"] / 2
        assert line["reward"] == pytest.approx(parts, abs=1e-6)
    samples = [json.loads(line) for line in folder.completions.read_text().splitlines()]
    held_out = {json.loads(row)["prompt"][0]["content"] for row in rows[8:]}
    assert {x["prompt"].removeprefix("user: ") for x in samples if x["step"] in (-1, 3)} == held_out


def shortness(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward of short completions."""
    return [1 / (1 + len(x)) for x in completions]


def test_texts_longer_than_the_model_was_made_for(files, tmp_path, capsys):
    model = shutil.copytree(files[0], tmp_path / "model")
    change(model / "config.json", max_position_embeddings=20)
    assert tiny.run_here(*command((model, files[1]), tmp_path / "out", **SHORT)) == 0
    assert "prompt and completion have up to" in (said := capsys.readouterr().err) and "made for 20" in said
