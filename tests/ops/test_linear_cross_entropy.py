"""linear_cross_entropy on a CPU: the definition in every implementation, the bits of linear_logp, tokens that do not
count, shards, optax as a client, a message for every bad input.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlk_jax
from rlk_jax import linear_cross_entropy, linear_logp
from rlk_jax.checker.gold import cross_entropy_gold
from rlk_jax.vocab_parallel import pad_lm_head
from tests.support import helpers
from tests.support.allowed import allowed_beside, ids_of
from tests.support.helpers import IMPLEMENTATIONS, assert_same_bits, assert_within_contract

LEAD, DIM, VOCAB = (4, 6), 24, 300
IGNORED = -100
SOFTCAP, Z_LOSS, SMOOTHING = 4.0, 1e-2, 0.1
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum", "temperature": 0.7},
    "weights": {"token_weights": "some", "ignore_index": IGNORED},
    "z-loss": {"z_loss": Z_LOSS, "reduction": "none", "global_vocab_size": 290},
    "smoothing": {"label_smoothing": SMOOTHING, "global_vocab_size": 290},
    "everything": {
        "z_loss": Z_LOSS,
        "label_smoothing": SMOOTHING,
        "token_weights": "some",
        "ignore_index": IGNORED,
        "temperature": "per token",
        "logit_softcap": SOFTCAP,
        "global_vocab_size": 290,
        "memory_budget": 2**14,
    },
}


class Batch(NamedTuple):
    """linear_cross_entropy's operands, in its order."""

    hidden: Any
    weight: Any
    target_ids: Any
    bias: Any

    def loss(self, **options: Any) -> jax.Array:
        return linear_cross_entropy(*self, **options)


@functools.cache
def batch(dtype: Any = jnp.float32, vocab: int = VOCAB, real: int = 290) -> Batch:
    rng = np.random.default_rng(0)
    hidden, weight, bias = rng.normal(size=(*LEAD, DIM)), rng.normal(size=(vocab, DIM)) / 3, rng.normal(size=vocab)
    ids = jnp.asarray(rng.integers(0, real, LEAD), jnp.int32)
    return Batch(jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), ids, jnp.asarray(bias, dtype))


@functools.cache
def some_weights() -> jax.Array:
    """Weights from 0 to 2, a quarter of them 0."""
    return jnp.maximum(jnp.asarray(np.random.default_rng(1).uniform(-0.7, 2, LEAD), jnp.float32), 0)


def problem(name: str, dtype: Any = jnp.float32) -> tuple[Batch, dict[str, Any]]:
    """A batch, some tokens of which are ignored where an option says so, and its options."""
    b, options = batch(dtype), dict(OPTIONS[name])
    if "ignore_index" in options:
        b = b._replace(target_ids=jnp.where(jnp.arange(LEAD[1]) == 2, IGNORED, b.target_ids))
    if "token_weights" in options:
        options["token_weights"] = some_weights()
    if options.get("temperature") == "per token":
        options["temperature"] = jnp.linspace(0.5, 2, 24).reshape(LEAD)
    return b, options


@functools.partial(jax.jit, static_argnames="static")
def _gradients(b: Batch, upstream: Any, arrays: dict[str, Any], static: tuple[tuple[str, Any], ...]) -> Any:
    def loss(*operands: Any) -> Any:
        value = b._replace(hidden=operands[0], weight=operands[1], bias=operands[2]).loss(**arrays, **dict(static))
        return jnp.vdot(upstream, value), value

    (_, value), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(b.hidden, b.weight, b.bias)
    return value, gradients


def value_and_gradients(b: Batch, upstream: Any = 1.0, **options: Any) -> Any:
    """(the loss, the gradients of hidden, weight and bias); calls alike share a program."""
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = tuple((name, x) for name, x in options.items() if name not in arrays)
    shape = b.target_ids.shape if options.get("reduction") == "none" else ()
    return _gradients(b, jnp.broadcast_to(jnp.float32(upstream), shape), arrays, static)


