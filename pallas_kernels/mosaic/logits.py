"""Kernels over materialised logits at the speed of memory: one warpgroup streams one row, each thread its own columns.

A row is read once, in pieces of as many columns as one load of all threads holds. Every column of a piece has a running
maximum and running sums, which are folded at the end of the row. Their order depends on V and the dtype alone, so that
a row has the same bits in any batch. Rows that are not active are not read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.allowed import bits_of_pieces
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.logits import LOG2_E, RowCoefficients, RowConfig, RowStatistics
from pallas_kernels.mosaic.launch import all_threads, launch
from pallas_kernels.mosaic.row_pieces import (
    Reader,
    StepRing,
    WordsOfLines,
    is_set,
    lines_of,
    reader_of,
    widened,
    widest,
    words_of_lines,
)
from pallas_kernels.mosaic.softcap import softcapped

Array = jax.Array
Ref = Any
_LOWEST = float(jnp.finfo(jnp.float32).min)
"""The value that maxima start from: with −inf the difference of two maxima could be NaN."""
_IN_FLIGHT = 32
"""Columns that a thread loads while it works on as many others: loads in flight hide the latency of memory."""
_WRITTEN_AT_ONCE = 16
"""Columns of a gradient that a thread writes together. More gained nothing, since no thread waits for a store."""


def _only(values: Array, allowed: Array | None) -> Array:
    """The values, −∞ where they are not allowed."""
    return values if allowed is None else jnp.where(allowed, values, -jnp.inf)


class _Values(NamedTuple):
    """A piece of values x, and which of them are allowed, or None for all."""

    x: Array
    allowed: Array | None


class _Running(NamedTuple):
    """What each column of a piece holds of the values x so far, with s = log2(e) / temperature.

    largest is their maximum. With the weights w = 2^((x − largest)·s), total is Σ w and gap is Σ w·(largest − x)·s.
    """

    largest: Array
    total: Array
    gap: Array | None


def _added(so_far: _Running, pieces: list[_Values], scale: Array) -> _Running:
    """`so_far` with the values of some pieces added."""
    largest = functools.reduce(jnp.maximum, [_only(*values) for values in pieces], so_far.largest)
    total, gap = _rescaled(so_far, largest, scale)
    for x, allowed in pieces:
        # The difference is that of all values: compilers fuse a softcap's last product into it, and not into one of
        # values that were chosen from.
        below = _only((x - largest) * scale, allowed)
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


class _Step(NamedTuple):
    """The pieces of one step of a row, and the words that say which of their columns are allowed, or None."""

    pieces: tuple[Array, ...]
    words: Array | None


def statistics(
    config: RowConfig,
    logits: Array,
    target_ids: Array,
    temperature: Array,
    active: Array,
    allowed: Array | None,
    *,
    machine: Machine,
) -> RowStatistics:
    """The softmax of each active row of `logits [N, V]`; target_ids and active are int32, temperature float32 `[N]`.

    allowed is packed words `[N, words]`, whose bit i of word j is column 32·j + i, or None for all columns.
    """
    logits = widened(logits)
    (n, size), reader = logits.shape, reader_of(logits.shape[1], logits.dtype)
    lines = lines_of(n, size, logits.dtype)
    at_once, whole = _IN_FLIGHT // reader.vector, config.columns // reader.piece
    steps, rest = divmod(whole, at_once)
    ring = StepRing(steps, at_once * reader.piece, widest(logits.dtype), logits.dtype)
    # The last piece may overlap the one before it and reach into the padding.
    is_ragged, ragged_start = config.columns % reader.piece > 0, min(whole * reader.piece, size - reader.piece)
    starts = [*range(0, whole * reader.piece, reader.piece), *([ragged_start] if is_ragged else [])]
    words = None if allowed is None else lax.optimization_barrier(bits_of_pieces(allowed, starts, reader.piece))
    # The copy of the last step reads up to `widest` columns beyond that step.
    by_ring = lines.rows > 1 and steps > 0 and size - steps * ring.columns >= ring.widest

    def body(
        logits_gmem: Ref,
        target_ids_gmem: Ref,
        temperature_gmem: Ref,
        active_gmem: Ref,
        words_gmem: Ref | None,
        out_gmem: RowStatistics,
    ) -> None:
        row = lax.axis_index("blocks")
        line, begin = lines.place(row)
        # These are loaded together, before the branch waits for one of them.
        is_active, target, scale = active_gmem[row] != 0, target_ids_gmem[row], LOG2_E / temperature_gmem[row]

        def load(start: Any) -> Array:
            return reader.load(logits_gmem, line, begin + start)

        def loaded(step: Any) -> _Step:
            words = reader.words(words_gmem, row, step * at_once)
            return _Step(tuple(load((step * at_once + i) * reader.piece) for i in range(at_once)), words)

        def read(step: Any, slot_smem: Ref, start: Array) -> _Step:
            words = reader.words(words_gmem, row, step * at_once)
            return _Step(tuple(reader.load_from(slot_smem, start + i * reader.piece) for i in range(at_once)), words)

        def values(found: Array) -> Array:
            return softcapped(found.astype(jnp.float32), config.softcap)[0]

        def numbered(found: _Step, first: Any) -> list[_Values]:
            """The values of a step whose first piece has this number."""
            words, pieces = found.words, map(values, found.pieces)
            return [_Values(x, None if words is None else is_set(words, first + i)) for i, x in enumerate(pieces)]

        def added(i: Any, running: _Running, found: _Step) -> _Running:
            return _added(running, numbered(found, i * at_once), scale)

        def step(i: Array, carry: tuple[_Running, _Step]) -> tuple[_Running, _Step]:
            running, found = carry
            following = loaded(i + 1)
            return added(i, running, found), following

        @pl.when(is_active)
        def _() -> None:
            running = _Running(reader.full(_LOWEST), reader.full(0), reader.full(0) if config.entropy else None)
            in_registers = steps > 0 and not by_ring
            found = loaded(0) if in_registers else _Step((), None)
            # The target's piece is read a second time: looking for the target in every piece would cost more.
            place = jnp.clip(target, 0, config.columns - 1)
            near = jnp.minimum(lax.div(place, jnp.int32(reader.vector)) * reader.vector, size - reader.piece)
            around_target = load(near)
            if by_ring:
                over_steps = functools.partial(ring.fold, logits_gmem.at[line], begin, read, added, running)
                running = pl.run_scoped(over_steps, *ring.scratch)
            elif in_registers:
                running, found = lax.fori_loop(0, steps - 1, step, (running, found))
            # The rest of the row is loaded before the last step waits for its own columns.
            begins = starts[whole - rest :]
            words = reader.words(words_gmem, row, whole - rest) if begins else None
            rest_of_row = _Step(tuple(map(load, begins)), words)
            running = added(steps - 1, running, found) if in_registers else running
            last = numbered(rest_of_row, whole - rest)
            if is_ragged:
                column = reader.columns(ragged_start)
                is_new = (column >= whole * reader.piece) & (column < config.columns)
                last[-1] = last[-1]._replace(x=_only(last[-1].x, is_new))
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
    arguments = (lines.cut(logits), target_ids, temperature, active, words)
    return launch(body, "logits_statistics", machine, out_type, (n,), *arguments, approx_math=True)


def gradients(
    config: RowConfig,
    logits: Array,
    target_ids: Array,
    active: Array,
    allowed: Array | None,
    rows: RowCoefficients,
    in_place: bool,
    *,
    machine: Machine,
) -> Array:
    """The gradient of every logit `[N, V]`, in the logits' dtype: 0 in rows that are not active, in columns that are
    padding, and in those that are not allowed. allowed is that of `statistics`.

    in_place: the gradients take the logits' memory, and XLA copies the logits first if anything else needs them.
    """
    columns = logits.shape[1]
    logits = widened(logits)
    n, size = logits.shape
    lines = lines_of(n, size, logits.dtype)
    wide, narrow = lines.wide, lines.narrow
    at_once = max(1, _WRITTEN_AT_ONCE // wide.vector)
    words = None if allowed is None else lax.optimization_barrier(words_of_lines(lines, allowed))

    def body(
        source_gmem: Ref | None,
        target_ids_gmem: Ref,
        active_gmem: Ref,
        words_gmem: WordsOfLines | None,
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
        # The pieces at a row's ends overlap others, and both write the same values. They have numbers of their own.
        ends: list[tuple[Reader, Any, int]] = []
        if narrow is not None:
            ends = [(narrow, start, 0), (narrow, end - narrow.piece, 1)]
        if narrow is not None or size % wide.piece:
            last = lax.div(end, jnp.int32(wide.vector)) * wide.vector - wide.piece
            ends.append((wide, last, size // wide.piece))

        def store(reader: Reader, first: Any, values: Array) -> None:
            out_gmem[line, pl.ds(first, reader.piece)] = values.astype(out_gmem.dtype)

        @pl.when(active_gmem[row] != 0)
        def write_gradients() -> None:
            c = jax.tree.map(lambda ref: ref[row], rows_gmem)
            target = target_ids_gmem[row]

            def words_of(reader: Reader, number: Any) -> Array | None:
                """The words that have the piece of this number, and others."""
                if words_gmem is None:
                    return None
                return reader.words(words_gmem.wide if reader == wide else words_gmem.narrow, row, number)

            def gradient(reader: Reader, first: Any, number: Any, words: Array | None) -> Array:
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
                found = found if words is None else jnp.where(is_set(words, number), found, 0.0)
                return jnp.where(column < config.columns, found, 0.0) if config.columns < size else found

            def end_gradient(reader: Reader, first: Any, number: int) -> Array:
                return gradient(reader, first, number, words_of(reader, number))

            def some(piece: Any, count: int) -> None:
                numbers, words = [piece + j for j in range(count)], words_of(wide, piece)
                starts = [first + number * wide.piece for number in numbers]
                found = [gradient(wide, x, number, words) for x, number in zip(starts, numbers, strict=True)]
                for there, values in zip(starts, found, strict=True):
                    store(wide, there, values)

            if not in_place:
                _in_steps(count, at_once, some)
                for reader, there, number in ends:
                    store(reader, there, end_gradient(reader, there, number))
                return
            # All threads read what overlapping pieces share before any thread writes it.
            end_gradients = [end_gradient(*place) for place in ends]
            all_threads()
            _in_steps(count, at_once, some)
            all_threads()
            for (reader, there, _), values in zip(ends, end_gradients, strict=True):
                store(reader, there, values)

        @pl.when(active_gmem[row] == 0)
        def write_zeros() -> None:
            _in_steps(count, 1, lambda piece, _: store(wide, first + piece * wide.piece, wide.full(0)))
            for reader, there, _ in ends:
                store(reader, there, reader.full(0))

    logits = lines.cut(logits)
    out = jax.new_ref(logits if in_place else lax.empty(logits.shape, logits.dtype))
    arguments = (None if in_place else logits, target_ids, active, words, rows, out)
    launch(body, "logits_gradients", machine, (), (n,), *arguments, approx_math=True)
    return jax.freeze(out).reshape(n, size)[:, :columns]


def _in_steps(count: Array, at_once: int, step: Callable[[Any, int], None]) -> None:
    """Call `step(first, how many)` for 0 … count − 1: `at_once` of them together, and the rest one by one."""
    steps = lax.div(count, jnp.int32(at_once))
    lax.fori_loop(0, steps, lambda i, _: step(i * at_once, at_once), None)
    if at_once > 1:
        lax.fori_loop(steps * at_once, count, lambda i, _: step(i, 1), None)
