"""A teacher that is known by its most probable tokens.

Each of these tokens is a bucket, and the rest of the vocabulary together is one more, which stands in front of them. A
divergence is that of the two distributions over the buckets.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.fixed_order import ascending_sum, pairwise_sum, rounded_product
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import zero_if_neg_inf
from rlk_jax.ops.linear_kl.divergence import KlStatistics, Normalizer, derivatives, normalizer_of_rows, terms_of
from rlk_jax.ops.linear_kl.options import KlConfig, KlTokens, TeacherTopK

Array = jax.Array
_LEAST_REST = -1e-7
"""The largest logarithm of the sum of a teacher's listed probabilities. As much as their rounding is left to the rest:
a rest of 0 would make a reverse divergence infinite.
"""


class BucketStatistics(NamedTuple):
    """What a backward needs of the forward: the student's softmax over the rest, the derivative of the divergence by
    the logit of each bucket `[N, 1 + k]`, that of the rest first, and the sum of all slopes `[N]`.
    """

    rest: Normalizer
    by_bucket: Array
    slope: Array


def no_values(tokens: KlTokens) -> tuple[Array, KlStatistics | BucketStatistics]:
    """Zeros, which divergences and statistics are stored in."""
    zeros = jnp.zeros(tokens.active.shape, jnp.float32)
    normalizer = Normalizer(zeros, zeros)
    if tokens.top_k is None:
        return zeros, KlStatistics(normalizer, normalizer, zeros)
    rows, count = tokens.top_k.ids.shape
    return zeros, BucketStatistics(normalizer, jnp.zeros((rows, 1 + count), jnp.float32), zeros)


def divergence_of_logits(config: KlConfig, top_k: TeacherTopK, logits: Array) -> tuple[Array, BucketStatistics]:
    """The divergence of rows of all of the student's logits, with sums over these in whatever order XLA picks."""
    student, rest = normalizer_of_rows(logits), possibly_of_none(normalizer_of_rows(without_listed(logits, top_k)))
    return divergence_of_buckets(config, top_k, listed_logits(logits, top_k), student, rest)


def possibly_of_none(rest: Normalizer) -> Normalizer:
    """The normalizer of tokens of which there may be none: its maximum is finite then, too."""
    return rest._replace(max=zero_if_neg_inf(rest.max))


def without_listed(logits: Array, top_k: TeacherTopK, start: Array | int = 0) -> Array:
    """Logits of the columns from `start` on, −inf where the teacher lists the token."""
    return _with_listed(logits, top_k, start, jnp.float32(-jnp.inf))


def listed_logits(logits: Array, top_k: TeacherTopK, start: Array | int = 0) -> Array:
    """The logits `[N, k]` of the tokens that the teacher lists; 0 where they are not among the columns."""
    places = _places_of_listed(top_k, start, logits.shape[1])
    found = jnp.take_along_axis(logits, places, axis=1, mode="clip")
    return jnp.where(places < logits.shape[1], found, 0)


def logits_of_all(logits: Array, groups: int, gather: Gather) -> Array:
    """The logits `[N, k]` of listed tokens, each of which one device has, beside 0 on the others. They travel as one of
    the groups that each device has.
    """
    own = jnp.pad(logits.reshape(1, -1), ((0, groups - 1), (0, 0)))
    return ascending_sum(gather(own)).reshape(logits.shape)


def divergence_of_buckets(
    config: KlConfig, top_k: TeacherTopK, logits: Array, student: Normalizer, rest: Normalizer
) -> tuple[Array, BucketStatistics]:
    """The divergence of each row, and what its gradients need, from the student's logits `[N, k]` of the listed tokens
    and its softmaxes over all tokens and over the rest.
    """
    is_listed = top_k.is_listed
    of_rest = (rest.max - student.max) + (rest.log_sum - student.log_sum)
    own = jnp.where(is_listed, student.logprobs(logits), -jnp.inf)
    listed = jnp.log(pairwise_sum(jnp.where(is_listed, jnp.exp(top_k.logps), 0)))
    teacher_rest = jnp.log(-jnp.expm1(jnp.minimum(listed, _LEAST_REST)))
    has_rest = is_listed.sum(axis=1) < config.vocabulary
    terms = terms_of(
        config,
        jnp.concatenate([of_rest[:, None], own], axis=1),
        jnp.concatenate([jnp.where(has_rest, teacher_rest, -jnp.inf)[:, None], top_k.logps], axis=1),
    )
    by_bucket, slope = _derivatives_by_bucket(terms.slope, jnp.exp(of_rest), jnp.exp(own))
    return pairwise_sum(terms.value), BucketStatistics(rest, by_bucket, slope)


def _derivatives_by_bucket(slopes: Array, rest: Array, listed: Array) -> tuple[Array, Array]:
    """The derivative of the divergence by the logit of each bucket, and the sum of the slopes `[N, 1 + k]`, where the
    student's probabilities of the rest `[N]` and of listed tokens `[N, k]` are such.

    A rest may have nearly all of the probability, and its slope most of the sum: with 1 − p of the rest as the sum of
    what is listed, nothing cancels.
    """
    of_rest, of_listed = slopes[:, 0], slopes[:, 1:]
    by_rest = rounded_product(of_rest, pairwise_sum(listed)) - rounded_product(rest, pairwise_sum(of_listed))
    slope = pairwise_sum(slopes)
    return jnp.concatenate([by_rest[:, None], derivatives(of_listed, listed, slope)], axis=1), slope


def derivatives_with_rest(
    statistics: BucketStatistics, top_k: TeacherTopK, logits: Array, start: Array | int = 0
) -> Array:
    """The derivatives by the logits of columns from `start` on. A token of the rest has its share of the rest's."""
    rest = statistics.rest._replace(log_sum=zero_if_neg_inf(statistics.rest.log_sum))
    # What a listed token would have there may overflow, and is replaced.
    share = jnp.exp(jnp.minimum(rest.logprobs(logits), 0))
    found = rounded_product(share, statistics.by_bucket[:, :1])
    return _with_listed(found, top_k, start, statistics.by_bucket[:, 1:])


def _places_of_listed(top_k: TeacherTopK, start: Array | int, columns: int) -> Array:
    """Where each listed token stands among the columns from `start` on; `columns` if it does not."""
    places = top_k.ids - start
    return jnp.where((top_k.ids >= 0) & (places >= 0) & (places < columns), places, columns)


def _with_listed(x: Array, top_k: TeacherTopK, start: Array | int, values: Array) -> Array:
    """`x [N, columns]` with the columns of listed tokens set."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return x.at[rows, _places_of_listed(top_k, start, x.shape[1])].set(values, mode="drop")
