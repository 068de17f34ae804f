"""Which tokens of the vocabulary each row may take: a sampler's mask, as words of 32 bits.

Bit i of word j is token 32·j + i. Words come packed, or are made of lists of ids.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int, Int32, UInt32

from rlk_jax.core.checks import INT32, as_array, is_concrete, require
from rlk_jax.core.rows import MEMORY_BUDGET, rows_within
from rlk_jax.core.tokens import PADDED_IDS_OUT_OF_RANGE, Tokens, as_int32, checked, fit
from rlk_jax.core.transforms import varying_like

Array = jax.Array
_ALL = np.uint32(0xFFFFFFFF)
_NO_ID = -1
_BYTES_PER_ID = 16
"""An id, its copy in ascending order, its word and its bit."""
_ALLOWED_OUT_OF_RANGE = PADDED_IDS_OUT_OF_RANGE.replace("{name}", "allowed_ids")
_NOTHING_ALLOWED = "every token that counts needs an allowed id: rows {low} to {high} of the flat tokens have none."
_TARGET_NOT_ALLOWED = "{name} must be allowed: they are not in rows {low} to {high} of the flat tokens."


class AllowedArrays(Protocol):
    """The arrays of a call that say which ids each row may take, of which at most one is not None."""

    @property
    def allowed_ids(self) -> Any: ...

    @property
    def allowed_mask(self) -> Any: ...


def has_allowed(inputs: AllowedArrays) -> bool:
    """Whether a call says which ids its rows may take."""
    return inputs.allowed_ids is not None or inputs.allowed_mask is not None


class AllowedTokens(NamedTuple):
    """Which tokens each row may take, in one of the two forms that ops on a head are given by these names; neither
    stands for every token.
    """

    allowed_ids: Int32[Array, "*lead K"] | None = None
    allowed_mask: UInt32[Array, "*lead words"] | None = None

    @property
    def restricts(self) -> bool:
        """Whether there may be tokens that a row may not take."""
        return has_allowed(self)

    def where(self, counts: Bool[Array, "*lead"]) -> "AllowedTokens":
        """The same for rows that count; other rows may take nothing."""
        ids, mask = self
        return AllowedTokens(
            None if ids is None else jnp.where(counts[..., None], ids, _NO_ID),
            None if mask is None else jnp.where(counts[..., None], mask, 0),
        )


EVERY_TOKEN = AllowedTokens()


def padded_allowed_ids(ids: Int[Array, " total"], offsets: Int[Array, " N+1"]) -> Int[Array, "N K"]:
    """The `allowed_ids` of N rows that stand one behind the other, as vLLM gives them: row r has ids[offsets[r] :
    offsets[r + 1]].

    Returns int32 `[N, K]` with −1 behind each row's ids, where K is the length of the longest row, and at least 1.
    Raises ValueError for arrays that are traced, that hold no integers, for ids below −1, which is padding, or beyond
    int32, and for offsets that do not ascend from 0 to the number of ids. K depends on the values, so that a jitted
    step is compiled anew for each K: pad it with −1 to one of a few widths there.
    """
    given = checked_lists(ids, offsets)
    for name, x in zip(("ids", "offsets"), given, strict=True):
        require(is_concrete(x), f"{name} must be concrete: the width of the result depends on their values.")
    return jnp.asarray(padded_lists(*map(np.asarray, given)))


def checked_lists(ids: Any, offsets: Any) -> tuple[Any, Any]:
    """Ids that stand one behind the other, and the offsets of rows, as arrays: integers in one dimension."""
    given = as_array("ids", ids), as_array("offsets", offsets)
    for name, x in zip(("ids", "offsets"), given, strict=True):
        require(x.ndim == 1, f"{name} must be 1-D, got shape {x.shape}.")
        require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} must be integers, got {x.dtype}.")
    return given


def padded_lists(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """What `padded_allowed_ids` returns, for integers of NumPy that `checked_lists` has checked."""
    low, high = (ids.min(), ids.max()) if ids.size else (0, 0)
    say = PADDED_IDS_OUT_OF_RANGE.format(name="ids", last=INT32.max, low=low, high=high)
    require(low >= _NO_ID and high <= INT32.max, say)
    lengths: np.ndarray = np.diff(offsets.astype(np.int64))
    ends = (*offsets[:1], *offsets[-1:])
    require(
        ends == (0, len(ids)) and (lengths >= 0).all(), f"offsets must ascend from 0 to the number of ids, {len(ids)}."
    )
    width = int(lengths.max(initial=1))
    padded = np.full((len(lengths), width), _NO_ID, np.int32)
    padded[np.arange(width) < lengths[:, None]] = ids
    return padded


def allowed_arrays(inputs: AllowedArrays) -> dict[str, Any]:
    """What a call allows, as arrays or None, by the names of its arguments."""
    given = {"allowed_ids": inputs.allowed_ids, "allowed_mask": inputs.allowed_mask}
    arrays = {name: None if x is None else as_array(name, x) for name, x in given.items()}
    if (mask := arrays["allowed_mask"]) is not None:
        words = "int32 or uint32, of which bit i of word j is token 32·j + i"
        require(mask.dtype in (jnp.int32, jnp.uint32), f"allowed_mask must be {words}, got {mask.dtype}.")
    return arrays


def check_allowed(inputs: AllowedArrays, name: str, lead: tuple[int, ...], vocab_sizes: tuple[int, int]) -> None:
    """What is allowed comes as ids, or as a mask of the words that one of the vocabularies has, for each token of the
    ids that the caller knows as `name`.
    """
    ids, mask = inputs.allowed_ids, inputs.allowed_mask
    require(ids is None or mask is None, "allowed_ids and allowed_mask say the same: give one of them.")
    require(
        ids is None or (ids.ndim == len(lead) + 1 and ids.shape[:-1] == lead),
        f"allowed_ids must be [*lead, K] with {name}' lead shape {lead}, got shape {getattr(ids, 'shape', None)}.",
    )
    if mask is not None:
        words = sorted(set(map(words_of, vocab_sizes)))
        require(
            mask.ndim == len(lead) + 1 and mask.shape[:-1] == lead and mask.shape[-1] in words,
            f"allowed_mask must be [*lead, ceil(V / 32)] with {name}' lead shape {lead} and "
            f"{' or '.join(map(str, words))} words, got shape {mask.shape}.",
        )


def words_of(vocab_size: int) -> int:
    """How many words have a bit for each token."""
    return -(-vocab_size // 32)


def packed_words(is_allowed: Bool[Array, "*lead V"]) -> UInt32[Array, "*lead words"]:
    """The words of tokens that are allowed."""
    *lead, vocab_size = is_allowed.shape
    padded = jnp.pad(is_allowed, [*[(0, 0)] * len(lead), (0, -vocab_size % 32)])
    bits = padded.reshape(*lead, words_of(vocab_size), 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def is_allowed(words: Array, columns: Array) -> Array:
    """Whether each row of `words [rows, W]` allows each of the columns `[1, C]`, as bool `[rows, C]`.

    Columns behind the last word, which are padding, may give anything.
    """
    return _bits(jnp.take(words, columns[0] // 32, axis=1, mode="clip"), columns)


def words_from(words: Array, start: Array, columns: int) -> Array:
    """The words of `columns` columns from `start` on, which need not be the first bit of a word."""
    count, shift = words_of(columns), (start % 32).astype(jnp.uint32)
    own = lax.dynamic_slice_in_dim(jnp.pad(words, ((0, 0), (0, count + 1))), start // 32, count + 1, axis=1)
    # The word behind is shifted in two steps, for none shifts by all of its 32 bits.
    return (own[:, :-1] >> shift) | ((own[:, 1:] << 1) << (31 - shift))


def with_allowed(
    tokens: Tokens,
    inputs: AllowedArrays,
    *,
    vocab_size: int,
    validate: bool | None,
    name: str,
    memory_budget: int | None = None,
) -> Tokens:
    """The checked tokens `[N]`, whose ids the caller knows as `name`, with the words of what they may take: of ids
    `[*lead, K]` or a mask `[*lead, words]`.

    A row with a bad id, or one that does not allow its target, is poisoned as by `checked_tokens`; values are checked
    in the same way. Rows that are poisoned or do not count allow everything, so that no softmax is over nothing.
    """
    if not has_allowed(inputs):
        return tokens
    ids = None if inputs.allowed_ids is None else as_int32(inputs.allowed_ids)
    found = _inspect_allowed(tokens, ids, inputs.allowed_mask, vocab_size=vocab_size, memory_budget=memory_budget)
    checks = [(found.empty, _NOTHING_ALLOWED), (found.forbidden, _TARGET_NOT_ALLOWED.replace("{name}", name))]
    if found.ids is not None:
        checks.insert(0, (found.ids, _ALLOWED_OUT_OF_RANGE.replace("{last}", str(vocab_size - 1))))
    words = checked(found.tokens.allowed, checks, validate, f"{name}, allowed_ids and allowed_mask")
    return found.tokens._replace(allowed=words)


class _FoundAllowed(NamedTuple):
    """Tokens with bad ones marked, and what `fit` gives: for ids, for the rows that allow nothing, and for those that
    do not allow their target.
    """

    tokens: Tokens
    ids: Array | None
    empty: Array
    forbidden: Array


@functools.partial(jax.jit, static_argnames=("vocab_size", "memory_budget"))
def _inspect_allowed(
    tokens: Tokens, ids: Array | None, mask: Array | None, *, vocab_size: int, memory_budget: int | None
) -> _FoundAllowed:
    """Packs what is allowed and checks it in one pass."""
    n, limits = tokens.active.shape[0], (INT32.min, INT32.max)
    rows, counted = jnp.arange(n, dtype=jnp.int32), tokens.active & ~jnp.isnan(tokens.temperature)
    ids_fit, ids_are_good = None, jnp.ones(n, bool)
    if ids is not None:
        # The barrier keeps XLA from sorting constants while it compiles.
        ids = lax.optimization_barrier(ids.reshape(n, ids.shape[-1]))
        is_in_range = (ids >= _NO_ID) & (ids < vocab_size)
        ids_fit, ids_are_good = fit(ids, is_in_range, counted[:, None], limits), jnp.all(is_in_range, axis=1)
        words = words_of_ids(ids, vocab_size, memory_budget or MEMORY_BUDGET)
    else:
        assert mask is not None
        words = _within(lax.bitcast_convert_type(mask, jnp.uint32).reshape(n, mask.shape[-1]), vocab_size)
    has_any = jnp.any(words != 0, axis=1)
    target_ids = tokens.target_ids[:, None]
    has_target = _bits(jnp.take_along_axis(words, target_ids // 32, axis=1), target_ids)[:, 0]
    is_good = ids_are_good & has_target
    return _FoundAllowed(
        tokens._replace(
            temperature=jnp.where(counted & ~is_good, jnp.nan, tokens.temperature),
            allowed=jnp.where((counted & is_good)[:, None], words, _ALL),
        ),
        ids=ids_fit,
        empty=fit(rows, has_any, counted & ~has_any, limits),
        forbidden=fit(rows, has_target, counted & ~has_target, limits),
    )


def _bits(words: Array, ids: Array) -> Array:
    """The bits of ids in the words that hold them."""
    return (words >> (ids % 32).astype(jnp.uint32)) & 1 != 0


def _within(mask: Array, vocab_size: int) -> Array:
    """The words of a mask `[N, ...]` without bits behind the vocabulary."""
    in_vocabulary = np.full(words_of(vocab_size), _ALL)
    in_vocabulary[-1] >>= np.uint32(-vocab_size % 32)
    return mask[:, : len(in_vocabulary)] & in_vocabulary


def words_of_ids(ids: Array, vocab_size: int, memory_budget: int) -> Array:
    """The words `[N, W]` of int32 ids `[N, K]`; ids out of range are left out."""
    n, count = ids.shape
    none = varying_like(jnp.zeros(words_of(vocab_size), jnp.uint32), ids)

    def of_row(own: Array) -> Array:
        own = jnp.sort(own)
        # An id that stands there twice is added once: a sum of different bits is their union.
        is_new = jnp.concatenate([own[:1] >= 0, own[1:] != own[:-1]])
        counts = is_new & (own >= 0) & (own < vocab_size)
        bit = jnp.uint32(1) << (own % 32).astype(jnp.uint32)
        return none.at[jnp.where(counts, own // 32, len(none))].add(bit, mode="drop")

    return lax.map(of_row, ids, batch_size=rows_within(memory_budget, _BYTES_PER_ID * max(count, 1), n))
