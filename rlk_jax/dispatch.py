"""Which implementation of an op runs for these arguments on this device, and why the others do not.

The choice may depend on vocabulary, hidden size, dtypes, options and device, never on the number of tokens: a row
keeps its bits.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from rlk_jax import cuda, deterministic, hopper, mosaic, reference, triton, xla
from rlk_jax._cut import Cut
from rlk_jax._partition import partitioned
from rlk_jax._shard import Shard

log = logging.getLogger("rlk_jax")

IMPLEMENTATIONS = ("mosaic", "cuda", "triton", "xla", "deterministic", "reference")
"""Every name `implementation=` takes, fastest first."""

COMPOSED = ("linear_grpo_loss",)
"""Ops on the implementations of another: their `describe` says which."""

numerics_version = {"linear_logp": 4, "det_gemm": 1, "logp": 2, "ratio_kl": 3, "grpo_loss": 3}
"""Per op, a number that rises when the bits of a promise-keeping implementation change."""


@dataclass(frozen=True)
class Device:
    """Where the arguments live: a JAX platform ("cpu", "gpu", "tpu") and, on NVIDIA GPUs, the compute capability
    ("9.0").
    """

    platform: str
    kind: str
    compute_capability: str | None = None


@dataclass(frozen=True)
class Problem:
    """What an implementation may look at when it says whether it can run: no fact that changes with the batch."""

    op: str
    device: Device
    dtypes: tuple[str, ...]
    dim: int
    options: Any


@dataclass(frozen=True)
class Implementation:
    """One way to run one op."""

    name: str
    functions: Any
    why_not: Callable[[Problem], list[str]] = lambda problem: []
    """Reasons why it cannot run this problem; none means that it can."""
    by_name_only: str | None = None
    """Why it is never chosen by itself."""
    meant_for: Callable[[Device], bool] = lambda device: True
    """Where being passed over is a fallback, which is logged."""
    promises_bits: bool = False


@functools.cache
def _log_once(message: str) -> None:
    log.warning(message)


def check_edges(shard: Shard | Cut) -> None:
    """Shards that cut a group of the softmax's tree keep no bits across TP degrees: logged once, refused if strict."""
    if shard.on_group_edges:
        return
    message = (
        f"{shard} do not end where the softmax's groups do for a vocabulary of "
        f"{shard.vocab_size}: results are right, but their bits differ from those at other TP degrees. "
        "rlk_jax.vocab_parallel.pad_lm_head makes shards that keep them"
    )
    if os.environ.get("RLK_STRICT") == "1":
        raise ValueError(f"RLK_STRICT=1: {message}")
    _log_once(message)


def _is_hopper(device: Device) -> bool:
    return device.compute_capability == "9.0"


def _is_for_triton(device: Device) -> bool:
    """On Hopper `mosaic` comes first, and refuses the same arguments."""
    return triton.is_ampere(device) and not _is_hopper(device)


_LOGITS_IN = (
    Implementation("mosaic", mosaic.LOGP, hopper.needs_hopper, meant_for=_is_hopper, promises_bits=True),
    Implementation("triton", triton.LOGP, triton.cannot_run, meant_for=_is_for_triton, promises_bits=True),
    Implementation("xla", xla.LOGP),
    Implementation(
        "deterministic",
        deterministic.LOGP,
        by_name_only="slow: promises bits, not speed",
        promises_bits=True,
    ),
    Implementation("reference", reference.LOGP, by_name_only="holds float32 logits: the gold of the tests"),
)
"""All that the ops over logits differ by is what they do with log-probabilities."""

_MOSAIC_WILL_DO = "mosaic is as fast and needs no compiler"

TABLE: dict[str, tuple[Implementation, ...]] = {
    "linear_logp": (
        Implementation(
            "mosaic",
            partitioned(mosaic.LINEAR_LOGP, check_edges),
            hopper.why_not,
            meant_for=_is_hopper,
            promises_bits=True,
        ),
        Implementation(
            "cuda",
            partitioned(cuda.LINEAR_LOGP, check_edges),
            cuda.why_not,
            by_name_only=_MOSAIC_WILL_DO,
            promises_bits=True,
        ),
        # By construction: one tile, unsplit chains over K, a cut of the vocabulary that only V decides, no atomics.
        Implementation(
            "triton",
            partitioned(triton.LINEAR_LOGP, check_edges),
            triton.why_not,
            meant_for=_is_for_triton,
            promises_bits=True,
        ),
        Implementation("xla", partitioned(xla.LINEAR_LOGP), xla.why_not),
        Implementation(
            "deterministic",
            partitioned(deterministic.LINEAR_LOGP, check_edges),
            by_name_only="slow: promises bits, not speed",
            promises_bits=True,
        ),
        Implementation(
            "reference",
            partitioned(reference.LINEAR_LOGP),
            reference.why_not,
            by_name_only="holds [N, V] logits: the gold of the tests",
        ),
    ),
    # Nothing here may stand in for another that does not promise bits itself.
    "det_gemm": (
        Implementation("mosaic", mosaic.DET_GEMM, hopper.needs_hopper, meant_for=_is_hopper, promises_bits=True),
        Implementation("cuda", cuda.DET_GEMM, cuda.cannot_run, by_name_only=_MOSAIC_WILL_DO, promises_bits=True),
        Implementation("deterministic", deterministic.det_gemm, promises_bits=True),
        Implementation("reference", reference.det_gemm, by_name_only="promises no bits: the gold of the tests"),
    ),
    "logp": _LOGITS_IN,
    "ratio_kl": _LOGITS_IN,
    "grpo_loss": _LOGITS_IN,
}
"""Implementations of each op, fastest first. A new kernel joins by one entry here."""


