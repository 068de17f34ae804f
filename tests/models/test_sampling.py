"""Sampling: what is recorded of tokens, where rows end, and that a row does not depend on the others."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax import linear_logp, models
from rlk_jax.models import Sampling, config_of
from rlk_jax.models import sampling as sampling_module
from rlk_jax.models.sampling import _with_drawn
from tests.models.test_drawing import gold
from tests.models.tiny import FAMILIES, SIZES
from tests.support.helpers import assert_same_bits, assert_within_contract

VOCAB, PAD, LENGTH = SIZES["vocab_size"], 0, 8


@functools.cache
def made(case="llama", kind="stock"):
    fields = {**SIZES, **FAMILIES[case], "num_hidden_layers": 1}
    dtype = jnp.float32 if kind == "stock" else jnp.bfloat16
    return nnx.jit(lambda: models.CausalLM(config_of(fields), kind=kind, dtype=dtype, rngs=nnx.Rngs(0)))()


@functools.partial(nnx.jit, static_argnames=("max_new_tokens", "sampling", "stop_ids", "pad_id", "score"))
def sampled(model, prompts, padding, keys, **options):
    return models.sample(model, prompts, padding, keys, **options)


def batch_of(rows, width=5, seed=0):
    """Prompts, their padding and their keys. The first one has no padding."""
    rng = np.random.default_rng(seed)
    prompts, padding = rng.integers(3, VOCAB, (rows, width)), np.arange(rows) % (width - 1)
    return jnp.asarray(prompts), jnp.asarray(padding), jax.random.split(jax.random.key(seed), rows)


ENDLESS = {"max_new_tokens": LENGTH, "sampling": Sampling(0.8, top_k=40)}


@pytest.fixture(scope="module")
def endless():
    """Rows that nothing stops, and what they were drawn from."""
    drawn_from = batch_of(4)
    return drawn_from, sampled(made(), *drawn_from, **ENDLESS, stop_ids=(), pad_id=PAD)


# Rows and their log-probs.


# In make test, the second has what can move a draw and a softcap, and records packed bits. The first records ids: in
# their place are test_a_draw_does_not_depend_on_other_rows (test_drawing.py) and, for log-probs that are those of
# training, test_ratios_begin_at_one (tests/grpo/test_truncated.py). The third adds biases and a tied head.
@pytest.mark.parametrize(
    ("case", "sampling"),
    [
        pytest.param("gemma2", Sampling(0.7, top_k=40, top_p=0.9), marks=pytest.mark.full),
        ("gemma2", Sampling(0.8, top_p=0.9, min_p=1e-3)),
        pytest.param("llama 3.1, tied, biases", Sampling(1.3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_of_an_invariant_model_keep_their_bits(case, sampling):
    """Alone, and among others behind more padding with more tokens: ids, what they were drawn among, and log-probs as
    training has them of that.
    """
    model, width, more = made(case, "invariant"), 5, 4
    prompt, _, _ = batch_of(1, width)
    key, nothing = jax.random.split(jax.random.key(3), 1), jnp.zeros(1, jnp.int32)
    alone = sampled(model, prompt, nothing, key, max_new_tokens=LENGTH, sampling=sampling)
    others, padding, keys = batch_of(5, width + more, seed=1)
    among = others.at[2].set(jnp.pad(prompt[0], (more, 0))), padding.at[2].set(more), keys.at[2].set(key[0])
    batch = sampled(model, *among, max_new_tokens=LENGTH + 3, sampling=sampling)
    assert len(set(np.asarray(batch.ids).ravel().tolist())) > LENGTH
    assert_same_bits(
        jax.tree.map(lambda x: x[2:3, :LENGTH], batch._replace(lengths=None)), alone._replace(lengths=None)
    )

    @nnx.jit
    def trained(model, tokens, allowed):
        head = model.lm_head
        return linear_logp(
            model(tokens[:, :-1])[:, width - 1 :],
            head.weight[...],
            tokens[:, width:],
            temperature=sampling.temperature,
            logit_softcap=head.softcap,
            implementation="deterministic",
            **allowed._asdict(),
        )

    assert alone.allowed.restricts == sampling.truncates(VOCAB)
    assert_same_bits(alone.logps, trained(model, jnp.concatenate([prompt, alone.ids], axis=1), alone.allowed))


@nnx.jit
def logits_of(model, tokens, padding):
    return model.lm_head(model(tokens, padding))


def test_log_probs_are_those_of_what_tokens_were_drawn_from(endless):
    """At the sampling temperature, of the tokens that were left; of the whole vocabulary at temperature 1 where the
    largest logit is taken.
    """
    (prompts, padding, keys), greedy = endless[0], Sampling(0)
    largest = sampled(made(), prompts, padding, keys, max_new_tokens=LENGTH, sampling=greedy)
    for found, sampling in ((endless[1], ENDLESS["sampling"]), (largest, greedy)):
        tokens = jnp.concatenate([prompts, found.ids], axis=1)
        logits = np.asarray(logits_of(made(), tokens, padding)[:, -LENGTH - 1 : -1], np.float64)
        if found.allowed.restricts:
            kept = np.stack([gold(x, sampling)[0] for x in logits.reshape(-1, VOCAB)]).reshape(logits.shape)
            recorded = (found.allowed_ids[..., None] == np.arange(VOCAB)).any(axis=-2)
            np.testing.assert_array_equal(recorded, kept)
            logits = np.where(kept, logits, -np.inf)
        logits = logits / sampling.scored_temperature
        logps = np.take_along_axis(logits, np.asarray(found.ids)[..., None], axis=-1)[..., 0]
        expected = logps - np.log(np.exp(logits).sum(axis=-1))
        assert_within_contract(found.logps, expected, "models", jnp.float32, "forward")
    np.testing.assert_array_equal(largest.ids, logits.argmax(axis=-1))
    assert endless[1].allowed.restricts and not largest.allowed.restricts


def test_log_probs_take_no_second_product_with_the_head(monkeypatch):
    monkeypatch.setattr(sampling_module, "linear_logp", lambda *_, **__: pytest.fail("a second product is taken"))
    model, (prompts, *others) = made("gemma2", "invariant"), batch_of(2)
    for sampling in (Sampling(top_k=40), Sampling(top_p=0.9)):
        draw = lambda x, sampling=sampling: models.sample(model, x, *others, max_new_tokens=2, sampling=sampling)  # noqa: E731
        assert jax.eval_shape(draw, prompts).logps.shape == (2, 2)


# Where rows end.


def shortened(rows, stop_ids, pad_id=PAD):
    """The rows, cut behind their first stop tokens, and their lengths."""
    lengths = [next((i for i, x in enumerate(row, 1) if x in stop_ids), len(row)) for row in rows.tolist()]
    return np.where(np.arange(rows.shape[1]) < np.array(lengths)[:, None], rows, pad_id), lengths


def assert_ends(endless, stop_ids, pad_id=PAD):
    """The rows of `endless`, cut where they must end; their lengths are returned."""
    drawn_from, whole = endless
    found = sampled(made(), *drawn_from, **ENDLESS, stop_ids=stop_ids, pad_id=pad_id)
    ids, lengths = shortened(np.asarray(whole.ids), stop_ids, pad_id)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.lengths, lengths)
    mask = np.asarray(found.mask)
    np.testing.assert_array_equal(mask.sum(axis=1), lengths)
    assert_within_contract(found.logps, np.where(mask, whole.logps, 0), "models", jnp.float32, "forward")
    assert not np.asarray(found.logps)[~mask].any() and (np.asarray(found.logps)[mask] < 0).all()
    np.testing.assert_array_equal(found.allowed_ids, np.where(mask[..., None], whole.allowed_ids, -1))
    return lengths


def test_a_row_ends_with_its_first_stop_token(endless):
    ids = np.asarray(endless[1].ids)
    lengths = assert_ends(endless, (int(ids[0, 0]), int(ids[1, 3]), int(ids[2, 7]), int(ids[1, 5])), pad_id=17)
    assert lengths[0] == 1 and lengths[1] <= 4 and lengths[2] <= LENGTH and len(set(lengths)) >= 3


def test_nothing_stops_rows_without_stop_ids(endless):
    assert assert_ends(endless, ()) == [LENGTH] * 4


def test_a_pad_token_may_be_a_stop_token(endless):
    stop = int(endless[1].ids[1, 3])
    lengths = assert_ends(endless, (stop,), pad_id=stop)
    assert lengths[1] <= 4 and max(lengths) == LENGTH


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=7), Sampling(top_p=0.5)], ids=str)
def test_no_tokens_at_all(sampling):
    found = sampled(made(), *batch_of(3), max_new_tokens=0, sampling=sampling, stop_ids=(2,))
    shapes = [None if x is None else x.shape for x in found.allowed]
    assert shapes == [(3, 0, 7) if sampling.top_k else None, (3, 0, 5) if sampling.top_p else None]
    assert found.ids.shape == found.logps.shape == found.mask.shape == (3, 0)
    assert found.ids.dtype == jnp.int32 and found.logps.dtype == jnp.float32
    np.testing.assert_array_equal(found.lengths, [0, 0, 0])


def test_decoding_ends_with_the_last_row(endless):
    """`score` is called once for each token of the longest row, and is told which rows have stopped."""
    drawn_from, whole = endless
    ids = np.asarray(whole.ids)
    stop_ids, calls = tuple(ids[:, 3].tolist()), []

    def score(hidden, products, token_ids, allowed):
        jax.debug.callback(lambda x: calls.append(np.asarray(x).tolist()), token_ids)
        return {"norms": (hidden**2).sum(-1), "largest": products.argmax(-1), "first": allowed.allowed_ids[:, 0]}

    found = sampled(made(), *drawn_from, **ENDLESS, stop_ids=stop_ids, score=score)
    jax.effects_barrier()
    cut, lengths = shortened(ids, stop_ids, pad_id=-100)
    assert max(lengths) == 4 < LENGTH and sorted(calls) == sorted(cut[:, :4].T.tolist())
    np.testing.assert_array_equal(found.logps["largest"], found.logps["first"])
    assert found.logps["norms"].shape == (4, LENGTH) and found.logps["largest"].dtype == jnp.int32


kinds = pytest.mark.parametrize("kind", ["stock", pytest.param("invariant", marks=pytest.mark.full)])
"""Where the layers take no part in what is tested, those of stock are enough in make test."""


@kinds
def test_rows_on_two_devices_end_together(kind, endless):
    """The rows of the first device end at their first tokens, those of the second one go on."""
    model, drawn_from = made(kind=kind), endless[0]
    whole = endless[1] if kind == "stock" else sampled(model, *drawn_from, **ENDLESS)
    stop_ids = tuple(whole.ids[:2, 0].tolist())
    expected, lengths = shortened(np.asarray(whole.ids), stop_ids)
    assert lengths[:2] == [1, 1] and max(lengths[2:]) == LENGTH
    mesh = Mesh(jax.devices()[:2], "data")
    rows = jax.device_put(drawn_from, NamedSharding(mesh, PartitionSpec("data")))
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, PartitionSpec())))
    found = sampled(model, *rows, **ENDLESS, stop_ids=stop_ids)
    np.testing.assert_array_equal(found.ids, expected)
    np.testing.assert_array_equal(found.lengths, lengths)


# One prompt, token by token.


@kinds
def test_streamed_tokens_are_those_of_sample(kind, endless):
    """They come from two programs however many there are: that of the prompt, and that of a token."""
    model, ((prompts, _, keys), whole) = made(kind=kind), endless
    if kind == "invariant":
        whole = sampled(model, prompts[:1], jnp.zeros(1, int), keys[:1], **ENDLESS)
    before = _with_drawn._cache_size()
    found = list(models.stream(model, prompts[0], keys[0], **ENDLESS))
    assert found == whole.ids[0].tolist() and _with_drawn._cache_size() == before + 2
    stop = found[4]
    ended = list(models.stream(model, prompts[0], keys[0], **ENDLESS, stop_ids=[stop]))
    assert ended == found[: found.index(stop) + 1]
    assert list(models.stream(model, prompts[0], keys[0], max_new_tokens=0)) == []


def test_streamed_tokens_come_one_by_one(endless, monkeypatch):
    """The second token is there before the third is computed."""
    (prompts, _, keys), whole = endless
    drawn, calls = models.stream(made(), prompts[0], keys[0], **ENDLESS), []
    monkeypatch.setattr(
        models.sampling, "_with_drawn", lambda *args, **options: calls.append(args) or _with_drawn(*args, **options)
    )
    assert [next(drawn), next(drawn)] == whole.ids[0, :2].tolist() and len(calls) == 2


# Mistakes.


KEYS = jax.random.split(jax.random.key(0), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of at least 0, got -1."),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer of at least 0, got 1.5."),
        ({"stop_ids": (4, VOCAB)}, "stop_ids and pad_id must be integers in [0, V=131), got 131."),
        ({"stop_ids": (-1,)}, "stop_ids and pad_id must be integers in [0, V=131), got -1."),
        ({"pad_id": None}, "stop_ids and pad_id must be integers in [0, V=131), got None."),
        ({"prompts": [[1, 2]]}, "prompt_ids must be a JAX or NumPy array, got builtins.list."),
        ({"prompts": np.ones((3, 0), int)}, "prompt_ids must be [B, P] with at least one token, got shape (3, 0)."),
        ({"prompts": np.ones(3, int)}, "prompt_ids must be [B, P] with at least one token, got shape (3,)."),
        ({"prompts": np.full((3, 2), VOCAB)}, "prompt_ids must be integers in [0, V=131), got 131."),
        ({"prompts": np.full((3, 2), -1)}, "prompt_ids must be integers in [0, V=131), got -1."),
        ({"prompts": np.ones((3, 2))}, "prompt_ids must be integers in [0, V=131), got 1.0."),
        ({"padding": np.zeros(2, int)}, "padding must be [B=3], a number per prompt, got shape (2,)."),
        ({"padding": np.zeros((3, 2), int)}, "padding must be [B=3], a number per prompt, got shape (3, 2)."),
        ({"padding": np.array([0, 1, 2])}, "padding must leave a prompt of P=2 slots at least one of them, got [2]."),
        (
            {"keys": KEYS[:2]},
            "keys must be [B=3] of jax.random.split, a key per prompt, got key<fry> of shape (2,).",
        ),
        (
            {"keys": jax.random.PRNGKey(0)},
            "keys must be [B=3] of jax.random.split, a key per prompt, got uint32 of shape (2,).",
        ),
    ],
)
def test_wrong_inputs(change, message):
    options = {"prompts": np.ones((3, 2), int), "padding": np.zeros(3, int), "keys": KEYS, "max_new_tokens": 2}
    arrays = {**options, **change}
    with pytest.raises(ValueError) as error:
        models.sample(made(), *(arrays.pop(name) for name in ("prompts", "padding", "keys")), **arrays)
    assert str(error.value) == message


@pytest.mark.parametrize("prompt", [np.asarray([5, 2**32 + 6]), np.asarray([5.0])])
def test_a_prompt_to_stream_is_checked_as_it_was_given(prompt):
    """An id of 64 bits does not wrap before it is checked."""
    message = f"prompt_ids must be integers in [0, V=131), got {prompt[-1]}."
    with pytest.raises(ValueError, match=re.escape(message)):
        models.stream(made(), prompt, KEYS[0], max_new_tokens=1)
