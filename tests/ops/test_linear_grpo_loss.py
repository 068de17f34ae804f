"""linear_grpo_loss on a CPU: the definition, the bits of what it is made of, masks, references, a message for every bad
input.
"""

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlk_jax
from rlk_jax import linear_logp
from rlk_jax.checker import gold
from rlk_jax.grpo import LossOptions, policy_loss
from rlk_jax.ops.linear_logp import autodiff
from tests.support import helpers, policy_losses
from tests.support.allowed import allowed_beside, mask_of
from tests.support.helpers import IMPLEMENTATIONS, IN_FEW_DTYPES, assert_same_bits, assert_within_contract
from tests.support.policy_losses import Batch, gradients, gradients_of_batch

LEAD, DIM, VOCAB = (4, 6), 24, 300
CLIP, HIGH, BETA = 0.15, 0.3, 0.07
LOSSES = {
    "dapo": LossOptions(clip_eps=CLIP, clip_eps_high=HIGH, beta=BETA),
    "grpo": LossOptions(loss_type="grpo", dual_clip=3.0),
    "dr_grpo": LossOptions(loss_type="dr_grpo", max_completion_length=6),
    "gspo": LossOptions(loss_type="gspo", beta=BETA, kl_estimator="k2"),
    "cispo": LossOptions(loss_type="cispo", cispo_ratio_cap=1.1),
    "sapo": LossOptions(loss_type="sapo"),
    "luspo": LossOptions(loss_type="luspo"),
    "vespo": LossOptions(loss_type="vespo", beta=BETA, kl_estimator="ratio_k3", entropy_coef=0.02),
}


@functools.cache
def batch(dtype: Any = jnp.float32) -> Batch:
    return policy_losses.batch(LEAD, DIM, VOCAB, dtype)


@functools.partial(jax.jit, static_argnames="implementation")
def scaled_gradients(b: Batch, scale: Any, implementation: str) -> Any:
    """((the loss times a scale, everything), the gradients of hidden and weight); arrays alike share a program."""

    def loss(hidden: Any, weight: Any) -> Any:
        found = b._replace(hidden=hidden, weight=weight).loss(options=LOSSES["dapo"], implementation=implementation)
        return scale * found.loss, found

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(b.hidden, b.weight)


# linear_logp has its own tests against float64, in every implementation and dtype.
@helpers.cover("implementation, dtype", IN_FEW_DTYPES, lambda *x: x == ("xla", jnp.float32))
def test_against_float64(implementation, dtype):
    b = batch(dtype)
    hidden, weight = (np.asarray(x, np.float64) for x in (b.hidden, b.weight))
    ref_weight = jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, DIM)) / 3, dtype)
    policy, ref = hidden @ weight.T, hidden @ np.asarray(ref_weight, np.float64).T
    advantages = np.asarray(b.advantages, np.float64)
    *values, slope = gold.grpo_loss_gold(
        policy, ref, b.target_ids, b.mask, b.old_logps, advantages, clip=(CLIP, HIGH), beta=BETA
    )

    def loss(hidden, weight):
        one = b._replace(hidden=hidden, weight=weight, ref_logps=None)
        reference: Any = {"ref_hidden": hidden, "ref_weight": ref_weight}
        return one.loss(**reference, options=LOSSES["dapo"], implementation=implementation)

    (_, found), (d_hidden, d_weight) = gradients(loss, b.hidden, b.weight)
    assert_within_contract(
        np.array([found.loss, found.policy_loss, found.kl]), np.array(values), "grpo_loss", dtype, "forward"
    )
    flat = slope.reshape(-1, VOCAB)
    expected = slope @ weight, flat.T @ hidden.reshape(-1, DIM)
    for gradient, gold_gradient in zip((d_hidden, d_weight), expected, strict=True):
        assert gradient.dtype == dtype
        assert_within_contract(gradient, gold_gradient, "linear_logp", dtype, "gradient")


