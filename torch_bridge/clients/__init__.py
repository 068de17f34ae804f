"""The bridge inside other trainers: one object of the trainer library is replaced by one that calls `linear_logp`."""

from typing import Any

from rlk_jax import dispatch
from rlk_jax.core.checks import check_memory_budget, check_one_of
from torch_bridge.clients import trl, verl
from torch_bridge.clients._patch_point import PatchPoint

_PATCH_POINTS = {point.library: point for point in (trl.PATCH_POINT, verl.PATCH_POINT)}
_installed: dict[str, tuple[dict[str, Any], Any]] = {}
"""For each library that the bridge is installed in: the original object of each of its modules, and the replacement."""


def install(name: str, *, implementation: str | None = None, memory_budget: int | None = None) -> None:
    """Has a trainer library compute its log-probabilities and entropies with `linear_logp`.

    Args:
      name: "trl" (GRPOTrainer and all others with a fused LM head) or "verl" (`use_fused_kernels`, impl_backend
        "triton"). A second call for a library changes the options.
      implementation, memory_budget: as in `linear_logp`.

    Raises:
      ValueError: for an unknown name, and for options that `linear_logp` does not take.
      RuntimeError: for a version of the library that the bridge does not know, and where other code has replaced the
        bridge's object since; nothing is changed then.
    """
    patch_point = _patch_point_of(name)
    if implementation is not None:
        check_one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    check_memory_budget(memory_budget)
    patch_point.check_version()
    originals = _originals(patch_point) if name in _installed else patch_point.read()
    replacement = patch_point.replacement(
        originals[patch_point.module], {"implementation": implementation, "memory_budget": memory_budget}
    )
    patch_point.write(dict.fromkeys(originals, replacement))
    _installed[name] = originals, replacement


def uninstall(name: str) -> None:
    """Puts back the original object of each module of the library; does nothing where the bridge is not installed.

    Raises:
      ValueError: for an unknown name.
      RuntimeError: where other code has replaced the bridge's object since; nothing is changed then.
    """
    patch_point = _patch_point_of(name)
    if name in _installed:
        patch_point.write(_originals(patch_point))
        del _installed[name]


def _originals(patch_point: PatchPoint) -> dict[str, Any]:
    """The original object of each module, where the bridge is installed."""
    originals, replacement = _installed[patch_point.library]
    found = patch_point.read()
    for module, x in found.items():
        if x is not replacement:
            raise RuntimeError(
                f"{module}.{patch_point.name} is not the object that torch_bridge installed: what has replaced it "
                "must be removed first."
            )
    # A module that was imported after `install` has bound the bridge's object: its original is that of the home module.
    return {module: originals.get(module, originals[patch_point.module]) for module in found}


def _patch_point_of(name: str) -> PatchPoint:
    if not isinstance(name, str) or name not in _PATCH_POINTS:
        raise ValueError(f"name must be one of {', '.join(map(repr, _PATCH_POINTS))}, got {name!r}.")
    return _PATCH_POINTS[name]
