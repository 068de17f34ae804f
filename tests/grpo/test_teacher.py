"""`rlk grpo --teacher`: a frozen model that a policy learns from, its plan, its bits, and mistakes."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from rlk_jax import models
from rlk_jax.core.allowed import AllowedTokens
from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo import plan
from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.job import load_job
from rlk_jax.grpo.policy import load_parameters, make_policy
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.teacher import Teacher, make_teacher
from rlk_jax.models import load_tokenizer
from tests.grpo import tiny, tiny_text
from tests.support import helpers

INVARIANT = {"invariant": True, "compute_dtype": "bfloat16", "teacher_coef": 0.5, "teacher_kind": "jsd"}
OPTIONS: dict[str, Any] = {
    "grpo_steps": 4,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "updates_per_rollout": 2,
    "max_new_tokens": 6,
    "learning_rate": 1e-2,
    "checkpoint_every": 2,
    "reward": "tests.grpo.tiny_text:letters",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A policy whose head is its embedding, a wider teacher whose head has more tokens, and prompts."""
    folder, one = tmp_path_factory.mktemp("given"), {"num_hidden_layers": 1}
    return {
        "model": str(tiny_text.write_model(folder / "model", **one, tie_word_embeddings=True)),
        "teacher": str(tiny_text.write_model(folder / "teacher", seed=1, **one, hidden_size=48, vocab_size=320)),
        "prompts": str(tiny_text.write_prompts(folder / "prompts.jsonl")),
    }


def command(values: dict[str, Any], out: Path) -> list[str]:
    flags = {name: "--" + name.replace("_", "-") for name in values}
    return [*(flags[name] if x is True else f"{flags[name]}={x}" for name, x in values.items()), "--out", str(out)]


def metrics_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in RunFolder(out).metrics.read_text().splitlines()]


def config_of(files: dict[str, str], **changes: Any) -> GrpoConfig:
    return GrpoConfig(**{**OPTIONS, **files, **changes})


def run(files: dict[str, str], out: Path, **changes: Any) -> list[dict]:
    """The metrics of a run."""
    assert tiny.run_here(*command({**files, **OPTIONS, **changes}, out)) == 0
    return metrics_of(out)


@pytest.mark.learning
def test_on_policy_distillation_lowers_the_reverse_kl(files, tmp_path):
    """The divergence is the whole loss, and is measured on completions of the policy of each step."""
    wider = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": 320, "tie_word_embeddings": True}
    given = {"model": tiny_text.write_model(tmp_path / "model", num_hidden_layers=1)}
    given["teacher"] = tiny_text.write_model(tmp_path / "teacher", seed=1, **wider)
    how = {"teacher_only": True, "grpo_steps": 20, "updates_per_rollout": 1, "show_every": 20}
    lines = run({**files, **given}, tmp_path / "out", **how)
    assert [line["loss"] for line in lines] == [line["teacher_kl"] for line in lines]
    assert all(line["kl"] == 0 for line in lines)
    first, last = lines[0]["teacher_kl"], lines[-1]["teacher_kl"]
    print(f"\nreverse KL to the teacher: {first:.3f} before, {last:.3f} after")
    assert first > 0.3 and last <= 0.2 * first


def some_sequences() -> Sequences:
    """Two prompts with completions, whose last slot does not count, of which each token may be one of two."""
    token_ids = np.random.default_rng(0).integers(3, 200, (2, 9)).astype(np.int32)
    targets = token_ids[:, 5:].copy()
    targets[0, -1] = IGNORED
    allowed = AllowedTokens(allowed_ids=np.stack([targets, targets + 1], axis=-1).astype(np.int32))
    return Sequences(token_ids[:, :-1], np.zeros(2, np.int32), targets, allowed)


def taught_by(config: GrpoConfig) -> tuple[Teacher, Any, Any]:
    """The teacher of a run with its policy, and the parameters of policy and teacher."""
    mesh, tokenizer = make_mesh(config), load_tokenizer(config.model)
    policy = make_policy(config, mesh, tokenizer)
    teacher = make_teacher(config, policy, tokenizer, mesh)
    return teacher, policy.head.shard(load_parameters(config.model, mesh)), teacher.load()


@nnx.jit
def logits_of(model: models.CausalLM, token_ids: np.ndarray) -> jax.Array:
    return model.lm_head(model(token_ids))


