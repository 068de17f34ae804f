"""The jitted steps: what they compute, on one device and on a mesh.

In `make test` one run on one device, `plain`, is compared with one that has every option which cuts a batch, a row or a
head, `rich`. `make test-full` has a run for each option.
"""

import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.checker import tolerance
from rlk_jax.grpo import steps as grpo_steps
from rlk_jax.grpo.accumulation import accumulated_gradients
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.rollout import sample_completions
from rlk_jax.grpo.sequences import join_completions, pack
from rlk_jax.grpo.steps import TrainingSteps, TrainState, make_head, make_mesh, target_logps
from rlk_jax.grpo.tasks import Examples, completion_mask, load_task
from tests.grpo import tiny
from tests.support import helpers

WARMUP, GRPO = 3, 3


class Run(NamedTuple):
    """A few steps of both phases: the state before GRPO, the last one, and what every step measured."""

    steps: TrainingSteps
    warm: TrainState
    final: TrainState
    measured: dict[str, np.ndarray]


def build(**changes) -> TrainingSteps:
    config = tiny.config(**changes)
    return tiny.shared_steps(config, load_task(config), make_mesh(config))


def trained_state(**changes) -> TrainState:
    """Weights that are right now and then, so that GRPO has something to learn from."""
    steps = build(**{"warmup_learning_rate": 1e-2, **changes})
    state = steps.initial_state()
    for step in range(70):
        state, _ = steps.warmup_step(state, step)
    return jax.device_get(state)  # A step donates its state; this copy stays.


@pytest.fixture(scope="module")
def trained() -> TrainState:
    return trained_state(demonstration_errors=0.0)


def run(trained: TrainState, **changes) -> Run:
    changes = {"learning_rate": 5e-3, **changes}
    steps, config = build(**changes), tiny.config(**changes)
    mesh = make_mesh(config)
    head, whole = (
        make_head(config, load_task(config), mesh),
        jax.device_put(trained, NamedSharding(mesh, PartitionSpec())),
    )
    state, rows = jax.jit(head.shard, out_shardings=head.shardings(trained))(whole), []
    for step in range(WARMUP):
        state, metrics = steps.warmup_step(state, step)
        rows.append(metrics)
    warm = jax.device_get(head.unshard(state))
    state = steps.start_grpo(state)
    for step in range(WARMUP, WARMUP + GRPO):
        state, metrics = steps.grpo_step(state, step)
        rows.append(metrics)
    measured = {name: np.array([row[name] for row in rows if name in row]) for name in rows[-1]}
    return Run(steps, warm, head.unshard(state), measured)


@pytest.fixture(scope="module")
def mixed() -> TrainState:
    """Weights trained on prompts of mixed lengths."""
    return trained_state(**tiny.MIXED)


@pytest.fixture(scope="module")
def plain(mixed) -> Run:
    return run(mixed, **tiny.MIXED)


@pytest.fixture(scope="module")
def arithmetic(trained) -> Run:
    """The run that the tests in `make test-full` compare others with."""
    return run(trained)


def assert_trains_like(actual: Run, expected: Run, op_class: str = "grpo_training") -> None:
    # Ratios and mismatch follow single tokens, and enlarge rounding. The number of tokens would drown the rest.
    names = sorted(x for x in expected.measured if "ratio" not in x and x not in ("mismatch", "tokens"))
    measured = [np.concatenate([run.measured[name] for name in names]) for run in (actual, expected)]
    helpers.assert_within_contract(*measured, op_class, jnp.float32, "forward")
    moved = [
        jax.tree.map(lambda a, b: np.asarray(a - b).ravel(), r.final.params, r.warm.params) for r in (actual, expected)
    ]
    flat = [np.concatenate(jax.tree.leaves(move)) for move in moved]
    helpers.assert_within_contract(*flat, op_class, jnp.float32, "gradient")


def assert_grpo_acts(run: Run) -> None:
    assert 0 < run.measured["reward"].mean() < 1
    assert np.all(run.measured["kl"] > 0)
    assert run.measured["clip_fraction"].max() > 0
    chex.assert_tree_all_finite(run.measured)


def test_grpo_acts_in_these_tests(plain):
    assert_grpo_acts(plain)


