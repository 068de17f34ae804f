"""The tokens of a call as the ops see them, and every check that reads their values."""

import functools
from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from rlk_jax.core.checks import BAD_TEMPERATURE, INT32, SMALLEST, is_concrete, require
from rlk_jax.core.exports import exportable
from rlk_jax.core.reports import reported

Array = jax.Array
IGNORED = -100
"""The id of a token that does not count: its log-prob is 0 and it has no gradient. Sampling and training give it."""
_OUT_OF_RANGE = -1
_IDS_OUT_OF_RANGE = (
    "{name} out of range: expected [0, {last}], got [{low}, {high}]. "
    "Mask or filter padding / ignore-index values (e.g. -100) before this op. "
    "Where the op takes ignore_index or completion_mask, that says which tokens do not count."
)
PADDED_IDS_OUT_OF_RANGE = "{name} out of range: expected [0, {last}], or -1 as padding, got values in [{low}, {high}]."
_ACTIONS_OUT_OF_RANGE = (
    "action_ids at active (unmasked) positions must be in [0, V); found out-of-range ids. Expected [0, {last}], got "
    "[{low}, {high}]."
)
_ROWS_OUT_OF_RANGE = "row_indices contains an out-of-range row: expected [0, {last}], got [{low}, {high}]."


@exportable
class LinearLogp(NamedTuple):
    """Each token's log-probability, and ln Σ exp z and entropy of its row of logits z, float32 `[*lead]`; None for what
    was not asked for. Ops on rows of logits return it.
    """

    logp: Array
    lse: Array | None
    entropy: Array | None


@exportable
class RankedLogp(NamedTuple):
    """The fields of LinearLogp, and which tokens are the most probable: their ids int32 and log-probs float32
    `[*lead, k]`, most probable first, and how many tokens are more probable than the target, int32 `[*lead]`.

    None stands for what was not asked for. These three have no gradient.
    """

    logp: Array
    lse: Array | None
    entropy: Array | None
    top_ids: Array | None
    top_logps: Array | None
    target_rank: Array | None


class Tokens(NamedTuple):
    """One row per token `[N]`: its id, its temperature, whether it counts, and which ids it may take.

    Ids are int32 and in range. Temperatures are float32; NaN poisons the row. `allowed` is uint32 words `[N, W]` with a
    bit for each id (`core/allowed.py`), and None where every id may be taken.
    """

    target_ids: Array
    temperature: Array
    active: Array
    allowed: Array | None = None

    def with_upstream(self, upstream: LinearLogp) -> "Tokens":
        """The same tokens, of which those without an upstream gradient are not active.

        A token whose upstream gradients are all 0 contributes nothing, whatever it holds.
        """
        has_upstream = reduce(jnp.logical_or, (g != 0 for g in upstream if g is not None))
        return self._replace(active=self.active & has_upstream)


def upstream_gradients(cotangents: LinearLogp, tokens: Tokens) -> LinearLogp:
    """The cotangents of a custom_vjp with symbolic zeros, as arrays: a symbolic one is zeros for logp, else None."""
    logp, *others = (None if isinstance(g, SymbolicZero) else g for g in cotangents)
    return LinearLogp(jnp.zeros_like(tokens.temperature) if logp is None else logp, *others)


def as_int32(ids: Any, ignore_index: int | None = None) -> Array:
    """Integer ids as int32. Ids beyond int32 saturate: an id that is out of range must stay so. It must not wrap, and
    must not become the ignored one.
    """
    return jnp.asarray(ids if ids.dtype == np.int32 else _saturated(ids, ignore_index))


def as_int32_on_host[Ids](ids: Ids, ignore_index: int | None = None) -> Ids:
    """Ids of NumPy in the 32 bits that `as_int32` gives them; anything else is returned as it is.

    JAX itself cuts the 64 bits of a NumPy array that a program is given to 32, and wraps ids beyond them.
    """
    return _saturated(ids, ignore_index) if _is_numpy(ids) else ids


def _saturated(ids: Any, ignore_index: int | None) -> Any:
    info, library = jnp.iinfo(ids.dtype), np if _is_numpy(ids) else jnp
    within = library.clip(ids, max(info.min, INT32.min), min(info.max, INT32.max))
    found = within.astype(np.int32)
    if ignore_index is None:
        return found
    return library.where((within != ids) & (found == ignore_index), found - library.sign(found), found)


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def row_ids(ids: Any, count: int) -> Array:
    """Ids of `count` rows as int32. Negative ones, which JAX would count from the end, are beyond the last row."""
    ids = as_int32(ids)
    return jnp.where(ids < 0, count, ids)


def active_mask(mask: Any) -> Array:
    """Where a mask is not 0, as bool. NumPy masks are converted by NumPy: JAX would cut 64 bits to 32 first."""
    mask = mask if _is_numpy(mask) else jnp.asarray(mask)
    return jnp.asarray(mask.astype(bool))


def counted(ids: Any, ignore_index: int | None) -> Array:
    """Which tokens `[N]` are not ignored."""
    ids = as_int32(ids, ignore_index).reshape(-1)
    return jnp.ones(ids.shape, bool) if ignore_index is None else ids != ignore_index


