"""The gold standard of the tests: the definition on float32-upcast inputs. It stays this plain, and holds `[N, V]`
logits of both.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.core.transforms import isolated
from rlk_jax.ops.linear_kl.divergence import Terms, terms_of
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


def _terms_of_logits(config: KlConfig, student: Array, operands: Operands, tokens: KlTokens) -> tuple[Array, Terms]:
    """The student's log-probabilities, and the terms."""
    teacher = _logits_of_head(config.teacher, operands.teacher, tokens.teacher_temperature)
    logprobs = _log_softmax(student)
    return logprobs, terms_of(config, logprobs, _log_softmax(teacher))


def _forward(config: KlConfig, operands: Operands, tokens: KlTokens) -> tuple[Array, tuple[()]]:
    """The sum of all columns' terms."""
    student = _logits_of_head(config.student, operands.student, tokens.temperature)
    return _terms_of_logits(config, student, operands, tokens)[1].value.sum(axis=1), ()


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
    logprobs, (_, slope) = _terms_of_logits(config, student, operands, tokens)
    gradient = upstream[:, None] * (slope - jnp.exp(logprobs) * slope.sum(axis=1, keepdims=True))
    found = pull_back(jnp.where(active[:, None], gradient, 0))[0]
    return Gradients(
        found.hidden if needs.hidden else None,
        found.weight if needs.weight else None,
        found.bias if needs.bias else None,
    )


REFERENCE = KlFunctions(_forward, _gradients)