@dataclass(frozen=True)
class Decision:
    """What `explain` returns: the implementation that runs, and why each other one does not."""

    op: str
    choice: str
    reasons: dict[str, list[str]]
    by_name: tuple[str, ...]
    """The others that would run if `implementation=` named them."""
    device: Device
    numerics_version: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device.kind} runs {self.choice} (numerics version {self.numerics_version})"]
        return "\n".join(lines + [f"  not {name}: {'; '.join(why)}" for name, why in self.reasons.items()])


def device_of(arrays: Sequence[Any]) -> Device:
    """The device that holds the arguments; where that cannot be seen (inside jit), JAX's default device."""
    device: Any
    committed = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed]
    default = jax.config.jax_default_device
    if committed:
        device = next(iter(committed[0].sharding.addressable_devices))
    elif isinstance(default, jax.Device):
        device = default
    else:
        device = jax.devices(default)[0]
    return Device(device.platform, device.device_kind, getattr(device, "compute_capability", None))


def problem_of(op: str, operands: Sequence[Any], options: Any) -> Problem:
    """What dispatch sees of a call: `operands` are those given, the first one's last dimension is summed over."""
    operands = [x for x in operands if x is not None]
    dtypes = tuple(str(x.dtype) for x in operands)
    return Problem(op, device_of(operands), dtypes, operands[0].shape[-1], options)


def _reasons(problem: Problem, name: str) -> list[str]:
    """Why the implementation of this name cannot run; empty where it can."""
    found = [x for x in TABLE[problem.op] if x.name == name]
    return found[0].why_not(problem) if found else [f"{problem.op} has no such implementation in this release"]


def _all_reasons(problem: Problem) -> dict[str, list[str]]:
    return {name: _reasons(problem, name) for name in IMPLEMENTATIONS}


def _check_fallback(problem: Problem, chosen: Implementation) -> None:
    """A faster implementation meant for this device was passed over: logged once per reason, refused if strict."""
    for faster in TABLE[problem.op]:
        if faster is chosen:
            return
        if faster.by_name_only or not faster.meant_for(problem.device):
            continue
        message = f"{problem.op} runs {chosen.name} instead of {faster.name}: {'; '.join(faster.why_not(problem))}"
        if os.environ.get("RLK_STRICT") == "1" and problem.device.platform == "gpu":
            raise ValueError(f"RLK_STRICT=1: {message}")
        _log_once(message)


def choose(problem: Problem, implementation: str | None) -> Implementation:
    """The named implementation, or the fastest that can run; ValueError with the reasons where there is none.

    Nothing is asked of those that the choice does not depend on: to find a compiler takes a process.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}.")
    if implementation is not None and (reasons := _reasons(problem, implementation)):
        raise ValueError(f"{problem.op} cannot run {implementation!r} here: {'; '.join(reasons)}.")
    for candidate in TABLE[problem.op]:
        if implementation == candidate.name:
            return candidate
        if implementation is None and not candidate.by_name_only and not candidate.why_not(problem):
            _check_fallback(problem, candidate)
            return candidate
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in _all_reasons(problem).items() if why)
    raise ValueError(f"{problem.op} has no implementation for these arguments: {listed}.")


def explain(op: str, *args: Any, **kwargs: Any) -> Decision:
    """Which implementation `rlk_jax.<op>(*args, **kwargs)` would run and why not the others; runs nothing.

    Arrays may be `jax.ShapeDtypeStruct`. Raises ValueError as the op itself would, and for an op that does not exist.
    """
    if op not in (*TABLE, *COMPOSED):
        raise ValueError(f"unknown op {op!r}; the ops are {(*TABLE, *COMPOSED)}.")
    problem, implementation = importlib.import_module(f"rlk_jax.{op}").describe(*args, **kwargs)
    chosen = choose(problem, implementation)
    reasons = _all_reasons(problem)
    del reasons[chosen.name]
    others = {x.name: x for x in TABLE[problem.op] if x is not chosen and not reasons[x.name]}
    reasons |= {name: [x.by_name_only or f"{chosen.name} was chosen"] for name, x in others.items()}
    return Decision(op, chosen.name, reasons, tuple(others), problem.device, numerics_version[problem.op])


def promising(op: str, *args: Any, **kwargs: Any) -> str:
    """The fastest implementation that promises bits for the call `rlk_jax.<op>(*args, **kwargs)`, or the one it names.

    Raises ValueError where the named one promises none.
    """
    problem, named = importlib.import_module(f"rlk_jax.{op}").describe(*args, **kwargs)
    asked = (x for x in TABLE[op] if x.promises_bits and named in (None, x.name))
    found = next((x.name for x in asked if not x.why_not(problem)), None)
    if found is None:
        raise ValueError(f"{op} promises no bits with implementation={named!r} here.")
    return found
