"""The pure functions around the kernels: tiles, the vocabulary's chunks, slices under a budget, compaction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.hopper.tiles import (
    COLUMNS,
    DEPTH,
    SHARED_MEMORY,
    Tile,
    gemm_plan,
    gemm_tile,
    hidden_gradient_tile,
    of_parts,
    statistics_tile,
)
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.products import padded
from rlk_jax.core import hopper_plan
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import Needs, kernel_memory_budget
from rlk_jax.core.rows import compact
from rlk_jax.ops.linear_logp import triton
from rlk_jax.ops.linear_logp.hopper_blocks import block_functions
from tests.support.head_configs import head_config
from tests.support.policy_losses import BUDGETS, DIM, TOKENS, VOCAB

PARTS = ((1, 1), (2, 2), (1, 2), (2, 1))
"""In how many parts hidden and the head may be."""
MOST_CHUNKS = 4096
"""More chunks than any vocabulary here has: with arrays of this size all share the same few programs."""


def vocabulary(size: int) -> Vocabulary:
    return Vocabulary(size, column_groups(size).count, column_groups(size).width)


def assert_fits(tile: Tile, staged: int, a_parts: int = 1, b_parts: int = 1) -> None:
    """A tile fits into shared memory. staged: the bytes of one strip of a warpgroup, of which two are in flight."""
    ring = tile.stages * 2 * tile.depth * (a_parts * tile.rows + b_parts * tile.columns)
    assert ring + tile.warpgroups * 2 * staged <= SHARED_MEMORY
    assert tile.rows == 64 * tile.warpgroups and tile.stages >= 3


@given(rows=st.integers(1, 1 << 20))
def test_tiles_fit_the_machine(rows):
    for tile in (statistics_tile(rows), gemm_tile(rows)):
        assert tile.columns == COLUMNS and padded(rows, tile.cluster_rows) % 64 == 0
        assert_fits(tile, staged=2 * 64 * 64)


@given(rows=st.integers(1, 1 << 20), columns=st.integers(1, 16384), sums=st.sampled_from([1, 8]))
def test_tiles_of_hidden_gradients(rows, columns, sums):
    """A narrow tile is taken where wide ones are too few, and none goes beyond the columns, which are padded to 256."""
    tile = hidden_gradient_tile(rows, columns, sums)
    assert padded(columns, tile.columns) <= padded(columns, COLUMNS)
    assert_fits(tile, staged=0)
    assert tile.columns == gemm_tile(rows, columns).columns or sums * -(-rows // tile.rows) * -(-columns // 256) < 96


@given(rows=st.integers(1, 1 << 20), columns=st.integers(1, 16384), parts=st.sampled_from(PARTS))
def test_tiles_of_operands_in_parts(rows, columns, parts):
    for tile in (statistics_tile(rows), gemm_tile(rows, columns), hidden_gradient_tile(rows, columns, 8)):
        found = of_parts(tile, *parts)
        assert_fits(found, 2 * 64 * 64, *parts)
        assert found.cluster_rows == tile.cluster_rows
        assert padded(columns, found.columns) <= padded(columns, COLUMNS)
        assert found == tile if parts == (1, 1) else found.columns <= 128


layouts = st.fixed_dictionaries({name: st.booleans() for name in ("a_transposed", "accumulates")})


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 20),
    sm_count=st.integers(2, 160),
    layout=layouts,
    b_transposed=st.booleans(),
)
def test_every_plan_of_a_gemm_can_run(m, n, sm_count, layout, b_transposed):
    plan = gemm_plan(m, n, sm_count, **layout)
    tile = plan.tile
    # With swapped operands a strip is the whole tile, else it is 128 bytes of each row.
    assert_fits(tile, staged=4 * 64 * tile.columns if plan.swapped else 64 * 128)
    assert tile.stages.bit_count() == 1
    # Columns that lie along memory are read 64 at a time.
    columns_lie_along_memory = layout["a_transposed"] if plan.swapped else not b_transposed
    assert tile.columns % 64 == 0 or not columns_lie_along_memory
    assert not (plan.swapped and layout["accumulates"])
    if plan.swapped:
        assert m <= tile.columns * 2 and tile.columns <= 64 and tile.cluster == 1
        # Two tiles beside each other run at the same time.
        assert m <= tile.columns or 2 * -(-n // tile.rows) <= sm_count


@pytest.mark.parametrize(
    ("m", "n", "tile", "swapped"),
    [
        (4096, 4096, (128, 256, 2, 64), False),
        (4096, 12288, (128, 256, 2, 64), False),
        (4096, 32000, (128, 256, 2, 64), False),
        (1024, 4096, (128, 256, 2, 64), False),
        (1024, 14336, (128, 128, 2, 64), False),
        (128, 4096, (64, 64, 2, 64), False),
        (128, 14336, (128, 128, 1, 64), False),
        (16, 4096, (64, 16, 1, 128), True),
        (1, 14336, (64, 8, 1, 128), True),
        (64, 2048, (64, 32, 1, 128), True),
        (64, 32000, (64, 64, 1, 64), True),
    ],
)
def test_which_tile_a_gemm_takes(m, n, tile, swapped):
    plan = gemm_plan(m, n, 132, a_transposed=False, accumulates=False)
    found = plan.tile
    assert (found.rows, found.columns, found.cluster, found.depth) == tile and plan.swapped == swapped


def test_few_rows_get_small_tiles():
    assert [statistics_tile(n).cluster_rows for n in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]


@settings(max_examples=60)
@given(size=st.integers(1, 300_000), columns=st.sampled_from([COLUMNS, 128]))
def test_chunks_partition_the_vocabulary(size, columns):
    v = vocabulary(size).cut(columns)
    assert v.chunks == vocabulary(size).chunks * (COLUMNS // columns)
    chunk = jnp.arange(MOST_CHUNKS, dtype=jnp.int32)
    start, width = (np.asarray(function(chunk))[: v.chunks] for function in (v.start, v.width))
    held = np.concatenate([np.arange(s, s + w) for s, w in zip(start, width, strict=True)])
    np.testing.assert_array_equal(held, np.arange(size))
    assert v.is_ragged == bool((width < columns).any())
    column = jnp.asarray(np.linspace(0, size - 1, 500), jnp.int32)
    holder = np.asarray(v.chunk_of(column))
    assert ((start[holder] <= column) & (column < start[holder] + width[holder])).all()


@settings(max_examples=60)
@given(size=st.integers(1, 300_000))
def test_every_chunk_has_its_steps_of_k(size):
    v = vocabulary(size)
    before = np.asarray(v.steps_before(jnp.arange(MOST_CHUNKS, dtype=jnp.int32)))[: v.chunks + 1]
    assert before[0] == 0 and (np.diff(before) >= 1).all() and (np.diff(before) <= 4).all()


@given(
    size=st.integers(1, 300_000),
    padding=st.sampled_from([0, 0, 1, 100, 5000]),
    tokens=st.integers(1, 40_000),
    dim=st.integers(1, 600),
    budget=st.integers(1, 1 << 33),
    keeps=st.booleans(),
    parts=st.sampled_from(PARTS),
)
@example(4345, 0, 1042, 112, 13_672_997, True, (1, 1))  # copied, no group fits a slice
@example(2129, 47, 23, 16, 305_981, True, (1, 1))  # only the end is copied
def test_slices_respect_the_budget(size, padding, tokens, dim, budget, keeps, parts):
    dim *= 8
    of_parts = {"hidden_parts": parts[0], "weight_parts": parts[1]}
    given_options = head_config(size + padding, real_vocab_size=size, memory_budget=budget, **of_parts)
    kept = hopper_plan.kept_chunks(dataclasses.replace(given_options, keeps=keeps), dim, tokens, jnp.bfloat16)
    needs = Needs(True, True, True)
    plan = hopper_plan.backward_plan(given_options, dim, tokens, needs=needs, dtype=jnp.bfloat16, kept=kept)
    ends = [0, *(part.end for part in plan.ranges)]
    assert [part.first for part in plan.ranges] == ends[:-1] and ends[-1] == vocabulary(size).chunks
    assert kept == sum(part.end - part.first for part in plan.ranges if part.is_kept) and (keeps or not kept)
    kept_bytes = kept * max(parts) * (2 * COLUMNS * plan.matrix_rows + 4 * plan.rows)
    rows_bytes = 2 * parts[0] * plan.matrix_rows * padded(dim, 64)
    sum_bytes = 4 * plan.rows * padded(dim, COLUMNS)
    rows_bytes += sum_bytes * (given_options.groups.count - 1) * plan.groups_at_once
    chain_bytes = sum_bytes * (plan.cuts_groups and not plan.groups_at_once)
    in_place = hopper_plan.replaces_kept(given_options, dim)
    assert not kept or kept_bytes + rows_bytes + chain_bytes <= budget
    for part in plan.ranges:
        assert 1 <= part.width <= part.end - part.first <= part.width * part.slices
        if part.is_kept and in_place:
            assert part.slices == 1 and not part.copied
            continue
        # A copy and its gather, or two parts; dW in its dtype and a copy of it, unless it is stored where it belongs.
        is_stored = parts[1] == 2 and hopper_plan.stores_in_place(given_options, dim)
        copies = 1 if is_stored else 1 + parts[1]
        head = 2 * 2 * copies * COLUMNS * padded(dim, 64) if part.copied else 0
        per_chunk = 2 * max(parts) * COLUMNS * plan.matrix_rows + head
        beside = rows_bytes + kept_bytes * part.is_kept
        assert part.width * per_chunk + beside <= budget or (part.width == 1 and not kept)
        # The chain of a cut group comes on top of a budget that would else hold no 4096 columns.
        is_exceeded = part.width * per_chunk + beside + chain_bytes > budget
        assert not is_exceeded or part.width == 1 or (part.width <= 16 and not part.is_kept)
    assert plan.cuts_groups == any(
        (part.first + i * part.width) % vocabulary(size).group_chunks
        for part in plan.ranges
        for i in range(part.slices)
    )
    forward = hopper_plan.forward_plan(given_options, dim, tokens, kept)
    assert forward.slices == 1 or not hopper_plan.reads_in_place(given_options, dim)
    for part in forward.ranges:
        copies = part.width * 2 * 2 * COLUMNS * padded(dim, 64) if part.copied else 0
        hidden = 2 * parts[0] * plan.matrix_rows * padded(dim, 64)
        assert copies + hidden + kept_bytes <= budget or (part.width == 1 and not kept) or not part.copied


@given(
    tokens=st.integers(1, 1 << 20),
    dim=st.integers(1, 128).map(lambda x: 64 * x),
    hidden_parts=st.sampled_from([1, 2]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16]),
    keeps=st.booleans(),
)
@example(32768, 4096, 1, jnp.bfloat16, True)
@example(1 << 19, 896, 1, jnp.bfloat16, True)
@example(65536, 2048, 1, jnp.float16, False)
def test_the_default_budget_holds_wide_slices_for_any_number_of_tokens(tokens, dim, hidden_parts, dtype, keeps):
    """Every slice reads and writes a sum of dH: in slices of 256 columns that takes as long as the products."""
    config, needs = head_config(151936, hidden_parts=hidden_parts, keeps=keeps), Needs(True, True, True)
    dtype = hopper_plan.logits_dtype(config, dtype)
    kept = hopper_plan.kept_chunks(config, dim, tokens, dtype)
    plan = hopper_plan.backward_plan(config, dim, tokens, needs=needs, dtype=dtype, kept=kept)
    assert all(part.width >= min(12, part.end - part.first) for part in plan.ranges if not part.is_kept)
    sizes, chain = hopper_plan.backward_sizes(config, dim, tokens, needs, dtype), hopper_plan.chain_bytes(dim, tokens)
    held = sizes.fixed + chain * (plan.cuts_groups and not plan.groups_at_once)
    widest = max(part.width for part in plan.ranges)
    assert held + widest * sizes.chunk <= kernel_memory_budget(config, dim, tokens)
    width = triton.slice_width(config, dim, tokens, needs=needs, dtype=dtype)
    assert width >= 2048


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dim", [2048, 4096])
def test_a_small_budget_holds_wide_slices_beside_hidden(dim, keeps):
    """The chain of dH comes on top of 64 MiB, or it would leave slices of 8 chunks and of 1."""
    config, tokens, needs = head_config(131072, keeps=keeps, memory_budget=2**26), 4096, Needs(True, True, True)
    kept = hopper_plan.kept_chunks(config, dim, tokens, jnp.bfloat16)
    plan = hopper_plan.backward_plan(config, dim, tokens, needs=needs, dtype=jnp.bfloat16, kept=kept)
    assert {part.width for part in plan.ranges if not part.is_kept} == {16}
    assert triton.slice_width(config, dim, tokens, needs=needs, dtype=jnp.bfloat16) == 4096


def test_what_is_kept():
    keeping = head_config(131072, keeps=True)
    assert (
        hopper_plan.kept_chunks(keeping, 4096, 4096, jnp.bfloat16) == 206
    )  # of 512: what 512 MiB hold beside hidden and a chain
    assert (
        hopper_plan.kept_chunks(head_config(131071, keeps=True), 4096, 4096, jnp.bfloat16) == 100
    )  # half, for a copied head
    padded_head = head_config(131072, keeps=True, real_vocab_size=131000, memory_budget=2**34)
    assert hopper_plan.kept_chunks(padded_head, 4096, 4096, jnp.bfloat16) == 511  # the last chunk's rows are copied
    assert hopper_plan.kept_chunks(dataclasses.replace(keeping, memory_budget=2**25), 4096, 4096, jnp.bfloat16) == 0
    assert hopper_plan.kept_chunks(keeping, 4096, 1, jnp.bfloat16) == 512
    assert hopper_plan.kept_chunks(keeping, 4096, 4096, jnp.float16) == 192  # rescaled rows of hidden take some room
    assert hopper_plan.kept_chunks(dataclasses.replace(keeping, logit_softcap=30.0), 4096, 4096, jnp.bfloat16) == 206
    assert hopper_plan.kept_chunks(dataclasses.replace(keeping, memory_budget=2**34), 4096, 4096, jnp.bfloat16) == 512
    assert hopper_plan.kept_chunks(head_config(131072), 4096, 4096, jnp.bfloat16) == 0
    groups = dataclasses.replace(keeping, is_shard=True, sums_by_group=True)
    assert hopper_plan.kept_chunks(groups, 4096, 4096, jnp.bfloat16) == 238  # every group has its chain


def test_what_is_kept_of_float32_operands():
    """Two parts take twice the bytes, and a float32 head is copied, for which half of the budget is set aside."""
    of_parts = ({"hidden_parts": hidden, "weight_parts": weight} for hidden, weight in PARTS)
    kept = [hopper_plan.kept_chunks(head_config(131072, keeps=True, **x), 4096, 4096, jnp.bfloat16) for x in of_parts]
    assert kept == [206, 46, 50, 95]
    whole = head_config(131072, keeps=True, hidden_parts=2, weight_parts=2, memory_budget=2**33)
    assert hopper_plan.kept_chunks(whole, 4096, 4096, jnp.bfloat16) == 512


def test_budgets_of_the_gpu_test_keep_none_some_and_all():
    """Or tests/gpu/test_linear_grpo_loss.py would compare a plan with itself."""

    def kept(budget: int | None) -> int:
        keeping = head_config(VOCAB, keeps=True, may_ignore=True, memory_budget=budget)
        return hopper_plan.kept_chunks(keeping, DIM, TOKENS, jnp.bfloat16)

    none, some, whole = map(kept, BUDGETS)
    assert none == 0 < some < whole == kept(2**40)


@settings(max_examples=60)
@given(size=st.integers(512, 300_000), padding=st.integers(1, 5000))
def test_only_the_end_of_a_padded_head_is_copied(size, padding):
    total = padded(size + padding, 64)
    in_place = hopper_plan.chunks_in_place(head_config(total, real_vocab_size=size), 128)
    v = vocabulary(size)
    chunk = jnp.arange(MOST_CHUNKS, dtype=jnp.int32)
    start, width = (np.asarray(function(chunk))[: v.chunks] for function in (v.start, v.width))
    last_read = start + -(-width // DEPTH) * DEPTH
    assert (last_read[:in_place] <= size).all()
    assert (width[in_place:] > 0).sum() <= 2


@pytest.mark.parametrize(
    ("size", "dim", "layout", "in_place"),
    [
        (131072, 2048, "vd", True),
        (151936, 4096, "vd", True),
        (131072, 2048, "dv", True),
        (131072, 2056, "dv", True),
        (50257, 768, "vd", False),
        (32000, 72, "vd", False),
        (151936, 4096, "dv", False),
        (50257, 768, "dv", False),
    ],
)
def test_which_heads_are_read_in_place(size, dim, layout, in_place):
    assert hopper_plan.reads_in_place(head_config(size, weight_layout=layout), dim) == in_place


@functools.partial(jax.jit, static_argnums=2)
def compacted_and_back(active, x, size):
    rows = compact(active, size)
    taken = rows.take(x, -1)
    return rows.count[0], taken, rows.spread(taken)


few_lengths = st.sampled_from((1, 7, 40)).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n))
"""Few, because each length is a program of its own."""


def check_compaction(mask, room):
    x = np.arange(1.0, len(mask) + 1, dtype=np.float32)
    found, taken, back = map(np.asarray, compacted_and_back(mask, x, len(mask) + room))
    count = int(mask.sum())
    np.testing.assert_array_equal(taken[:count], x[mask])
    np.testing.assert_array_equal(taken[count:], -1)
    np.testing.assert_array_equal(back, np.where(mask, x, 0))
    assert found == count


@given(active=few_lengths, room=st.sampled_from((0, 9)))
def test_compaction_and_back(active, room):
    check_compaction(np.asarray(active), room)


@pytest.mark.parametrize("tokens", [64, 65, 4097])
def test_compaction_of_many_tokens(tokens):
    """They are counted by blocks of 64, and blocks by blocks."""
    check_compaction(np.random.default_rng(tokens).random(tokens) < 0.6, 3)


def test_float32_operands_take_all_tokens_at_once():
    plan = block_functions(lambda: pytest.fail("no kernel is needed"), None).plan
    of_head = dataclasses.replace(head_config(131072, weight_parts=2), memory_budget=2**30)
    assert plan(of_head, 4096, 65536, 1, jnp.bfloat16) == "products of float32 matrices take all tokens at once"
