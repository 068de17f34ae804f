"""Which implementation of an op runs for these arguments on this device, and why the others do not.

This module is the mechanism and names no op: each op's `implementations.py` has its rows, and `rlk_jax.ops` enters
them into `TABLE`. The choice may depend on vocabulary, hidden size, dtypes, options and device, never on the number of
tokens, so that a row keeps its bits in any batch.
"""

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

log = logging.getLogger("rlk_jax")

IMPLEMENTATIONS = ("mosaic", "cuda", "triton", "xla", "deterministic", "reference")
"""Every name that `implementation=` takes, fastest first."""


@dataclass(frozen=True)
class Device:
    """Where the arguments live: a JAX platform ("cpu", "gpu", "tpu") and, on NVIDIA GPUs, the compute capability
    ("9.0").
    """

    platform: str
    kind: str
    compute_capability: str | None = None


@dataclass(frozen=True)
class CallFacts:
    """What an implementation may look at when it says whether it can run: no fact that changes with the batch."""

    op: str
    device: Device
    dtypes: tuple[str, ...]
    dim: int
    """The last dimension of the first operand, which the op sums over."""
    config: Any
    """The op's own static facts."""


@dataclass(frozen=True)
class Implementation:
    """One way to run one op: a row of the op's table."""

    name: str
    functions: Any
    """What the op calls to run it; its type is the op's own."""
    obstacles: Callable[[CallFacts], list[str]] = lambda facts: []
    """A function that gives everything that keeps it from running a call; an empty list means that it can."""
    by_name_only: str | None = None
    """Why it runs only where `implementation=` names it; None where dispatch may choose it."""
    meant_for: Callable[[Device], bool] = lambda device: True
    """Whether it should run on a device. Passing it over there is a fallback, which is logged."""
    promises_bits: bool = False
    """Whether it keeps the op's promise of the same bits; the op's page in docs/ has the whole contract."""
    skips_padding: bool = False
    """Whether rows that are not active cost it memory alone, so that a caller may pad to much more than it has."""


TABLE: dict[str, Sequence[Implementation]] = {}
"""The implementations of each op, fastest first."""


@dataclass(frozen=True)
class TypicalCall:
    """A call of one op as models in use make it. `rlk doctor` tells which implementation would run it."""

    text: str
    """The call in a few words."""
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def log_once(message: str) -> None:
    """Logs a warning, once per process and message."""
    log.warning(message)


def refuse_if_strict(message: str, *, applies: bool = True) -> None:
    """Raises ValueError where RLK_STRICT=1 and the case `applies`; logs the message once otherwise."""
    if applies and os.environ.get("RLK_STRICT") == "1":
        raise ValueError(f"RLK_STRICT=1: {message}")
    log_once(message)


@dataclass(frozen=True)
class Decision:
    """What `explain` returns: the implementation that runs, and why each other one does not."""

    op: str
    choice: str
    reasons: dict[str, list[str]]
    by_name: tuple[str, ...]
    """The other implementations that would run if `implementation=` named them."""
    device: Device
    numerics_version: int
    plan: str | None = None
    """How the implementation goes about it, and why; None where there is one way alone."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device.kind} runs {self.choice} (numerics version {self.numerics_version})"]
        lines += [] if self.plan is None else [f"  {self.plan}"]
        return "\n".join(lines + [f"  not {name}: {'; '.join(why)}" for name, why in self.reasons.items()])


_compiled_for: jax.Device | None = None


@contextlib.contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """Have what is traced inside be for this device, which need not be here, where arguments do not say where they are.

    JAX may take what it traced outside again: a process should trace for one kind of device alone.
    """
    global _compiled_for
    before, _compiled_for = _compiled_for, device
    try:
        yield
    finally:
        _compiled_for = before


def traced_device() -> jax.Device:
    """The device that programs are traced for where their arguments do not say it: JAX's default device."""
    default = jax.config.jax_default_device
    if _compiled_for is not None:
        return _compiled_for
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def device_of(arrays: Sequence[Any]) -> Device:
    """The device that holds the arguments; where that cannot be seen (inside jit), the one that is traced for."""
    committed = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed]
    device: Any = next(iter(committed[0].sharding.addressable_devices)) if committed else traced_device()
    return Device(device.platform, device.device_kind, getattr(device, "compute_capability", None))


