"""The packages that are installed here."""

import importlib.metadata


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
