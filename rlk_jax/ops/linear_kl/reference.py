"""The gold standard of the tests: the definition on float32-upcast inputs. It stays this plain, and holds `[N, V]`
logits of both.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.core.shard import Gather
from rlk_jax.core.transforms import isolated
from rlk_jax.ops.linear_kl.divergence import derivatives, terms_of
from rlk_jax.ops.linear_kl.options import (
    Gradients,
    KlConfig,
    KlFunctions,
    KlTokens,
    Needs,
    OneHead,
    OneHeadConfig,
    Operands,
)
from rlk_jax.ops.linear_kl.top_k import derivatives_with_rest, divergence_of_logits

Array = jax.Array


_log_softmax = isolated(jax.nn.log_softmax)


def _logits_of_head(config: OneHeadConfig, head: OneHead, temperature: Array) -> Array:
    """softcap(hidden·Wᵀ + bias) / temperature over the true vocabulary."""
    weight = (head.weight if config.weight_layout == "vd" else head.weight.T)[: config.real_vocab_size]
    hidden = head.hidden.astype(jnp.float32)
    logits = jnp.matmul(hidden, weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    if head.bias is not None:
        logits += head.bias.astype(jnp.float32)[None, : config.real_vocab_size]
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits / temperature[:, None]


def _divergence(config: KlConfig, student: Array, operands: Operands, tokens: KlTokens) -> tuple[Array, Array]:
    """The divergence of a student of these logits, and its derivative by each of them."""
    if tokens.top_k is not None:
        value, statistics = divergence_of_logits(config, tokens.top_k, student)
        return value, derivatives_with_rest(statistics, tokens.top_k, student)
    assert config.teacher is not None and operands.teacher is not None
    teacher = _logits_of_head(config.teacher, operands.teacher, tokens.teacher_temperature)
    logprobs = _log_softmax(student)
    terms = terms_of(config, logprobs, _log_softmax(teacher))
    return terms.value.sum(axis=1), derivatives(terms.slope, jnp.exp(logprobs), terms.slope.sum(axis=1))


def _forward(config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather) -> tuple[Array, tuple[()]]:
    """The sum of all terms. Heads are whole, and nothing is gathered."""
    student = _logits_of_head(config.student, operands.student, tokens.temperature)
    return _divergence(config, student, operands, tokens)[0], ()


def _gradients(
    config: KlConfig, needs: Needs, operands: Operands, tokens: KlTokens, residual: Any, upstream: Array
) -> Gradients:
    """The derivative by the logits of active rows, and from there on JAX's own."""
    active = tokens.active
    hidden = jnp.where(active[:, None], operands.student.hidden, 0)
    temperature = jnp.where(active, tokens.temperature, 1)

    def logits(student: OneHead) -> Array:
        return _logits_of_head(config.student, student, temperature)

    student, pull_back = jax.vjp(logits, operands.student._replace(hidden=hidden))
    gradient = upstream[:, None] * _divergence(config, student, operands, tokens)[1]
    found = pull_back(jnp.where(active[:, None], gradient, 0))[0]
    return Gradients(
        found.hidden if needs.hidden else None,
        found.weight if needs.weight else None,
        found.bias if needs.bias else None,
    )


REFERENCE = KlFunctions(_forward, _gradients)
