"""The arrays that linear_logp's kernels for Hopper take and return, in Mosaic and in CUDA C++ alike.

Kernels scale logits z to y = z·log2(e), so that exponentials are powers of two. A shift, also called k, is the integer
nearest to the largest y of some columns of a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.vocabulary import HeadAccess


@dataclass(frozen=True)
class LogitsConfig:
    """How a product of a row and a column of the head becomes y = softcap(product + bias)·log2(e) / temperature."""

    head: HeadAccess
    softcap: float | None


class VocabSlice(NamedTuple):
    """Which rows and which chunks of the vocabulary one call works on, as int32 `[1]` each.

    rows: how many rows count. first_chunk, chunks: the first chunk of the slice, and how many chunks it has. columns:
    the size of the true vocabulary where only the device knows it, else None. allowed: the columns that each row's
    softmax is taken over (`allowed_bits`), or None for all of them.
    """

    rows: Any
    first_chunk: Any
    chunks: Any
    columns: Any = None
    allowed: Any = None


class Partials(NamedTuple):
    """The softmax of each row over the columns of each chunk or group, float32 `[chunks or groups, rows]` each.

    total is Σ 2^(y − shift); target is the y of the row's target, 0 where it is not among the columns; gap is
    Σ 2^(y − shift)·(shift − y), or None where no entropy is asked for; target_derivative is the softcap's derivative at
    the target, 0 where the target is not among the columns, or None without a softcap; logit_sum is Σ y, or None where
    targets are not smoothed. Fields may also be references to such arrays.
    """

    shift: Any
    total: Any
    target: Any
    gap: Any
    target_derivative: Any
    logit_sum: Any = None


def new_partials(shape: tuple[int, int], *, with_gap: bool, with_derivative: bool, with_sum: bool = False) -> Partials:
    """References to partials of this shape that nothing is written to yet."""
    wanted = (True, True, True, with_gap, with_derivative, with_sum)
    return Partials(*(jax.new_ref(lax.empty(shape, jnp.float32)) if x else None for x in wanted))


class SliceProducts(NamedTuple):
    """The products of hidden and a slice of the head with their bias, before softcap and temperature, as references: a
    ranking looks for the largest.

    values: float32 `[rows, slice's chunks · 256]`, −inf where a place holds no column or one that the row may not take.
    largest: the largest in each chunk, float32 `[slice's chunks, rows]`.
    """

    values: Any
    largest: Any


class LargestProducts(NamedTuple):
    """The largest products of each row, float32 `[rows, LIST]`, in descending order, and their columns int32, as
    references. Columns of equal products stand in ascending order. Behind the last one are −inf and the column −1.
    """

    values: Any
    columns: Any


LIST = 128
"""The most products that a list of the largest ones holds."""


class Softmax(NamedTuple):
    """The softmax of each row over the whole vocabulary, float32 `[rows]` each.

    gap is Σ p·(shift − y). entropy and gap are None where no entropy is asked for. target_derivative is the softcap's
    derivative at the target, or None without a softcap. logit_sum is Σ z, or None where targets are not smoothed.
    """

    logp: Any
    lse: Any
    entropy: Any
    shift: Any
    total: Any
    gap: Any
    target_derivative: Any
    logit_sum: Any = None


class KeptExponentials(NamedTuple):
    """What the forward kept of its first chunks for the backward.

    exponentials: 2^(y − k) times the softcap's derivative and times `exponential_scale`, rounded to hidden's dtype
    `[rows, chunks · 256]`. shift: the k of each chunk, float32 `[chunks, rows]`.
    """

    exponentials: Any
    shift: Any


def exponential_scale(dtype: Any) -> float:
    """The power of two that exponentials 2^(y − k) are multiplied by before they are rounded to `dtype`.

    The largest lies between √½ and √2. In float16 it is put at the top of the range, so that small ones keep digits.
    """
    return 2.0**15 if dtype == jnp.float16 else 1.0


class KeptRowMap(NamedTuple):
    """Where the backward's rows are among the rows that the forward kept.

    row: int32 `[rows]`, row[i] >= i is the kept row of the backward's row i. For a row that does not count it is i
    itself, which no other row writes. moved: int32 `[1]`, 0 where row[i] = i for all rows.
    """

    row: Any
    moved: Any


class GradientRows(NamedTuple):
    """The facts about each row that its gradients depend on, `[rows]` each; target_ids int32, the others float32.

    Rows that do not count hold values whose gradients are 0. scale is a power of two that the row's gradients are
    multiplied by before they are rounded, or None. gap, g_lse, g_entropy are None where nothing asks for them, and
    target_derivative is None without a softcap. Where targets are smoothed, each logit has g_uniform as a part of the
    target, and g_spread is what the target gives to all of them; both are None elsewhere.
    """

    target_ids: Any
    temperature: Any
    logp: Any
    shift: Any
    total: Any
    gap: Any
    target_derivative: Any
    g_logp: Any
    g_lse: Any
    g_entropy: Any
    scale: Any
    g_uniform: Any = None
    g_spread: Any = None


class Coefficients(NamedTuple):
    """What the gradients of a row's logits are computed from, `[rows]` each.

    A logit's gradient is 2^(y − shift)·(constant + slope·(y − shift)) + uniform, times the softcap's derivative; the
    target's is `at_target`, which holds that derivative. slope is None where no entropy has an upstream gradient, and
    uniform where targets are not smoothed.
    """

    target_ids: Any
    temperature: Any
    shift: Any
    constant: Any
    slope: Any
    at_target: Any
    uniform: Any = None


class GroupRange(NamedTuple):
    """The groups of the vocabulary that one call sums up, as int32 `[1]` each."""

    first: Any
    count: Any


class HiddenGradient(NamedTuple):
    """References to where dH is summed up: a chain over the columns of each group, and the fold of the groups.

    chains: float32 `[groups, rows, columns]` where every group has a chain of its own, `[1, rows, columns]` for the
    group that a slice may end inside, None where no slice ends inside a group. total: float32 `[rows, columns]`, the
    fold of the groups so far in ascending order, or None where every group has its chain. rounded: `[rows, columns]`,
    what the fold of all groups is rounded to, or None. Columns are a multiple of 256.
    """

    chains: Any
    total: Any
    rounded: Any