def gold_of(b: Batch, upstream: Any = 1.0, **options: Any) -> Any:
    """The same in float64, by a definition that shares no code with the op."""
    ids, weights = np.asarray(b.target_ids), np.ones(LEAD) * np.asarray(options.pop("token_weights", 1.0))
    weights = np.where(ids == options.pop("ignore_index", None), 0, weights)
    options = {"reduction": "mean", "z_loss": 0.0, **options}
    del options["implementation"]
    options.pop("memory_budget", None)
    shape = LEAD if options["reduction"] == "none" else ()
    hidden, weight, bias = (np.asarray(x, np.float64) for x in (b.hidden, b.weight, b.bias))
    h = np.where(weights[..., None] == 0, 0, hidden).reshape(-1, DIM)
    found = cross_entropy_gold(h @ weight.T + bias, ids, weights, np.broadcast_to(upstream, shape), **options)
    gradients = (found.d_raw @ weight).reshape(hidden.shape), found.d_raw.T @ h, found.d_raw.sum(axis=0)
    return found.loss, gradients


def each_pair_once() -> Iterator[tuple[str, Any, str]]:
    """(options, dtype, implementation): all options at once in every implementation, too."""
    for (i, name), (j, dtype) in itertools.product(enumerate(OPTIONS), enumerate(helpers.DTYPES)):
        for implementation in IMPLEMENTATIONS:
            if implementation == IMPLEMENTATIONS[(i + j) % 3] or (name, dtype) == ("everything", jnp.float32):
                yield name, dtype, implementation


# Each implementation has linear_logp's own tests, and dtypes meet options in no code of this op. "everything" catches
# bugs of smoothing and weights, and tests of bits below those of a sum.
@helpers.cover(
    "name, dtype, implementation",
    each_pair_once(),
    lambda *x: (
        x[:2] == ("everything", jnp.float32)
        or x in (("plain", jnp.float32, "xla"), ("z-loss", jnp.float32, "xla"), ("weights", jnp.bfloat16, "xla"))
    ),
)
def test_against_float64(name, dtype, implementation):
    b, options = problem(name, dtype)
    upstream = np.random.default_rng(3).normal(size=LEAD) if options.get("reduction") == "none" else 0.7
    value, gradients = value_and_gradients(b, upstream, implementation=implementation, **options)
    expected, expected_gradients = gold_of(b, upstream, implementation=implementation, **options)
    assert value.dtype == jnp.float32 and value.shape == expected.shape
    assert_within_contract(value, expected, "linear_cross_entropy", dtype, "forward")
    for gradient, gold_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == dtype
        assert_within_contract(gradient, gold_gradient, "linear_cross_entropy", dtype, "gradient")


def test_allowed_tokens():
    b = batch()
    head = {"allowed_ids": ids_of(allowed_beside(b.target_ids, VOCAB)), "implementation": "deterministic"}
    assert_same_bits(b.loss(reduction="none", **head), -linear_logp(*b, **head))


def test_the_bits_of_linear_logp():
    """A token's loss is −logp, and gradients of a weighted sum are those of linear_logp under the weights."""
    b, weights = batch(), jnp.abs(some_weights()) + 0.25

    def by_hand(*operands):
        logp = linear_logp(*operands[:2], b.target_ids, operands[2], implementation="deterministic")
        return -jnp.vdot(weights, logp), logp

    operands = b.hidden, b.weight, b.bias
    (_, logp), gradients = jax.jit(jax.value_and_grad(by_hand, (0, 1, 2), has_aux=True))(*operands)
    assert_same_bits(b.loss(implementation="deterministic", reduction="none"), -logp)
    _, found = value_and_gradients(b, implementation="deterministic", reduction="sum", token_weights=weights)
    assert_same_bits(found, gradients)


@helpers.cover("z_loss", [(0.0,), (Z_LOSS,)], lambda z_loss: z_loss > 0)  # with it, logp counts as well as lse
def test_a_token_keeps_its_bits_in_any_batch(z_loss):
    """reduction="none" by an implementation that promises bits: losses and rows of dH."""
    b = batch()
    options: dict[str, Any] = {"implementation": "deterministic", "reduction": "none", "z_loss": z_loss}
    upstream = np.float32(np.random.default_rng(2).normal(size=LEAD))
    losses, (d_hidden, *_) = value_and_gradients(b, upstream, **options, token_weights=some_weights())
    here = slice(1, 3), slice(2, 5)
    part = b._replace(hidden=b.hidden[here], target_ids=b.target_ids[here])
    found, (d_part, *_) = value_and_gradients(part, upstream[here], **options, token_weights=some_weights()[here])
    assert_same_bits((found, d_part), (losses[here], d_hidden[here]))


