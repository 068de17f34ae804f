"""The public door to dispatch: which implementations there are, and which of them a call runs.

The mechanism is in `rlk_jax.core.dispatch`; the ops and their implementations are listed by `rlk_jax.ops`.
"""

from rlk_jax.core.dispatch import IMPLEMENTATIONS, TABLE, CallFacts, Decision, Device, Implementation, choose, device_of
from rlk_jax.ops import explain, numerics_version, promising

__all__ = [
    "IMPLEMENTATIONS",
    "TABLE",
    "CallFacts",
    "Decision",
    "Device",
    "Implementation",
    "choose",
    "device_of",
    "explain",
    "numerics_version",
    "promising",
]