def mean_log_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The mean of a − b under the probabilities whose logarithms are a."""
    return (np.exp(a) * (a - b)).sum(axis=-1)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_divergence_is_that_of_both_models(files, kind):
    """It is that over the policy's whole vocabulary, at the temperature of the run, whatever tokens are allowed."""
    beta = {"teacher_beta": 0.2} if kind == "jsd" else {}
    config = config_of(files, teacher_kind=kind, temperature=0.7, **beta)
    (teacher, params, theirs), rows = taught_by(config), some_sequences()
    taught = rows._replace(teacher_hidden=jax.jit(teacher.hidden)(theirs, rows))
    values, found = jax.jit(functools.partial(teacher.values, entropy=False))(params, theirs, taught)
    helpers.assert_same_bits(values.logp, jax.jit(teacher.policy.values)(params, rows).logp)
    logps = []
    for directory in (files["model"], files["teacher"]):
        logits = logits_of(models.load(directory, dtype=jnp.float32), rows.token_ids)
        logits = np.asarray(logits, np.float64)[:, -4:, : teacher.policy.head.vocab_size] / 0.7
        logps.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    own, taught_logps = logps
    mixture = np.logaddexp(np.log(0.2) + taught_logps, np.log(0.8) + own)
    expected = {
        "reverse": mean_log_ratio(own, taught_logps),
        "forward": mean_log_ratio(taught_logps, own),
        "jsd": 0.2 * mean_log_ratio(taught_logps, mixture) + 0.8 * mean_log_ratio(own, mixture),
    }[kind]
    expected = np.where(rows.mask, expected, 0)
    helpers.assert_within_contract(found, expected, "models", jnp.float32, "forward")


def test_a_teacher_that_is_the_policy_teaches_nothing(files):
    """Invariant layers give both the same hidden states, and the divergence of equal distributions is exactly 0."""
    config = config_of({**files, "teacher": files["model"]}, **INVARIANT)
    teacher, params, theirs = taught_by(config)
    rows = some_sequences()
    rows = rows._replace(teacher_hidden=jax.jit(teacher.hidden)(theirs, rows))
    divergence = jax.jit(functools.partial(teacher.values, entropy=False))(params, theirs, rows)[1]
    np.testing.assert_array_equal(divergence, np.zeros((2, 4)))


RESUMED = {
    "teacher_coef": 0.5,
    "teacher_kind": "jsd",
    "micro_batches": 2,
    "packing": True,
    "grpo_steps": 2,
    "checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def tied_files(files, tmp_path_factory) -> dict[str, str]:
    """A policy with a head of its own, whose teacher's is its embedding, and has more tokens."""
    folder, wider = tmp_path_factory.mktemp("tied"), {"hidden_size": 48, "vocab_size": 320, "tie_word_embeddings": True}
    model = tiny_text.write_model(folder / "model", num_hidden_layers=1)
    teacher = tiny_text.write_model(folder / "teacher", seed=1, num_hidden_layers=1, **wider)
    return {**files, "model": str(model), "teacher": str(teacher)}


@pytest.fixture(params=["files", "tied_files"])
def either_files(request) -> dict[str, str]:
    """Policy or teacher has its embedding as its head, and the other has not."""
    return request.getfixturevalue(request.param)


def learnt(config: GrpoConfig) -> tuple[jax.Array, Any]:
    """The divergences of some sequences, and whole gradients of these and of log-probs."""
    teacher, params, theirs = taught_by(config)

    def loss(params: Any, theirs: Any, rows: Sequences) -> tuple[jax.Array, jax.Array]:
        rows = rows._replace(teacher_hidden=teacher.hidden(theirs, rows))
        values, divergence = teacher.values(params, theirs, rows, entropy=False)
        return (values.logp + divergence).sum(), divergence

    (_, divergence), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, theirs, some_sequences())
    assert (divergence > 0).sum() == 7
    return divergence, teacher.policy.head.unshard(gradients)


def test_a_mesh_gives_what_one_device_does(either_files):
    """Each device has its part of both models, heads included, and its rows."""
    one, *others = (
        learnt(config_of(either_files, mesh=mesh)) for mesh in ("data=1,tensor=1", "data=2,tensor=1", "data=2,tensor=2")
    )
    for found in others:
        helpers.assert_within_contract(found[0], one[0], "models", jnp.float32, "forward")
        for x, expected in zip(*map(jax.tree.leaves, (found[1], one[1])), strict=True):
            helpers.assert_within_contract(x, expected, "models", jnp.float32, "gradient")


