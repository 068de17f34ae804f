"""Several sequences packed into a row: none is lost, and log-probs, losses and gradients stay as in rows of one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from rlk_jax.core.allowed import AllowedTokens
from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo.accumulation import accumulated_gradients
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.layers import INVARIANT, STOCK, Layers
from rlk_jax.grpo.sequences import Sequences, first_fit, join_completions, pack
from rlk_jax.grpo.steps import make_mesh, target_logps
from rlk_jax.grpo.vocabulary import EOS, PAD, VOCAB_SIZE
from rlk_jax.losses import LossOptions, loss_denominator, policy_loss
from tests.grpo import tiny
from tests.support import helpers

packed_once = jax.jit(pack, static_argnames="shards")
placed_once = jax.jit(first_fit, static_argnames="width")
target_logps_once = nnx.jit(target_logps, static_argnames="head")
policy_loss_once = jax.jit(policy_loss, static_argnames="options")
PROMPT_WIDTH, LENGTH = 120, 12
PADDING = np.array([110, 0, 80, 118, 60, 119, 100, 115], np.int32)
SAID = np.array([3, 12, 0, 1, 12, 7, 5, 9])
"""How many tokens of each completion count; one has none that does."""


@pytest.fixture(scope="module")
def rows() -> Sequences:
    rng = np.random.default_rng(0)
    prompts = rng.integers(EOS + 1, VOCAB_SIZE, (len(PADDING), PROMPT_WIDTH), np.int32)
    completions = rng.integers(EOS + 1, VOCAB_SIZE, (len(PADDING), LENGTH), np.int32)
    prompts = np.where(np.arange(PROMPT_WIDTH) < PADDING[:, None], PAD, prompts)
    return join_completions(prompts, PADDING, completions, np.arange(LENGTH) < SAID[:, None])


def head_for(kind: Layers) -> MeshHead:
    implementation = "deterministic" if kind is INVARIANT else None
    return MeshHead(make_mesh(tiny.config()), VOCAB_SIZE, implementation, kind.dtype)


def logps_of(kind: Layers, rows: Sequences) -> jax.Array:
    return target_logps_once(tiny.decoder(kind), rows, head=head_for(kind))


def test_packed_sequences_have_the_bits_of_their_own_rows(rows):
    packed, expected = packed_once(rows, logps_of(INVARIANT, rows), shards=1)
    first = np.unique(np.asarray(packed.padding)[np.asarray(packed.mask)])
    assert len(first) > 1 and np.any(first % 64), "several share a row, from any slot on"
    assert np.any(np.asarray(expected))
    helpers.assert_same_bits(logps_of(INVARIANT, packed), expected)


def test_what_targets_were_drawn_among_is_packed_with_them(rows):
    """In either form, which differs from target to target."""
    numbers = jnp.arange(len(PADDING) * LENGTH, dtype=jnp.int32).reshape(len(PADDING), LENGTH)
    ids = numbers[..., None] * 3 + jnp.arange(3)
    allowed = AllowedTokens(ids, (ids[..., :2] + 1).astype(jnp.uint32))
    packed, moved = packed_once(rows._replace(allowed=allowed), numbers, shards=2)
    where, mask = np.asarray(moved)[np.asarray(packed.mask)], np.asarray(packed.mask)
    assert len(where) == SAID.sum()
    for found, own in zip(packed.allowed, allowed, strict=True):
        assert found.shape[:2] == packed.target_ids.shape
        np.testing.assert_array_equal(np.asarray(found)[mask], np.asarray(own).reshape(-1, own.shape[-1])[where])


def test_packed_sequences_of_stock_layers_are_those_of_their_own_rows(rows):
    packed, expected = packed_once(rows, logps_of(STOCK, rows), shards=1)
    helpers.assert_within_contract(logps_of(STOCK, packed), expected, "decoder_cache", jnp.float32, "forward")


def test_neighbours_in_a_row_are_not_seen(rows):
    """Other tokens in half of the sequences leave the bits of the other half. The shapes stay, so GEMMs round alike."""
    other = rows._replace(token_ids=jnp.where((jnp.arange(len(PADDING)) % 2 == 0)[:, None], EOS + 1, rows.token_ids))
    is_same = jnp.broadcast_to((jnp.arange(len(PADDING)) % 2 == 1)[:, None], rows.mask.shape)
    packed, same = packed_once(rows, is_same, shards=1)
    changed, _ = packed_once(other, is_same, shards=1)
    before, after = (np.asarray(logps_of(STOCK, x))[np.asarray(same)] for x in (packed, changed))
    helpers.assert_same_bits(before, after)


@helpers.cover("beta, parts", [(0.1, 8), (0.0, 8), (0.1, 1), (0.0, 1)], lambda *x: x == (0.1, 8))
def test_losses_and_gradients_of_packed_sequences_are_those_of_their_own_rows(rows, beta, parts):
    """The gradients of so many micro-batches; empty ones are skipped.

    In `make test`, the case of a loss with a KL, in parts, catches bugs of all four: the gradient of the KL is added to
    that of the loss without, and the parts make up the whole.
    """
    rng, (graph, params), head = np.random.default_rng(1), nnx.split(tiny.decoder(STOCK)), head_for(STOCK)
    options = LossOptions(beta=beta)
    near = np.asarray(logps_of(STOCK, rows)) + rng.normal(size=(2, *rows.mask.shape)).astype(np.float32) / 4
    advantages = np.broadcast_to(rng.normal(size=(len(PADDING), 1)).astype(np.float32), rows.mask.shape)
    given = tuple(jnp.where(rows.mask, x, 0) for x in (*near, advantages))

    def loss_and_gradients(rows: Sequences, given: Any, parts: int) -> Any:
        def loss_of(logp: jax.Array, rows: Sequences, given: Any, denominator: jax.Array | None = None) -> Any:
            old_logps, ref_logps, advantages = given
            more = {"ref_logps": ref_logps, "denominator": denominator, "options": options}
            return policy_loss_once(logp, old_logps, advantages, rows.mask, **more)

        denominator = loss_denominator(rows.mask, options=options)

        def loss(params: nnx.State, micro_batch: Any) -> Any:
            logp = target_logps(nnx.merge(graph, params), micro_batch[0], head)
            return loss_of(logp, *micro_batch, denominator).loss, logp

        def is_active(micro_batch: Any) -> jax.Array:
            return micro_batch[0].mask.any()

        how = {"micro_batches": parts, "mesh": head.mesh, "is_active": is_active}
        gradients, logp = jax.jit(functools.partial(accumulated_gradients, loss, **how))(params, (rows, given))
        return loss_of(logp, rows, given), gradients

    packed = packed_once(rows, given, shards=1)
    expected, actual = loss_and_gradients(rows, given, 1), loss_and_gradients(*packed, parts)
    assert expected[0].clip_fraction > 0
    for (a, b), kind in zip(zip(actual, expected, strict=True), ("forward", "gradient"), strict=True):
        flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b)]
        helpers.assert_within_contract(*flat, "grpo_accumulation", jnp.float32, kind)
    assert packed[0].mask.any(axis=1).sum() < len(PADDING), "micro-batches are skipped"


def first_fit_decreasing(lengths: list[int], width: int) -> list[tuple[int, int]]:
    """The plain algorithm: the longest sequence is placed first, and each goes into the first row with room."""
    used, places = [0] * len(lengths), [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next(r for r in range(len(lengths)) if used[r] + lengths[i] <= width)
        places[i] = row, used[row]
        used[row] += lengths[i]
    return places


@given(lengths=st.lists(st.integers(0, 24), min_size=1, max_size=12))
def test_each_sequence_lies_in_the_first_row_with_room(lengths):
    padded = np.zeros(12, int)  # One shape needs one program only; empty sequences are placed last.
    padded[: len(lengths)] = lengths
    row, start = placed_once(jnp.asarray(padded), width=24)
    assert list(zip(row.tolist(), start.tolist(), strict=True)) == first_fit_decreasing(padded.tolist(), 24)


@given(lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=6, max_size=6))
def test_nothing_is_lost(lengths):
    """Packed rows of two shards are read back token by token."""
    prompt, said = np.array(lengths).T
    ids = EOS + 1 + np.arange(6 * 9, dtype=np.int32).reshape(6, 9)
    rows = join_completions(ids[:, :5], (5 - prompt).astype(np.int32), ids[:, 5:], np.arange(4) < said[:, None])
    packed, values = packed_once(rows, jnp.asarray(ids[:, 5:]), shards=2)
    assert packed.token_ids.shape == packed.target_ids.shape == packed.padding.shape == values.shape == (6, 8)
    tokens, before, targets = np.asarray(packed.token_ids), np.asarray(packed.padding), np.asarray(packed.target_ids)
    found = {}
    for r, s in np.argwhere(tokens != PAD):
        found.setdefault((r, before[r, s]), []).append(s)
    read = {tuple(tokens[r, slots]): tuple(targets[r, slots]) for (r, _), slots in found.items()}
    expected = {}
    for i in range(6):
        if said[i]:
            sequence = ids[i, 5 - prompt[i] : 5 + said[i]]
            expected[tuple(sequence[:-1])] = (IGNORED,) * (prompt[i] - 1) + tuple(ids[i, 5 : 5 + said[i]])
    assert read == expected
    for (r, first), slots in found.items():
        assert slots == list(range(first, first + len(slots)))
        assert (r < 3) == (tokens[r, first] < ids[3, 0]), "rows stay in their shard"
    np.testing.assert_array_equal(np.asarray(values)[targets != IGNORED], targets[targets != IGNORED])
    used = (targets != IGNORED).any(axis=1)
    assert all(not used[a] or used[a - 1] for a in (1, 2, 4, 5)), "empty rows are the last"
