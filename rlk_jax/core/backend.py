"""Whether JAX can start a backend on this machine, and what is said where it cannot."""

import jax


def start_error() -> Exception | None:
    """What JAX raises here whenever it is asked for its devices; None where it has some."""
    try:
        jax.devices()
    except Exception as error:  # Each plugin of JAX fails in its own way.
        return error
    return None


def is_start_error(problem: Exception) -> bool:
    """Whether a problem is the one that JAX raises here whenever something needs its devices."""
    error = start_error()
    return error is not None and (type(error), str(error)) == (type(problem), str(problem))


def not_started(error: Exception) -> str:
    """The sentence that says why JAX cannot start, without its full stop. Some errors of JAX have no message."""
    return f"JAX cannot start a backend here: {str(error) or type(error).__name__}"
