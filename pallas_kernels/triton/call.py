"""Calls Triton kernels through jax-triton. Only this file knows how jax-triton's supported versions differ."""

import functools
import importlib.metadata
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

Array = jax.Array
_NONE: Mapping[int, int] = {}
_PINNED = {"enable_fp_fusion": True, "ptx_version": 88}
"""Options that do not follow triton's defaults. triton 3.10 changes the default of the first; the second keeps PTX
readable for CUDA 12.9 and later, not for the newest CUDA alone."""
PAIRS = "jax-triton 0.3.1 with triton 3.6, or jax-triton 0.4.1 with triton 3.7 or later"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pair() -> str:
    """The names and versions of jax-triton and triton as they are installed."""
    return " with ".join(f"{name} {_version(name) or '(not installed)'}" for name in ("jax-triton", "triton"))


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(x) for x in version.groups())


@functools.cache
def why_missing() -> str | None:
    """Why no kernel can be compiled here; None where kernels can. It imports neither jax-triton nor triton."""
    bridge, compiler = (re.match(r"(\d+)\.(\d+)", _version(name) or "") for name in ("jax-triton", "triton"))
    if bridge and compiler:
        needed = (3, 7) if _numbers(bridge) >= (0, 4) else (3, 6)
        if _numbers(bridge) >= (0, 3) and _numbers(compiler) >= needed:
            return None
    return f"needs {PAIRS}; found {pair()}: {what_installs_a_pair(_version('triton'))}"


def what_installs_a_pair(triton: str | None) -> str:
    """The command that installs a pair, by the extra of rlk-jax. It keeps a triton 3.6 that is here: torch pins it."""
    bridge = "jax-triton<0.4" if re.match(r"3\.6(\D|$)", triton or "") else "jax-triton>=0.4"
    return f'pip install "rlk-jax[triton]" "{bridge}"'


def launch(
    kernel: Any,
    arguments: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] = _NONE,
) -> tuple[Array, ...]:
    """Run `kernel(*arguments, *outputs, **constants)` on `grid` programs and return the outputs.

    aliases maps the index of an argument to the index of the output that takes its memory. The kernel's parameter for
    such an output must come behind those of all other outputs; it is None under jax-triton 0.4.1 and the argument's own
    address under 0.3.1.
    """
    import jax_triton

    options: dict[str, Any] = {"grid": (grid,), "num_warps": num_warps, "num_stages": num_stages, **constants}
    if "out_shape" in inspect.signature(jax_triton.triton_call).parameters:
        options |= {"out_shape": tuple(outputs), "enable_fp_fusion": True}
    else:
        options |= {"out_type": tuple(outputs), "backend_options": _PINNED}
        names = [p.name for p in kernel.params if not p.is_constexpr]
        first = len(arguments) + len(outputs) - len(aliases)
        options |= dict.fromkeys(names[first:])
    with warnings.catch_warnings():
        # jax-triton 0.4.1 deprecates aliases in favour of references, which may not vary over a mesh axis in shard_map.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(*arguments, kernel=kernel, input_output_aliases=dict(aliases), **options)
