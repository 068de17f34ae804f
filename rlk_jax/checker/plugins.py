"""The only place where rlk_jax reaches torch_bridge.

rlk_jax needs no torch, and torch_bridge imports rlk_jax. The checker can check torch_bridge where PyTorch is installed,
so it looks torch_bridge up here, by name and when it is asked for. Nothing else in rlk_jax imports torch_bridge.
"""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from rlk_jax.checker.options import Unusable
from rlk_jax.core.packages import need_of


def has_torch() -> bool:
    """Whether PyTorch is installed, which torch_bridge needs."""
    return importlib.util.find_spec("torch") is not None


def bridge_has(op: str) -> bool:
    """Whether torch_bridge can give this op here. Each of its ops has a module of its own; none is imported, for torch
    would be, which takes seconds.
    """
    found = importlib.util.find_spec("torch_bridge")
    assert found is not None, "it comes in one package with rlk_jax"
    return has_torch() and op in {x.name for x in pkgutil.iter_modules(found.submodule_search_locations)}


def bridge(part: str = "") -> ModuleType:
    """The package torch_bridge, or the module of this name in it. Raises `Unusable` where PyTorch is missing."""
    if not has_torch():
        raise Unusable(f"torch_bridge {need_of(['PyTorch'], extra='torch')}")
    return importlib.import_module(f"torch_bridge.{part}" if part else "torch_bridge")