@helpers.cover("reduction", [("mean",), ("sum",)], lambda reduction: reduction == "mean")  # a mean is of a sum
def test_tokens_that_are_appended_and_do_not_count_change_no_bit(reduction):
    b, options = problem("everything")
    del options["temperature"]
    options |= {"reduction": reduction, "implementation": "deterministic"}
    value, (d_hidden, *rest) = value_and_gradients(b, **options)
    more = Batch(
        np.concatenate([b.hidden, np.full((3, *b.hidden.shape[1:]), np.nan, np.float32)]),
        b.weight,
        np.concatenate([b.target_ids, np.array([[IGNORED] * 6, [10**6] * 6, [-1] * 6], np.int32)]),
        b.bias,
    )
    # Weights of ignored tokens may be anything, and so may ids of tokens of weight 0.
    weights = np.array([[np.nan] * 6, [0.0] * 6, [0.0] * 6], np.float32)
    weights = jnp.asarray(np.concatenate([options.pop("token_weights"), weights]))
    assert np.isfinite(more.loss(**{**options, "implementation": "xla"}, token_weights=weights))
    found, (d_more, *rest_of_more) = value_and_gradients(more, **options, token_weights=weights)
    d_more = np.asarray(d_more)
    assert_same_bits((found, d_more[:4], rest_of_more), (value, d_hidden, rest))
    assert not np.any(d_more[4:])


# A mean of nothing is this op's own, whatever implementation has the tokens.
@helpers.cover(
    "what, reduction, implementation",
    itertools.product(["ignored", "weights 0", "no tokens"], ["mean", "sum"], ["xla", "deterministic"]),
    lambda what, reduction, implementation: (
        (implementation == "xla" and reduction == "mean")
        or (what, reduction, implementation) in (("weights 0", "sum", "xla"), ("ignored", "mean", "deterministic"))
    ),
)
def test_nothing_counts(what, implementation, reduction):
    b, options = batch(), {"implementation": implementation, "z_loss": Z_LOSS, "reduction": reduction}
    if what == "ignored":
        b, options = b._replace(target_ids=jnp.full(LEAD, IGNORED)), {**options, "ignore_index": IGNORED}
    elif what == "weights 0":
        options["token_weights"] = jnp.zeros(LEAD)
    else:
        b = b._replace(hidden=b.hidden[:0], target_ids=b.target_ids[:0])
    value, gradients = value_and_gradients(b, **options)
    assert_same_bits(value, jnp.float32(0))
    assert not any(np.any(x) for x in gradients)


def test_masks_are_weights():
    b, mask = batch(), some_weights() > 0
    expected = b._replace(target_ids=jnp.where(mask, b.target_ids, IGNORED)).loss(ignore_index=IGNORED)
    for dtype in (bool, jnp.int8, jnp.bfloat16):
        assert_same_bits(b.loss(token_weights=mask.astype(dtype)), expected)


def test_an_active_id_that_stands_for_left_out_tokens_is_still_out_of_range():
    b = batch()._replace(target_ids=batch().target_ids.at[1, 1].set(IGNORED))
    with pytest.raises(ValueError, match="target_ids out of range"):
        b.loss(token_weights=some_weights() + 1)
    assert np.isnan(b.loss(token_weights=some_weights() + 1, validate=False))


def test_weights_get_no_gradient():
    b = batch()
    assert not np.any(jax.grad(lambda w: b.loss(token_weights=w, z_loss=Z_LOSS))(some_weights()))


BAD_WEIGHTS = [jnp.nan, jnp.inf, -1.0]


@jax.jit
def of_weights(weights: jax.Array) -> jax.Array:
    return batch().loss(token_weights=weights)


