"""What linear_logp's kernels for Hopper take and give, whichever language they are written in.

Logits are scaled to powers of two: y = z·log2(e). A shift, or k, is the integer nearest to the largest y.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pallas_kernels.hopper.vocabulary import Head

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Logits:
    """How a product becomes logits in units of ln 2: softcap(product + bias) · log2(e) / temperature."""

    head: Head
    softcap: float | None


class Slice(NamedTuple):
    """int32 scalars: rows that count, first chunk and number of chunks of the slice; `[1]` each.

    `columns`: the true vocabulary, where only the device knows it; else None.
    """

    rows: Any
    first_chunk: Any
    chunks: Any
    columns: Any = None


class Partials(NamedTuple):
    """float32 `[chunks or groups, rows]` each, or references to such; `gap` only where entropy is asked for."""

    shift: Any
    total: Any
    target: Any
    gap: Any


class Softmax(NamedTuple):
    """Per row, float32 `[rows]`; `gap` is Σ p·(shift − y), only where entropy is asked for."""

    logp: Any
    lse: Any
    entropy: Any
    shift: Any
    total: Any
    gap: Any


class Kept(NamedTuple):
    """What the forward kept: powers bfloat16 `[rows, chunks · 256]`, and their chunks' k, float32 `[chunks, rows]`."""

    powers: Any
    shift: Any


class Source(NamedTuple):
    """Which row of what was kept belongs to row i: `row[i]` >= i, int32 `[rows]`, and behind those that count i itself,
    which nobody else writes. `moved`, int32 `[1]`, is 0 where all are in their place.
    """

    row: Any
    moved: Any


class Rows(NamedTuple):
    """What the gradient knows of each row, `[rows]`; float32 but for `target_ids`. Neutral where a row does not count.

    `scale` is a power of two that the row's gradients are multiplied by before they are rounded, or None.
    """

    target_ids: Any
    temperature: Any
    logp: Any
    shift: Any
    total: Any
    gap: Any
    g_logp: Any
    g_lse: Any
    g_entropy: Any
    scale: Any


class Coefficients(NamedTuple):
    """`[rows]`: dlogit = 2^(y − shift)·(constant + slope·(y − shift)), and `at_target` at the target."""

    target_ids: Any
    temperature: Any
    shift: Any
    constant: Any
    slope: Any
    at_target: Any


class HiddenGradient(NamedTuple):
    """References `[rows, multiple of 256 columns]`: the float32 chain; what its last slice rounds it to, or None."""

    chain: Any
    rounded: Any