def test_explain_says_what_linear_logp_runs():
    b = batch()
    given = (b.hidden, b.weight, b.target_ids, b.old_logps, b.ref_logps, b.advantages, b.mask)
    decision = rlk_jax.explain("linear_grpo_loss", *given, options=LOSSES["dapo"], temperature=0.7)
    expected = rlk_jax.explain("linear_logp", *given[:3], temperature=0.7)
    assert decision == replace(expected, op="linear_grpo_loss", plan=decision.plan)
    assert decision.plan == "a gradient takes all tokens at once: xla has no sums over blocks of tokens"
    with pytest.raises(ValueError, match="does not match completion_mask shape"):
        rlk_jax.explain("linear_grpo_loss", *given[:6], b.mask[:1])


# How arrays are laid depends on the reference and on whether ratios are of a token or a sequence. The log-probs of a
# reference are laid as old_logps, and a token's ratio as a sequence's: in `make test`, the case of gspo with a model
# catches bugs of both. vespo's weight adds up the errors of all log-probs of a sequence, so that its loss is not as
# accurate as a token's log-prob; it has a test of its own below.
@helpers.cover(
    "reference, name",
    [
        (x, name)
        for x in ("none", "logps", "model")
        for name in LOSSES
        if name != "vespo" and (x != "none" or not LOSSES[name].beta)
    ],
    lambda *x: x == ("model", "gspo"),
)
def test_explicit_mesh_axes(name, reference):
    """On axes of `jax.make_mesh`, tokens over data and the head over tensor, the values are those of one device."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    # A vocabulary that can be cut in two.
    b = policy_losses.batch(LEAD, DIM, 304, jnp.float32)
    b = b._replace(ref_logps=b.ref_logps if reference == "logps" else None)
    of_reference = {"ref_hidden": b.hidden, "ref_weight": b.weight * 0.9} if reference == "model" else {}

    def laid(x, *spec):
        return x if x is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def values(b, of_reference):
        def loss(hidden, weight):
            return b._replace(hidden=hidden, weight=weight).loss(**of_reference, options=LOSSES[name])

        return gradients(loss, b.hidden, b.weight)

    expected = values(b, of_reference)
    by_row = {field: laid(x, "data") for field, x in b._asdict().items() if field not in ("weight", "bias")}
    sharded = Batch(**by_row, weight=laid(b.weight, "tensor"), bias=None)
    kinds = {"ref_hidden": "data", "ref_weight": "tensor"}
    with jax.set_mesh(mesh):
        found = values(sharded, {field: laid(x, kinds[field]) for field, x in of_reference.items()})
    for gradient, x in zip(found[1], (sharded.hidden, sharded.weight), strict=True):
        assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    for actual, gold_value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within_contract(actual, gold_value, "linear_logp", jnp.float32, "gradient")


# In `make test`, the case of gspo above catches a sequence's ratio that a mesh breaks.
@pytest.mark.full
def test_vespo_on_explicit_mesh_axes():
    """On the mesh the loss is `policy_loss` of the mesh's own log-probs, on one device."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    b, options = policy_losses.batch(LEAD, DIM, 304, jnp.float32), LOSSES["vespo"]

    def laid(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    by_row = {field: laid(x, "data") for field, x in b._asdict().items() if field not in ("weight", "bias")}
    sharded = Batch(**by_row, weight=laid(b.weight, "tensor"), bias=None)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(Batch.loss, options=options))(sharded)
        logps = jax.jit(lambda b: linear_logp(b.hidden, b.weight, b.target_ids, return_entropy=True))(sharded)
    logp, _, entropy = (None if x is None else jnp.asarray(np.asarray(x)) for x in logps)
    expected = policy_loss(
        logp, b.old_logps, b.advantages, b.mask, ref_logps=b.ref_logps, entropy=entropy, options=options
    )
    for actual, gold_value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within_contract(actual, gold_value, "grpo_loss", jnp.float32, "forward")


