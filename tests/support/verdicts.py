"""What the scripts share that compile kernels without a GPU: sm90.py for Mosaic, aot.py for Triton.

A verdict is whether something is well, and the line that says so.
"""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.export

import rlk_jax
from tests.support.pairwise import cover

type Verdict = tuple[bool, str]
type HeadLayout = tuple[int, tuple[str | None, ...]]

HEAD_LAYOUTS: tuple[HeadLayout, ...] = ((1, ()), (2, ("x", None)), (2, (None, "x")))
"""Numbers of H200s, and how a head lies over them in a bare call."""


def named(name: str, is_ok: bool) -> Verdict:
    return is_ok, f"{'ok  ' if is_ok else 'FAIL'} {name}"


def exported(function: Callable[..., Any], operands: Sequence[Any]) -> Verdict:
    """Whether jax.export takes a program for GPUs once it skips the checks that rlk_jax names."""
    checks = rlk_jax.export_checks()
    program = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)(*operands)
    return named("an exported program", program.platforms == ("cuda",))


def of_configurations(
    options: Sequence[dict], verdict_of: Callable[[int], Verdict], *, every: bool, name: str | None = None
) -> tuple[Sequence[int], Iterator[Verdict]]:
    """The numbers of the configurations to compile, and their verdicts.

    Every configuration takes a process per core. Otherwise those that have every pair of options, or with a name every
    option beside the one of this name, take this process alone, because `make test` keeps the other cores busy.
    """
    if not every:
        numbers = cover(options, name)
        return numbers, map(verdict_of, numbers)
    return range(len(options)), _by_processes(verdict_of, len(options))


def _by_processes(verdict_of: Callable[[int], Verdict], count: int) -> Iterator[Verdict]:
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(verdict_of, range(count))


def count_failed(verdicts: Iterable[Verdict]) -> int:
    """Print each verdict as it comes, and count those that are not well."""
    failed = 0
    for is_ok, line in verdicts:
        failed += not is_ok
        print(line, flush=True)
    return failed
