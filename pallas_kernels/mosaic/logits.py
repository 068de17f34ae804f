"""Kernels over materialised logits at the speed of memory: one warpgroup streams one row, each thread its own columns.

A row is read once, in pieces of as many columns as one load of all threads holds. Every column of a piece has a running
maximum and running sums, which are folded at the end of the row. Their order depends on V and the dtype alone, so that
a row has the same bits in any batch. Rows that are not active are not read.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.logits import LOG2_E, RowCoefficients, RowConfig, RowStatistics
from pallas_kernels.mosaic.launch import all_threads, launch
from pallas_kernels.mosaic.statistics import softcapped

Array = jax.Array
Ref = Any
_LOWEST = float(jnp.finfo(jnp.float32).min)
"""The value that maxima start from: with −inf the difference of two maxima could be NaN."""
_LOAD_BYTES = 16
"""Bytes that one thread loads at a time where rows are aligned to them."""
_IN_FLIGHT = 32
"""Columns that a thread loads while it works on as many others: loads in flight hide the latency of memory."""
_SLOTS = 2
"""Steps of a row that shared memory holds."""
_WRITTEN_AT_ONCE = 16
"""Columns of a gradient that a thread writes together. More gained nothing, since no thread waits for a store."""


@dataclass(frozen=True)
class _Reader:
    """How a row is read in pieces, with `vector` neighbouring columns in each thread."""

    vector: int

    @property
    def piece(self) -> int:
        """Columns of a piece."""
        return THREADS * self.vector

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.piece,), vec_size=self.vector)

    def load(self, lines_gmem: Ref, line: Array, start: Any) -> Array:
        """The piece that begins at column `start` of a line."""
        return plgpu.load(lines_gmem.at[line, pl.ds(start, self.piece)], layout=self.layout, optimized=False)

    def load_from(self, columns_smem: Ref, start: Any) -> Array:
        """The piece that begins at place `start` of a step in shared memory."""
        return plgpu.load(columns_smem.at[pl.ds(start, self.piece)], layout=self.layout, optimized=False)

    def columns(self, start: Any) -> Array:
        """The column numbers of the piece that begins at column `start`."""
        return plgpu.broadcasted_iota(jnp.int32, (self.piece,), 0, layout=self.layout) + start

    def full(self, value: Any) -> Array:
        """A piece that holds `value` in every column."""
        return plgpu.layout_cast(jnp.full((self.piece,), value, jnp.float32), self.layout)


def _reader(size: int, dtype: Any) -> _Reader:
    """The reader of the widest pieces that fit into rows of `size` columns and that every row begins aligned to."""
    vector = math.gcd(size, _widest(dtype))
    while THREADS * vector > size:
        vector //= 2
    return _Reader(vector)


def _widest(dtype: Any) -> int:
    """The most columns that one thread can load at a time."""
    return _LOAD_BYTES // jnp.dtype(dtype).itemsize


def _widened(logits: Array) -> Array:
    """The logits, padded to at least one column for each thread."""
    return jnp.pad(logits, ((0, 0), (0, max(0, THREADS - logits.shape[1]))))


class _Running(NamedTuple):
    """What each column of a piece holds of the values x so far, with s = log2(e) / temperature.

    largest is their maximum. With the weights w = 2^((x − largest)·s), total is Σ w and gap is Σ w·(largest − x)·s.
    """

    largest: Array
    total: Array
    gap: Array | None


def _added(so_far: _Running, pieces: list[Array], scale: Array) -> _Running:
    """`so_far` with the values of some pieces added."""
    largest = functools.reduce(jnp.maximum, pieces, so_far.largest)
    total, gap = _rescaled(so_far, largest, scale)
    for x in pieces:
        below = (x - largest) * scale
        weight = jnp.exp2(below)
        total = total + weight
        if gap is not None:
            # The weight of a logit of −∞ is 0, and 0·∞ must be 0.
            gap = gap + weight * jnp.minimum(-below, 1e30)
    return _Running(largest, total, gap)


def _rescaled(x: _Running, largest: Array, scale: Array) -> tuple[Array, Array | None]:
    """The sums of `x` rescaled to a maximum that is not smaller than its own."""
    above = jnp.minimum((largest - x.largest) * scale, 1e30)
    factor = jnp.exp2(-above)
    return x.total * factor, None if x.gap is None else (x.gap + x.total * above) * factor


@dataclass(frozen=True)
class _Lines:
    """Rows of `size` columns seen as lines of `rows` rows each, so that each begins aligned for the reader `wide`."""

    size: int
    rows: int
    wide: _Reader

    @property
    def narrow(self) -> _Reader | None:
        """The reader for the ends of rows where rows do not begin aligned themselves, else None."""
        return _Reader(1) if self.rows > 1 else None

    def place(self, row: Array) -> tuple[Array, Array]:
        """The line that holds a row, and the row's first column there."""
        return lax.div(row, jnp.int32(self.rows)), lax.rem(row, jnp.int32(self.rows)) * self.size

    def cut(self, logits: Array) -> Array:
        """The logits in the shape of lines."""
        return logits.reshape(logits.shape[0] // self.rows, self.rows * self.size)


def _lines(count: int, size: int, dtype: Any) -> _Lines:
    """The lines with the widest pieces. Rows that are short or do not fill whole lines are lines of their own."""
    widest = _widest(dtype)
    rows = widest // math.gcd(size, widest)
    if rows > 1 and (count % rows or size < (THREADS + 1) * widest):
        return _Lines(size, 1, _reader(size, dtype))
    return _Lines(size, rows, _Reader(widest) if rows > 1 else _reader(size, dtype))


@dataclass(frozen=True)
class _StepRing:
    """Brings the steps of a row that does not begin aligned into shared memory.

    A copy begins at the last aligned column before a step, and threads skip the columns in between. Each thread thus
    reads the same columns of a step as from a row that begins aligned.
    """

    steps: int
    columns: int
    """Columns of a step."""
    widest: int
    """Columns that copies are aligned to."""
    dtype: Any

    @property
    def scratch(self) -> tuple[Any, Any]:
        smem = plgpu.SMEM((_SLOTS, self.columns + self.widest), self.dtype)
        return smem, plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS)

    def fold[Carry](
        self,
        line_gmem: Ref,
        start: Array,
        read: Callable[[Ref, Array], Any],
        add: Callable[[Carry, Any], Carry],
        carry: Carry,
        slots_smem: Ref,
        full_barriers: Ref,
    ) -> Carry:
        """Fold the steps of the row that begins at column `start` of a line: carry = add(carry, read(slot, shift)).

        `read(slot, shift)` loads a step whose first column is at place `shift` of its slot in shared memory.
        """
        shift = lax.rem(start, jnp.int32(self.widest))

        def slot_of(i: Any) -> Array:
            return lax.rem(jnp.int32(i), jnp.int32(_SLOTS))

        def fetch(i: Any) -> None:
            columns = pl.ds(start - shift + i * self.columns, self.columns + self.widest)
            source, target, barrier = line_gmem.at[columns], slots_smem.at[slot_of(i)], full_barriers.at[slot_of(i)]
            plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        def step(i: Array, carry: Carry) -> Carry:
            plgpu.barrier_wait(full_barriers.at[slot_of(i)])
            found = read(slots_smem.at[slot_of(i)], shift)
            all_threads()

            @pl.when(i + _SLOTS < self.steps)
            def _() -> None:
                fetch(i + _SLOTS)

            return add(carry, found)

        for i in range(min(_SLOTS, self.steps)):
            fetch(i)
        return lax.fori_loop(0, self.steps, step, carry)


