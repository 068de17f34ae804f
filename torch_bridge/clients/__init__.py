"""The bridge inside the trainers of others: an object of theirs replaced by one on `linear_logp`, and put back."""

from typing import Any

from torch_bridge.clients import trl, verl
from torch_bridge.clients._seam import Seam

_SEAMS = {seam.library: seam for seam in (trl.SEAM, verl.SEAM)}
_originals: dict[str, Any] = {}
"""By library, of those the bridge is installed in."""


def install(name: str, *, implementation: str | None = None, memory_budget: int | None = None) -> None:
    """Has a trainer library compute its log-probabilities and entropies with `linear_logp`.

    Args:
      name: "trl" (GRPOTrainer and all others with a fused LM head) or "verl" (`use_fused_kernels`, impl_backend
        "triton"). Once more does no harm, and changes the options.
      implementation, memory_budget: as in `linear_logp`.

    Raises:
      ValueError: for a name that is no client's.
      RuntimeError: for a version of the library that the bridge does not know; nothing is changed then.
    """
    seam = _seam(name)
    seam.check_version()
    original = _originals.setdefault(name, seam.read())
    seam.write(seam.replacement(original, {"implementation": implementation, "memory_budget": memory_budget}))


def uninstall(name: str) -> None:
    """Puts back the library's own object, where the bridge is installed.

    Raises:
      ValueError: for a name that is no client's.
    """
    seam = _seam(name)
    if name in _originals:
        seam.write(_originals.pop(name))


def _seam(name: str) -> Seam:
    if name not in _SEAMS:
        raise ValueError(f"name must be one of {', '.join(map(repr, _SEAMS))}, got {name!r}.")
    return _SEAMS[name]
