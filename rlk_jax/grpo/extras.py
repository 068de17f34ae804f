"""Packages that come with an extra of rlk-jax. Where some are not installed, one line names them and the extra."""

import importlib.util
from collections.abc import Iterable

from rlk_jax.grpo.config import BadInput

MODEL_PACKAGES = ("flax", "safetensors", "tokenizers", "jinja2")
"""What `rlk_jax.models` imports, of the extra `grpo`."""
TRAINER_PACKAGES = (*MODEL_PACKAGES, "optax", "orbax.checkpoint", "matplotlib", "flatbuffers")
"""All of the extra `grpo`."""


def require_packages(packages: Iterable[str], *, extra: str) -> None:
    """Raise BadInput where packages are not installed. Importing them here would take long, and each one may fail in a
    way of its own.
    """
    if missing := [name for name in packages if not _is_installed(name)]:
        raise BadInput(f"not installed, of rlk-jax's extra `{extra}`: {', '.join(missing)}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The package that it is a part of is missing.
        return False
