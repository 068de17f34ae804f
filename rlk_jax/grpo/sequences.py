"""What a training pass reads: sequences, one to a row or several."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rlk_jax.grpo.head import IGNORED
from rlk_jax.grpo.vocabulary import PAD


class Sequences(NamedTuple):
    """Rows of tokens, and what their last T slots are to predict."""

    token_ids: Int[Array, "R S"]
    padding: Int[Array, "R"] | Int[Array, "R S"]
    """How many slots of its row stand before a sequence: of a row, or of each token where a row holds several (of a
    slot that holds none: all before it).
    """
    target_ids: Int[Array, "R T"]
    """IGNORED where nothing counts."""

    @property
    def mask(self) -> Bool[Array, "R T"]:
        """Where targets count."""
        return self.target_ids != IGNORED


def joined(
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    completion_ids: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
) -> Sequences:
    """Left-padded prompts and their completions, one to a row; the last C slots predict the completions."""
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    return Sequences(tokens[:, :-1], padding, jnp.where(mask, completion_ids, IGNORED))


def pack[Values](rows: Sequences, values: Values, *, shards: int, multiple: int) -> tuple[Sequences, Values]:
    """The same sequences and `values [R, T]` of their targets, as many as fit to a row; no row is lost, so many are
    empty, the last ones. Targets then are those of all slots.

    Each of `shards` equal runs of rows is packed by itself, by `first_fit`. Sequences start at multiples of `multiple`.
    Those without a target are left out, and so is what stands behind a sequence's last target. Losses that are
    normalised by tokens take the rows as they are; those of whole sequences would take a row for one.
    """

    def one(rows: Sequences, values: Values) -> tuple[Sequences, Values]:
        return _packed(rows, values, multiple)

    cut = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), (rows, values))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(one)(*cut))


def _packed[Values](rows: Sequences, values: Values, multiple: int) -> tuple[Sequences, Values]:
    (count, slots), targets = rows.token_ids.shape, rows.target_ids.shape[1]
    width, slot = -(-slots // multiple) * multiple, jnp.arange(slots)

    def of_slots(x: Array, fill: int) -> Array:
        return jnp.pad(x, ((0, 0), (slots - targets, 0)), constant_values=fill)

    target_ids = of_slots(rows.target_ids, IGNORED)
    last = jnp.max(jnp.where(target_ids == IGNORED, -1, slot), axis=1, keepdims=True)
    is_read = (slot >= rows.padding[:, None]) & (slot <= last)
    row, start = first_fit(is_read.sum(axis=1), width=width, multiple=multiple)
    moved_by = row * width + start - rows.padding
    place = jnp.where(is_read, moved_by[:, None] + slot, count * width)
    source = jnp.full(count * width, count * slots).at[place].set(jnp.arange(count * slots).reshape(place.shape))

    def moved(x: Array, fill: int) -> Array:
        return x.reshape(-1).at[source].get(mode="fill", fill_value=fill).reshape(count, width)

    of_tokens = jnp.broadcast_to(start[:, None], is_read.shape)
    before = jnp.where((source < is_read.size).reshape(count, width), moved(of_tokens, 0), jnp.arange(width))
    packed = Sequences(moved(rows.token_ids, PAD), before, moved(target_ids, IGNORED))
    return packed, jax.tree.map(lambda x: moved(of_slots(x, 0), 0), values)


def first_fit(lengths: Int[Array, "B"], *, width: int, multiple: int) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The row of each sequence and its first slot there: the longest first, each in the first row that has room.

    Rows have `width` slots, a multiple of `multiple`, as all first slots are. The rows that are used are at most
    11/9 · (the fewest possible) + 6/9 where `multiple` is 1 (Dósa, 2007).
    """
    order = jnp.argsort(-lengths, stable=True)

    def place(used: Array, length: Array) -> tuple[Array, tuple[Array, Array]]:
        row = jnp.argmax(used + length <= width)
        start = used[row]
        return used.at[row].set(-(-(start + length) // multiple) * multiple), (row, start)

    _, (row, start) = jax.lax.scan(place, jnp.zeros_like(lengths), lengths[order])
    back = jnp.argsort(order)
    return row[back], start[back]
