"""The ops over logits by their kernels on a GPU: accuracy, raw bits, golden hashes, memory, JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.triton import call
from rlk_jax import logp, ratio_kl
from tests.gpu import golden
from tests.support import logits as ops
from tests.support import rollouts
from tests.support.allowed import mask_of
from tests.support.helpers import assert_same_bits, assert_within_contract, weighted
from tests.support.logits import Case

_TRITON = pytest.param("triton", marks=pytest.mark.skipif(call.why_missing() is not None, reason="no jax-triton here"))
every_kernel = pytest.mark.parametrize("implementation", ["mosaic", _TRITON])
every_dtype = pytest.mark.parametrize("dtype", ops.DTYPES, ids=lambda d: np.dtype(d).name)
SHAPES = (
    Case("gpt2", (24,), 50257, temperature="per token"),
    Case("gpt2, no whole lines", (13,), 50257),
    Case("qwen3, padded", (16,), 152064, {"global_vocab_size": 151643}, "per token"),
    Case("much padding", (16,), 9000, {"global_vocab_size": 1500}),
    Case("unaligned padding", (16,), 3001, {"global_vocab_size": 2900, "logit_softcap": 3.0}),
    Case("gemma", (5,), 256000, {"logit_softcap": 30.0}),
)
ROLLOUTS = (
    *(rollouts.Case(f"llama, {n}", n, 2048, 128256, rollouts.EVERYTHING) for n in (3, 16, 256)),
    rollouts.Case("qwen, one token of few", 4, 896, 151936),
    rollouts.Case("gemma", 8, 2304, 256000, {**rollouts.EVERYTHING, "logit_softcap": 30.0}),
    *(rollouts.Case(f"llama, {n}, allowed", n, 2048, 128256, rollouts.EVERYTHING, allowed=True) for n in (3, 16, 256)),
)
BITS = (
    Case("aligned", (300,), 131072, temperature="per token"),
    Case("unaligned", (304,), 50257, {"logit_softcap": 20.0}, "per token"),
)


@every_dtype
@every_kernel
@pytest.mark.parametrize("case", [*ops.CASES, *SHAPES], ids=str)
def test_against_float64(case, implementation, dtype):
    ops.check_against_gold(case, dtype, implementation)


@every_dtype
@every_kernel
@pytest.mark.parametrize("case", ops.LARGE, ids=str)
def test_large_and_peaked_logits(case, implementation, dtype):
    ops.check_large(case, dtype, implementation)


@every_dtype
@every_kernel
@pytest.mark.parametrize("case", BITS, ids=str)
def test_rows_keep_their_bits(case, implementation, dtype):
    """Alone, in any batch, at any place, beside any neighbours; run to run; with or without the other outputs."""
    p = ops.make(case, dtype)
    whole = p.outputs(case, implementation)
    for _ in range(3):
        assert_same_bits(p.outputs(case, implementation), whole)
    for rows in (slice(3, 4), slice(5, 12), slice(1, 65), slice(200, 300), np.array([7, 0, 7, 250])):
        assert_same_bits(p.rows(rows).outputs(case, implementation), tuple(x[rows] for x in whole))
    assert_same_bits(p.call(case, implementation, return_lse=False, return_entropy=False), whole[0])
    lead = p.logits.shape[0] // 4
    folded = jax.tree.map(lambda x: x.reshape(4, lead, *x.shape[1:]) if jnp.ndim(x) else x, p)
    shaped = Case("folded", (4, lead), case.vocab, case.options, case.temperature)
    assert_same_bits(folded.outputs(shaped, implementation), tuple(x.reshape(4, lead, *x.shape[1:]) for x in whole))


@pytest.mark.parametrize("case", [*rollouts.CASES, *ROLLOUTS], ids=str)
def test_recorded_log_probs_have_the_bits_of_linear_logp(case):
    rollouts.check(case, "mosaic")


@every_dtype
@every_kernel
@pytest.mark.parametrize("case", BITS, ids=str)
def test_in_place_has_the_same_bits(case, implementation, dtype):
    p = ops.make(case, dtype)
    expected = p.gradient(case, implementation)
    for _ in range(3):
        assert_same_bits(p.gradient(case, implementation, donate_logits=True), expected)


@every_kernel
@pytest.mark.parametrize("case", BITS, ids=str)
def test_masked_rows_are_not_read(case, implementation):
    p = ops.make(case, jnp.bfloat16)
    ignored = np.arange(p.token_ids.size) % 3 > 0
    options = {"ignore_index": -100}
    p = p._replace(token_ids=jnp.where(ignored, -100, p.token_ids))
    expected = p.outputs(case, implementation, **options)
    poisoned = p._replace(logits=jnp.where(ignored[:, None], jnp.nan, p.logits))
    assert_same_bits(poisoned.outputs(case, implementation, **options), expected)
    assert not any(np.any(np.asarray(x)[ignored]) for x in expected)
    alone = p.rows(np.flatnonzero(~ignored)).outputs(case, implementation)
    assert_same_bits(alone, tuple(x[~ignored] for x in expected))


@every_dtype
@every_kernel
def test_ratio_kl_and_grpo_loss(implementation, dtype):
    p = ops.make_policies(dtype, (4, 40), 50257)
    zeros = jnp.zeros((4, 40))
    gold = ops.ratio_kl_gold(p, (zeros + 1, zeros + 2))
    for value, expected in zip(p.ratio_kl(implementation), gold, strict=False):
        assert_within_contract(value, expected, "ratio_kl", dtype, "forward")

    def loss(policy):
        found = p._replace(policy_logits=policy).ratio_kl(implementation, donate_logits=True)
        return found.ratio.sum() + 2 * found.kl.sum()

    assert_within_contract(jax.jit(jax.grad(loss))(p.policy_logits), gold.gradient, "ratio_kl", dtype, "gradient")
    rewards = jnp.arange(4.0)
    found = p.grpo_loss(rewards, implementation, samples_per_prompt=2, beta=0.1)
    expected = p.grpo_loss(rewards, "reference", samples_per_prompt=2, beta=0.1)
    assert_within_contract(np.array(found), np.array(expected), "grpo_loss", dtype, "forward")
    padded = ops.Policies(*(jnp.pad(x, ((0, 2), (0, 3), *((0, 0),) * (x.ndim - 2))) for x in p))
    assert_same_bits(padded.grpo_loss(jnp.arange(6.0), implementation, group_boundaries=[0, 2, 4, 6], beta=0.1), found)


@every_kernel
@pytest.mark.parametrize("donate", [False, True])
def test_transformations_keep_the_bits(implementation, donate):
    case = Case("transformed", (6, 8), 3001)
    p = ops.make(case, jnp.bfloat16)
    whole = p.outputs(case, implementation)

    def of_row(x):
        logits, ids, *upstream = x
        return ops.Problem(logits, ids, 1.0, tuple(upstream)).outputs(case, implementation, donate_logits=donate)

    rows = (p.logits, p.token_ids, *p.upstream)
    for transformed in (jax.vmap(of_row), jax.jit(partial(lax.map, of_row))):
        assert_same_bits(transformed(rows), whole)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for check_vma in (True, False):
        spread = jax.shard_map(
            lambda x, ids: logp(x, ids, implementation=implementation, donate_logits=donate),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=check_vma,
        )
        assert_same_bits(spread(p.logits, p.token_ids), whole[0])
        found = jax.grad(lambda x: jnp.vdot(spread(x, p.token_ids), p.upstream[0]))(p.logits)  # noqa: B023
        expected = jax.grad(lambda x: jnp.vdot(logp(x, p.token_ids, implementation=implementation), p.upstream[0]))(
            p.logits
        )
        assert_same_bits(found, expected)


@every_kernel
@pytest.mark.parametrize("vocab", [131072, 50257])
def test_memory(implementation, vocab):
    """Outputs and the one gradient, and no more than a hundredth of the logits beside them."""
    logits = jax.ShapeDtypeStruct((2048, vocab), jnp.bfloat16)
    ids, row = jax.ShapeDtypeStruct((2048,), jnp.int32), jax.ShapeDtypeStruct((2048,), jnp.float32)
    size = 2048 * vocab * 2

    def loss(policy, ref, ids, row, donate):
        found = ratio_kl(policy, ref, ids, row, row, donate_logits=donate, implementation=implementation)
        return jnp.vdot(row, found.ratio + found.kl)

    arguments = (logits, logits, ids, row)
    fresh = jax.jit(jax.value_and_grad(partial(loss, donate=False))).lower(*arguments).compile().memory_analysis()
    assert fresh.temp_size_in_bytes <= 0.01 * size
    donated = jax.jit(jax.value_and_grad(partial(loss, donate=True)), donate_argnums=0).lower(*arguments).compile()
    assert donated.memory_analysis().temp_size_in_bytes <= 0.01 * size
    assert donated.memory_analysis().alias_size_in_bytes >= size


@every_kernel
@pytest.mark.parametrize("vocab", [151936, 151937])
def test_more_logits_than_32_bits_count(implementation, vocab):
    rows = 16400
    logits = jax.jit(lambda key: jax.random.normal(key, (rows, vocab), jnp.bfloat16))(jax.random.key(0))
    ids = jnp.arange(rows, dtype=jnp.int32)

    def both(logits, ids):
        return jax.jit(jax.value_and_grad(lambda x: logp(x, ids, implementation=implementation).sum()))(logits)[1]

    last = jnp.array([0, rows // 2, rows - 1])
    assert_same_bits(both(logits, ids)[last], both(logits[last], ids[last]))
    assert_same_bits(
        logp(logits, ids, implementation=implementation)[last],
        logp(logits[last], ids[last], implementation=implementation),
    )


@every_kernel
def test_constants_of_a_program_give_the_bits_of_arguments(implementation):
    case = BITS[0]
    p = ops.make(case, jnp.float32).rows(slice(0, 40))

    def loss(logits):
        return weighted(p._replace(logits=logits).call(case, implementation), p.upstream)

    assert_same_bits(jax.jit(jax.grad(loss))(p.logits), p.gradient(case, implementation))


ALLOWED = (
    Case("qwen3", (16,), 151936, temperature="per token"),
    Case("gpt2", (24,), 50257, {"logit_softcap": 30.0}, "per token"),
    Case("gpt2, no whole lines", (13,), 50257),
    Case("padding", (16,), 3001, {"global_vocab_size": 2900, "logit_softcap": 3.0}),
)
every_allowed = pytest.mark.parametrize("case", ALLOWED, ids=str)


@every_dtype
@every_kernel
@every_allowed
def test_allowed_tokens_against_float64(case, implementation, dtype):
    ops.check_allowed(case, dtype, implementation)


@every_dtype
@every_kernel
@every_allowed
def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask(case, implementation, dtype):
    """The compiler fuses products of a softcap into differences, which must be the same ones beside a mask."""
    ops.check_everything_allowed(case, dtype, implementation)


@every_dtype
@every_kernel
@every_allowed
def test_rows_of_allowed_tokens_keep_their_bits(case, implementation, dtype):
    """At other places, where rows begin at other bits of a word, in place, and from run to run."""
    p = ops.make(case, dtype)
    mask, rows = mask_of(ops.allowed_of(case, p)), np.array([9, 0, 9, 7])
    whole = p.outputs(case, implementation, allowed_mask=mask)
    for _ in range(3):
        in_place = p.gradient(case, implementation, allowed_mask=mask, donate_logits=True)
        assert_same_bits(in_place, whole[-1])
    for some in (slice(1, 9), rows):
        found = p.rows(some).outputs(case, implementation, allowed_mask=mask[some])
        assert_same_bits(found, tuple(x[some] for x in whole))


def test_golden_bits():
    def outputs():
        found = {}
        for case in BITS:
            for dtype in ops.DTYPES:
                p = ops.make(case, dtype).rows(slice(0, 40))
                names = ("logp", "lse", "entropy", "gradient")
                name = f"{case.name} {np.dtype(dtype).name}"
                found |= {f"{name} {n}": x for n, x in zip(names, p.outputs(case, "mosaic"), strict=True)}
        return found

    golden.check("logp", outputs)