reported_of_weights = jax.jit(checkify.checkify(of_weights))


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_a_bad_weight_raises_or_gives_nan(bad):
    b, weights = batch(), some_weights().at[0, 0].set(bad)
    with pytest.raises(ValueError, match=re.escape("token_weights must be finite and not negative, got values in [")):
        b.loss(token_weights=weights)
    losses = np.asarray(b.loss(token_weights=weights, validate=False, reduction="none"))
    np.testing.assert_array_equal(np.isnan(losses), np.isnan(losses) & (np.arange(24).reshape(LEAD) == 0))
    assert np.isnan(losses[0, 0])
    assert np.isnan(of_weights(weights))
    error, _ = reported_of_weights(weights)
    assert "token_weights must be finite and not negative" in error.get()
    with pytest.raises(ValueError, match="validate=True needs concrete token_weights"):
        jax.eval_shape(lambda weights: b.loss(token_weights=weights, validate=True), weights)


# A mean is of all ranks' tokens alike; degrees meet the other options in no code.
@helpers.cover(
    "degree, implementation, name",
    [(n, x, name) for n in (1, 2, 4, 8) for x in ("deterministic", "xla") for name in ("everything", "z-loss")],
    lambda n, x, name: name == "everything" and (n, x) in ((8, "deterministic"), (2, "xla")),
)
def test_shards_of_the_vocabulary(degree, implementation, name):
    """Inside shard_map on group edges: the bits of a whole head where the implementation promises them."""
    b, options = problem(name)
    options |= {"implementation": implementation, "global_vocab_size": 290}
    upstream = np.float32(np.random.default_rng(3).normal(size=LEAD)) if name == "z-loss" else jnp.float32(0.7)
    # 290 columns are eight groups of 40, the last of which has ten.
    b = b._replace(weight=jnp.pad(b.weight[:290], ((0, 30), (0, 0))), bias=jnp.pad(b.bias[:290], (0, 30)))
    mesh = Mesh(np.array(jax.devices()[:degree]), ("tp",))
    arrays = {key: x for key, x in options.items() if isinstance(x, jax.Array)}
    static = {key: x for key, x in options.items() if key not in arrays}
    spec = PartitionSpec()
    specs = (spec, PartitionSpec("tp"), spec, PartitionSpec("tp")), dict.fromkeys(arrays, spec)

    has_bits = implementation == "deterministic"
    static |= {"axis_name": "tp", "hidden_grad_reduction": "canonical" if has_bits else "sum"}

    def on_rank(b, arrays):
        return linear_cross_entropy(*b, **arrays, **static)

    def loss(hidden, weight, bias):
        one = Batch(hidden, weight, b.target_ids, bias)
        value = jax.shard_map(on_rank, mesh=mesh, in_specs=(Batch(*specs[0]), specs[1]), out_specs=spec)(one, arrays)
        return jnp.vdot(upstream, value), value

    (_, value), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(b.hidden, b.weight, b.bias)
    whole = value_and_gradients(b, upstream, **options)
    if has_bits:
        assert_same_bits((value, gradients), whole)
    assert_within_contract(value, whole[0], "linear_cross_entropy", jnp.float32, "forward")
    for a, e in zip(gradients, whole[1], strict=True):
        assert_within_contract(a, e, "linear_cross_entropy", jnp.float32, "gradient")


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_arrays_over_a_mesh(kind):
    """Tokens over data and the head over tensor: values and gradients are those of one device, and lie as operands."""
    devices = jax.devices()[:4]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))
    if kind == "explicit":
        mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=devices)
    b, options = problem("weights")
    expected = value_and_gradients(b, **options)

    def laid(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    sharded = Batch(
        laid(b.hidden, "data"), laid(b.weight, "tensor"), laid(b.target_ids, "data"), laid(b.bias, "tensor")
    )
    options["token_weights"] = laid(options["token_weights"], "data")
    with jax.set_mesh(mesh):
        found = value_and_gradients(sharded, **options)
        losses = jax.eval_shape(lambda b: b.loss(**options, reduction="none"), sharded)
    assert losses.shape == LEAD
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within_contract(a, e, "linear_cross_entropy", jnp.float32, "gradient")


def test_optax_on_logits_is_the_same():
    """A drop-in for optax's loss of logits in a training step of optax, with its mask as weights."""
    b, mask = batch(), some_weights() > 0

    def by_optax(hidden, weight, bias):
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T + bias, b.target_ids)
        return (losses * mask).sum() / mask.sum(), losses

    def by_ours(hidden, weight, bias):
        head = Batch(hidden, weight, b.target_ids, bias)
        return head.loss(token_weights=mask), head.loss(reduction="none")

    def stepped(loss):
        operands = b.hidden, b.weight, b.bias
        optimizer = optax.sgd(0.5)
        (value, losses), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*operands)
        updates, _ = optimizer.update(gradients, optimizer.init(operands))
        return (value, losses), updates

    (values, updates), (expected, expected_updates) = (
        jax.jit(stepped, static_argnums=0)(f) for f in (by_ours, by_optax)
    )
    for a, e in zip(values, expected, strict=True):
        assert_within_contract(a, e, "linear_cross_entropy", jnp.float32, "forward")
    for a, e in zip(updates, expected_updates, strict=True):
        assert_within_contract(a, e, "linear_cross_entropy", jnp.float32, "gradient")


