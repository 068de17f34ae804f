"""The packages that are installed here."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable

MODEL_PACKAGES = ("flax", "safetensors", "tokenizers", "jinja2")
"""What `rlk_jax.models` imports, of the extra `grpo`."""


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages(packages: Iterable[str]) -> list[str]:
    """Those of the packages that are not installed. None is imported: that would take long, and each may fail in a way
    of its own.
    """
    return [name for name in packages if not _is_installed(name)]


def require_extra(module: str, packages: Iterable[str], *, extra: str) -> None:
    """Raise ImportError where packages that a module imports are not installed; an extra of rlk-jax brings them."""
    if missing := missing_packages(packages):
        raise ImportError(f"{module} {need_of(missing, extra=extra)}")


def need_of(missing: Iterable[str], *, extra: str) -> str:
    """What somebody is told who lacks these parts of an extra of rlk-jax, behind the name of what needs them."""
    return f"needs {', '.join(missing)}, of rlk-jax's extra `{extra}`: {install_command(extra)}"


def install_command(extra: str) -> str:
    """The command that installs an extra of rlk-jax."""
    return f'pip install "rlk-jax[{extra}]"'


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The package that it is a part of is missing.
        return False
