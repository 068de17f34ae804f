"""What the kernels over materialised logits `[N, V]` take and return for each row, in Mosaic and in Triton alike; and
the constants by which all kernels exchange e and 2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class RowConfig:
    """The static facts of every row: x = softcap(logit) in its first `columns` columns; the others are padding."""

    columns: int
    softcap: float | None
    entropy: bool
    """Whether the entropy is asked for or, in the backward, has an upstream gradient."""


class RowStatistics(NamedTuple):
    """The softmax of each row, float32 `[N]` each. Values of rows that are not active are undefined.

    With s = log2(e) / temperature: maximum = max x, total = Σ 2^((x − maximum)·s), target is the x of the row's target,
    and gap = Σ 2^((x − maximum)·s)·(maximum − x)·s, or None where no entropy is asked for.
    """

    maximum: Any
    total: Any
    target: Any
    gap: Any


class RowCoefficients(NamedTuple):
    """What the gradients of a row's logits are computed from, float32 `[N]` each.

    With l = (x − maximum)·scale − log2_total, a logit's gradient is softcap'·2^l·(constant + slope·l); the target's is
    softcap'·at_target. slope is None where no entropy has an upstream gradient.
    """

    scale: Any
    maximum: Any
    log2_total: Any
    constant: Any
    slope: Any
    at_target: Any