# In make test, a scan has remat in it, and one call for each sequence is what all are compared with.
@helpers.cover(
    "transform",
    [("plain",), ("remat",), ("vmap",), ("scan",), ("scan of remat",)],
    lambda transform: transform in ("vmap", "scan of remat"),
)
def test_transformations(transform):
    """The loss of each sequence by a transformation, and its gradients, have the bits of one call each."""
    b, options = problem("everything")
    weights, temperature = options.pop("token_weights"), options.pop("temperature")
    options["implementation"] = "deterministic"
    sequences = b.hidden, b.target_ids, weights, temperature

    def of_sequence(hidden, ids, weights, temperature):
        one = b._replace(hidden=hidden, target_ids=ids)
        return one.loss(token_weights=weights, temperature=temperature, validate=False, **options)

    def scan_of(f):
        return lambda *x: jax.lax.scan(lambda _, one: (None, f(*one)), None, x)[1]

    ways = {
        "plain": lambda *x: jnp.stack([of_sequence(*one) for one in zip(*x, strict=True)]),
        "remat": lambda *x: jnp.stack([jax.checkpoint(of_sequence)(*one) for one in zip(*x, strict=True)]),
        "vmap": jax.vmap(of_sequence),
        "scan": scan_of(of_sequence),
        "scan of remat": scan_of(jax.checkpoint(of_sequence)),
    }

    def total(hidden):
        losses = ways[transform](hidden, *sequences[1:])
        return losses.sum(), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(b.hidden)
    alone = jax.jit(jax.value_and_grad(of_sequence))
    for i, one in enumerate(zip(*sequences, strict=True)):
        assert_same_bits((losses[i], gradient[i]), alone(*one))


def test_a_low_rank_term():
    b, rng = batch(), np.random.default_rng(5)
    a, low = (jnp.asarray(rng.normal(size=x) / 4, jnp.float32) for x in ((3, DIM), (VOCAB, 3)))

    def adapted(a, low):
        return b.loss(low_rank=(a, low, 0.5), z_loss=Z_LOSS, implementation="xla")

    def merged(a, low):
        return b._replace(weight=b.weight + 0.5 * low @ a).loss(z_loss=Z_LOSS, implementation="xla")

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(a, low) for f in (adapted, merged))
    assert_within_contract(found[0], expected[0], "linear_cross_entropy", jnp.float32, "forward")
    for x, e in zip(found[1], expected[1], strict=True):
        assert_within_contract(x, e, "linear_logp_low_rank", jnp.float32, "gradient")


def test_a_loss_without_z_loss_asks_for_logp_alone():
    """The program has no lse that a backward would have to differentiate."""
    b = batch()
    text, with_lse = (
        jax.jit(jax.grad(lambda h, z=z: b._replace(hidden=h).loss(z_loss=z, implementation="reference")))
        .lower(b.hidden)
        .as_text()
        for z in (0.0, Z_LOSS)
    )
    assert len(text) < len(with_lse)


def test_strict_jax_modes():
    b, options = problem("everything")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        jax.grad(lambda h: b._replace(hidden=h).loss(**options))(b.hidden)