# The losses are policy_loss's own; whether a program keeps them apart from the head shows with every loss and
# implementation. In `make test`, the case of gspo and "xla" catches one that does not, and that of vespo an entropy
# bonus that reaches the head otherwise.
@helpers.cover(
    "name, implementation",
    [(x, "xla") for x in LOSSES] + [("dapo", x) for x in IMPLEMENTATIONS if x != "xla"],
    lambda *x: x in (("gspo", "xla"), ("vespo", "xla")),
)
def test_the_bits_of_linear_logp_and_policy_loss(name, implementation):
    b, options = batch(), LOSSES[name]
    b = b._replace(bias=jnp.linspace(-1, 1, VOCAB), ref_logps=b.ref_logps if options.beta else None)
    temperature = jnp.linspace(0.5, 2, 24).reshape(LEAD)
    head: Any = {"temperature": temperature, "logit_softcap": 5.0, "implementation": implementation}
    head |= {"options": options, "return_entropy": True}
    if options.entropy_coef:
        head["entropy_threshold"] = 4.0
    one, two = (gradients_of_batch(calls, b, **head) for calls in (Batch.loss, Batch.in_two_calls))
    assert_same_bits(one, two)


def test_allowed_tokens_of_the_policy_and_its_reference():
    b, options = batch(), LOSSES["dapo"]
    head: Any = {"allowed_mask": mask_of(allowed_beside(b.target_ids, VOCAB)), "implementation": "xla"}
    one, two = (gradients_of_batch(calls, b, options=options, **head) for calls in (Batch.loss, Batch.in_two_calls))
    assert_same_bits(one, two)
    reference = {"ref_hidden": b.hidden * 0.5, "ref_weight": b.weight}
    ref_logps = linear_logp(*reference.values(), b.target_ids, **head)
    expected = b._replace(ref_logps=ref_logps).loss(options=options, **head)
    assert_same_bits(b._replace(ref_logps=None).loss(options=options, **reference, **head), expected)


def test_a_loss_that_needs_entropies_has_them_unasked():
    b, options = batch(), LossOptions(entropy_coef=0.1)
    found, asked = b.loss(options=options), b.loss(options=options, return_entropy=True)
    assert found.entropy_bonus > 0
    assert_same_bits(found, asked)
    assert b.loss(entropy_threshold=1.0).entropy is not None and b.loss().entropy is None
    assert rlk_jax.explain("linear_grpo_loss", *b, options=options).choice == "xla"


# Masks are made bool first; a loss over tokens and one over sequences.
@helpers.cover(
    "name, dtype",
    itertools.product(LOSSES, [bool, jnp.int8, jnp.float32]),
    lambda *x: x in (("dapo", jnp.int8), ("gspo", jnp.float32)),
)
def test_strict_jax_modes(name, dtype):
    b = batch()._replace(mask=batch().mask.astype(dtype))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        jax.grad(lambda h: b._replace(hidden=h).loss(options=LOSSES[name], return_entropy=True).loss)(b.hidden)


def with_a_float_mask() -> Batch:
    return batch()._replace(mask=batch().mask.astype(jnp.float32))


def test_what_is_masked_does_not_count():
    b = with_a_float_mask()
    active = batch().mask
    garbage = b._replace(
        hidden=jnp.where(active[..., None], b.hidden, jnp.nan),
        target_ids=jnp.where(active, b.target_ids, -7),
        old_logps=jnp.where(active, b.old_logps, jnp.nan),
        ref_logps=jnp.where(active, b.ref_logps, jnp.inf),
        mask=b.mask * 3,
    )
    found, expected = (scaled_gradients(x, 1.0, "xla") for x in (garbage, b))
    assert_same_bits(found, expected)
    assert not np.any(np.asarray(found[1][0])[~np.asarray(active)])
    # Ids are checked where they are not traced.
    jax.eval_shape(lambda hidden: garbage._replace(hidden=hidden).loss(), b.hidden)