def left_out(ids: Array, counts: Array, ignore_index: int = IGNORED) -> Array:
    """int32 ids in which ignore_index stands for every token that does not count, and for no other.

    That id is out of range and must stay so: a token that counts must not be left out by it.
    """
    return jnp.where(counts, jnp.where(ids == ignore_index, _OUT_OF_RANGE, ids), ignore_index)


class _Findings(NamedTuple):
    """What one fused pass over the tokens finds: tokens with bad ones marked, and what `fit` gives for each."""

    tokens: Tokens
    ids: Array
    temperatures: Array


@functools.partial(jax.jit, static_argnames="vocab_size")
def _inspect(ids: Array, counted: Array, temperature: Any, *, vocab_size: int) -> _Findings:
    """Checks the tokens in one pass; those that do not count may hold anything."""
    temperature = jnp.broadcast_to(jnp.asarray(temperature).astype(jnp.float32), ids.shape).reshape(-1)
    # The barrier makes constants behave as arguments: XLA itself would divide by a constant, and round otherwise.
    temperature, ids = jax.lax.optimization_barrier(temperature), ids.reshape(-1)
    id_is_good = (ids >= 0) & (ids < vocab_size)
    temperature_is_good = (temperature >= SMALLEST) & (temperature < jnp.inf)
    is_good = id_is_good & temperature_is_good
    # An ignored row poisons nothing: its NaN would stop a program under jax_debug_nans.
    poison = jnp.where(counted, jnp.nan, 1.0)
    return _Findings(
        Tokens(jnp.where(is_good, ids, 0), jnp.where(is_good, temperature, poison), counted),
        ids=fit(ids, id_is_good, counted, (INT32.min, INT32.max)),
        temperatures=fit(temperature, temperature_is_good, counted, (-jnp.inf, jnp.inf)),
    )


def fit(x: Array, is_good: Array, counted: Any, limits: tuple[float, float]) -> Array:
    """Whether all counted values are good, the least and the greatest one: `[3]` in x's dtype, for one read-back."""
    least, greatest = limits
    low = jnp.min(x, where=counted, initial=greatest)
    high = jnp.max(x, where=counted, initial=least)
    return jnp.stack([jnp.all(is_good | ~counted).astype(x.dtype), low, high])


def checked_tokens(
    ids: Any,
    temperature: Any,
    counted: Array,
    *,
    vocab_size: int,
    validate: bool | None,
    name: Literal["target_ids", "token_ids", "action_ids"],
) -> Tokens:
    """Flat tokens `[N]`, of which the `counted` ones are active.

    A row with a bad id or temperature gets temperature NaN, which poisons everything that the row reaches.
    validate=True reads the values back once and raises ValueError for a bad one; None does so where they can be read.
    Otherwise bad rows are only marked, and reported to a program under `checkify.checkify`.
    """
    found = _inspect(as_int32(ids), counted, temperature, vocab_size=vocab_size)
    out_of_range = _ACTIONS_OUT_OF_RANGE if name == "action_ids" else _IDS_OUT_OF_RANGE.replace("{name}", name)
    checks = (
        (found.ids, out_of_range.replace("{last}", str(vocab_size - 1))),
        (found.temperatures, BAD_TEMPERATURE),
    )
    target_ids = checked(found.tokens.target_ids, checks, validate, f"{name} and temperature")
    return found.tokens._replace(target_ids=target_ids)


def listed_rows(row_indices: Any, count: int, validate: bool | None) -> tuple[Array, Array]:
    """Which of `count` rows are listed, `[count]`, and whether every index is in range.

    Values are checked as by `checked_tokens`.
    """
    indices, is_good = rows_in_range(row_indices, count, validate)
    listed = jnp.zeros(count, bool).at[jnp.where(is_good, indices, count)].set(True, mode="drop")
    return listed, jnp.all(is_good)


def rows_in_range(row_indices: Any, count: int, validate: bool | None) -> tuple[Array, Array]:
    """int32 indices, and which of them name one of `count` rows. Values are checked as by `checked_tokens`."""
    indices = as_int32(row_indices)
    is_good = (indices >= 0) & (indices < count)
    found = fit(indices, is_good, jnp.ones((), bool), (INT32.min, INT32.max))
    checks = ((found, _ROWS_OUT_OF_RANGE.replace("{last}", str(count - 1))),)
    return checked(indices, checks, validate, "row_indices"), is_good


def checked(x: Array, checks: Sequence[tuple[Array, str]], validate: bool | None, names: str) -> Array:
    """x. Raises ValueError for the first check that fails, where values can be read; otherwise reports it to checkify.

    Each check is what `fit` gives, and a message.
    """
    readable = all(is_concrete(fit) for fit, _ in checks)
    if validate and not readable:
        raise ValueError(f"validate=True needs concrete {names}; under jit use jax.experimental.checkify.")
    must_raise = readable and validate is not False
    for (fits, low, high), message in jax.device_get(checks) if must_raise else checks:
        if must_raise:
            require(fits, message.format(low=low, high=high))
        else:
            x = reported(x, fits != 0, message, low=low, high=high)
    return x