def test_explain_says_what_linear_logp_runs():
    b, options = problem("everything")
    decision = rlk_jax.explain("linear_cross_entropy", *b, **options)
    head = {name: options[name] for name in ("temperature", "logit_softcap", "global_vocab_size", "ignore_index")}
    expected = rlk_jax.explain("linear_logp", *b, return_lse=True, **head)
    assert decision.op == "linear_cross_entropy" and decision.choice == expected.choice
    assert decision.reasons == expected.reasons and decision.plan is None
    assert rlk_jax.explain("linear_cross_entropy", *b, token_weights=some_weights()).choice == "xla"
    with pytest.raises(ValueError, match="does not match target_ids shape"):
        rlk_jax.explain("linear_cross_entropy", *b, token_weights=jnp.ones(3))


def test_targets_of_any_integer_dtype():
    b = batch()
    ids = b.target_ids % 120
    for dtype in (jnp.int8, jnp.uint32, np.int64):
        found = b._replace(target_ids=np.asarray(ids).astype(dtype)).loss(token_weights=some_weights())
        assert_same_bits(found, b._replace(target_ids=ids).loss(token_weights=some_weights()))


def test_a_padded_head_of_a_mesh_axis_is_the_whole_one():
    """`pad_lm_head` pads for 8 ranks; the loss is that of the head without padding."""
    b = batch()
    padded = b._replace(weight=pad_lm_head(b.weight, 8), bias=pad_lm_head(b.bias, 8))
    assert padded.weight.shape[0] > VOCAB
    options: dict[str, Any] = {"implementation": "deterministic", "z_loss": Z_LOSS}
    assert_same_bits(padded.loss(global_vocab_size=VOCAB, **options), b.loss(**options))


def logits_of(b: Batch) -> Any:
    return b.hidden @ b.weight.T + b.bias


@helpers.cover("smoothing", [(0.3,), (1.0,)], lambda smoothing: smoothing == 1)  # "everything" has less, by a gold
def test_label_smoothing_of_optax(smoothing):
    b = batch()

    def by_optax(hidden):
        labels = optax.smooth_labels(jax.nn.one_hot(b.target_ids, VOCAB), smoothing)
        return optax.softmax_cross_entropy(logits_of(b._replace(hidden=hidden)), labels).mean()

    found, expected = (
        jax.jit(jax.value_and_grad(f))(b.hidden)
        for f in (lambda h: b._replace(hidden=h).loss(label_smoothing=smoothing), by_optax)
    )
    assert_within_contract(found[0], expected[0], "linear_cross_entropy", jnp.float32, "forward")
    assert_within_contract(found[1], expected[1], "linear_cross_entropy", jnp.float32, "gradient")


@helpers.implementations("xla", "deterministic")  # the reference is what others are compared with
def test_a_bias_of_minus_infinity_makes_smoothed_losses_infinite(implementation):
    """As torch has it; gradients stay finite, and the impossible token's logit has g·s/V."""
    b = batch()
    b = b._replace(bias=b.bias.at[7].set(-jnp.inf), target_ids=jnp.where(b.target_ids == 7, 8, b.target_ids))
    options = {"implementation": implementation, "reduction": "sum"}
    assert np.isfinite(b.loss(reduction="sum"))
    value, (d_hidden, d_weight, d_bias) = value_and_gradients(b, label_smoothing=SMOOTHING, **options)
    assert value == np.inf
    assert all(np.isfinite(x).all() for x in (d_hidden, d_weight, d_bias))
    assert_within_contract(d_bias[7], -24 * SMOOTHING / VOCAB, "linear_cross_entropy", jnp.float32, "gradient")


@helpers.implementations("xla", "deterministic")  # the reference is what others are compared with
def test_the_loss_of_an_impossible_target_is_infinite_where_it_has_no_share_of_its_own(implementation):
    b = batch()
    b = b._replace(bias=b.bias.at[b.target_ids.reshape(-1)[0]].set(-jnp.inf))
    options: dict[str, Any] = {"implementation": implementation, "label_smoothing": 1.0}
    assert (b.loss(reduction="none", **options)[b.target_ids != -100] == np.inf).all()
    _, gradients = value_and_gradients(b, reduction="sum", **options)
    assert all(np.isfinite(x).all() for x in gradients)


