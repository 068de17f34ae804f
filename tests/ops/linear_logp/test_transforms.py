"""linear_logp under JAX's transformations, and what the compiled program does not do."""

import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import pytest

from rlk_jax import linear_logp
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import HeadConfig
from rlk_jax.ops.linear_logp import xla
from tests.support import helpers
from tests.support.helpers import Case, assert_within_contract

CASE = Case("transforms", (12,), 16, 300, bias=True)


@pytest.fixture(scope="module")
def problem():
    return helpers.make(CASE, jnp.float32)


def assert_equal_up_to_rounding(actual, expected, kind="gradient"):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_within_contract(a, e, "linear_logp", jnp.float32, kind)


class Variants(chex.TestCase):
    """With and without jit, the op and its gradient agree with the definition."""

    implementations: tuple[str, ...] = ("xla",)

    @chex.variants(with_jit=True, without_jit=True)
    def test_values_and_gradients(self):
        problem = helpers.make(CASE, jnp.float32)
        gold = helpers.gold(CASE, problem)
        for implementation in self.implementations:

            def loss(operands, target_ids, implementation=implementation):
                changed = problem._replace(
                    hidden=operands[0], weight=operands[1], bias=operands[2], target_ids=target_ids
                )
                values = changed.call(CASE, implementation)
                return helpers.weighted(values, problem.upstream), values

            variant = self.variant(jax.value_and_grad(loss, has_aux=True))
            (_, values), gradients = variant((problem.hidden, problem.weight, problem.bias), problem.target_ids)
            chex.assert_tree_all_finite((values, gradients))
            assert_equal_up_to_rounding(tuple(values), gold.values, "forward")
            assert_equal_up_to_rounding(gradients, gold.gradients)


@pytest.mark.full
class VariantsOfTheOthers(Variants):
    """The other implementations are called by the same rules, whose bug `Variants` catches in `make test`. There,
    test_with_and_without_the_other_outputs (test_bits.py) calls `deterministic` without jit, and
    test_bare_calls_on_sharded_heads (test_vocab_parallel.py) the reference.
    """

    implementations = ("deterministic", "reference")


def test_traces_once_for_many_batches(problem):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def logp(hidden, target_ids):
        return linear_logp(hidden, problem.weight, target_ids, problem.bias)

    for i in range(3):
        logp(problem.hidden + i, (problem.target_ids + i) % 300)


def test_eager_calls_compile_once(problem):
    def call(i):
        return linear_logp(problem.hidden + i, problem.weight, problem.target_ids, problem.bias)

    call(0)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr("logging.Logger.handle", lambda self, record: compiled.append(record.getMessage()))
        call(1)
    assert not [m for m in compiled if "Compiling" in m]


# The rules of vmap stand in autodiff for all; test_bits.py maps `deterministic`.
@helpers.implementations("xla")
def test_vmap(problem, implementation):
    def logp(h, w, t):
        return linear_logp(h, w, t, implementation=implementation)

    h, w, t = problem.hidden, problem.weight, problem.target_ids
    whole = logp(h, w, t)
    h3, t3 = h.reshape(3, 4, -1), t.reshape(3, 4)
    over_rows = jax.vmap(logp, (0, None, 0))
    nested = jax.vmap(over_rows, (0, None, 0))(h3, w, t3)
    chex.assert_trees_all_equal(nested.reshape(-1), whole)
    heads = jnp.stack([w, 2 * w])
    chex.assert_trees_all_equal(jax.vmap(logp, (None, 0, None))(h, heads, t)[1], logp(h, 2 * w, t))
    same_token = jax.vmap(lambda h: logp(h, w, t[:4]))(h3)
    chex.assert_trees_all_equal(same_token, logp(h, w, jnp.tile(t[:4], 3)).reshape(3, 4))

    def gradients(f):
        return jax.grad(lambda h, w, t: f(h, w, t).sum(), (0, 1))

    expected, of_sum = jax.jit(gradients(logp))(h, w, t), jax.jit(gradients(over_rows))(h3, w, t3)
    per_example = jax.jit(jax.vmap(gradients(logp), (0, None, 0)))(h3, w, t3)
    for d_hidden, d_weight in (of_sum, (per_example[0], per_example[1].sum(0))):
        assert_equal_up_to_rounding((d_hidden.reshape(h.shape), d_weight), expected)


@pytest.mark.full
@helpers.implementations()
def test_vmap_over_single_tokens(problem, implementation):
    """In `make test`, test_vmap catches a call of one token that is mapped: its nested vmap has such calls."""
    logp = functools.partial(linear_logp, implementation=implementation)
    arguments = problem.hidden, problem.weight, problem.target_ids
    chex.assert_trees_all_equal(jax.vmap(logp, (0, None, 0))(*arguments), logp(*arguments))


