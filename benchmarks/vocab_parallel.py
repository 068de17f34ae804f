"""linear_logp with the head spread over 1 to 8 GPUs: python -m benchmarks.vocab_parallel --help.

Efficiency is the time of plain linear_logp on one device over the product of the number of devices and the time on
them, all in one run. "naive" computes the same by XLA and keeps the logits: each device has the logits of its rows of
the head, and a pmax and two psums merge them. Memory is what the compiled program takes on each device beyond inputs
and results. NVLink multicast is off (NCCL_NVLS_ENABLE=0).
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from benchmarks import common
from benchmarks.common import Candidate, compiled_candidate
from benchmarks.linear_logp import IGNORED, SMOKE_SHAPES, Inputs, make_inputs
from rlk_jax import linear_logp, vocab_parallel
from rlk_jax.core.dispatch import IMPLEMENTATIONS

SHAPES = "8192,4096,131072"
DEGREES = (1, 2, 4, 8)
CANDIDATES = ("mosaic", "mosaic canonical", "naive")
_AXIS = "tp"


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one shape, on `degree` devices."""

    shape: str
    dtype: str
    mask_density: float
    implementation: str
    what: str
    degree: int
    status: str
    ms: float | None = None
    efficiency: float | None = None
    extra_mib: float | None = None


def naive(mesh: Mesh, hidden: jax.Array, weight: jax.Array, target_ids: jax.Array) -> jax.Array:
    """Vocabulary-parallel log-probabilities as a trainer writes them without this library."""

    def on_rank(hidden: jax.Array, weight: jax.Array, target_ids: jax.Array) -> jax.Array:
        logits = (hidden @ weight.T).astype(jnp.float32)
        largest = lax.pmax(lax.stop_gradient(logits.max(axis=1)), _AXIS)
        total = lax.psum(jnp.exp(logits - largest[:, None]).sum(axis=1), _AXIS)
        local_ids = target_ids - lax.axis_index(_AXIS) * weight.shape[0]
        is_here = (local_ids >= 0) & (local_ids < weight.shape[0])
        found = jnp.take_along_axis(logits, jnp.where(is_here, local_ids, 0)[:, None], axis=1)[:, 0]
        return lax.psum(jnp.where(is_here, found, 0), _AXIS) - largest - jnp.log(total)

    whole, rows = PartitionSpec(), PartitionSpec(_AXIS)
    logp = jax.shard_map(on_rank, mesh=mesh, in_specs=(whole, rows, whole), out_specs=whole)
    return jnp.where(target_ids == IGNORED, 0, logp(hidden, weight, target_ids))


def _logp(name: str, mesh: Mesh, masked: dict[str, Any]) -> Callable[..., Any]:
    """The log-probabilities of one candidate on a mesh.

    A name that ends in "canonical" has that reduction. On one device, a name without it is the plain op.
    """
    if name == "naive":
        return functools.partial(naive, mesh)
    implementation, *canonical = name.split(" ")
    if mesh.size == 1 and not canonical:
        return functools.partial(linear_logp, implementation=implementation, **masked)
    return functools.partial(
        vocab_parallel.linear_logp,
        mesh=mesh,
        vocab_axis=_AXIS,
        implementation=implementation,
        reduction="canonical" if canonical else "sum",
        **masked,
    )


def candidates_of(name: str, degree: int, inputs: Inputs) -> dict[str, Candidate]:
    """The passes of one candidate on `degree` devices; raises what it raises where it cannot run."""
    mesh = Mesh(np.asarray(jax.devices()[:degree]), (_AXIS,))
    masked: dict[str, Any] = {"ignore_index": IGNORED} if inputs.density < 1 else {}
    logp = _logp(name, mesh, masked)

    def put(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    ids = put(jnp.where(inputs.active, inputs.target_ids, IGNORED) if masked else inputs.target_ids)
    hidden, weight, upstream = put(inputs.hidden), put(inputs.weight, _AXIS, None), put(inputs.upstream)

    def loss(h: jax.Array, w: jax.Array, t: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.vdot(logp(h, w, t), g)

    return {
        "forward": compiled_candidate(logp, hidden, weight, ids),
        "forward+backward": compiled_candidate(jax.grad(loss, (0, 1)), hidden, weight, ids, upstream),
    }


def measure(
    degrees: Sequence[int], dtype: str, density: float, shape: str, names: Sequence[str], rounds: int, seconds: float
) -> list[Row]:
    """The rows of all candidates on one shape, at those degrees that there are devices for. One that cannot run has a
    status that says why.
    """
    inputs = make_inputs(shape, dtype, density)

    def by_pass(name: str, degree: int) -> dict[tuple[str, str, int], Candidate]:
        return {(name, what, degree): x for what, x in candidates_of(name, degree, inputs).items()}

    possible = [degree for degree in degrees if degree <= jax.device_count()]
    builders = {(name, "", degree): functools.partial(by_pass, name, degree) for name in names for degree in possible}
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, dtype, density, *key, status) for key, status in failed.items()]
    for (name, what, degree), x in found.items():
        alone = found.get((name.split(" ")[0], what, 1))
        efficiency = None if alone is None else alone.ms / (degree * x.ms)
        rows.append(Row(shape, dtype, density, name, what, degree, "pass", x.ms, efficiency, x.extra_mib))
    return rows


def _print(rows: Sequence[Row], device: str) -> None:
    table = Table("N,D,V", "implementation", "pass", "devices", "time", "efficiency", "memory each")
    for r in rows:
        figures = (r.status, "", "")
        if r.status == "pass":
            efficiency = "" if r.efficiency is None else f"{r.efficiency:.3f}"
            figures = (f"{r.ms:.3f} ms", efficiency, "" if r.extra_mib is None else f"{r.extra_mib:.0f} MiB")
        table.add_row(r.shape, r.implementation, r.what, str(r.degree), *figures)
    common.show(f"vocab_parallel.linear_logp, {rows[0].dtype}, mask density {rows[0].mask_density}, {device}", table)


def main(argv: Sequence[str] | None = None) -> int:
    known = [x + reduction for x in IMPLEMENTATIONS for reduction in ("", " canonical")]
    names = ",".join(CANDIDATES)
    parser = common.parser("vocab_parallel", __doc__, shapes=SHAPES, implementations=names, known=known)
    options = common.add_mask_density(parser).parse_args(argv)
    fixed = DEGREES[:2] if options.smoke else DEGREES, options.dtype, options.mask_density
    rows = common.measure_shapes("vocab_parallel", options, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _print(rows, f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    bars = ((f"{r.shape}: {r.what}", f"{r.implementation} on {r.degree}", r.efficiency) for r in rows)
    common.plot(options.plot, bars, "share of linear speed-up")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
