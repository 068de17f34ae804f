"""The token sequences that a training pass reads, one to a row or several packed into a row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlk_jax.core.allowed import EVERY_TOKEN, AllowedTokens
from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo.vocabulary import PAD


class Sequences(NamedTuple):
    """Rows of tokens, and the target ids that their last T slots predict."""

    token_ids: Int[Array, "R S"]
    padding: Int[Array, "R"] | Int[Array, "R S"]
    """How many slots stand before the start of a sequence: one number per row where a row holds one sequence, one per
    token where it holds several. An empty slot of such a row counts all slots of the row, so that it sees nothing.
    """
    target_ids: Int[Array, "R T"]
    """Ids of the predicted tokens; IGNORED where a slot predicts nothing that counts."""
    allowed: AllowedTokens = EVERY_TOKEN
    """What each target was drawn among, `[R, T, ...]`, which its log-prob is of; anything where none counts."""
    teacher_hidden: Float[Array, "R T Dt"] | None = None
    """Hidden states of a teacher that predict the targets, where the targets are taught. Packing drops them."""

    @property
    def mask(self) -> Bool[Array, "R T"]:
        """Where targets count."""
        return self.target_ids != IGNORED


def join_completions(
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    completion_ids: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
    allowed: AllowedTokens = EVERY_TOKEN,
) -> Sequences:
    """Left-padded prompts followed by their completions, one to a row; the last C slots predict the completions."""
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    return Sequences(tokens[:, :-1], padding, jnp.where(mask, completion_ids, IGNORED), allowed)


def pack[Values](rows: Sequences, values: Values, *, shards: int) -> tuple[Sequences, Values]:
    """The same sequences and the `values [R, T]` of their targets, with as many sequences in a row as fit.

    The number of rows stays, so the last ones are empty. Packed rows have a target for every slot. Each of `shards`
    equal runs of rows is packed by itself, by `first_fit`. Sequences without a target are dropped, and so are the
    tokens behind a sequence's last target. Losses that are normalised by tokens take packed rows as they are; losses
    that are normalised by sequences would take a row for one sequence.
    """
    split = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), (rows, values))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(_pack_shard)(*split))


def _pack_shard[Values](rows: Sequences, values: Values) -> tuple[Sequences, Values]:
    (count, slots), targets = rows.token_ids.shape, rows.target_ids.shape[1]
    slot = jnp.arange(slots)

    def pad_to_slots(x: Array, fill: int) -> Array:
        padding = [(0, 0), (slots - targets, 0), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, padding, constant_values=fill)

    target_ids = pad_to_slots(rows.target_ids, IGNORED)
    last_target = jnp.max(jnp.where(target_ids == IGNORED, -1, slot), axis=1, keepdims=True)
    is_read = (slot >= rows.padding[:, None]) & (slot <= last_target)
    row, start = first_fit(is_read.sum(axis=1), width=slots)
    shift = row * slots + start - rows.padding
    destination = jnp.where(is_read, shift[:, None] + slot, count * slots)
    token_index = jnp.arange(count * slots).reshape(destination.shape)
    source = jnp.full(count * slots, count * slots).at[destination].set(token_index)

    def move(x: Array, fill: int) -> Array:
        flat = x.reshape(-1, *x.shape[2:])
        return flat.at[source].get(mode="fill", fill_value=fill).reshape(count, slots, *x.shape[2:])

    start_of_tokens = jnp.broadcast_to(start[:, None], is_read.shape)
    is_filled = (source < is_read.size).reshape(count, slots)
    padding = jnp.where(is_filled, move(start_of_tokens, 0), slots)
    allowed, values = jax.tree.map(lambda x: move(pad_to_slots(x, 0), 0), (rows.allowed, values))
    return Sequences(move(rows.token_ids, PAD), padding, move(target_ids, IGNORED), allowed), values


def first_fit(lengths: Int[Array, "B"], *, width: int) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The row of each sequence and its first slot there: the longest sequence is placed first, and each goes into the
    first row that has room.

    Rows have `width` slots. The number of rows used is at most 11/9 · (the fewest possible) + 6/9 (Dósa, 2007).
    """
    order = jnp.argsort(-lengths, stable=True)

    def place(used: Array, length: Array) -> tuple[Array, tuple[Array, Array]]:
        row = jnp.argmax(used + length <= width)
        start = used[row]
        return used.at[row].set(start + length), (row, start)

    _, (row, start) = jax.lax.scan(place, jnp.zeros_like(lengths), lengths[order])
    inverse = jnp.argsort(order)
    return row[inverse], start[inverse]