def test_without_smoothing_the_program_is_the_same():
    b = batch()
    text, expected = (
        jax.jit(jax.grad(lambda h, o=o: b._replace(hidden=h).loss(**o))).lower(b.hidden).as_text()
        for o in ({"label_smoothing": 0.0}, {})
    )
    assert text == expected


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reduction": ({}, {"reduction": "average"}, "reduction must be one of ('mean', 'sum', 'none'), got 'average'."),
    "z-loss < 0": ({}, {"z_loss": -1e-4}, "z_loss must be 0 or a positive finite number, got -0.0001."),
    "z-loss NaN": ({}, {"z_loss": float("nan")}, "z_loss must be 0 or a positive finite number, got nan."),
    "z-loss array": ({}, {"z_loss": jnp.ones(())}, "z_loss must be 0 or a positive finite number, got "),
    "smoothing > 1": ({}, {"label_smoothing": 1.5}, "label_smoothing must be a number in [0, 1], got 1.5."),
    "smoothing < 0": ({}, {"label_smoothing": -0.1}, "label_smoothing must be a number in [0, 1], got -0.1."),
    "smoothing NaN": ({}, {"label_smoothing": float("nan")}, "label_smoothing must be a number in [0, 1], got nan."),
    "smoothing of allowed tokens": (
        {},
        {"label_smoothing": 0.1, "allowed_ids": jnp.zeros((*LEAD, 1), jnp.int32)},
        "label_smoothing cannot be given beside allowed_ids or allowed_mask",
    ),
    "weights": (
        {},
        {"token_weights": jnp.ones(LEAD[:1])},
        "token_weights shape (4,) does not match target_ids shape (4, 6).",
    ),
    "complex weights": (
        {},
        {"token_weights": jnp.ones(LEAD, complex)},
        "token_weights must be bool or real numbers, got complex64.",
    ),
    "list of weights": (
        {},
        {"token_weights": [1.0]},
        "token_weights must be a JAX or NumPy array, got builtins.list.",
    ),
    "float ids": ({"target_ids": jnp.zeros(LEAD)}, {}, "target_ids must be integers, got float32."),
    "ids": ({"target_ids": jnp.zeros((4, 5), jnp.int32)}, {}, "must match target_ids shape (4, 5)."),
    "out of range": ({"target_ids": jnp.full(LEAD, VOCAB)}, {}, "target_ids out of range: expected [0, 299]"),
    "ignore_index": ({}, {"ignore_index": 3}, "ignore_index 3 is a valid token id; it must lie outside [0, 299]."),
    "ignore_index beside weights": (
        {},
        {"ignore_index": 2**40, "token_weights": jnp.ones(LEAD)},
        "ignore_index must be a 32-bit integer, got 1099511627776.",
    ),
    "validate": ({}, {"validate": "yes"}, "validate must be None, True or False, got 'yes'."),
    "hidden": ({"hidden": jnp.zeros((4, 6, 7))}, {}, "hidden dim 7 must match lm_head_weight dim 24."),
    "no such reduction of ranks": (
        {},
        {"hidden_grad_reduction": "mean", "axis_name": "tp"},
        "hidden_grad_reduction must be one of ('sum', 'canonical'), got 'mean'.",
    ),
    "an order of ranks without ranks": (
        {},
        {"hidden_grad_reduction": "canonical"},
        "hidden_grad_reduction='canonical' requires axis_name, the mesh axis of the shards.",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_messages(bad):
    arrays, options, message = BAD[bad]
    with pytest.raises(ValueError, match=re.escape(message)):
        batch()._replace(**arrays).loss(**options)


@pytest.mark.parametrize("name", ["return_lse", "return_entropy", "return_top_k", "return_target_rank"])
def test_no_such_option(name):
    message = f"linear_cross_entropy has no option {name}: it returns a loss alone."
    with pytest.raises(ValueError, match=message):
        batch().loss(**{name: 1})
    given = batch()
    with pytest.raises(ValueError, match=message):
        rlk_jax.explain("linear_cross_entropy", given.hidden, given.weight, given.target_ids, **{name: 1})