def test_a_reference_in_the_same_call():
    b = batch()
    ref_hidden, ref_weight = b.hidden[..., :16] * 0.5, b.weight[:, :16]
    head: dict[str, Any] = {"temperature": 0.7, "implementation": "deterministic"}
    ref_logps = linear_logp(ref_hidden, ref_weight, b.target_ids, **head)

    def loss(ref_hidden, ref_weight):
        one = b._replace(ref_logps=None)
        return one.loss(ref_hidden=ref_hidden, ref_weight=ref_weight, options=LOSSES["dapo"], **head)

    (_, found), frozen = gradients(loss, ref_hidden, ref_weight)
    expected = jax.jit(lambda ref_logps: b._replace(ref_logps=ref_logps).loss(options=LOSSES["dapo"], **head))
    assert_same_bits(found, expected(ref_logps))
    assert not any(np.any(x) for x in frozen)


def test_a_reference_that_is_differentiated_too_keeps_nothing_for_a_backward(monkeypatch):
    forward, kept = autodiff._forward, []

    def recorded(functions, config, *operands):
        kept.append(config.keeps)
        return forward(functions, config, *operands)

    monkeypatch.setattr(autodiff, "_forward", recorded)
    b = policy_losses.batch((3, 5), 16, 130)._replace(ref_logps=None)

    def loss(weight):
        return b._replace(weight=weight).loss(ref_hidden=b.hidden, ref_weight=weight).loss

    jax.eval_shape(jax.grad(loss), b.weight)
    assert kept.count(True) == 1 and len(kept) > 1


@helpers.cover("loss", [("dapo",), ("gspo",)], lambda loss: loss == "dapo")  # the loss comes after the head's last rank
def test_shards_of_the_vocabulary(loss):
    """Inside shard_map: the bits of a whole head."""
    b = batch()._replace(weight=jnp.pad(batch().weight, ((0, 20), (0, 0))))
    head: dict[str, Any] = {"options": LOSSES[loss], "implementation": "deterministic", "global_vocab_size": VOCAB}

    def sharded(hidden, weight):
        one = b._replace(hidden=hidden, weight=weight)
        return one.loss(axis_name="tp", reduction="canonical", **head)

    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("tp")), "out_specs": PartitionSpec()}
    found = gradients(jax.shard_map(sharded, mesh=mesh, **specs), b.hidden, b.weight)
    assert_same_bits(found, gradients(lambda h, w: b._replace(hidden=h, weight=w).loss(**head), b.hidden, b.weight))


# A power of two scales the sums of any order.
@helpers.cover("implementation", [("deterministic",), ("xla",)], lambda implementation: implementation == "xla")
def test_an_outer_scale_scales_gradients(implementation):
    one, eight = (scaled_gradients(with_a_float_mask(), scale, implementation)[1] for scale in (1.0, 8.0))
    assert_same_bits(eight, jax.tree.map(lambda x: 8 * x, one))


def test_micro_batches_add_up():
    b = jax.device_get(batch())
    loss, total = jax.jit(lambda b, total: b.loss(denominator=total).loss), np.float32(b.mask.sum())
    halves = [
        loss(jax.tree.map(lambda x, s=s: x[s], b)._replace(weight=b.weight), total) for s in (slice(0, 2), slice(2, 4))
    ]
    assert_within_contract(sum(halves), loss(b, None), "grpo_loss", jnp.float32, "forward")


# In `make test`, tests/ops/linear_logp/test_values.py has every integer dtype of targets.
@pytest.mark.parametrize(
    "dtype",
    [jnp.uint8, pytest.param(jnp.uint32, marks=pytest.mark.full), pytest.param(jnp.int16, marks=pytest.mark.full)],
)
def test_targets_of_any_integer_dtype(dtype):
    b = batch()
    b = b._replace(target_ids=b.target_ids % 200)
    assert_same_bits(b._replace(target_ids=b.target_ids.astype(dtype)).loss(), b.loss())


@pytest.mark.parametrize(
    ("name", "hint"), [("clip_eps", ": it is a field of options=LossOptions(clip_eps=…)"), ("cliping", "")]
)
def test_an_option_that_does_not_exist(name, hint):
    message = f"linear_grpo_loss() got an unexpected keyword argument {name!r}{hint}"
    with pytest.raises(TypeError, match=f"{re.escape(message)}$"):
        batch().loss(**{name: 0.2})


