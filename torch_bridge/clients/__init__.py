"""The bridge inside the trainers of others: an object of theirs replaced by one on `linear_logp`, and put back."""

from typing import Any

from rlk_jax import dispatch
from rlk_jax.core.checks import check_memory_budget, one_of
from torch_bridge.clients import trl, verl
from torch_bridge.clients._seam import Seam

_SEAMS = {seam.library: seam for seam in (trl.SEAM, verl.SEAM)}
_installed: dict[str, tuple[dict[str, Any], Any]] = {}
"""By library, of those the bridge is installed in: the object that each of its modules had, and the bridge's."""


def install(name: str, *, implementation: str | None = None, memory_budget: int | None = None) -> None:
    """Has a trainer library compute its log-probabilities and entropies with `linear_logp`.

    Args:
      name: "trl" (GRPOTrainer and all others with a fused LM head) or "verl" (`use_fused_kernels`, impl_backend
        "triton"). Once more does no harm, and changes the options.
      implementation, memory_budget: as in `linear_logp`.

    Raises:
      ValueError: for a name that is no client's, and for options that `linear_logp` does not take.
      RuntimeError: for a version of the library that the bridge does not know, and where someone has replaced the
        bridge's object since; nothing is changed then.
    """
    seam = _seam(name)
    if implementation is not None:
        one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    check_memory_budget(memory_budget)
    seam.check_version()
    originals = _originals(seam) if name in _installed else seam.read()
    replacement = seam.replacement(
        originals[seam.module], {"implementation": implementation, "memory_budget": memory_budget}
    )
    seam.write(dict.fromkeys(originals, replacement))
    _installed[name] = originals, replacement


def uninstall(name: str) -> None:
    """Puts back what each module of the library had, where the bridge is installed.

    Raises:
      ValueError: for a name that is no client's.
      RuntimeError: where someone has replaced the bridge's object since; nothing is changed then.
    """
    seam = _seam(name)
    if name in _installed:
        seam.write(_originals(seam))
        del _installed[name]


def _originals(seam: Seam) -> dict[str, Any]:
    """What each module had, where the bridge's object stands in its place."""
    originals, replacement = _installed[seam.library]
    found = seam.read()
    for module, x in found.items():
        if x is not replacement:
            raise RuntimeError(
                f"{module}.{seam.name} is not the object that torch_bridge installed: what has replaced it must be "
                "removed first."
            )
    # A module that was imported since has bound the bridge's.
    return {module: originals.get(module, originals[seam.module]) for module in found}


def _seam(name: str) -> Seam:
    if not isinstance(name, str) or name not in _SEAMS:
        raise ValueError(f"name must be one of {', '.join(map(repr, _SEAMS))}, got {name!r}.")
    return _SEAMS[name]
