"""The jitted steps: what they compute, on one device and on a mesh."""

import json
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.checker import tolerance
from rlk_jax.grpo.accumulation import accumulated_gradients
from rlk_jax.grpo.sequences import join_completions, pack
from rlk_jax.grpo.steps import TrainingSteps, TrainState, build_steps, make_mesh
from rlk_jax.grpo.tasks import completion_mask, load_task
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
    return build_steps(config, load_task(config), make_mesh(config))


def trained_state(**changes) -> TrainState:
    """Weights that are right now and then, so that GRPO has something to learn from."""
    steps = build(demonstration_errors=0.0, warmup_learning_rate=1e-2, **changes)
    state = steps.initial_state()
    for step in range(70):
        state, _ = steps.warmup_step(state, step)
    return jax.device_get(state)  # a step takes what it is given


@pytest.fixture(scope="module")
def trained() -> TrainState:
    return trained_state()


def run(trained: TrainState, **changes) -> Run:
    changes = {"learning_rate": 5e-3, **changes}
    steps, config = build(**changes), tiny.config(**changes)
    state, rows = jax.device_put(trained, NamedSharding(make_mesh(config), PartitionSpec())), []
    for step in range(WARMUP):
        state, metrics = steps.warmup_step(state, step)
        rows.append(metrics)
    warm = jax.device_get(state)
    state = steps.start_grpo(state)
    for step in range(WARMUP, WARMUP + GRPO):
        state, metrics = steps.grpo_step(state, step)
        rows.append(metrics)
    measured = {name: np.array([row[name] for row in rows if name in row]) for name in rows[-1]}
    return Run(steps, warm, state, measured)


@pytest.fixture(scope="module")
def plain(trained) -> Run:
    return run(trained)


def assert_trains_like(actual: Run, expected: Run, op_class: str = "grpo_training") -> None:
    # What single tokens decide is rounding, enlarged; and their number would drown the rest.
    names = sorted(x for x in expected.measured if "ratio" not in x and x not in ("mismatch", "tokens"))
    measured = [np.concatenate([run.measured[name] for name in names]) for run in (actual, expected)]
    helpers.assert_within_contract(*measured, op_class, jnp.float32, "forward")
    moved = [
        jax.tree.map(lambda a, b: np.asarray(a - b).ravel(), r.final.params, r.warm.params) for r in (actual, expected)
    ]
    flat = [np.concatenate(jax.tree.leaves(move)) for move in moved]
    helpers.assert_within_contract(*flat, op_class, jnp.float32, "gradient")


def test_grpo_acts_in_these_tests(plain):
    assert 0 < plain.measured["reward"].mean() < 1
    assert np.all(plain.measured["kl"] > 0)
    assert plain.measured["clip_fraction"].max() > 0
    chex.assert_tree_all_finite(plain.measured)


def test_each_phase_is_compiled_once(plain):
    assert plain.steps.warmup_step._cache_size() == plain.steps.grpo_step._cache_size() == 1


def test_reference_is_frozen_at_the_end_of_the_warm_start(plain):
    chex.assert_trees_all_equal(plain.final.reference, plain.warm.params)
    moved = jax.tree.map(lambda a, b: np.any(a != b), plain.final.params, plain.final.reference)
    assert any(jax.tree.leaves(moved))


def test_runs_repeat_bit_for_bit(trained, plain, compiled_anew):
    compiled_anew()
    again = run(trained)
    chex.assert_trees_all_equal(again.final, plain.final)
    chex.assert_trees_all_equal(again.measured, plain.measured)


def test_the_first_update_starts_at_ratio_one(trained):
    """Policy, old and reference log-probs come from the same weights: no clip, and a KL of rounding error squared."""
    first = run(trained, updates_per_rollout=1).measured
    assert first["clip_fraction"][0] == 0
    assert first["kl"][0] <= tolerance("grpo_training", jnp.float32, "forward") * first["kl"][1]


def test_stock_layers_do_not_decode_with_the_bits_of_training(trained):
    """In a step of enough tokens. See test_invariant.py for those that do."""
    assert np.all(run(trained, samples_per_prompt=32).measured["mismatch"] > 0)


def test_two_devices_train_like_one(trained, plain):
    wide = run(trained, mesh="data=2,tensor=1")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(wide.final)} == {2}
    assert_trains_like(wide, plain)


@pytest.mark.parametrize(("mesh", "parts"), [("data=1,tensor=1", 4), ("data=2,tensor=1", 2)])
def test_accumulated_gradients_train_like_those_of_the_whole_batch(trained, plain, mesh, parts):
    assert_trains_like(run(trained, mesh=mesh, micro_batches=parts), plain, "grpo_accumulation")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> str:
    """Sums behind up to 12 spaces, too hard to be learnt by heart: where gradients vanish, Adam enlarges rounding."""
    path = tmp_path_factory.mktemp("prompts") / "mixed.jsonl"
    sums = {" " * ((5 * a + 3 * b) % 13) + f"{a}+{b}=": str(a + b) for a in range(5) for b in range(5)}
    path.write_text("".join(json.dumps({"prompt": p, "answer": answer}) + "\n" for p, answer in sums.items()))
    return str(path)


def run_mixed(trained: TrainState, mixed: str, **changes) -> Run:
    """In smaller steps: on some CPUs these weights lie where KL, quadratic in a step, carries what Adam enlarges."""
    return run(trained, prompts=mixed, learning_rate=1e-3, **changes)


@pytest.fixture(scope="module")
def mixed_runs(mixed) -> tuple[TrainState, Run]:
    trained = trained_state(prompts=mixed)
    return trained, run_mixed(trained, mixed)


