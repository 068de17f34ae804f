"""The gold standard of the tests: the plain definition on float32-upcast inputs. It stays this plain, and holds
`[N, V]` logits.
"""

import jax
import jax.numpy as jnp

from rlk_jax.core.gemm import plain_gemm
from rlk_jax.core.reference import values_of_logits
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.options import Gradients, HeadConfig, LinearLogpFunctions, Needs, Operands


def definition(config: HeadConfig, operands: Operands, tokens: Tokens) -> LinearLogp:
    """z = softcap(hidden·Wᵀ + bias) / temperature; logp = log_softmax(z)[target], lse, entropy = −Σ p·ln p."""
    is_padding = jnp.arange(config.vocab_size)[None] >= config.real_vocab_size
    weight = operands.weight.T if config.weight_layout == "vd" else operands.weight
    weight = jnp.where(is_padding, 0, weight.astype(jnp.float32))
    if operands.low_rank is not None:
        low_rank = operands.low_rank.T if config.weight_layout == "vd" else operands.low_rank
        weight = jnp.concatenate([weight, jnp.where(is_padding, 0, low_rank.astype(jnp.float32))])
    logits = jnp.matmul(operands.hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    if operands.bias is not None:
        logits = logits + jnp.where(is_padding, 0, operands.bias.astype(jnp.float32)[None])
    return values_of_logits(config, logits, tokens)


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[LinearLogp, None]:
    """The values of the whole head, which need no merging."""
    return definition(config, operands, tokens), None


def _merge(config: HeadConfig, values: LinearLogp, state: None) -> tuple[LinearLogp, None, None]:
    """The values as they are, because the head is whole."""
    return values, None, None


def _gradients(
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    residual: None,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    """JAX's own derivative of the definition, on the active rows."""
    operands = operands._replace(hidden=jnp.where(tokens.active[:, None], operands.hidden, 0))
    tokens = tokens._replace(temperature=jnp.where(tokens.active, tokens.temperature, 1))
    upstream = jax.tree.map(lambda g: jnp.where(tokens.active, g, 0), upstream)

    def values(operands: Operands) -> LinearLogp:
        logp, lse, entropy = definition(config, operands, tokens)
        return LinearLogp(logp, None if upstream.lse is None else lse, None if upstream.entropy is None else entropy)

    gradients = jax.vjp(values, operands)[1](upstream)[0]
    return Gradients(
        hidden=gradients.hidden if needs.hidden else None,
        weight=gradients.weight if needs.weight else None,
        bias=gradients.bias if needs.bias else None,
        low_rank=gradients.low_rank if needs.low_rank else None,
    )


REFERENCE = LinearLogpFunctions(_partials, _merge, _gradients, plain_gemm)
