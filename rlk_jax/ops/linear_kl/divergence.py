"""The formulas of the divergences: what each column adds to one, and to its gradient.

With p and q the probabilities of student and teacher, m = β·q + (1 − β)·p and D(a ‖ b) = Σ a·ln(a / b):
  forward D(q ‖ p),   reverse D(p ‖ q),   jsd β·D(q ‖ m) + (1 − β)·D(p ‖ m).
Because Σ b − a is 0, D(a ‖ b) = Σ a·(eᵈ − 1 − d) with d = ln(b / a): no term is negative, that of equal probabilities
is exactly 0, and an error of a log-sum-exp, which all columns share, cancels to first order.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.fixed_order import halving_sum, rounded_product
from rlk_jax.core.softmax import Partial, before_softcap, fp16_scale, merged, partial_of_rows
from rlk_jax.ops.linear_kl.options import KlConfig, KlTokens

Array = jax.Array
BYTES_PER_PAIR = 12
"""float32 products of both heads, and what XLA keeps of the terms or gradients that it makes of them."""
_LARGEST_DIFFERENCE = 80.0
"""Where one probability is less than e⁻⁸⁰ of the other, it adds nothing to their mixture, and eᵈ stays finite."""


class Normalizer(NamedTuple):
    """ln Σ exp z of each row `[N]`, float32, as max z and ln Σ exp(z − max), which stay apart as in core/softmax.py."""

    max: Array
    log_sum: Array

    def logprobs(self, logits: Array) -> Array:
        """The log-probabilities of logits `[N, columns]`."""
        return (logits - self.max[:, None]) - self.log_sum[:, None]


def normalizer_of_rows(logits: Array) -> Normalizer:
    """That of rows of all logits, summed in whatever order XLA picks."""
    partial = partial_of_rows(logits, logits[:, 0], with_gap=False)
    return Normalizer(partial.max, jnp.log(partial.total))


def normalizer_of_groups(groups: Partial) -> Normalizer:
    """That of rows, from the partials `[groups, rows]` of the whole vocabulary."""
    found = merged(groups)
    return Normalizer(found.max, found.log_sum)


class SliceLogits(NamedTuple):
    """Which of a slice's columns are real and its own, `[1, width]`, and their logits `[rows, width]`, −inf elsewhere;
    `raw` is before softcap and temperature.
    """

    valid: Array
    raw: Array
    logits: Array


class KlStatistics(NamedTuple):
    """What a backward needs of the forward: the softmax of both rows, and the sum of all slopes, `[N]`."""

    student: Normalizer
    teacher: Normalizer
    slope: Array


class Terms(NamedTuple):
    """What each column `[N, columns]` adds to the divergence, and its slope s: by the student's logit z_v, the
    derivative of the divergence is s_v − p_v·Σ s.
    """

    value: Array
    slope: Array


def terms_of(config: KlConfig, student: Array, teacher: Array) -> Terms:
    """The terms of log-probabilities `[N, columns]`; those of a column that is impossible for both are 0."""
    p, q = jnp.exp(student), jnp.exp(teacher)
    # Both may be −inf, whose difference is NaN.
    difference = jnp.where((p == 0) & (q == 0), 0, student - teacher)
    if config.kind == "forward":
        return Terms(_excess(q, p, difference), _change(p, q, difference))
    if config.kind == "reverse":
        return Terms(_excess(p, q, -difference), jnp.where(p == 0, 0, rounded_product(p, difference)))
    return _terms_of_mixture(config.beta, p, q, jnp.clip(difference, -_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE))


def sums_of_chunks(config: KlConfig, normalizers: Sequence[Normalizer], logits: Iterable[Array], columns: int) -> Terms:
    """The terms of student and teacher, summed over each chunk of so many columns, `[N, chunks]`."""
    logprobs = (own.logprobs(x) for own, x in zip(normalizers, logits, strict=True))
    terms = terms_of(config, *logprobs)
    return jax.tree.map(lambda x: halving_sum(x.reshape(-1, columns)).reshape(len(x), -1), terms)


def _excess(a: Array, b: Array, d: Array) -> Array:
    """a·(eᵈ − 1 − d) where b = a·eᵈ: how much b − a − a·d is above 0, without their cancellation where d is small."""
    near = rounded_product(a, jnp.expm1(d) - d)
    far = b - rounded_product(a, 1 + d)
    return jnp.where(a == 0, b, jnp.where(d > 1, far, near))


def _change(p: Array, q: Array, d: Array) -> Array:
    """p − q where p = q·eᵈ, without cancellation and without overflow."""
    return jnp.where(d < 0, rounded_product(q, jnp.expm1(d)), -rounded_product(p, jnp.expm1(-d)))


def _terms_of_mixture(beta: float, p: Array, q: Array, difference: Array) -> Terms:
    """The terms of the generalised Jensen-Shannon divergence."""
    teacher_share, student_share = jnp.float32(beta), jnp.float32(1 - beta)
    mixture = rounded_product(teacher_share, q) + rounded_product(student_share, p)
    from_teacher = _log_mixture(teacher_share, student_share, difference)
    from_student = _log_mixture(student_share, teacher_share, -difference)
    of_teacher = rounded_product(teacher_share, _excess(q, mixture, from_teacher))
    of_student = rounded_product(student_share, _excess(p, mixture, from_student))
    return Terms(of_teacher + of_student, rounded_product(-student_share, rounded_product(p, from_student)))


def _log_mixture(own: Array, other: Array, d: Array) -> Array:
    """ln(own + other·eᵈ) for two shares whose sum is 1; exactly 0 for d = 0.

    The sum of two positive terms keeps the digits of a result far from 0. A small share of the other leaves the result
    near 0 however far apart the two are, and there only log1p keeps them.
    """
    near = jnp.log1p(rounded_product(other, jnp.expm1(d)))
    far = jnp.log(own + rounded_product(other, jnp.exp(d)))
    return jnp.where((d < -1) & (other >= own), far, near)


def derivatives(slope: Array, probability: Array, sum_of_slopes: Array) -> Array:
    """The derivative of the divergence by each of the student's logits `[N, columns]`, where these have such slopes and
    probabilities, and all slopes of a row such a sum `[N]`.
    """
    return slope - rounded_product(probability, sum_of_slopes[:, None])


def derivatives_of(config: KlConfig, logits: tuple[Array, Array], statistics: KlStatistics) -> Array:
    """Those in columns in which `logits` are those of student and teacher."""
    student, teacher = statistics.student.logprobs(logits[0]), statistics.teacher.logprobs(logits[1])
    return derivatives(terms_of(config, student, teacher).slope, jnp.exp(student), statistics.slope)


def raw_gradients(
    config: KlConfig, raw: Array, by_logit: Array, tokens: KlTokens, upstream: Array, is_real: Array
) -> Array:
    """The gradient with respect to `raw`, the student's logits before softcap and temperature, `[N, columns]`, from the
    derivative of the divergence by each logit.

    It is exactly 0 for tokens that are not active, and in columns that are not real. Everything is float32.
    """
    gradient = rounded_product(upstream[:, None], by_logit)
    counts = tokens.active[:, None] & is_real
    return before_softcap(config.student, gradient, raw, tokens.temperature, counts)


def row_scale(tokens: KlTokens, slope: Array, upstream: Array) -> Array:
    """The power of two that float16 needs in each row `[N]`, from the sums of all slopes. A slope is at most 1, or as
    large as the divergence where that is the sum of all.
    """
    return fp16_scale((2 + 2 * jnp.abs(slope)) * jnp.abs(upstream) / tokens.temperature)