def test_prompts_of_mixed_lengths_leave_rows_empty(mixed, mixed_runs):
    """And are right now and then: what the next test says is not about nothing."""
    assert 0 < mixed_runs[1].measured["reward"].mean() < 1
    examples = load_task(tiny.config(prompts=mixed)).train
    examples = jax.tree.map(lambda x: x[:16], examples)
    mask = completion_mask(examples.answer_ids)
    rows, _ = pack(
        join_completions(examples.prompt_ids, examples.padding, examples.answer_ids, mask), (), shards=1, multiple=1
    )
    assert rows.mask.any(axis=1).sum() <= 12
    assert len(np.unique(examples.padding)) > 4


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True, "micro_batches": 4},
        {"packing": True, "micro_batches": 2, "rollout_buckets": 2, "mesh": "data=2,tensor=1"},
    ],
)
def test_packed_and_bucketed_runs_train_alike(mixed, mixed_runs, changes):
    trained, plain = mixed_runs
    assert_trains_like(run_mixed(trained, mixed, **changes), plain, "grpo_accumulation")


def test_rollouts_by_length_draw_the_same_tokens(mixed, mixed_runs):
    """Their log-probs are rounded otherwise; those of invariant layers are not, see test_invariant.py."""
    trained, plain = mixed_runs
    measured = run_mixed(trained, mixed, rollout_buckets=4).measured
    for name in ("reward", "tokens"):
        np.testing.assert_array_equal(measured[name], plain.measured[name])


def test_parts_without_a_target_are_left_out():
    """Their gradients would be NaN."""
    rows = jnp.array([[1.0], [2.0], [-1.0], [-1.0]])

    def loss_of(weights, part):
        return (jnp.where(part < 0, jnp.nan, part) * weights).sum(), part[:, 0] + 1

    mesh = make_mesh(tiny.config())

    def gradients(counts):
        return accumulated_gradients(loss_of, jnp.ones(()), rows, micro_batches=2, mesh=mesh, is_active=counts)

    helpers.assert_same_bits(gradients(lambda part: (part > 0).any()), (jnp.float32(3), jnp.array([2.0, 3, 0, 0])))
    assert np.isnan(gradients(None)[0])


def test_parts_add_up_and_rows_keep_their_order():
    """Exactly, in small integers; spread over two devices, of which each keeps its rows."""
    mesh = make_mesh(tiny.config(mesh="data=2,tensor=1"))
    values, weights = np.arange(24, dtype=np.float32).reshape(8, 3), jnp.arange(3.0)
    rows = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))

    def loss_of(weights, rows):
        return (rows * rows * weights).sum(), rows @ jnp.ones(3)

    @jax.jit
    def accumulated(weights, rows):
        return accumulated_gradients(loss_of, weights, rows, micro_batches=4, mesh=mesh)

    helpers.assert_same_bits(accumulated(weights, rows), ((values**2).sum(axis=0), values.sum(axis=1)))
    program = accumulated.lower(weights, rows).compile().as_text()
    assert not any(name in program for name in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("implementation", ["deterministic", "reference"])
def test_every_implementation_trains_alike(trained, plain, implementation):
    assert_trains_like(run(trained, implementation=implementation), plain)


def test_steps_train_in_place(plain):
    state = plain.steps.initial_state()
    for step in (plain.steps.warmup_step, plain.steps.grpo_step):
        memory = step.lower(jax.eval_shape(lambda: state), 0).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state))
    trained, _ = plain.steps.grpo_step(plain.steps.start_grpo(state), 0)
    chex.assert_tree_all_finite((trained.params, trained.reference))


@pytest.mark.parametrize("changes", [{}, {"micro_batches": 4, "rollout_buckets": 2}, {"mesh": "data=2,tensor=1"}])
def test_the_evaluation_takes_no_more_memory_than_a_step(changes):
    """Of a vocabulary whose logits are all that counts."""
    steps = build(vocab_size=20000, max_operand=30, **changes)
    state = jax.eval_shape(steps.initial_state)
    programs = steps.heldout_rewards.lower(state.params), steps.grpo_step.lower(state, 0)
    evaluation, step = (x.compile().memory_analysis().temp_size_in_bytes for x in programs)
    assert evaluation <= step


def test_bfloat16_computes_near_float32_and_keeps_masters_in_it(trained, plain):
    (_, wide), (state, narrow) = (s.warmup_step(trained, 0) for s in (plain.steps, build(compute_dtype="bfloat16")))
    assert wide["loss"] != narrow["loss"]
    helpers.assert_within_contract(narrow["loss"], wide["loss"], "grpo_training", jnp.bfloat16, "forward")
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(trained)]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_a_larger_vocabulary_is_embedded_sampled_and_trained():
    """An untrained policy spreads its probability over all of it."""
    steps = build(vocab_size=300, mesh="data=2,tensor=2")
    state = steps.start_grpo(steps.initial_state())
    assert state.params["embed"]["embedding"].shape == (300, tiny.SIZES["width"])
    _, metrics = steps.grpo_step(state, 0)
    assert np.isfinite(metrics["loss"])
    _, metrics = steps.warmup_step(steps.initial_state(), 0)
    assert metrics["loss"] > np.log(300 / 2)


def test_shuffling_changes_the_update_and_not_the_first_rollout(trained, plain):
    shuffled = run(trained, shuffle_advantages=True).measured
    assert shuffled["reward"][0] == plain.measured["reward"][0]
    assert shuffled["policy_loss"][0] != plain.measured["policy_loss"][0]


def test_demonstration_errors_change_the_warm_start(trained, plain):
    _, wrong = plain.steps.warmup_step(trained, 0)
    _, right = build(demonstration_errors=0.0).warmup_step(trained, 0)
    assert wrong["loss"] > right["loss"]