# What remat saves is one program more of the same rules.
@helpers.cover(
    "implementation, wrap",
    [
        *(("xla", wrap) for wrap in ("jit", "remat", "scan", "saved")),
        ("deterministic", "remat"),
        ("deterministic", "scan"),
        ("reference", "jit"),
    ],
    lambda *x: x in (("xla", "remat"), ("xla", "scan")),
)
def test_gradients_through_transformations(problem, implementation, wrap):
    def logp(h, w, b, t):
        return linear_logp(h, w, t, b, implementation=implementation).sum()

    def scanned(h, w, b, t):
        def step(total, x):
            return total + logp(x[0], w, b, x[1]), None

        return jax.lax.scan(step, 0.0, (h.reshape(3, 4, -1), t.reshape(3, 4)))[0]

    wrapped = {
        "jit": jax.jit(logp),
        "remat": jax.checkpoint(logp),
        "saved": jax.checkpoint(logp, policy=jax.checkpoint_policies.everything_saveable),
        "scan": scanned,
    }[wrap]
    arguments = (problem.hidden, problem.weight, problem.bias, problem.target_ids)
    expected = jax.jit(jax.grad(logp, (0, 1, 2)))(*arguments)
    assert_equal_up_to_rounding(jax.jit(jax.grad(wrapped, (0, 1, 2)))(*arguments), expected)


# Types of varying axes are checked in one program; test_vocab_parallel.py shards `deterministic`.
@helpers.cover(
    "check_vma, implementation",
    itertools.product([True, False], helpers.IMPLEMENTATIONS),
    lambda check_vma, implementation: check_vma and implementation == "xla",
)
def test_shard_map_over_tokens(problem, implementation, check_vma):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], ("data",))
    whole, rows = jax.P(), jax.P("data")

    def logp(h, w, b, t):
        return linear_logp(h, w, t, b, implementation=implementation)

    def loss(f, h, w, b):
        return jnp.vdot(problem.upstream[0], f(h, w, b, problem.target_ids))

    sharded = jax.shard_map(logp, mesh=mesh, in_specs=(rows, whole, whole, rows), out_specs=rows, check_vma=check_vma)
    operands = (problem.hidden, problem.weight, problem.bias)
    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(*operands) for f in (sharded, logp)
    )
    assert_equal_up_to_rounding(actual, expected)


@helpers.implementations("xla", "deterministic")  # the reference has few operations
def test_strict_jax_modes(problem, implementation):
    ids = problem.target_ids.at[0].set(-1)
    mixed = problem._replace(hidden=problem.hidden.astype(jnp.bfloat16), target_ids=ids)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        gradient = jax.grad(lambda h: mixed._replace(hidden=h).call(CASE, implementation, ignore_index=-1)[0].sum())
        jax.jit(gradient)(mixed.hidden)


# Wide ids are converted before any implementation; det_gemm's and the losses' tests have strict modes of their own.
@helpers.implementations("xla")
def test_x64(problem, implementation):
    with jax.enable_x64(True):
        gold = helpers.gold(CASE, problem)
        wide = problem._replace(target_ids=jnp.asarray(problem.target_ids, jnp.int64))
        assert wide.target_ids.dtype == jnp.int64
        values, gradients = wide.values_and_gradients(CASE, implementation)
        chex.assert_type(list(values), jnp.float32)
        assert_equal_up_to_rounding(tuple(values), gold.values, "forward")
        chex.assert_type(gradients, jnp.float32)
        assert_equal_up_to_rounding(gradients, gold.gradients)
        with pytest.raises(ValueError, match="target_ids out of range"):
            wide._replace(target_ids=wide.target_ids.at[0].set(2**32)).call(CASE, implementation)


def test_eval_shape():
    spec = jax.ShapeDtypeStruct
    arguments = (spec((2, 3, 8), jnp.bfloat16), spec((50, 8), jnp.bfloat16), spec((2, 3), jnp.int32))
    chex.assert_trees_all_equal(jax.eval_shape(linear_logp, *arguments), spec((2, 3), jnp.float32))


