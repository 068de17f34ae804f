"""What several benchmarks compile: chains of short calls, copies of an array, and the bytes that a program holds."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common import Candidate, Launch

_LAUNCH_HIDDEN = 4e-4
"""The seconds that a program should take at least, so that its launch is hidden behind the one before."""


def calls_to_hide_a_launch(seconds: float, most: int = 32) -> int:
    """How many calls of so many seconds each a program must make for its launch to be hidden; no more than `most`."""
    return min(most, int(_LAUNCH_HIDDEN / seconds) + 1)


def chain(
    function: Callable[..., Any], xs: Sequence[Any], *rest: Any, compiler_options: dict[str, Any] | None = None
) -> Any:
    """A compiled program `(xs, *rest)` that computes `function(x, *rest)` for each x of `xs`, one after the other."""

    def run(xs: Sequence[Any], *rest: Any) -> list[Any]:
        results: list[Any] = []
        for x in xs:
            if results:
                # Each call waits for the one before, or XLA would merge calls that share an operand.
                x, results[-1] = lax.optimization_barrier((x, results[-1]))
            results.append(function(x, *rest))
        return results

    return jax.jit(run).lower(xs, *rest).compile(compiler_options=compiler_options)


def cublas_alone() -> dict[str, Any] | None:
    """What a program is compiled with on a GPU for XLA to run its products by cuBLAS, not by kernels in Triton."""
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None


def copies(x: jax.Array) -> dict[str, Callable[[], Candidate]]:
    """The builders of two copies of x, by name, which read and write all of it: the faster one is the card's limit."""
    negated = jax.jit(jnp.negative)
    return {
        "copy: memcpy": lambda: Candidate(Launch(lambda: jnp.copy(x)), work=2),
        "copy: negation": lambda: Candidate(Launch(lambda: negated(x)), work=2),
    }


def held_bytes(compiled: Any) -> int:
    """All that a compiled program holds at its peak: arguments, results and temporary memory."""
    found: Any = compiled.memory_analysis()
    ends = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return ends + found.temp_size_in_bytes