def statistics(
    config: RowConfig, logits: Array, target_ids: Array, temperature: Array, active: Array, *, machine: Machine
) -> RowStatistics:
    """The softmax of each active row of `logits [N, V]`; target_ids and active are int32, temperature float32 `[N]`."""
    logits = _widened(logits)
    (n, size), reader = logits.shape, _reader(logits.shape[1], logits.dtype)
    lines = _lines(n, size, logits.dtype)
    at_once, whole = _IN_FLIGHT // reader.vector, config.columns // reader.piece
    steps, rest = divmod(whole, at_once)
    ring = _StepRing(steps, at_once * reader.piece, _widest(logits.dtype), logits.dtype)
    # The copy of the last step reads up to `widest` columns beyond that step.
    by_ring = lines.rows > 1 and steps > 0 and size - steps * ring.columns >= ring.widest

    def body(
        logits_gmem: Ref, target_ids_gmem: Ref, temperature_gmem: Ref, active_gmem: Ref, out_gmem: RowStatistics
    ) -> None:
        row = lax.axis_index("blocks")
        line, begin = lines.place(row)
        # These are loaded together, before the branch waits for one of them.
        is_active, target, scale = active_gmem[row] != 0, target_ids_gmem[row], LOG2_E / temperature_gmem[row]

        def load(start: Any) -> Array:
            return reader.load(logits_gmem, line, begin + start)

        def loaded(step: Any) -> tuple[Array, ...]:
            return tuple(load((step * at_once + i) * reader.piece) for i in range(at_once))

        def read(slot_smem: Ref, start: Array) -> tuple[Array, ...]:
            return tuple(reader.load_from(slot_smem, start + i * reader.piece) for i in range(at_once))

        def values(found: Array) -> Array:
            return softcapped(found.astype(jnp.float32), config.softcap)[0]

        def added(running: _Running, pieces: Iterable[Array]) -> _Running:
            return _added(running, list(map(values, pieces)), scale)

        def step(i: Array, carry: tuple[_Running, tuple[Array, ...]]) -> tuple[_Running, tuple[Array, ...]]:
            running, pieces = carry
            following = loaded(i + 1)
            return added(running, pieces), following

        @pl.when(is_active)
        def _() -> None:
            running = _Running(reader.full(_LOWEST), reader.full(0), reader.full(0) if config.entropy else None)
            in_registers = steps > 0 and not by_ring
            pieces = loaded(0) if in_registers else ()
            # The target's piece is read a second time: looking for the target in every piece would cost more.
            place = jnp.clip(target, 0, config.columns - 1)
            near = jnp.minimum(lax.div(place, jnp.int32(reader.vector)) * reader.vector, size - reader.piece)
            around_target = load(near)
            if by_ring:
                over_steps = functools.partial(ring.fold, logits_gmem.at[line], begin, read, added, running)
                running = pl.run_scoped(over_steps, *ring.scratch)
            elif in_registers:
                running, pieces = lax.fori_loop(0, steps - 1, step, (running, pieces))
            # The rest of the row is loaded before the last step waits for its own columns.
            rest_of_row = [load((whole - rest + i) * reader.piece) for i in range(rest)]
            first = whole * reader.piece
            start = min(first, size - reader.piece)
            ragged = load(start) if config.columns % reader.piece else None
            running = added(running, pieces) if in_registers else running
            last = list(map(values, rest_of_row))
            if ragged is not None:
                # The last piece may overlap the one before it and reach into the padding.
                column = reader.columns(start)
                is_new = (column >= first) & (column < config.columns)
                last.append(jnp.where(is_new, values(ragged), -jnp.inf))
            running = _added(running, last, scale) if last else running
            maximum = running.largest.max()
            total, gap = _rescaled(running, maximum, scale)
            picked = jnp.where(reader.columns(near) == place, values(around_target), 0.0)
            out_gmem.maximum[row] = maximum
            out_gmem.total[row] = total.sum()
            out_gmem.target[row] = picked.sum()
            if gap is not None:
                out_gmem.gap[row] = gap.sum()

    value = jax.ShapeDtypeStruct((n,), jnp.float32)
    out_type = RowStatistics(value, value, value, value if config.entropy else None)
    arguments = (lines.cut(logits), target_ids, temperature, active)
    return launch(body, "logits_statistics", machine, out_type, (n,), *arguments, approx_math=True)