def facts_of(op: str, operands: Sequence[Any], config: Any) -> CallFacts:
    """What dispatch sees of a call. `operands` are its arrays, None where one was not given; the op sums over the last
    dimension of the first one.
    """
    operands = [x for x in operands if x is not None]
    dtypes = tuple(str(x.dtype) for x in operands)
    return CallFacts(op, device_of(operands), dtypes, operands[0].shape[-1], config)


def bound_arguments(op: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `function` by their names, defaults included. Raises TypeError for those that it does
    not take, in the name of the op that the user called.
    """
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op}() {error}") from None
    call.apply_defaults()
    return call.arguments


def _obstacles(facts: CallFacts, name: str) -> list[str]:
    """Why the implementation of this name cannot run; empty where it can."""
    found = [x for x in TABLE[facts.op] if x.name == name]
    return found[0].obstacles(facts) if found else [f"{facts.op} has no such implementation in this release"]


def _all_obstacles(facts: CallFacts) -> dict[str, list[str]]:
    """Why each implementation cannot run, by its name; an empty list where it can."""
    return {name: _obstacles(facts, name) for name in IMPLEMENTATIONS}


def _check_fallback(facts: CallFacts, chosen: Implementation) -> None:
    """Logs, once per reason, that a faster implementation meant for this device was passed over; strict mode raises."""
    for faster in TABLE[facts.op]:
        if faster is chosen:
            return
        if faster.by_name_only or not faster.meant_for(facts.device):
            continue
        message = f"{facts.op} runs {chosen.name} instead of {faster.name}: {'; '.join(faster.obstacles(facts))}"
        refuse_if_strict(message, applies=facts.device.platform == "gpu")


def choose(facts: CallFacts, implementation: str | None) -> Implementation:
    """The named implementation, or the fastest that can run; ValueError with the reasons where there is none.

    Only implementations that the choice depends on are asked for obstacles, because finding a compiler takes a process.
    """
    is_name = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not is_name:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}.")
    if implementation is not None and (reasons := _obstacles(facts, implementation)):
        raise ValueError(f"{facts.op} cannot run {implementation!r} here: {'; '.join(reasons)}.")
    for candidate in TABLE[facts.op]:
        if implementation == candidate.name:
            return candidate
        if implementation is None and not candidate.by_name_only and not candidate.obstacles(facts):
            _check_fallback(facts, candidate)
            return candidate
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in _all_obstacles(facts).items() if why)
    raise ValueError(f"{facts.op} has no implementation for these arguments: {listed}.")


def decide(op: str, facts: CallFacts, implementation: str | None, numerics_version: int) -> Decision:
    """The implementation that `choose` would choose for a call of `op`, and why each other one would not run."""
    chosen = choose(facts, implementation)
    reasons = _all_obstacles(facts)
    del reasons[chosen.name]
    others = {x.name: x for x in TABLE[facts.op] if x is not chosen and not reasons[x.name]}
    reasons |= {name: [x.by_name_only or f"{chosen.name} was chosen"] for name, x in others.items()}
    return Decision(op, chosen.name, reasons, tuple(others), facts.device, numerics_version)


def first_promising(facts: CallFacts, implementation: str | None) -> str:
    """The fastest implementation that promises bits for this call, or the named one.

    Raises ValueError where the named one promises none.
    """
    asked = (x for x in TABLE[facts.op] if x.promises_bits and implementation in (None, x.name))
    found = next((x.name for x in asked if not x.obstacles(facts)), None)
    if found is None:
        raise ValueError(f"{facts.op} promises no bits with implementation={implementation!r} here.")
    return found