def count_dots(function, *arguments) -> int:
    """Matrix products in the compiled HLO, a fused computation as often as it is called, a loop's body once."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    computations, entry, lines = {}, "", []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        lines.append(line)

    def count(name: str) -> int:
        body = "\n".join(computations[name])
        called = re.findall(r"(?:calls|body|to_apply)=%([\w.-]+)", body)
        return len(re.findall(r" dot\(", body)) + sum(map(count, called))

    return count(entry)


# In `make test`, the plain case catches a product too many: it is compiled too, and jit calls the same rules. What
# remat alone repeats too often is left to `make test-full`.
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: f, id="plain"),
        pytest.param(jax.jit, id="jit", marks=pytest.mark.full),
        pytest.param(jax.checkpoint, id="remat", marks=pytest.mark.full),
    ],
)
def test_frozen_sides_cost_no_gemm(wrap, monkeypatch):
    """The forward takes one GEMM, the backward one to recompute and one for each side that needs a gradient.

    Several chunks: with one alone XLA finds that forward and backward can share a GEMM.
    """
    jax.clear_caches()
    monkeypatch.setattr(xla, "MEMORY_BUDGET", 0)
    case = Case("dots", (256,), 64, 4096)
    problem = helpers.make(case, jnp.float32)
    arguments = (problem.hidden, problem.weight, problem.target_ids)

    def loss(*arguments):
        return wrap(functools.partial(linear_logp, ignore_index=-1, implementation="xla"))(*arguments).sum()

    remat = wrap is jax.checkpoint  # runs the forward once more
    assert count_dots(loss, *arguments) == 1
    assert count_dots(jax.value_and_grad(loss, (0, 1)), *arguments) == 4 + remat
    assert count_dots(jax.value_and_grad(loss, 0), *arguments) == 3 + remat
    assert count_dots(jax.value_and_grad(loss, 1), *arguments) == 3 + remat


def test_temperature_is_a_constant(problem):
    gradient = jax.grad(lambda t: linear_logp(problem.hidden, problem.weight, problem.target_ids, temperature=t).sum())
    assert gradient(jnp.float32(0.7)) == 0


def temporary_bytes(tokens: int, dim: int, vocab: int, dtype, options: dict) -> int:
    """Temporary bytes of the compiled forward and backward, beyond the float32 accumulator of dW."""
    spec = jax.ShapeDtypeStruct
    head = (dim, vocab) if options.get("weight_layout") == "dv" else (vocab, dim)

    def total(h, w, t):
        return sum(map(jnp.sum, jax.tree.leaves(linear_logp(h, w, t, implementation="xla", **options))))

    function = jax.value_and_grad(total, (0, 1))
    arguments = (spec((tokens, dim), dtype), spec(head, dtype), spec((tokens,), jnp.int32))
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes - 4 * vocab * dim


# Chunks are of one size in every dtype, and options add arrays to them.
@helpers.cover(
    "options, dtype",
    itertools.product(
        [{}, {"weight_layout": "dv"}, {"return_entropy": True, "logit_softcap": 30.0}],
        helpers.DTYPES,
    ),
    lambda options, dtype: (len(options), dtype) == (2, jnp.float32),
)
def test_memory_is_a_small_part_of_the_logits_and_does_not_grow(dtype, options):
    tokens, dim, vocab = 8192, 256, 65536
    at_8192 = temporary_bytes(tokens, dim, vocab, dtype, options)
    assert at_8192 <= 0.15 * tokens * vocab * 4
    # A few numbers per token stay, as in any log-softmax; nothing of the vocabulary's size does.
    assert temporary_bytes(4 * tokens, dim, vocab, dtype, options) - at_8192 <= 3 * tokens * 40


@pytest.mark.parametrize(("vocab", "tokens"), [(1, 1), (2049, 100), (65536, 8192), (151936, 10**6), (10**8, 50)])
def test_chunks_fit_the_budget(vocab, tokens):
    rows = xla.chunk_rows(vocab, tokens, xla.MEMORY_BUDGET)
    assert rows % 16 == 0 and 16 <= rows <= max(16, tokens + 15)
    assert rows == 16 or rows * vocab * 10 <= xla.MEMORY_BUDGET
    assert xla.chunk_rows(vocab, tokens, 0) == 16


def test_the_budget_grows_with_the_head_alone_or_is_the_one_given():
    spec = jax.ShapeDtypeStruct
    default = HeadConfig(
        vocab_size=1,
        real_vocab_size=1,
        logit_softcap=None,
        return_lse=False,
        return_entropy=False,
        groups=column_groups(1),
        weight_layout="vd",
        may_ignore=False,
        memory_budget=None,
    )
    given = dataclasses.replace(default, memory_budget=1000)
    small, large = spec((65536, 256), jnp.bfloat16), spec((151936, 4096), jnp.bfloat16)
    assert xla.memory_budget(default, small) == xla.MEMORY_BUDGET
    assert xla.memory_budget(default, large) == 151936 * 4096 * 2
    assert xla.memory_budget(given, large) == 1000


# All tokens in one chunk are what most tests have; the least chunks are full's, for those of 48 rows have a last one
# that is short.
@helpers.cover("budget", [(0,), (10 * 1000 * 48,), (10**9,)], lambda budget: budget == 10 * 1000 * 48)
def test_any_budget_gives_the_same_answer(budget, monkeypatch):
    case = Case("budget", (200,), 24, 1000, bias=True)
    problem = helpers.make(case, jnp.float32)
    gold = helpers.gold(case, problem)
    jax.clear_caches()
    monkeypatch.setattr(xla, "MEMORY_BUDGET", budget)
    if budget:
        given = problem.call(case, "xla", memory_budget=budget)
        assert_equal_up_to_rounding(tuple(given), gold.values, "forward")
    values, gradients = problem.values_and_gradients(case, "xla")
    assert_equal_up_to_rounding(tuple(values), gold.values, "forward")
    assert_equal_up_to_rounding(gradients, gold.gradients)
