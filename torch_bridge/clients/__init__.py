"""The bridge inside the trainers of others: an object of theirs replaced by one on `linear_logp`, and put back."""

from typing import Any

from torch_bridge.clients import trl, verl
from torch_bridge.clients._seam import Seam

_SEAMS = {seam.library: seam for seam in (trl.SEAM, verl.SEAM)}
_installed: dict[str, tuple[Any, Any]] = {}
"""By library, of those the bridge is installed in: its own object, and the bridge's."""


def install(name: str, *, implementation: str | None = None, memory_budget: int | None = None) -> None:
    """Has a trainer library compute its log-probabilities and entropies with `linear_logp`.

    Args:
      name: "trl" (GRPOTrainer and all others with a fused LM head) or "verl" (`use_fused_kernels`, impl_backend
        "triton"). Once more does no harm, and changes the options.
      implementation, memory_budget: as in `linear_logp`.

    Raises:
      ValueError: for a name that is no client's.
      RuntimeError: for a version of the library that the bridge does not know, and where someone has replaced the
        bridge's object since; nothing is changed then.
    """
    seam = _seam(name)
    seam.check_version()
    original = _original(seam) if name in _installed else seam.read()
    replacement = seam.replacement(original, {"implementation": implementation, "memory_budget": memory_budget})
    seam.write(replacement)
    _installed[name] = original, replacement


def uninstall(name: str) -> None:
    """Puts back the library's own object, where the bridge is installed.

    Raises:
      ValueError: for a name that is no client's.
      RuntimeError: where someone has replaced the bridge's object since; nothing is changed then.
    """
    seam = _seam(name)
    if name in _installed:
        seam.write(_original(seam))
        del _installed[name]


def _original(seam: Seam) -> Any:
    """The library's own object, where the bridge's stands in its place."""
    original, replacement = _installed[seam.library]
    if seam.read() is not replacement:
        raise RuntimeError(
            f"{seam.module}.{seam.name} is not the object that torch_bridge installed: what has replaced it must be "
            "removed first."
        )
    return original


def _seam(name: str) -> Seam:
    if name not in _SEAMS:
        raise ValueError(f"name must be one of {', '.join(map(repr, _SEAMS))}, got {name!r}.")
    return _SEAMS[name]
