"""Programs of a run that are kept on disk, so that the next process neither traces nor lowers them."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding
from jaxtyping import Array

from rlk_jax.core import program_cache


class _Loaded(NamedTuple):
    """A program of flat arguments, and the names of its results behind the states."""

    jitted: Any
    names: Sequence[str]
    """They are known once the program was traced or found."""


@dataclass(frozen=True)
class KeptProgram:
    """A jitted `function(states, *arrays)` that returns named arrays, and new states in the place of the given ones.

    On one device it is kept as `rlk_jax.core.program_cache` has it, where Flax's states cannot be arguments: it takes
    and gives their leaves. On several devices it is traced and lowered in every process.
    """

    function: Callable[..., tuple[Any, Mapping[str, Array]]]
    """It returns None in the place of states that stay as they are."""
    key: Hashable
    """All that the program is made from, beside its arguments' shapes and the project's sources."""
    states: Sequence[Sharding]
    """How the leaves of new states lie; none where there are no new states."""
    named: Sharding
    """How all named arrays lie."""
    _loaded: dict[Any, _Loaded] = field(default_factory=dict)

    def __call__(self, states: Any, *arrays: Any) -> tuple[Any, dict[str, Array]]:
        """The new states, or None, and the named arrays. The given states are donated where there are new ones."""
        loaded, leaves = self._program(states, arrays)
        return self._results(loaded, states, loaded.jitted(*leaves))

    def lower(self, states: Any, *arrays: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes; calls with such arguments compile nothing else."""
        loaded, leaves = self._program(states, arrays)
        return loaded.jitted.lower(*leaves)

    def shapes(self, states: Any, *arrays: Any) -> tuple[Any, dict[str, Any]]:
        """The shapes of what a call returns."""
        loaded, leaves = self._program(states, arrays)
        return self._results(loaded, states, jax.eval_shape(loaded.jitted, *leaves))

    def _results(self, loaded: _Loaded, states: Any, flat: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        leaves, named = flat
        new = jax.tree.unflatten(jax.tree.structure(states), leaves) if self.states else None
        return new, dict(zip(loaded.names, named, strict=True))

    def _program(self, states: Any, arrays: Sequence[Any]) -> tuple[_Loaded, list[Any]]:
        leaves, tree = jax.tree.flatten((states, *arrays))
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        made_for = tree, *[(x.shape, str(x.dtype)) for x in specs]
        if made_for not in self._loaded:
            self._loaded[made_for] = self._load(tree, specs, len(jax.tree.leaves(states)))
        return self._loaded[made_for], leaves

    def _load(self, tree: Any, specs: Sequence[jax.ShapeDtypeStruct], count: int) -> _Loaded:
        make = functools.partial(self._made, tree)
        devices: list[Any] = list(self.named.device_set)
        if len(devices) > 1:
            made = make()
        else:
            (device,), key = devices, (self.function.__qualname__, self.key)
            # A run that goes on finds what XLA compiled for it, whatever is kept now.
            made, _ = program_cache.kept(key, specs, device, make, always_exports=device.platform == "gpu")

        def flat(*leaves: Array) -> tuple[Sequence[Array], Sequence[Array]]:
            return made.function(*leaves)

        flat.__name__ = self.function.__name__  # What was compiled is kept by this name.
        shardings = (list(self.states), self.named)
        donated = range(count) if self.states else ()
        return _Loaded(jax.jit(flat, out_shardings=shardings, donate_argnums=tuple(donated)), made.facts)

    def _made(self, tree: Any) -> program_cache.Made:
        names: list[str] = []

        def flat(*leaves: Array) -> tuple[list[Array], list[Array]]:
            states, named = self.function(*jax.tree.unflatten(tree, leaves))
            names[:] = sorted(named)
            return jax.tree.leaves(states), [named[name] for name in names]

        return program_cache.Made(flat, names)
