"""`rlk grpo --model` with top-k, top-p and min-p: training replays what tokens were drawn among."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlk_jax import dispatch
from rlk_jax.core.allowed import EVERY_TOKEN, AllowedTokens
from rlk_jax.grpo import text_steps
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.policy import load_parameters, make_policy
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.sequences import join_completions
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.text_task import load_text_task
from tests.grpo import tiny, tiny_text
from tests.grpo.test_text_run import HALVES, OPTIONS, command, metrics_of
from tests.support import helpers

SMOLLM2 = Path(__file__).parents[2] / ".smollm2" / "model"
IDS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
WORDS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.001}
"""What a rollout records of V = 263 tokens: 50 ids for each, and packed bits."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and a file of prompts."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny_text.write_model(folder / "model", num_hidden_layers=1)
    return model, tiny_text.write_prompts(folder / "prompts.jsonl")


@pytest.fixture
def forgetful(monkeypatch) -> Iterator[None]:
    """Training does not know what tokens were drawn among."""
    tiny.forget_programs()
    monkeypatch.setattr(text_steps, "join_completions", lambda *given: join_completions(*given[:-1], EVERY_TOKEN))
    yield
    tiny.forget_programs()


def run(files: tuple[Path, Path], out: Path, **changes) -> list[dict]:
    """The metrics of a run of two steps of one update."""
    assert tiny.run_here(*command(files, out, **{"grpo_steps": 2, "updates_per_rollout": 1, **changes})) == 0
    return metrics_of(RunFolder(out))


def test_log_probs_have_the_bits_of_training(files):
    """Those of a rollout are what training computes of the same packed bits. Of the whole vocabulary, they are less."""
    config = GrpoConfig(**OPTIONS, **WORDS, model=str(files[0]), prompts=str(files[1]))
    task, mesh = load_text_task(config), make_mesh(config)
    policy = make_policy(config, mesh, task.tokenizer)
    params = load_parameters(files[0])
    prompts = task.train.prompt_ids, task.train.padding
    keys = jax.random.split(jax.random.key(0), len(prompts[1]))
    found = jax.jit(functools.partial(policy.roll_out, max_new_tokens=6))(params, *prompts, keys)
    assert found.allowed_ids is None and found.allowed_mask.shape == (*found.ids.shape, 9)
    rows = join_completions(*prompts, found.ids, found.mask, found.allowed)
    values = jax.jit(policy.values)
    helpers.assert_same_bits(values(params, rows).logp, found.logps)
    everything = AllowedTokens(allowed_mask=found.allowed_mask | np.uint32(2**32 - 1))
    of_all = values(params, rows._replace(allowed=everything)).logp
    assert bool(((of_all < found.logps) == found.mask).all())


# In make test, test_a_run_of_many_options asserts the same of ids that are replayed for packed rows in micro-batches.
# The test above has packed bits. Adapters, a cut head, several updates on a rollout and the policy before them take the
# same way.
@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {**WORDS, "entropy_coef": 0.01, "loss_type": "gspo", "clip_eps_high": 0.3},
        {**IDS, "lora_rank": 4},
        {**WORDS, **HALVES, "importance_cap": 2.0},
        {**IDS, "mesh": "data=2,tensor=2", "implementation": "deterministic"},
        {**WORDS, "mesh": "data=2,tensor=2", "implementation": "deterministic"},
    ],
    ids=str,
)
def test_ratios_begin_at_one(files, tmp_path, changes):
    """On weights that move. The first policy is the reference, among the same tokens. Entropies are those of 50 tokens
    at most, or of 0.9 of the probability.
    """
    lines = run(files, tmp_path / "out", **changes)
    assert [line["mismatch"] for line in lines] == [0] * 2
    assert [(line["first_ratio_min"], line["first_ratio_max"]) for line in lines] == [(1, 1)] * 2
    assert lines[0]["kl"] == 0 < lines[1]["kl"]
    if "entropy_coef" in changes:
        assert all(0 < line["entropy_bonus"] < np.log(50 if "top_k" in changes else 263 * 0.9) for line in lines)


@pytest.mark.full
def test_later_updates_on_a_rollout_replay_it_too(files, tmp_path):
    """In `make test`, runs have one update on each rollout: several are a loop over the same program."""
    lines = run(files, tmp_path / "out", **IDS, updates_per_rollout=3, learning_rate=5e-5)
    assert [(line["first_ratio_min"], line["first_ratio_max"]) for line in lines] == [(1, 1)] * 2
    assert all(0.5 < line["ratio_min"] < 1 < line["ratio_max"] < 2 for line in lines)


@pytest.mark.full
def test_without_the_replay_ratios_are_not_one(files, tmp_path, forgetful):
    """In `make test`, test_log_probs_have_the_bits_of_training has log-probs without it."""
    lines = run(files, tmp_path / "out", **WORDS, grpo_steps=1)
    assert lines[0]["first_ratio_min"] < lines[0]["first_ratio_max"] <= 1 and lines[0]["first_ratio_min"] < 0.95
    assert lines[0]["mismatch"] > 0.05


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits(files, tmp_path):
    """What tokens were drawn among is made and used within a step. In `make test`, test_text_run.py resumes a run."""
    whole = RunFolder(tmp_path / "out")
    run(files, whole.path, **WORDS, grpo_steps=4)
    metrics = whole.metrics.read_bytes()
    tiny.lose_the_end(whole, 4)
    options = command(files, whole.path, **WORDS, grpo_steps=4, updates_per_rollout=1)
    assert tiny.run_here(*options, "--resume") == 0
    assert whole.metrics.read_bytes() == metrics


@pytest.mark.parametrize("named", ["deterministic", None])
def test_an_implementation_that_takes_no_mask_is_refused(files, tmp_path, capsys, monkeypatch, named):
    """In one line, before anything runs, whether it is named or chosen."""
    maskless = [
        dataclasses.replace(row, obstacles=lambda facts: ["takes no mask"] if facts.config.has_mask else [])
        for row in dispatch.TABLE["linear_logp"]
    ]
    monkeypatch.setitem(dispatch.TABLE, "linear_logp", maskless)
    assert tiny.run_here(*command(files, tmp_path / "out", **WORDS, implementation=named)) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: ") and "takes no mask" in error and error.count("\n") == 1


REAL: dict[str, Any] = {
    **IDS,
    "reward": "last_number",
    "max_new_tokens": 16,
    "learning_rate": 2e-5,
    "remat": True,
}


@pytest.fixture
def real_files(tmp_path) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct and four sums."""
    prompts = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return SMOLLM2, prompts


needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="`make .smollm2/model/config.json` fetches the model")


# In make test, a tiny model has both.
@pytest.mark.full
@needs_smollm2
@pytest.mark.parametrize("form", [IDS, WORDS], ids=["ids", "words"])
def test_ratios_of_a_real_model_begin_at_one(real_files, tmp_path, form):
    lines = run(real_files, tmp_path / "out", **{**REAL, "top_k": None, **form})
    assert [line["mismatch"] for line in lines] == [0] * 2
    assert [(line["first_ratio_min"], line["first_ratio_max"]) for line in lines] == [(1, 1)] * 2


@pytest.mark.full
@needs_smollm2
def test_without_the_replay_ratios_of_a_real_model_are_not_one(real_files, tmp_path, forgetful):
    """In make test, a tiny model has this."""
    lines = run(real_files, tmp_path / "out", **REAL, grpo_steps=1)
    assert lines[0]["first_ratio_min"] < 0.9 and lines[0]["mismatch"] > 0.1
