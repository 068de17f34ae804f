"""A package that is not installed is bad input: one line names it, and the extra that it comes with."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlk_jax.grpo.config import BadInput

_EXTRA_PACKAGES = {"flax", "safetensors", "tokenizers", "jinja2", "optax", "orbax", "matplotlib"}
"""What the extra `grpo` installs."""


@contextmanager
def missing_extra_is_bad_input() -> Iterator[None]:
    """Turn an import of a package of the extra `grpo` that is not installed into BadInput."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA_PACKAGES:
            raise
        raise BadInput(f"{error.name} is not installed: it comes with rlk-jax's extra `grpo`") from error
