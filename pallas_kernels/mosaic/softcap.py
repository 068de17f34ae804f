"""The softcap of logits, softcap·tanh(x / softcap), as all kernels that read or write logits compute it."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import LOG2_E

Array = jax.Array
_LARGE_SOFTCAP = 64.0
"""With softcaps c above this, 1 − exp(−2x/c) loses digits of small logits that matter: a series computes those."""


def softcapped(values: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """softcap·tanh(values / softcap) and its derivative, or the values and None without a softcap.

    With e = exp(−2x/c) and q = (1 + e)^(−1/2), tanh(x/c) is (1 − e)·q² and the derivative is 4·e·q⁴. The exponent of e
    is bounded, so that e stays finite. The hardware's own tanh is not accurate enough.
    """
    if softcap is None:
        return values, None
    share = values * (1 / softcap)
    e = jnp.exp2(jnp.minimum(share * (-2 * LOG2_E), 60.0))
    root = lax.rsqrt(1 + e)
    inverse = root * root
    # In this order the compiler keeps few values alive: other orders spill registers in the backward.
    capped = (1 - e) * (inverse * softcap)
    if softcap > _LARGE_SOFTCAP:
        square = share * share
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315)))
        capped = jnp.where(jnp.abs(share) < 0.2, values * series, capped)
    return capped, (e * inverse) * (4 * inverse)
