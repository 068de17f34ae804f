"""The bridge inside other trainers: objects of the trainer library are replaced by ones that call the bridge's ops."""

from typing import Any

from rlk_jax.clients.options import checked_options
from rlk_jax.core.dispatch import log
from torch_bridge.clients import trl, verl
from torch_bridge.clients._patch_point import PatchPoint

_PATCH_POINTS: dict[str, tuple[PatchPoint, ...]] = {"trl": trl.PATCH_POINTS, "verl": (verl.PATCH_POINT,)}
_installed: dict[str, list[tuple[dict[str, Any], Any]]] = {}
"""For each library that the bridge is installed in, and each of its patch points: the original object of each module,
and the replacement.
"""


def install(name: str, *, implementation: str | None = None, memory_budget: int | None = None) -> None:
    """Has a trainer library compute its log-probabilities and entropies with `linear_logp`, and its divergences from a
    teacher with `linear_kl`. A line of the logger "rlk_jax" says so, of level INFO.

    Args:
      name: "trl" (GRPOTrainer and all others with a fused LM head, and DistillationTrainer) or "verl"
        (`use_fused_kernels`, impl_backend "triton"). A second call for a library changes the options.
      implementation, memory_budget: as in `linear_logp`.

    Raises:
      ValueError: for an unknown name, for options that `linear_logp` does not take, and for an implementation that
        does not run here: on JAX's device, with bfloat16. One that `linear_kl` has not raises where that is called.
      RuntimeError: for a version of the library that the bridge does not know, and where other code has replaced the
        bridge's object since; nothing is changed then.
    """
    patch_points = _patch_points_of(name)
    options = checked_options(implementation, memory_budget)
    version = patch_points[0].checked_version()
    found = _originals(name) if name in _installed else [point.read() for point in patch_points]
    installed = []
    for point, originals in zip(patch_points, found, strict=True):
        replacement = point.replacement(originals[point.module], options)
        point.write(dict.fromkeys(originals, replacement))
        installed.append((originals, replacement))
    _installed[name] = installed
    log.info("torch_bridge: %s %s computes log-probs with linear_logp", name, version)


def uninstall(name: str) -> None:
    """Puts back the original object of each module of the library; does nothing where the bridge is not installed.

    Raises:
      ValueError: for an unknown name.
      RuntimeError: where other code has replaced the bridge's object since; nothing is changed then.
    """
    patch_points = _patch_points_of(name)
    if name in _installed:
        for point, originals in zip(patch_points, _originals(name), strict=True):
            point.write(originals)
        del _installed[name]


def _originals(name: str) -> list[dict[str, Any]]:
    """The original object of each module, for each patch point of a library that the bridge is installed in."""
    return [_originals_of(*x) for x in zip(_PATCH_POINTS[name], *zip(*_installed[name], strict=True), strict=True)]


def _originals_of(patch_point: PatchPoint, originals: dict[str, Any], replacement: Any) -> dict[str, Any]:
    found = patch_point.read()
    for module, x in found.items():
        if x is not replacement:
            raise RuntimeError(
                f"{module}.{patch_point.name} is not the object that torch_bridge installed: what has replaced it "
                "must be removed first."
            )
    # A module that was imported after `install` has bound the bridge's object: its original is that of the home module.
    return {module: originals.get(module, originals[patch_point.module]) for module in found}


def _patch_points_of(name: str) -> tuple[PatchPoint, ...]:
    if not isinstance(name, str) or name not in _PATCH_POINTS:
        raise ValueError(f"name must be one of {', '.join(map(repr, _PATCH_POINTS))}, got {name!r}.")
    return _PATCH_POINTS[name]
