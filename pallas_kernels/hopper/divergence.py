"""What the kernels of linear_kl take and return on Hopper.

Logits z are scaled to y = z·log2(e), so that exponentials are powers of two. a and b are the two heads.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pallas_kernels.hopper.arrays import LogitsConfig, VocabSlice
from pallas_kernels.hopper.tiles import Machine, statistics_tile

Kind = Literal["forward", "reverse", "jsd"]
"""D(teacher ‖ student), D(student ‖ teacher), or the divergence of both from their mixture."""
EMPTY_SHIFT = -1e30
"""The shift of columns of which none is possible. It is finite, so that the difference of two is no NaN."""


class HeadRows(NamedTuple):
    """What the logits of one head are made of: its rows and a slice of its columns.

    hidden `[rows, D]` and weight, both in one 16-bit dtype, are those that `partials` takes. bias: float32 `[slice's
    chunks · 256]`, or None. temperature: float32 `[rows]`, rows a multiple of 64.
    """

    hidden: Any
    weight: Any
    bias: Any
    temperature: Any


@dataclass(frozen=True)
class TwoSlices:
    """One slice of two heads of one vocabulary, a and b: how the products with each become logits, what its logits are
    made of, where the slice lies, and the machine that a kernel runs on.
    """

    logits: tuple[LogitsConfig, LogitsConfig]
    heads: tuple[HeadRows, HeadRows]
    where: VocabSlice
    machine: Machine


class DivergencePartials(NamedTuple):
    """What D(a ‖ b) is made of, over the columns of each chunk or group, float32 `[chunks or groups, rows]` each.

    total_a is Σ 2^(y_a − shift_a), where the integer shift_a is nearest to the largest y_a, and `EMPTY_SHIFT` where no
    column is possible; those of b likewise. cross is Σ 2^(y_a − shift_a)·(y_b − y_a). With d = ln(2)·(y_b − y_a),
    excess is Σ 2^(y_a − k)·(eᵈ − 1 − d), k the larger one of both shifts. Fields may also be references.
    """

    shift_a: Any
    total_a: Any
    shift_b: Any
    total_b: Any
    cross: Any
    excess: Any


class RowNormalizer(NamedTuple):
    """The softmax of each row over the whole vocabulary: shift is as above, and log_total is log2 Σ 2^(y − shift)."""

    shift: Any
    log_total: Any


class GradientFactors(NamedTuple):
    """What the gradients of a row's logits depend on beside its softmaxes, float32 `[rows]` each.

    slope is the sum of the slopes of all columns. weight is what the gradients are multiplied by: the row's upstream
    gradient over its temperature, times the power of two that float16 needs.
    """

    slope: Any
    weight: Any


class MixtureSums(NamedTuple):
    """The terms of the divergence from a mixture and their slopes, summed over the columns of each chunk, float32
    `[chunks, rows]`. a is the student, b the teacher.
    """

    value: Any
    slope: Any


STORED_COLUMNS = 8
"""Columns of a tile that are stored together: the values that a warp stores at once are 256 bytes in one place."""


def stored_tiles(rows: int, machine: Machine) -> tuple[int, int, int, int]:
    """The shape of what a kernel over two heads of so many rows stores: for each compute warpgroup of the machine, the
    tile of one head in pieces of 8 columns, float32 `[warpgroups, pieces, 64, 8]`.
    """
    tile = statistics_tile(rows)
    pieces = tile.columns // STORED_COLUMNS
    return machine.sm_count * tile.warpgroups, pieces, tile.rows // tile.warpgroups, STORED_COLUMNS
