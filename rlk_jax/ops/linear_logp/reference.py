"""The gold standard of the tests: the plain definition on float32-upcast inputs. It stays this plain, and holds
`[N, V]` logits.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from rlk_jax.core.gemm import plain_gemm
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.reference import scaled_logits, values_of_logits
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.options import LinearLogpFunctions, RankingFunctions
from rlk_jax.ops.linear_logp.ranking import NO_TOKEN, BestColumns


def _raw_logits(config: HeadConfig, operands: Operands) -> jax.Array:
    """hidden·Wᵀ + bias."""
    is_padding = jnp.arange(config.vocab_size)[None] >= config.real_vocab_size
    weight = operands.weight.T if config.weight_layout == "vd" else operands.weight
    weight = jnp.where(is_padding, 0, weight.astype(jnp.float32))
    if operands.low_rank is not None:
        low_rank = operands.low_rank.T if config.weight_layout == "vd" else operands.low_rank
        weight = jnp.concatenate([weight, jnp.where(is_padding, 0, low_rank.astype(jnp.float32))])
    logits = jnp.matmul(operands.hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    if operands.bias is not None:
        logits = logits + jnp.where(is_padding, 0, operands.bias.astype(jnp.float32)[None])
    return logits


def definition(config: HeadConfig, operands: Operands, tokens: Tokens) -> LinearLogp:
    """z = softcap(hidden·Wᵀ + bias) / temperature; logp = log_softmax(z)[target], lse, entropy = −Σ p·ln p."""
    return values_of_logits(config, _raw_logits(config, operands), tokens)


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[LinearLogp, None]:
    """The values of the whole head, which need no merging, lse among them."""
    return definition(replace(config, return_lse=True), operands, tokens), None


def _merge(config: HeadConfig, values: LinearLogp, state: None) -> tuple[LinearLogp, jax.Array | None, None]:
    """The values that are asked for, as they are, because the head is whole; and lse, for a ranking."""
    return values if config.return_lse else values._replace(lse=None), values.lse, None


def _gradients(
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    lse: jax.Array,
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


def _best(
    config: HeadConfig, operands: Operands, tokens: Tokens, state: None, lse: jax.Array, targets: jax.Array | None
) -> BestColumns:
    """The first of all columns in descending order; logits of −inf stand behind all others, and are no token's."""
    wanted = config.ranking
    assert wanted is not None
    logits = scaled_logits(config, _raw_logits(config, operands), tokens)
    order = jnp.argsort(logits, axis=1, stable=True, descending=True).astype(jnp.int32)
    before = jnp.argmax(order == tokens.target_ids[:, None], axis=1).astype(jnp.int32)
    possible = jnp.sum(logits > -jnp.inf, axis=1, dtype=jnp.int32)
    first = order[:, : wanted.top_k or 0]
    largest = jnp.take_along_axis(logits, first, axis=1)
    return BestColumns(
        None if wanted.top_k is None else largest,
        None if wanted.top_k is None else jnp.where(largest > -jnp.inf, first, NO_TOKEN),
        jnp.minimum(before, possible) if wanted.has_target_rank else None,
    )


def _logps_of_lse(config: HeadConfig, tokens: Tokens, lse: jax.Array, logits: jax.Array) -> jax.Array:
    """The log-probs of logits `[N, k]`."""
    return logits - lse[:, None]


REFERENCE = LinearLogpFunctions(
    _partials, _merge, _gradients, plain_gemm, of_ranking=RankingFunctions(_best, _logps_of_lse)
)
