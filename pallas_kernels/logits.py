"""What every kernel over materialised logits `[N, V]` is told and tells of a row; see their files for the layout."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class RowConfig:
    """The static facts of a row: x = softcap(logit) in its first `columns` columns; the others are padding."""

    columns: int
    softcap: float | None
    entropy: bool
    """Whether the entropy is asked for, or has an upstream gradient."""


class RowStatistics(NamedTuple):
    """Float32 `[N]`, with s = log2(e) / temperature; undefined where a row is not active.

    maximum = max x, total = Σ 2^((x − maximum)·s), target = x at the row's target, and, where entropy is asked for,
    gap = Σ 2^((x − maximum)·s)·(maximum − x)·s.
    """

    maximum: Any
    total: Any
    target: Any
    gap: Any


class RowCoefficients(NamedTuple):
    """Float32 `[N]`: the gradient of a logit is softcap'·2^l·(constant + slope·l), with l = (x − maximum)·scale −
    log2_total, and softcap'·at_target at the row's target. slope is None where no entropy has an upstream gradient.
    """

    scale: Any
    maximum: Any
    log2_total: Any
    constant: Any
    slope: Any
    at_target: Any
