"""The checks of the options that spread a head over mesh axes, and their messages.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax.core.checks import is_static, require, require_one_of
from rlk_jax.core.dispatch import CallFacts
from rlk_jax.core.mesh import axis_names
from rlk_jax.core.shard import Reduction, Shard, ShardOptions


def check_reduction(reduction: Any, axis_name: Any, option: str = "reduction") -> None:
    """The reduction of hidden's gradient over ranks exists, and "canonical" has ranks. `option` is the op's name for
    it.
    """
    require_one_of(option, reduction, get_args(Reduction))
    require(
        reduction == "sum" or axis_name is not None,
        f"{option}='canonical' requires axis_name, the mesh axis of the shards.",
    )


def checked_shard(
    options: ShardOptions, columns: int, global_vocab_size: int | None, vocab_start_index: Any
) -> Shard | None:
    """The shard of `columns` columns that this rank holds; None without an axis_name."""
    axis_name = options.axis_name
    if axis_name is None:
        no_axis_options(options, vocab_start_index)
        return None
    check_axis_names("axis_name", axis_name)
    check_reduction(options.reduction, axis_name)
    require(
        options.reduce_hidden_grad or options.reduction == "sum",
        "reduction='canonical' orders a sum that reduce_hidden_grad=False leaves to the caller.",
    )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    require(
        all(name in manual for name in axis_names(axis_name)),
        f"axis_name {axis_name!r} is no mesh axis of a surrounding jax.shard_map.",
    )
    count = jax.lax.axis_size(axis_name)
    start = np.asarray(0) if vocab_start_index is None else jnp.asarray(vocab_start_index)
    require(
        start.shape == () and jnp.issubdtype(start.dtype, jnp.integer),
        f"vocab_start_index must be an integer scalar, got {vocab_start_index!r}.",
    )
    require(
        vocab_start_index is None or not is_static(vocab_start_index) or (count == 1 and vocab_start_index == 0),
        f"vocab_start_index {vocab_start_index} is the same on all {count} ranks of {axis_name!r}: it must be 0 on one "
        "rank, and on several an array that differs from rank to rank.",
    )
    vocab_size = columns * count if global_vocab_size is None else int(global_vocab_size)
    return Shard(axis_name, count, columns, vocab_size, options.reduction, options.reduce_hidden_grad)


def no_axis_options(options: ShardOptions, vocab_start_index: Any) -> None:
    """No option is given that is only for a rank's own shard inside shard_map."""
    require(
        options.axis_name is None,
        f"beside axis_name {options.axis_name!r} no input may lie over Explicit mesh axes: make them Auto, or manual "
        "too.",
    )
    check_reduction(options.reduction, options.axis_name)
    require(vocab_start_index is None, "vocab_start_index requires axis_name, the mesh axis of the shards.")
    require(options.reduce_hidden_grad, "reduce_hidden_grad=False requires axis_name, the mesh axis of the shards.")


def check_axis_names(argument: str, names: Any) -> None:
    """`names` is the name of a mesh axis, or a tuple of several names."""
    several = names if isinstance(names, tuple) else (names,)
    require(
        several and all(isinstance(name, str) for name in several) and len(set(several)) == len(several),
        f"{argument} must be the name of a mesh axis, or a tuple of different ones, got {names!r}.",
    )


def order_obstacles(facts: CallFacts) -> list[str]:
    """Why an implementation that promises no bits cannot run a call on a shard."""
    return ["promises no bits, which reduction='canonical' asks for"] if facts.config.sums_by_group else []


def shard_obstacles(facts: CallFacts) -> list[str]:
    """Why an implementation for whole heads alone cannot run a call."""
    return ["needs the whole head, not a shard of its vocabulary"] if facts.config.is_shard else []
