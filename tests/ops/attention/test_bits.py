"""A token's output and gradients have the same raw bits wherever its sequence stands, and however it came."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from rlk_jax.ops.attention.api import attention
from tests.support import attention as support
from tests.support import helpers
from tests.support.attention import Case
from tests.support.helpers import assert_same_bits

PROMISING = "deterministic"
ALONE = Case(batch=1, length=30, slots=30)
OPTIONS = [{}, {"sliding_window": 9, "logit_softcap": 2.0}]


# In make test, packed sequences have no options.
@helpers.cover("options", [(x,) for x in OPTIONS], lambda options: bool(options))
def test_alone_in_a_batch_and_behind_any_padding(options):
    places = ((1, 31, 2), (0, 130, 0), (63, 130, 1), (64, 130, 0), (100, 130, 1))
    case = replace(ALONE, options=options)
    support.check_bits_alone_in_a_batch_and_behind_padding(case, jnp.bfloat16, PROMISING, places)


# In make test, sequences behind padding have options.
@helpers.cover("options", [(x,) for x in OPTIONS], lambda options: not options)
def test_packed_at_every_offset(options):
    """From every slot of a block of keys on."""
    offsets = range(66)
    support.check_bits_packed(replace(ALONE, options=options), jnp.bfloat16, PROMISING, offsets)


def test_prefilled_in_chunks_and_decoded_one_by_one():
    parts = ((7, 23), (1,) * 30)
    support.check_bits_in_parts(ALONE, jnp.bfloat16, PROMISING, parts, slots=50)


def test_gradients_of_queries_that_come_in_parts():
    support.check_query_gradients_in_parts(ALONE, jnp.bfloat16, PROMISING, (15, 15), slots=50)


def test_run_to_run_in_and_outside_jit_and_under_vmap():
    case = Case(start=6, padding=(0, 11))
    problem = support.make(case, jnp.bfloat16)
    first = support.found(case, problem, PROMISING)
    assert_same_bits(support.found(case, problem, PROMISING), first)
    assert_same_bits(jax.jit(lambda x: support.found(case, x, PROMISING))(problem), first)
    query, key, value, _ = problem
    one = lambda q, k, v, p: attention(q[None], k[None], v[None], start=6, padding=p[None], implementation=PROMISING)[0]  # noqa: E731
    assert_same_bits(jax.vmap(one)(query, key, value, jnp.asarray(case.padding)), first.output)
