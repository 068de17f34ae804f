"""Packages that come with an extra of rlk-jax. Where some are not installed, one line names them and the extra."""

from collections.abc import Iterable

from rlk_jax.core.packages import MODEL_PACKAGES, missing_packages, need_of
from rlk_jax.grpo.config import BadInput

TRAINER_PACKAGES = (*MODEL_PACKAGES, "optax", "orbax.checkpoint", "matplotlib", "flatbuffers")
"""All of the extra `grpo`."""


def require_packages(packages: Iterable[str], *, extra: str) -> None:
    """Raise BadInput where packages are not installed."""
    if missing := missing_packages(packages):
        raise BadInput(f"the command {need_of(missing, extra=extra)}")