OK: Any = object()
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mask": (
        {"mask": jnp.ones(6)},
        {},
        "completion_mask must be 2D [num_sequences, completion_len]. The one given has shape (6,).",
    ),
    "ids": ({"target_ids": jnp.zeros((4, 5), jnp.int32)}, {}, "target_ids shape (4, 5) does not match completion_mask"),
    "float ids": ({"target_ids": jnp.zeros(LEAD)}, {}, "target_ids must be integers, got float32."),
    "the id of masked tokens": (
        {"target_ids": jnp.full(LEAD, -100)},
        {},
        "target_ids out of range: expected [0, 299], got [-100, -100].",
    ),
    "old": ({"old_logps": jnp.zeros(4)}, {}, "old_logps shape (4,) does not match completion_mask shape (4, 6)."),
    "advantages": ({"advantages": jnp.zeros(5)}, {}, "advantages must be [B] or [B, T]"),
    "no reference": ({"ref_logps": None}, {"options": LossOptions(beta=0.1)}, "beta=0.1 requires ref_logps. In linear"),
    "half a reference": ({"ref_logps": None}, {"ref_hidden": OK}, "ref_hidden and ref_weight must be given together."),
    "a reference of other tokens": (
        {"ref_logps": None},
        {"ref_hidden": jnp.zeros((2, 6, 8)), "ref_weight": jnp.zeros((VOCAB, 8))},
        "ref_hidden must be [B, T, E] of completion_mask shape (4, 6), got shape (2, 6, 8).",
    ),
    "a reference of another vocabulary": (
        {"ref_logps": None},
        {"ref_hidden": jnp.zeros((4, 6, 8)), "ref_weight": jnp.zeros((400, 8))},
        "ref_weight shape (400, 8) must have the vocabulary of lm_head_weight shape (300, 24).",
    ),
    "a reference of the other layout": (
        {"ref_logps": None, "weight": jnp.zeros((24, VOCAB))},
        {"ref_hidden": jnp.zeros((4, 6, 24)), "ref_weight": jnp.zeros((24, VOCAB))},
        'ref_hidden dim 24 must match ref_weight dim 300. For a weight [D, V], pass weight_layout="dv".',
    ),
    "a reference of another width": (
        {"ref_logps": None},
        {"ref_hidden": jnp.zeros((4, 6, 8)), "ref_weight": jnp.zeros((VOCAB, 9))},
        "ref_hidden dim 8 must match ref_weight dim 9.",
    ),
    "no old": ({"old_logps": None}, {}, "old_logps must be a JAX or NumPy array, got builtins.NoneType"),
    "two": ({}, {"ref_hidden": OK, "ref_weight": OK}, "Give ref_logps, or ref_hidden and ref_weight, not both."),
    "bias": (
        {"ref_logps": None, "bias": OK},
        {"ref_hidden": OK, "ref_weight": OK},
        "The head of ref_hidden has no bias: beside a bias, give ref_logps instead.",
    ),
    "ignore_index": ({}, {"ignore_index": 0}, "completion_mask says which tokens count: ignore_index must be None."),
    "hidden": ({"hidden": jnp.zeros((4, 6, 7))}, {}, "hidden"),
    "no options": ({}, {"options": {"beta": 0.1}}, "options must be LossOptions, got dict."),
    "threshold": (
        {},
        {"entropy_threshold": -1.0},
        "entropy_threshold must be 0 or a positive finite number, got -1.0.",
    ),
    "cap": ({}, {"options": LossOptions(importance_cap=2.0)}, "rollout_logps and importance_cap must be given"),
}


@pytest.mark.parametrize("bad", BAD)
def test_messages(bad):
    arrays, options, message = BAD[bad]
    with pytest.raises(ValueError, match=re.escape(message)):
        batch()._replace(**arrays).loss(**options)


def test_no_such_option():
    with pytest.raises(TypeError, match="colour"):
        batch().loss(colour="red")
