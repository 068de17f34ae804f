"""Where a trainer library calls something that the bridge can stand for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from sys import modules
from typing import Any


@dataclass(frozen=True)
class Seam:
    """One object of a library, and what makes the bridge's of it."""

    library: str
    versions: tuple[str, ...]
    """major.minor of those whose source was read for `replacement`."""
    module: str
    name: str
    importers: tuple[str, ...]
    """Modules that bind the same name when they are imported."""
    replacement: Callable[[Any, dict[str, Any]], Any]
    """Of the library's own object and options of `linear_logp`."""

    def check_version(self) -> None:
        """A library that changes may call the object otherwise."""
        try:
            found = metadata.version(self.library)
        except metadata.PackageNotFoundError:
            found = "none installed"
        if ".".join(found.split(".")[:2]) not in self.versions:
            known = " and ".join(self.versions)
            raise RuntimeError(f"torch_bridge knows {self.library} {known}, found {found}: nothing was changed.")

    def read(self) -> dict[str, Any]:
        """The object that each module of the library calls now."""
        import_module(self.module)
        return {name: getattr(modules[name], self.name) for name in (self.module, *self.importers) if name in modules}

    def write(self, objects: Mapping[str, Any]) -> None:
        """An object for each module, as `read` gives them."""
        for module, x in objects.items():
            setattr(modules[module], self.name, x)
