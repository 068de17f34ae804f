"""The object of a trainer library that the bridge replaces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from sys import modules
from typing import Any


@dataclass(frozen=True)
class PatchPoint:
    """One object of a library, and how its replacement is made."""

    library: str
    versions: tuple[str, ...]
    """The major.minor versions whose source was read when `replacement` was written."""
    install: str
    """The command that installs one of these versions."""
    module: str
    """The home of the object."""
    name: str
    """The name of the object in its module."""
    importers: tuple[str, ...]
    """Other modules that bind the object under the same name when they are imported."""
    replacement: Callable[[Any, dict[str, Any]], Any]
    """Makes the replacement from the library's own object and the options of `linear_logp`."""

    def checked_version(self) -> str:
        """The version of the library. Raises RuntimeError for one that may call the object in another way."""
        try:
            found = metadata.version(self.library)
        except metadata.PackageNotFoundError:
            found = "none installed"
        if ".".join(found.split(".")[:2]) not in self.versions:
            known = " and ".join(self.versions)
            raise RuntimeError(
                f"torch_bridge knows {self.library} {known}, found {found}: nothing was changed. "
                f"To install what it knows: {self.install}"
            )
        return found

    def read(self) -> dict[str, Any]:
        """The object that each imported module of the library calls now, by the name of the module."""
        import_module(self.module)
        return {name: getattr(modules[name], self.name) for name in (self.module, *self.importers) if name in modules}

    def write(self, objects: Mapping[str, Any]) -> None:
        """Give each module its object; `objects` is a mapping like that of `read`."""
        for module, x in objects.items():
            setattr(modules[module], self.name, x)