def gradients(
    config: RowConfig,
    logits: Array,
    target_ids: Array,
    active: Array,
    rows: RowCoefficients,
    in_place: bool,
    *,
    machine: Machine,
) -> Array:
    """The gradient of every logit `[N, V]`, in the logits' dtype: 0 in rows that are not active and in padding columns.

    in_place: the gradients take the logits' memory, and XLA copies the logits first if anything else needs them.
    """
    columns = logits.shape[1]
    logits = _widened(logits)
    n, size = logits.shape
    lines = _lines(n, size, logits.dtype)
    wide, narrow = lines.wide, lines.narrow
    at_once = max(1, _WRITTEN_AT_ONCE // wide.vector)

    def body(
        source_gmem: Ref | None,
        target_ids_gmem: Ref,
        active_gmem: Ref,
        rows_gmem: RowCoefficients,
        out_gmem: Ref,
        _outputs: tuple[()],
    ) -> None:
        logits_gmem = out_gmem if source_gmem is None else source_gmem
        row = lax.axis_index("blocks")
        line, start = lines.place(row)
        end = start + size
        first = lax.div(start + wide.vector - 1, jnp.int32(wide.vector)) * wide.vector
        count = lax.div(end - first, jnp.int32(wide.piece))
        # The pieces at a row's ends overlap others, and both write the same values.
        ends: list[tuple[_Reader, Any]] = []
        if narrow is not None:
            ends = [(narrow, start), (narrow, end - narrow.piece)]
        if narrow is not None or size % wide.piece:
            ends.append((wide, lax.div(end, jnp.int32(wide.vector)) * wide.vector - wide.piece))

        def store(reader: _Reader, first: Any, values: Array) -> None:
            out_gmem[line, pl.ds(first, reader.piece)] = values.astype(out_gmem.dtype)

        @pl.when(active_gmem[row] != 0)
        def write_gradients() -> None:
            c = jax.tree.map(lambda ref: ref[row], rows_gmem)
            target = target_ids_gmem[row]

            def gradient(reader: _Reader, first: Any) -> Array:
                x, derivative = softcapped(reader.load(logits_gmem, line, first).astype(jnp.float32), config.softcap)
                log2_p = (x - c.maximum) * c.scale - c.log2_total
                factor = c.constant
                if c.slope is not None:
                    # Where log2 p is −∞, p is 0, and 0·∞ must be 0.
                    log2_p = jnp.maximum(log2_p, -1e30)
                    factor = factor + c.slope * log2_p
                column = reader.columns(first - start)
                found = jnp.where(column == target, c.at_target, jnp.exp2(log2_p) * factor)
                found = found if derivative is None else found * derivative
                return jnp.where(column < config.columns, found, 0.0) if config.columns < size else found

            def some(piece: Any, count: int) -> None:
                starts = [first + (piece + j) * wide.piece for j in range(count)]
                for there, values in zip(starts, [gradient(wide, x) for x in starts], strict=True):
                    store(wide, there, values)

            if not in_place:
                _in_steps(count, at_once, some)
                for place in ends:
                    store(*place, gradient(*place))
                return
            # All threads read what overlapping pieces share before any thread writes it.
            end_gradients = [gradient(*place) for place in ends]
            all_threads()
            _in_steps(count, at_once, some)
            all_threads()
            for place, values in zip(ends, end_gradients, strict=True):
                store(*place, values)

        @pl.when(active_gmem[row] == 0)
        def write_zeros() -> None:
            _in_steps(count, 1, lambda piece, _: store(wide, first + piece * wide.piece, wide.full(0)))
            for reader, there in ends:
                store(reader, there, reader.full(0))

    logits = lines.cut(logits)
    out = jax.new_ref(logits if in_place else lax.empty(logits.shape, logits.dtype))
    source = None if in_place else logits
    launch(body, "logits_gradients", machine, (), (n,), source, target_ids, active, rows, out, approx_math=True)
    return jax.freeze(out).reshape(n, size)[:, :columns]


def _in_steps(count: Array, at_once: int, step: Callable[[Any, int], None]) -> None:
    """Call `step(first, how many)` for 0 … count − 1: `at_once` of them together, and the rest one by one."""
    steps = lax.div(count, jnp.int32(at_once))
    lax.fori_loop(0, steps, lambda i, _: step(i * at_once, at_once), None)
    if at_once > 1:
        lax.fori_loop(steps * at_once, count, lambda i, _: step(i, 1), None)
