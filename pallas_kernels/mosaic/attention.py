"""The forward of attention: blocks of keys stream past a tile of queries, whose softmax runs along (online).

Two compute warpgroups of 64 queries each take turns, so that one multiplies while the other exponentiates; a producer
warpgroup loads blocks of keys and values by TMA. Key blocks start at multiples of their width from the sequence's own
first key, and a block of which a query sees nothing changes nothing for it: its largest score stays, it is multiplied
by 2^0, and zeros are added. So a query's bits depend on its own sequence alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, SequencePlaces, attention_tile
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic.attention_products import Weighted, multiply
from pallas_kernels.mosaic.attention_schedule import Schedule, TilePlace
from pallas_kernels.mosaic.attention_softmax import (
    Softmax,
    empty_softmax,
    merged,
    merged_totals,
    output_of,
    scores_of,
    with_scores,
)
from pallas_kernels.mosaic.attention_tiles import (
    Call,
    Chunk,
    Ring,
    Run,
    chunk_widths,
    drain,
    load_keys,
    load_rows,
    pairs,
    store_rows,
    views,
)
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, row_vector

Array = jax.Array
Ref = Any


class _Arguments(NamedTuple):
    """The references that the kernel of `attend` is given."""

    query_gmem: Ref
    key_gmem: Ref
    value_gmem: Ref
    places_gmem: SequencePlaces
    output_gmem: Ref
    log_total_gmem: Ref


class _Memory(NamedTuple):
    """The shared memory of a block in chunks of columns, by warpgroup or by stage: queries; the output, in their place
    unless the tile stores it apart; keys; values; and the weighted sums of values over all spans but the last one, None
    where there is one span.
    """

    query: tuple[Chunk, ...]
    output: tuple[Chunk, ...]
    key: Ring
    value: Ring
    kept: tuple[Ref, ...] | None


class _Barriers(NamedTuple):
    """Barriers for when queries are loaded, whose turn it is, and when the edge of a block is empty."""

    query_full: Ref
    turn: Ref
    edge: Ref

    def take_turns(self) -> None:
        """Let the other warpgroup go on, and wait for one's own turn."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def attend(
    shape: AttentionShape, machine: Machine, query: Array, key: Array, value: Array, places: SequencePlaces
) -> tuple[Array, Array]:
    """The output `[B, T, H, F]` in query's dtype, and log2 of each query's softmax total, +inf where it sees nothing:
    float32 `[B, H, T]` with T rounded up to a multiple of 128.

    query is `[B, T, H, E]`, key `[B, S, G, E]` and value `[B, S, G, F]`, of one 16-bit dtype. T >= 1.
    """
    batch, queries, heads, size = query.shape
    value_size, dtype = value.shape[3], query.dtype
    tile = attention_tile(max(size, value_size), key.shape[1])
    tiles = -(-queries // tile.queries)
    schedule = Schedule(tiles, batch, heads, min(machine.sm_count, tiles * batch * heads))
    # The output is staged where the sums of spans were. The interpreter takes the warpgroups' parts of such a union for
    # one, and would report a race.
    shares_kept = tile.stores_apart and tile.span_blocks is not None and machine.interpret is None

    def body(
        query_gmem: Ref,
        key_gmem: Ref,
        value_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        output_gmem: Ref,
        log_total_gmem: Ref,
        **scratch: Ref,
    ) -> None:
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        refs = _Arguments(query_gmem, key_gmem, value_gmem, places, output_gmem, log_total_gmem)
        if shares_kept:
            *scratch["output_smem"], scratch["kept_smem"] = scratch["output_smem"]
        names = [x for x in ("query_smem", "output_smem", "key_smem", "value_smem") if x in scratch]
        query, output, key, value = (tuple(map(Chunk, *views)) for views in pairs(scratch, names))
        memory = _Memory(
            query,
            output,
            Ring(key_gmem, key, scratch["key_full"], scratch["key_empty"]),
            Ring(value_gmem, value, scratch["value_full"], scratch["value_empty"]),
            scratch.get("kept_smem"),
        )
        barriers = _Barriers(*(scratch[name] for name in _Barriers._fields))
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        rounds = schedule.rounds(block)

        def call_of(place: TilePlace) -> Call:
            first_query = place.tile * tile.queries
            return Call(shape, tile, places, place.batch, first_query, queries, machine.interpret is not None)

        @pl.when(warpgroup == tile.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(24, action="decrease")
            rings = memory.key, memory.value

            def load(i: Array, count: Array) -> Array:
                place = schedule.place(block, i)
                return load_keys(call_of(place), rings, lax.div(place.head, jnp.int32(shape.group_heads)), count)

            drain(tile, rings, lax.fori_loop(0, rounds, load, jnp.int32(0)))

        @pl.when(warpgroup < tile.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")

            def part(i: int | Array) -> _Warpgroup:
                place = schedule.place(block, i)
                return _Warpgroup(call_of(place), refs, memory, barriers, place.head, warpgroup)

            def compute(i: Array, blocks: Array) -> Array:
                return part(i).run(blocks, lambda: pl.when(i + 1 < rounds)(lambda: part(i + 1).load_queries()))

            pl.when(warpgroup == 1)(barriers.take_turns)
            part(0).load_queries()
            lax.fori_loop(0, rounds, compute, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            pl.when(warpgroup == 0)(barriers.take_turns)

    of_warpgroups, of_stages = (tile.warpgroups, WARPGROUP_ROWS), (tile.stages, tile.keys)
    stages: dict[str, Any] = {"num_barriers": tile.stages}
    scratch: dict[str, Any] = {
        "key_smem": plgpu.RefUnion(*views(of_stages, size, dtype)),
        "value_smem": plgpu.RefUnion(*views(of_stages, value_size, dtype)),
        "query_full": plgpu.Barrier(num_arrivals=len(chunk_widths(size)), num_barriers=tile.warpgroups),
        "key_full": plgpu.Barrier(num_arrivals=len(chunk_widths(size)), **stages),
        "value_full": plgpu.Barrier(num_arrivals=len(chunk_widths(value_size)), **stages),
        "key_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "value_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "turn": plgpu.Barrier(num_arrivals=tile.warpgroups),
        "edge": plgpu.Barrier(num_arrivals=tile.warpgroups),
    }
    queries_of, outputs_of = views(of_warpgroups, size, dtype), views(of_warpgroups, value_size, dtype)
    if shares_kept:
        # A warpgroup's part has the place and the bytes of its own sums, which are float32. Half of it is used.
        outputs_of = views((tile.warpgroups, 2 * WARPGROUP_ROWS), value_size, dtype)
    kept_of = views(of_warpgroups, value_size, jnp.float32)[1]
    if tile.stores_apart:
        scratch["query_smem"] = plgpu.RefUnion(*queries_of)
        scratch["output_smem"] = plgpu.RefUnion(*outputs_of, *([kept_of] if shares_kept else []))
    else:
        scratch["query_smem"] = plgpu.RefUnion(*queries_of, *outputs_of)
    if tile.span_blocks is not None and not shares_kept:
        scratch["kept_smem"] = kept_of
    output, log_total = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, queries, heads, 1, value_size), dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * tile.queries), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(schedule.blocks,),
        grid_names=("blocks",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*(x[:, :, :, None] for x in (query, key, value)), *places)
    return output[:, :, :, 0], log_total


class _Progress(NamedTuple):
    """How far a warpgroup has come: spans of the sequence and blocks of the tile begun; the largest score and the total
    of all spans but the last one, and the softmax of the last one.
    """

    spans: Array
    blocks: Array
    largest: Array
    total: Array
    last: Softmax


@dataclass(frozen=True)
class _Warpgroup:
    """One compute warpgroup: 64 queries of one head."""

    call: Call
    refs: _Arguments
    memory: _Memory
    barriers: _Barriers
    head: Array
    number: Array

    @property
    def first_query(self) -> Array:
        """The number of its first query."""
        return self.call.first_query + self.number * WARPGROUP_ROWS

    def run(self, blocks: Array, load_next: Callable[[], Any]) -> Array:
        """Run the blocks of keys past the queries, which are being loaded, one sequence after the other. `blocks`
        counts the blocks before; returns how many there are with these. `load_next` loads the queries of the next tile.
        """
        holds_several = self.call.shape.holds_several
        is_early = self.call.tile.stores_apart and not holds_several
        self._wait_for_queries()

        def over_run(run: Run, blocks: Array) -> Array:
            if holds_several and not self.call.tile.stores_apart:

                @pl.when(run.last_query < self.call.last_query)
                def _again() -> None:
                    # The output of another sequence's queries stands in the queries' place.
                    self.load_queries()
                    self._wait_for_queries()

            return self._run_sequence(run, blocks, load_next if is_early else lambda: None)

        blocks = self.call.runs(over_run, blocks)
        if not is_early:
            load_next()
        return blocks

    def _run_sequence(self, run: Run, blocks: Array, before_store: Callable[[], Any]) -> Array:
        """Compute and store the output of the queries of one sequence. What stands in the rows of others may have met
        NaN. `blocks` counts the blocks of keys before; returns how many there are with those of the sequence.
        """
        call, columns = self.call, self.refs.value_gmem.shape[-1]

        def span(first: Array, end: Array, state: _Progress) -> _Progress:
            def step(i: Array, so_far: Softmax, is_masked: bool) -> Softmax:
                return self._add_block(run, i, state.blocks + i - first, so_far, is_masked=is_masked)

            kept = self._keep(state)
            last = call.each_block(run, first, end, step, empty_softmax(columns))
            return _Progress(state.spans + 1, state.blocks + end - first, *kept, last)

        none = empty_softmax(columns)
        state = call.spans(run, span, _Progress(jnp.int32(0), blocks, none.largest, none.total, none))
        before_store()
        if self.memory.kept is None:
            self._store(run, state.last)
            return state.blocks

        @pl.when(state.spans > 1)
        def _() -> None:
            self._store(run, merged(self._kept(state), state.last))

        @pl.when(state.spans <= 1)
        def _() -> None:
            self._store(run, state.last)

        return state.blocks

    def load_queries(self) -> None:
        """Have the queries loaded into memory that nothing reads or writes any more."""
        plgpu.commit_smem()
        there = (self.call.batch, pl.ds(self.first_query, WARPGROUP_ROWS), self.head)
        full = self.barriers.query_full.at[self.number]
        load_rows(self.call, self.memory.query, self.refs.query_gmem, there, self.number, full)

    def _wait_for_queries(self) -> None:
        plgpu.barrier_wait(self.barriers.query_full.at[self.number])

    def _kept(self, state: _Progress) -> Softmax:
        """The softmax of all spans but the last one."""
        assert self.memory.kept is not None
        rows = (chunk.at[self.number] for chunk in self.memory.kept)
        values = tuple(plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False) for x in rows)
        return Softmax(state.largest, state.total, values)

    def _keep(self, state: _Progress) -> tuple[Array, Array]:
        """Merge the last span into those before it, whose sums of values shared memory holds: registers have no room.

        Returns the largest score and the total of both. There is no last span before the first one.
        """
        if self.memory.kept is None:
            return state.largest, state.total
        largest, total = merged_totals(state, state.last)
        kept_smem = self.memory.kept

        def store(x: Softmax) -> None:
            # The output of the tile before may be on its way from the same memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for chunk, values in zip(kept_smem, x.values, strict=True):
                chunk.at[self.number][...] = values

        @pl.when(state.spans == 1)
        def _() -> None:
            store(state.last)

        @pl.when(state.spans > 1)
        def _() -> None:
            store(merged(self._kept(state), state.last))

        return largest, total

    def _products(self, slot: Array) -> Array:
        """The products of the queries and a block of keys."""

        def products(acc: Ref) -> Array:
            for query, key in zip(self.memory.query, self.memory.key.chunks, strict=True):
                plgpu.wgmma(acc, query.tiles.at[self.number], key.tiles.at[slot].transpose((1, 0)))
            self.barriers.take_turns()
            return acc[...]

        found = pl.run_scoped(products, plgpu.ACC((WARPGROUP_ROWS, self.call.tile.keys), jnp.float32))
        plgpu.barrier_arrive(self.memory.key.empty.at[slot])
        return found

    def _add_block(self, run: Run, block: Array, step: Array, so_far: Softmax, *, is_masked: bool) -> Softmax:
        """The softmax with one block of keys added; `step` counts the blocks of the tile."""
        barriers = self.barriers
        slot = lax.rem(step, jnp.int32(self.call.tile.stages))
        plgpu.barrier_wait(self.memory.key.full.at[slot])
        scores, scale = scores_of(self.call.shape, self._products(slot))
        if is_masked:
            scores = self.call.masked(run, block, self.first_query, scores, -jnp.inf)
        softmax, weights = with_scores(so_far, scores, scale, self.refs.value_gmem.dtype)
        plgpu.barrier_arrive(barriers.turn)
        plgpu.barrier_wait(self.memory.value.full.at[slot])
        if is_masked:
            self.call.empty_unseen(run, block, self.memory.value.chunks, slot, self.number, barriers.edge)
        plgpu.barrier_wait(barriers.turn)
        (values,) = multiply(self.call, Weighted(softmax.values, weights, self.memory.value.tiles(slot)))
        plgpu.barrier_arrive(self.memory.value.empty.at[slot])
        return softmax._replace(values=values)

    def _store(self, run: Run, softmax: Softmax) -> None:
        """Write the output of the run's queries, and the logarithm of their totals."""
        call, there = self.call, (self.call.batch, self.head, pl.ds(self.first_query, WARPGROUP_ROWS))
        output, log_total = output_of(softmax, call.poison)
        if call.shape.holds_several:
            before = row_vector(self.refs.log_total_gmem.at[call.batch, self.head], self.first_query)
            query = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + self.first_query
            log_total = jnp.where((query >= run.first_query) & (query <= run.last_query), log_total, before)
        self.refs.log_total_gmem[there] = log_total
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.memory.kept is not None:
            # All threads have read the sums of the spans, whose memory the output takes.
            plgpu.commit_smem()
        for chunk, values in zip(self.memory.output, output, strict=True):
            chunk.tiles.at[self.number, pl.ds(0, WARPGROUP_ROWS)][...] = values.astype(chunk.tiles.dtype)
        rows = (self.head, self.first_query, call.stored(run))
        store_rows(
            call, self.number, self.memory.output, self.refs.output_gmem, *rows, waits=not call.tile.stores_apart
        )
