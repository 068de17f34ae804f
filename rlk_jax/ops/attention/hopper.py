"""attention on Hopper, by Pallas Mosaic GPU kernels, which are imported when one of them is traced."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.attention import PACKED_COLUMNS, AttentionShape, SequencePlaces
from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.transforms import as_replicated, fusion_barrier
from rlk_jax.ops.attention.options import AttentionConfig, AttentionFunctions, Gradients, Needs, Operands

Array = jax.Array


class _Kept(NamedTuple):
    """What the forward keeps for the backward: the output, and log2 of each query's softmax total, `[B, H, T]` with T
    rounded up to whole tiles.
    """

    output: Array
    log_total: Array


def mosaic(machine: Machine | None = None) -> AttentionFunctions:
    """The implementation for one machine; None for the GPU that JAX sees."""
    return AttentionFunctions(functools.partial(_forward, machine), functools.partial(_gradients, machine))


def _shape(config: AttentionConfig, operands: Operands) -> AttentionShape:
    options = (config.scale, config.sliding_window, config.logit_softcap)
    return AttentionShape(*options, operands.group_heads, config.holds_several)


def _columns(config: AttentionConfig, *arrays: Array) -> tuple[Array, ...]:
    """Arrays `[B, ·, ·, columns]` as the kernels take them: those of packed rows end in columns of zeros where their
    heads are narrower than the kernels can store row by row.
    """
    return tuple(zeros_behind(x, 3, PACKED_COLUMNS) for x in arrays) if config.holds_several else arrays


def _with_places(operands: Operands) -> tuple[Operands, SequencePlaces]:
    """The operands behind a barrier, and where sequences are. This is found in front of it, so that XLA finds it once
    for all layers of a model.
    """
    operands = as_replicated(operands)
    return fusion_barrier((operands, _places(operands)))


def _places(operands: Operands) -> SequencePlaces:
    """Where sequences are, and which neighbouring queries belong to one: all of a row that holds one sequence."""
    first_slots, is_good = operands.places
    first_slots = first_slots if first_slots.ndim == 2 else first_slots[:, None]
    begins = jnp.diff(first_slots, axis=1, prepend=-1) != 0
    runs = lax.cummax(jnp.where(begins, jnp.arange(first_slots.shape[1], dtype=jnp.int32), 0), axis=1)
    return SequencePlaces(operands.start.reshape(1), first_slots, jnp.where(is_good[:, None], runs, -1))


def _forward(machine: Machine | None, config: AttentionConfig, operands: Operands) -> tuple[Array, _Kept]:
    from pallas_kernels.mosaic.attention import attend
    from pallas_kernels.mosaic.attention_decode import MOST_GROUP_HEADS, decode

    operands, places = _with_places(operands)
    is_decoding = operands.query.shape[1] == 1 and operands.group_heads <= MOST_GROUP_HEADS
    kernel = decode if is_decoding else attend
    call = (_shape(config, operands), machine or default_machine())
    query, key, value = _columns(config, *operands[:3])
    output, log_total = fusion_barrier(kernel(*call, query, key, value, places))
    output = output[..., : config.value_size]
    return output, _Kept(output, log_total)


def _gradients(
    machine: Machine | None, config: AttentionConfig, needs: Needs, operands: Operands, kept: _Kept, upstream: Array
) -> Gradients:
    from pallas_kernels.mosaic.attention_key_gradient import key_gradients
    from pallas_kernels.mosaic.attention_query_gradient import query_gradient

    operands, places = _with_places(operands)
    kept, upstream = fusion_barrier(as_replicated((kept, upstream)))
    call = (_shape(config, operands), machine or default_machine())
    query, key, value, output, given = _columns(config, *operands[:3], kept.output, upstream)
    # The kernel of dQ finds the centers, which that of dK and dV needs.
    d_query, center = fusion_barrier(query_gradient(*call, query, key, value, output, kept.log_total, given, places))
    found = Gradients(d_query[..., : operands.query.shape[3]] if needs.query else None, None, None)
    if not needs.key and not needs.value:
        return found
    d_key, d_value = fusion_barrier(key_gradients(*call, query, key, value, kept.log_total, center, given, places))
    d_key, d_value = d_key[..., : operands.key.shape[3]], d_value[..., : config.value_size]
    return found._replace(key=d_key if needs.key else None, value=d_value if needs.value else None)
