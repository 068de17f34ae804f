"""Advantages: rewards normalised within each prompt's group, and spread over tokens."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from rlk_jax.core import checks
from rlk_jax.core.fixed_order import pairwise_sum
from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.tokens import active_mask
from rlk_jax.losses.checks import check_advantages, checked_boundaries
from rlk_jax.losses.masked import active_values

Std = Literal["population", "sample", "none"]


def group_advantages(
    rewards: Num[Array, "B"],
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Any = None,
    eps: float = 1e-6,
    std: Std = "population",
) -> Float[Array, "B"]:
    """Rewards normalised within each prompt's group, fp32 without gradient.

    The sequences of a group stand together. Each group has `samples_per_prompt` sequences, or group g has those from
    `group_boundaries[g]` up to `group_boundaries[g + 1]`, which are static integers.

    | std | A_i, c_i = r_i − mean of the group |
    | --- | --- |
    | "population" | c_i / max(σ, eps), σ² = mean of c² |
    | "sample" | c_i / (s + eps), s² = Σ c² / (size − 1); TRL's with eps=1e-4 |
    | "none" | c_i, as in Dr. GRPO |

    Rewards count as float32. A group's first reward is subtracted from all of them before anything is summed: a large
    common offset cancels exactly, as far as float32 tells rewards apart beside it, and a group of equal rewards, or of
    one, has advantages of exactly 0.

    Raises ValueError for rewards that are not `[B]` real numbers, both or neither of samples_per_prompt and
    group_boundaries, a samples_per_prompt below 2, groups that do not cover the batch, boundaries that are traced,
    an eps that is not positive and an unknown std.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    boundaries = checked_boundaries(rewards, samples_per_prompt, group_boundaries)
    checks.require_positive("eps", eps)
    checks.one_of("std", std, get_args(Std))
    if isinstance(rewards, np.ndarray | np.generic):
        # JAX would cut 64 bits to 32, and 64-bit integers would wrap.
        rewards = rewards.astype(np.float32)
    return advantages_of(whole_on_every_device(rewards), groups_of(boundaries), eps, std=std)


class Groups(NamedTuple):
    """Where the groups of a batch stand. These are arrays, so that one program serves groups of other sizes."""

    rows: Any
    """`[groups, largest]`: the sequences of each group, followed by any others."""
    sizes: Any
    """`[groups, 1]`: how many sequences each group has."""
    slots: Any
    """`[B]`: where each sequence is in the flattened `rows`."""


def groups_of(boundaries: tuple[int, ...], padded: Callable[[int], int] = lambda n: n) -> Groups:
    """The groups of sequences from each boundary to the next, in arrays whose dimensions `padded` rounds up.

    No bit of an advantage depends on the padding.
    """
    starts, sizes = np.array(boundaries[:-1], np.int32)[:, None], np.diff(boundaries)[:, None]
    count, largest = len(sizes), padded(int(sizes.max(initial=0)))
    places = np.arange(largest, dtype=np.int32)
    used = places < sizes
    slots = (np.arange(count, dtype=np.int32)[:, None] * largest + places)[used]
    more = ((0, padded(count) - count), (0, 0))
    return Groups(
        np.pad(np.where(used, starts + places, 0), more),
        np.pad(sizes.astype(np.int32), more, constant_values=1),
        np.pad(slots, (0, padded(len(slots)) - len(slots))),
    )


@functools.partial(jax.jit, static_argnames="std")
def advantages_of(rewards: Array, groups: Groups, eps: Array, *, std: Std = "population") -> Array:
    """`group_advantages` of groups that have been checked."""
    used = jnp.arange(groups.rows.shape[1]) < groups.sizes
    grouped = jax.lax.stop_gradient(rewards).astype(jnp.float32)[groups.rows]
    shifted = jnp.where(used, grouped - grouped[:, :1], 0.0)
    # Without the barrier XLA multiplies by the reciprocal of a constant that all groups share, and divides by others.
    count, degrees = jax.lax.optimization_barrier(
        (groups.sizes.astype(jnp.float32), jnp.maximum(groups.sizes - 1, 1).astype(jnp.float32))
    )
    mean = pairwise_sum(shifted)[:, None] / count
    centred = jnp.where(used, shifted - mean, 0.0)
    squares = pairwise_sum(centred**2)[:, None]
    if std == "population":
        centred /= jnp.maximum(jnp.sqrt(squares / count), eps)
    elif std == "sample":
        centred /= jnp.sqrt(squares / degrees) + eps
    return centred.reshape(-1)[groups.slots]


def expand_advantages(
    advantages: Num[Array, "B"] | Num[Array, "B T"], completion_mask: Num[Array, "B T"] | Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """The advantage of every token, fp32 without gradient, from one per sequence or per token; exactly 0 where masked.

    Raises ValueError for a mask that is not [B, T], and advantages that are neither [B] nor [B, T] or no real numbers.
    """
    check_advantages(advantages, completion_mask)
    advantages = jnp.asarray(advantages)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    return active_values(jax.lax.stop_gradient(per_token), active_mask(completion_mask))
