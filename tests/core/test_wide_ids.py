"""Ids of 64 bits that an int32 does not hold: they are out of range in every op, and become neither another id nor the
ignored one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rlk_jax
from rlk_jax.core.tokens import as_int32, as_int32_on_host
from rlk_jax.vocab_parallel import linear_logp as vocab_parallel_logp

N, D, V = 4, 8, 40
RANDOM = np.random.default_rng(0)
HIDDEN, HEAD = (jnp.asarray(RANDOM.normal(size=(rows, D)), jnp.float32) for rows in (N, V))
LOGITS = HIDDEN @ HEAD.T
IDS, LISTS = np.arange(N), np.tile(np.arange(6), (N, 1))
POLICIES = LOGITS[:, None], LOGITS[:, None]
ONE_EACH = jnp.zeros((N, 1))
WRAPS = 2**32
"""What makes another id of 64 bits of one, of which an int32 would keep the same 32."""


def wide(ids: np.ndarray) -> np.ndarray:
    """Ids of which the first one would wrap to what it was."""
    ids = ids.copy()
    ids.flat[0] += WRAPS
    return ids


def over_a_mesh(ids, **options):
    """On whole arrays."""
    return vocab_parallel_logp(HIDDEN, HEAD, ids, mesh=jax.make_mesh((1,), ("v",)), vocab_axis="v", **options)


def over_explicit_axes(ids, **options):
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Explicit,))
    head = jax.device_put(HEAD, NamedSharding(mesh, PartitionSpec("v")))
    return rlk_jax.linear_logp(HIDDEN, head, ids, **options)


def over_mixed_axes(ids, **options):
    mesh = jax.make_mesh((1, 1), ("v", "auto"), axis_types=(AxisType.Explicit, AxisType.Auto))
    head = jax.device_put(HEAD, NamedSharding(mesh, PartitionSpec("v")))
    return rlk_jax.linear_logp(HIDDEN, head, ids, **options)


def grpo_loss(ids, allowed_ids=None, **options):
    allowed = None if allowed_ids is None else allowed_ids[:, None]
    given = *POLICIES, ids[:, None], ONE_EACH, None, jnp.ones((N, 1))
    return rlk_jax.grpo_loss(*given, advantages=jnp.ones(N), allowed_ids=allowed, **options).loss


def linear_grpo_loss(ids, allowed_ids=None, **options):
    allowed = None if allowed_ids is None else allowed_ids[:, None]
    given = HIDDEN[:, None], HEAD, ids[:, None], ONE_EACH, None, jnp.ones(N), jnp.ones((N, 1))
    return rlk_jax.linear_grpo_loss(*given, allowed_ids=allowed, **options).loss


ON_TARGETS = {
    "linear_logp": lambda ids, **options: rlk_jax.linear_logp(HIDDEN, HEAD, ids, **options),
    "vocab_parallel.linear_logp": over_a_mesh,
    "linear_logp over Explicit axes": over_explicit_axes,
    "linear_logp over mixed axes": over_mixed_axes,
    "linear_cross_entropy": lambda ids, **options: rlk_jax.linear_cross_entropy(HIDDEN, HEAD, ids, **options),
    "linear_grpo_loss": linear_grpo_loss,
    "logp": lambda ids, **options: rlk_jax.logp(LOGITS, ids, **options),
    "ratio_kl": lambda ids, **options: rlk_jax.ratio_kl(LOGITS, LOGITS, ids, IDS >= 0, jnp.zeros(N), **options).kl,
    "grpo_loss": grpo_loss,
}


def weighted_cross_entropy(ids, **options):
    return rlk_jax.linear_cross_entropy(HIDDEN, HEAD, ids, token_weights=jnp.ones(N), **options)


def listed_kl(ids, **options):
    given = {"teacher_ids": ids, "teacher_logps": jnp.full(LISTS.shape, -2.0)}
    return rlk_jax.linear_kl(HIDDEN, HEAD, **given, **options)


CALLS = {
    **{f"{name}, its targets": (op, IDS) for name, op in ON_TARGETS.items()},
    **{
        f"{name}, what is allowed": (lambda lists, op=op, **options: op(IDS, allowed_ids=lists, **options), LISTS)
        for name, op in ON_TARGETS.items()
    },
    "linear_cross_entropy with weights": (weighted_cross_entropy, IDS),
    "linear_kl, what is listed": (listed_kl, LISTS),
    "logp, its rows": (lambda rows, **options: rlk_jax.logp(LOGITS, IDS, row_indices=rows, **options), IDS),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_id_beyond_int32_does_not_wrap(call):
    op, ids = CALLS[call]
    with pytest.raises(ValueError, match=r"out.of.range"):
        op(wide(ids))
    found = np.asarray(op(wide(ids), validate=False))
    assert np.isnan(found.flat[0])
    assert np.isfinite(np.asarray(op(ids, validate=False))).all()


@pytest.mark.parametrize("op", ["linear_logp", "vocab_parallel.linear_logp", "linear_cross_entropy", "logp"])
def test_an_id_beyond_int32_is_not_ignored(op):
    """Where the ignored id is the last that an int32 holds, and that one is ignored still."""
    ids, last = IDS.copy(), int(np.iinfo(np.int32).max)
    ids[:2] = WRAPS, last
    options = {"ignore_index": last, "validate": False}
    options |= {"reduction": "none"} if op == "linear_cross_entropy" else {}
    found = np.asarray(ON_TARGETS[op](ids, **options))
    assert np.isnan(found[0]) and found[1] == 0 and np.isfinite(found[2:]).all()


@pytest.mark.parametrize("ignored", [None, -100, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32, np.int16])
def test_ids_saturate(dtype, ignored):
    """At the ends of int32, or one before where that one is ignored; on the host and on the device alike."""
    info, (low, high) = np.iinfo(dtype), (-(2**31), 2**31 - 1)
    ids = [x for x in (info.min, low - 1, low, -100, 0, high, high + 1, info.max) if info.min <= x <= info.max]
    ends = low + (ignored == low), high - (ignored == high)
    expected = [x if low <= x <= high else ends[x > 0] for x in ids]
    given = np.asarray(ids, dtype)
    assert as_int32(given, ignored).tolist() == as_int32_on_host(given, ignored).tolist() == expected
    assert as_int32_on_host(given, ignored).dtype == np.int32
    with jax.enable_x64():
        assert as_int32(jnp.asarray(given), ignored).tolist() == expected


def test_a_shard_beyond_int32_does_not_begin_at_another_column():
    """Its shards do not cover the vocabulary, so that every row is NaN."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("tp",))

    def on_rank(hidden, head, ids, start):
        return rlk_jax.linear_logp(hidden, head, ids, axis_name="tp", vocab_start_index=start)

    by_rank = jax.P(), jax.P("tp"), jax.P(), jax.P()
    sharded = jax.shard_map(on_rank, mesh=mesh, in_specs=by_rank, out_specs=jax.P(), check_vma=False)
    with jax.enable_x64():
        found = [sharded(HIDDEN, HEAD, jnp.asarray(IDS), jnp.asarray(start, jnp.int64)) for start in (0, WRAPS)]
    assert np.isfinite(np.asarray(found[0])).all() and np.isnan(np.asarray(found[1])).all()
