"""The options of `linear_logp` that every adapter takes, checked when an adapter is put into a trainer."""

from typing import Any

from rlk_jax.core.checks import check_memory_budget
from rlk_jax.ops import OPS, explain


def checked_options(implementation: str | None, memory_budget: int | None) -> dict[str, Any]:
    """The options as `linear_logp` takes them.

    Raises ValueError for those that it does not take, and for an implementation that does not run here: on JAX's
    device, with bfloat16. The device is looked for only where an implementation is named.
    """
    if implementation is not None:
        typical: Any = OPS["linear_logp"].typical
        explain("linear_logp", *typical.arguments, implementation=implementation)
    check_memory_budget(memory_budget)
    return {"implementation": implementation, "memory_budget": memory_budget}
