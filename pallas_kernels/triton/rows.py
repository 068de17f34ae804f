"""The Triton kernels over materialised logits `[N, V]` in bfloat16, float16 or float32: their softmax and gradients.

Each pass reads a row once, and never reads an inactive row. How a row is cut into blocks depends on V alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import RowCoefficients, RowConfig, RowStatistics
from pallas_kernels.triton.call import launch

Array = jax.Array
_ROW_WARPS = 4
_LANES = 1024
_LANE_COLUMNS = 8
"""Columns that each lane takes at a time; they share one update of the maximum and one rescaling."""
_GRADIENT_WIDTH = 4096


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def block(columns: int) -> dict[str, int]:
    """How many lanes read a row of so many columns, and how many columns each lane reads at a time."""
    lanes = min(_LANES, _power_of_two(columns))
    return {"lanes": lanes, "depth": min(_LANE_COLUMNS, _power_of_two(-(-columns // lanes)))}


def gradient_width(row_length: int) -> int:
    """How many columns of a row one program of the gradient's kernel takes."""
    return min(_GRADIENT_WIDTH, _power_of_two(row_length))


def _constants(config: RowConfig, row_length: int, allowed: Array | None) -> dict[str, Any]:
    words = 0 if allowed is None else allowed.shape[1]
    return {"row_length": row_length, "columns": config.columns, "softcap": config.softcap, "words": words}


def _signed(allowed: Array | None, otherwise: Array) -> Array:
    """The words of what is allowed as int32; some other array where all columns are allowed, and nothing reads it."""
    return otherwise if allowed is None else lax.bitcast_convert_type(allowed, jnp.int32)


def statistics(
    config: RowConfig, logits: Array, target_ids: Array, temperature: Array, active: Array, allowed: Array | None
) -> RowStatistics:
    """The softmax of each active row of `logits [N, V]`, N > 0.

    target_ids and active are int32, temperature is float32, `[N]` each. allowed is packed words `[N, words]`, whose bit
    i of word j is column 32·j + i, or None for all columns. The result's target is 0 where the row's target
    is not one of the columns. An inactive row has a total of 1, and its other values are 0.
    """
    from pallas_kernels.triton import row_kernels

    n, row_length = logits.shape
    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    maximum, total, target, gap = launch(
        row_kernels.statistics,
        (logits, target_ids, temperature, active, _signed(allowed, active)),
        (row, row, row, row),
        {**_constants(config, row_length, allowed), "with_gap": config.entropy, **block(config.columns)},
        grid=n,
        num_warps=_ROW_WARPS,
    )
    return RowStatistics(maximum, total, target, gap if config.entropy else None)


def gradients(
    config: RowConfig,
    logits: Array,
    target_ids: Array,
    active: Array,
    allowed: Array | None,
    rows: RowCoefficients,
    in_place: bool,
) -> Array:
    """The gradient of every logit `[N, V]`, in the logits' dtype: 0 in rows that are not active, in columns that are
    padding, and in those that are not allowed. allowed is that of `statistics`.

    in_place: the gradients take the logits' memory, and XLA copies the logits first if anything else needs them.
    """
    from pallas_kernels.triton import row_kernels

    n, row_length = logits.shape
    width = gradient_width(row_length)
    has_slope = rows.slope is not None
    vectors = rows if has_slope else rows._replace(slope=rows.constant)
    (out,) = launch(
        row_kernels.gradients,
        (logits, target_ids, active, _signed(allowed, active), *vectors),
        (jax.ShapeDtypeStruct(logits.shape, logits.dtype),),
        {**_constants(config, row_length, allowed), "with_slope": has_slope, "width": width},
        grid=n * -(-row_length // width),
        num_warps=_ROW_WARPS,
        aliases={0: 0} if in_place else {},
    )
    return out