@pytest.fixture(scope="module")
def logps(plain) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of sampled tokens under the weights before GRPO: of a rollout, and of a training pass."""
    config = tiny.config(**tiny.MIXED)
    task = load_task(config)
    head = make_head(config, task, make_mesh(config))
    examples = jax.tree.map(lambda x: np.repeat(x, config.samples_per_prompt, axis=0), task.train)
    sizes = task.vocab_size, config.width, config.layers, config.heads
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(*sizes, rngs=nnx.Rngs(0))))

    @jax.jit
    def sampled(params: nnx.State, examples: Examples) -> tuple[jax.Array, jax.Array, jax.Array]:
        def score(hidden: jax.Array, logits: jax.Array, token_ids: jax.Array) -> jax.Array:
            return head.logps_of_logits(logits, token_ids)

        model, keys = nnx.merge(graph, params), jax.random.split(jax.random.key(0), len(examples.padding))
        prompts, length = (examples.prompt_ids, examples.padding), examples.answer_ids.shape[1]
        rollout = sample_completions(model, *prompts, keys, score, length=length)
        mask = completion_mask(rollout.completion_ids)
        rows = join_completions(*prompts, rollout.completion_ids, mask)
        return rollout.logps, target_logps(model, rows, head), mask

    recorded, trained, mask = map(np.asarray, sampled(plain.warm.params, examples))
    return recorded[mask], trained[mask]


def test_stock_layers_record_other_bits_than_training(logps):
    recorded, trained = logps
    assert np.any(helpers.bits(recorded) != helpers.bits(trained))
    helpers.assert_within_contract(recorded, trained, "decoder_cache", jnp.float32, "forward")


def test_the_first_update_on_a_rollout_starts_near_ratio_one(plain, logps):
    """Policy and old log-probs come from the same weights. The log of a ratio is the error of one log-prob.

    The contract bounds the norm of such errors, and so the largest of them, by the norm of the log-probs: what rounding
    leaves has the size of log-probs and logits, and not of their difference.
    """
    assert np.all(plain.measured["first_clip_fraction"] == 0)
    norms = np.sqrt(np.mean(np.square(logps[1], dtype=np.float64)) * plain.measured["tokens"][WARMUP:])
    for name in ("first_ratio_min", "first_ratio_max"):
        errors = np.abs(np.log(plain.measured[name], dtype=np.float64))
        helpers.assert_error((errors / norms).max(), "decoder_cache", "float32", "forward")


def test_each_phase_is_compiled_once(plain):
    assert plain.steps.warmup_step._cache_size() == plain.steps.grpo_step._cache_size() == 1


def test_reference_is_frozen_at_the_end_of_the_warm_start(plain):
    final = jax.device_get(plain.final)
    chex.assert_trees_all_equal(final.reference, plain.warm.params)
    moved = jax.tree.map(lambda a, b: np.any(a != b), final.params, final.reference)
    assert any(jax.tree.leaves(moved))


def test_a_packed_bucketed_accumulated_and_sharded_run_trains_like_a_plain_one(mixed, plain):
    rich = run(mixed, **tiny.RICH)
    assert_trains_like(rich, plain, "grpo_accumulation")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(rich.final)} == {4}
    np.testing.assert_array_equal(rich.measured["tokens"][0], plain.measured["tokens"][0])


def test_prompts_of_mixed_lengths_leave_rows_empty():
    """Otherwise the tests of packed runs would be about nothing."""
    examples = load_task(tiny.config(**tiny.MIXED)).train
    examples = jax.tree.map(lambda x: x[:16], examples)

    @jax.jit
    def packed(examples):
        mask = completion_mask(examples.answer_ids)
        rows = join_completions(examples.prompt_ids, examples.padding, examples.answer_ids, mask)
        return pack(rows, (), shards=1)[0]

    rows = jax.device_get(packed(examples))
    assert rows.mask.any(axis=1).sum() <= 12
    assert len(np.unique(examples.padding)) > 4


@pytest.mark.full
class TestEachOption:
    """In `make test`, `test_a_packed_bucketed_accumulated_and_sharded_run_trains_like_a_plain_one` has all of these
    options in one run; docstrings name the test for what it does not have.
    """

    def test_grpo_acts_in_these_tests(self, arithmetic):
        assert_grpo_acts(arithmetic)

    def test_runs_repeat_bit_for_bit(self, trained, compiled_anew):
        """In `make test`, test_resume.py compares the bits of two processes."""
        first = run(trained)
        tiny.forget_programs()
        compiled_anew()
        again = run(trained)
        chex.assert_trees_all_equal(again.final, first.final)
        chex.assert_trees_all_equal(again.measured, first.measured)

    def test_the_first_update_starts_at_ratio_one(self, trained):
        """Policy, old and reference log-probs come from the same weights: no clip, and a KL of rounding error squared.

        In `make test`, `test_the_first_update_on_a_rollout_starts_near_ratio_one` looks at the first of three updates.
        """
        first = run(trained, updates_per_rollout=1).measured
        assert first["clip_fraction"][0] == 0
        assert first["kl"][0] <= tolerance("grpo_training", jnp.float32, "forward") * first["kl"][1]

    def test_stock_layers_do_not_decode_with_the_bits_of_training(self, trained):
        """In a step of enough tokens. In `make test`, `test_stock_layers_record_other_bits_than_training` compares one
        pass of each.
        """
        assert np.all(run(trained, samples_per_prompt=32).measured["mismatch"] > 0)

    def test_two_devices_train_like_one(self, trained, arithmetic):
        wide = run(trained, mesh="data=2,tensor=1")
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(wide.final)} == {2}
        assert_trains_like(wide, arithmetic)

    @pytest.mark.parametrize(("mesh", "parts"), [("data=1,tensor=1", 4), ("data=2,tensor=1", 2)])
    def test_accumulated_gradients_train_like_those_of_the_whole_batch(self, trained, arithmetic, mesh, parts):
        assert_trains_like(run(trained, mesh=mesh, micro_batches=parts), arithmetic, "grpo_accumulation")

    @pytest.mark.parametrize(
        "changes",
        [
            {"packing": True, "micro_batches": 4},
            {"packing": True, "micro_batches": 2, "rollout_buckets": 2, "mesh": "data=2,tensor=1"},
        ],
    )
    def test_packed_and_bucketed_runs_train_alike(self, mixed, plain, changes):
        assert_trains_like(run(mixed, **tiny.MIXED, **changes), plain, "grpo_accumulation")

    def test_rollouts_by_length_draw_the_same_tokens(self, mixed, plain):
        """Their log-probs are rounded otherwise; test_invariant.py has layers whose log-probs are not."""
        measured = run(mixed, **tiny.MIXED, rollout_buckets=4).measured
        for name in ("reward", "tokens"):
            np.testing.assert_array_equal(measured[name], plain.measured[name])

    @pytest.mark.parametrize("implementation", ["deterministic", "reference"])
    def test_every_implementation_trains_alike(self, trained, arithmetic, implementation):
        """In `make test`, test_model.py compares the log-probs of every implementation with their definition."""
        assert_trains_like(run(trained, implementation=implementation), arithmetic)

    def test_shuffling_changes_the_update_and_not_the_first_rollout(self, trained, arithmetic):
        """In `make test`, the control of test_learning.py would learn if nothing were shuffled."""
        shuffled = run(trained, shuffle_advantages=True).measured
        assert shuffled["reward"][0] == arithmetic.measured["reward"][0]
        assert shuffled["policy_loss"][0] != arithmetic.measured["policy_loss"][0]


def test_micro_batches_without_a_target_are_skipped():
    """Their gradients would be NaN."""
    rows = jnp.array([[1.0], [2.0], [-1.0], [-1.0]])

    def loss_fn(weights, rows):
        return (jnp.where(rows < 0, jnp.nan, rows) * weights).sum(), rows[:, 0] + 1

    mesh = make_mesh(tiny.config())

    def gradients(is_active):
        return accumulated_gradients(loss_fn, jnp.ones(()), rows, micro_batches=2, mesh=mesh, is_active=is_active)

    helpers.assert_same_bits(gradients(lambda rows: (rows > 0).any()), (jnp.float32(3), jnp.array([2.0, 3, 0, 0])))
    assert np.isnan(gradients(None)[0])


def test_micro_batches_add_up_and_rows_keep_their_order():
    """They add up exactly, in small integers. The rows are sharded over two devices, and each device keeps its own."""
    mesh = make_mesh(tiny.config(mesh="data=2,tensor=1"))
    values, weights = np.arange(24, dtype=np.float32).reshape(8, 3), jnp.arange(3.0)
    rows = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))

    def loss_fn(weights, rows):
        return (rows * rows * weights).sum(), rows @ jnp.ones(3)

    @jax.jit
    def accumulated(weights, rows):
        return accumulated_gradients(loss_fn, weights, rows, micro_batches=4, mesh=mesh)

    helpers.assert_same_bits(accumulated(weights, rows), ((values**2).sum(axis=0), values.sum(axis=1)))
    program = accumulated.lower(weights, rows).compile().as_text()
    assert not any(name in program for name in ("all-gather", "all-to-all", "collective-permute"))


def test_steps_train_in_place(plain):
    state = plain.steps.initial_state()
    for step in (plain.steps.warmup_step, plain.steps.grpo_step):
        memory = step.lower(state, 0).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state))
    trained, _ = plain.steps.grpo_step(plain.steps.start_grpo(state), 0)
    chex.assert_tree_all_finite((trained.params, trained.reference))


IN_FULL = [pytest.param(x, marks=pytest.mark.full) for x in ({}, {"mesh": "data=2,tensor=1"})]
"""In `make test`, the case of micro-batches catches an evaluation that keeps logits: it has the least room for them."""


@pytest.mark.parametrize("changes", [{"micro_batches": 4, "rollout_buckets": 2}, *IN_FULL])
def test_the_evaluation_takes_no_more_memory_than_a_step(changes):
    """With a vocabulary so large that only logits count. A step of micro-batches takes the least memory, so it is the
    one in `make test`. XLA lays out buffers before LLVM runs, so LLVM does not optimize here.
    """
    steps = build(vocab_size=20000, max_operand=30, **changes)
    state = jax.eval_shape(steps.initial_state)
    programs = steps.heldout_rewards.lower(state.params), steps.grpo_step.lower(state, 0)
    compiled = (x.compile({"xla_backend_optimization_level": 0}) for x in programs)
    evaluation, step = (x.memory_analysis().temp_size_in_bytes for x in compiled)
    assert evaluation <= step


def test_bfloat16_computes_in_it_and_keeps_masters_in_float32(mixed):
    step = build(**tiny.MIXED, compute_dtype="bfloat16").warmup_step
    assert re.search("dot_general.*xbf16>", step.lower(mixed, 0).as_text())
    state, _ = jax.eval_shape(step, mixed, 0)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(mixed)]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


@pytest.mark.full
def test_bfloat16_computes_near_float32(mixed, plain):
    """In `make test`, the test above and `test_bfloat16_is_near_the_definition_and_its_gradients_are_float32` in
    test_model.py catch a step that does not.
    """
    half = build(**tiny.MIXED, compute_dtype="bfloat16")
    wide, narrow = (s.warmup_step(mixed, 0)[1]["loss"] for s in (plain.steps, half))
    assert wide != narrow
    helpers.assert_within_contract(narrow, wide, "grpo_training", jnp.bfloat16, "forward")


def test_a_larger_vocabulary_is_embedded_sampled_and_trained():
    """An untrained policy spreads its probability over all of it. The head is sharded."""
    steps = build(**tiny.RICH)
    state = steps.start_grpo(steps.initial_state())
    assert state.params["embed"]["embedding"].shape == (300, tiny.SIZES["width"])
    _, metrics = steps.grpo_step(state, 0)
    assert np.isfinite(metrics["loss"])
    _, metrics = steps.warmup_step(steps.initial_state(), 0)
    assert metrics["loss"] > np.log(300 / 2)


def test_demonstration_errors_change_the_warm_start(monkeypatch):
    """So many demonstrations have the answer of another prompt. Nothing is trained: a step gives what it would train
    on.
    """

    def give_rows(updates, optimizer, losses, learner, rows):
        return learner, rows._asdict()

    monkeypatch.setattr(grpo_steps, "supervised_update", give_rows)

    def demonstrations(errors: float) -> dict[str, np.ndarray]:
        config = tiny.config(**{**tiny.LEARNING, "demonstration_errors": errors, "prompts_per_step": 64})
        steps = grpo_steps.build_steps(config, load_task(config), make_mesh(config))
        return jax.device_get(steps.warmup_step(steps.initial_state(), 0)[1])

    right, wrong = demonstrations(0.0), demonstrations(0.5)
    changed = (right["target_ids"] != wrong["target_ids"]).any(axis=1)
    assert 0.3 < changed.mean() < 0.5, "the other answer may be the same"
    np.testing.assert_array_equal(right["token_ids"][~changed], wrong["token_ids"][~changed])