@pytest.mark.parametrize(
    ("either_files", "how"),
    [("files", INVARIANT), ("tied_files", {"teacher_kind": "forward"})],
    indirect=["either_files"],
    ids=["invariant", "stock"],
)
def test_heads_that_are_cut_have_the_bits_of_whole_ones(either_files, how):
    """By `deterministic`, which linear_kl then follows in its promise of bits."""
    meshes = ("data=1,tensor=1", "data=1,tensor=2")
    found = [learnt(config_of(either_files, **how, implementation="deterministic", mesh=mesh)) for mesh in meshes]
    helpers.assert_same_bits(*found)


def test_a_device_holds_its_part_of_a_teacher(either_files):
    """Its head is cut where the policy's is: the tokens behind the policy's vocabulary are no part of it. A run
    begins with it as it was read.
    """
    config = config_of(either_files, mesh="data=2,tensor=2")
    teacher, params, theirs = taught_by(config)
    own, head = params[teacher.policy.head.name], theirs[teacher.model.head.name]
    assert [x.shape[0] for x in jax.tree.leaves(own)] == [x.shape[0] for x in jax.tree.leaves(head)]
    for x in jax.tree.leaves(theirs):
        assert x.addressable_shards[0].data.size * (4 if x is jax.tree.leaves(head)[0] else 2) == x.size
    begun = load_job(config).steps.initial_state().teacher
    lying = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree) for tree in (teacher.shapes, theirs, begun)]
    assert lying[0] == lying[1] == lying[2]
    helpers.assert_same_bits(begun, theirs)


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> RunFolder:
    """A finished run, whose loss is that of GRPO and half of the teacher's divergence."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "out")
    run(files, folder.path, **RESUMED)
    return folder


def test_the_loss_of_grpo_is_kept(finished):
    for line in metrics_of(finished.path):
        assert line["teacher_kl"] > 0 and line["policy_loss"] != 0
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.01 * line["kl"] + 0.5 * line["teacher_kl"])


def test_a_resumed_run_has_the_same_bits(finished, files, tmp_path):
    """The teacher is read again, from where it has been moved to."""
    out = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "out")))
    metrics, summary = out.metrics.read_bytes(), out.summary.read_bytes()
    tiny.lose_the_end(out, 2)
    moved = shutil.copytree(files["teacher"], tmp_path / "moved")
    run({**files, "teacher": str(moved)}, out.path, **RESUMED, resume=True)
    assert [out.metrics.read_bytes(), out.summary.read_bytes()] == [metrics, summary]


def test_another_teacher_is_no_resumption(finished, files, tmp_path, capsys):
    other = tiny_text.write_model(tmp_path / "other", seed=2)
    given = {**files, **OPTIONS, **RESUMED, "teacher": str(other), "resume": True}
    assert tiny.run_here(*command(given, finished.path)) == 2
    assert re.search("cannot resume .*: the run began with other weights of ", capsys.readouterr().err)


@pytest.mark.full
def test_devices_have_the_bits_of_micro_batches(files):
    """Gradients of both uses of the head are added on a device before those of devices are. Each device holds its part
    of the teacher, which stays as it is, and which is not saved. In `make test`, test_shards.py has these bits without
    a teacher, and test_a_mesh_gives_what_one_device_does what is new on a mesh.
    """
    found = []
    for how in ({"micro_batches": 2}, {"mesh": "data=2,tensor=1"}):
        steps = load_job(config_of(files, **INVARIANT, **how, updates_per_rollout=1)).steps
        state = steps.initial_state()
        before = jax.tree.map(np.asarray, jax.tree.leaves(state.teacher))
        state, metrics = steps.grpo_step(state, 0)
        assert metrics["mismatch"] == 0 < metrics["teacher_kl"]
        helpers.assert_same_bits(jax.tree.map(np.asarray, jax.tree.leaves(state.teacher)), before)
        found.append(jax.tree.map(np.asarray, jax.tree.leaves(state)))
    helpers.assert_same_bits(*found)
    assert {x.dtype.name for x in before} == {"bfloat16"} and "teacher" not in state.saved
    assert all(x.addressable_shards[0].data.size * 2 == x.size for x in jax.tree.leaves(state.teacher))


@pytest.mark.full
def test_a_run_with_cut_heads_has_the_bits_of_one_with_whole_heads(files, tmp_path):
    """The same metrics, from the start and resumed. In `make test`, the gradients of cut heads have these bits."""
    how, metrics = {**RESUMED, **INVARIANT}, []
    for tensor in (1, 2):
        out = RunFolder(tmp_path / str(tensor))
        run(files, out.path, **how, mesh=f"data=1,tensor={tensor}")
        metrics.append(out.metrics.read_bytes())
    tiny.lose_the_end(out, 2)
    run(files, out.path, **how, mesh="data=1,tensor=2", resume=True)
    assert [metrics[0], out.metrics.read_bytes()] == [metrics[1]] * 2


def test_a_plan_counts_the_teacher(files, monkeypatch):
    """In the dtype that it computes in, and nothing else is more: it has no moments."""
    monkeypatch.setattr(plan, "program_memories", lambda *_: [])
    config = config_of(files, compute_dtype="bfloat16", mesh="data=2,tensor=1")
    numbers = sum(x.size for x in jax.tree.leaves(load_parameters(files["teacher"])))
    states = [
        plan.make_plan(dataclasses.replace(config, teacher=own), None, StopRequest())[1].states
        for own in (None, config.teacher)
    ]
    assert states[1] == {**states[0], "teacher": numbers}  # half of them, of two bytes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teacher": None, "teacher_coef": 2.0}, "--teacher-coef is of a teacher: it has no meaning without"),
    "no model": (
        dict.fromkeys(("model", "reward", "max_new_tokens")),
        "--teacher is of a given model: it has no meaning without --model",
    ),
    "kind": ({"teacher_kind": "tv"}, "--teacher-kind must be reverse, forward or jsd, got 'tv'"),
    "beta": ({"teacher_beta": 0.1}, "--teacher-beta is of jsd: it has no meaning beside --teacher-kind reverse"),
    "coef": ({"teacher_coef": 0.0}, "--teacher-coef must be greater than 0, got 0.0"),
    "lora": ({"lora_rank": 2}, "--teacher does not go with --lora-rank: linear_kl takes no low-rank term of a head"),
    "loss": (
        {"teacher_only": True, "clip_eps": 0.1},
        "--clip-eps is of GRPO's loss: it has no meaning beside --teacher-only",
    ),
    "shuffled": (
        {"teacher_only": True, "shuffle_advantages": True},
        "--shuffle-advantages is of GRPO's loss: it has no meaning beside --teacher-only",
    ),
    "missing": ({"teacher": "/nowhere"}, "cannot read /nowhere/config.json: No such file or directory"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line(files, tmp_path, capsys, changes, message):
    given = {name: x for name, x in {**OPTIONS, **files, **changes}.items() if x is not None}
    assert tiny.run_here(*command(given, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rlk grpo: error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(files, tmp_path):
    """The message has the first token that differs, which may be one that only one of them has."""
    other = Path(shutil.copytree(files["teacher"], tmp_path / "other")) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(other))
    backend.add_tokens(["more"])
    backend.save(str(other))
    with pytest.raises(BadInput, match=r"^teacher has another tokenizer: token 259 is 'more', not None$"):
        load_job(config_of(files, teacher=str(other.parent)))
    swapped = json.loads(other.read_text())
    vocab = swapped["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    other.write_text(json.dumps(swapped))
    with pytest.raises(BadInput, match=r"""^teacher has another tokenizer: token 3 is '"', not '!'$"""):
        load_job(config_of(files, teacher=str(other.parent)))


def test_a_teacher_of_fewer_tokens_is_refused(files, tmp_path):
    """The policy may draw a token that the teacher's embedding does not have."""
    fewer = tiny_text.write_model(tmp_path / "fewer", vocab_size=260)
    with pytest.raises(BadInput, match=r"^teacher has 260 tokens, and the policy may draw any of its 263$"):
        load_job(config_of(files, teacher=str(fewer)))


def test_a_teacher_that_the_mesh_cannot_cut_is_refused(files, tmp_path):
    odd = tiny_text.write_model(tmp_path / "odd", hidden_size=33, head_dim=16, num_hidden_layers=1)
    with pytest.raises(BadInput, match=r"^teacher: mesh: \S+ \[.*33.*\] cannot be cut into data=2 equal parts$"):
        load_job(config_of(files, teacher=str(odd), mesh="data=2,tensor=1"))


def test_weights_of_a_teacher_that_are_missing(files, tmp_path, capsys):
    """Nothing is begun."""
    empty = Path(shutil.copytree(files["teacher"], tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    assert tiny.run_here(*command({**OPTIONS, **files, "teacher": str(empty)}, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "empty has neither model.safetensors nor " in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
