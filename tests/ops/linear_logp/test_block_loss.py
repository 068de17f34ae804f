"""linear_grpo_loss by blocks of tokens on a CPU, where `xla` is given sums over blocks: values and gradients against
all tokens at once and against float64, what is not formed, JAX's transformations, and when blocks are taken.
"""

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlk_jax
from pallas_kernels.products import padded
from rlk_jax import dispatch
from rlk_jax.checker import gold
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import Gradients
from rlk_jax.grpo import LossOptions, policy_loss
from rlk_jax.losses.options import LossType
from rlk_jax.ops.linear_logp import hopper
from rlk_jax.ops.linear_logp.options import BlockFunctions, TokenBlocks
from rlk_jax.ops.linear_logp.sharding.partition import partitioned
from rlk_jax.ops.linear_logp.xla import XLA
from tests.support import helpers, policy_losses
from tests.support.head_configs import head_config
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.policy_losses import Batch, gradients_of_batch

LEAD, DIM, VOCAB, ROWS = (4, 6), 24, 300, 5
LOSSES = {
    "dapo": LossOptions(clip_eps=0.15, clip_eps_high=0.3, beta=0.07),
    "grpo": LossOptions(loss_type="grpo", dual_clip=3.0, beta=0.07, kl_estimator="ratio_k3"),
    "dr_grpo": LossOptions(loss_type="dr_grpo", max_completion_length=6, beta=0.07, log_ratio_bound=0.1),
    "bnpo": LossOptions(loss_type="bnpo", normaliser="sequence_sum"),
    "cispo": LossOptions(loss_type="cispo", cispo_ratio_cap=1.1),
    "sapo": LossOptions(loss_type="sapo"),
    "gspo": LossOptions(loss_type="gspo", clip_eps=0.9, clip_eps_high=9.0, beta=0.07, kl_estimator="ratio_k3"),
    "luspo": LossOptions(loss_type="luspo", clip_eps=0.9, clip_eps_high=9.0, log_ratio_bound=10.0),
    "vespo": LossOptions(
        loss_type="vespo", vespo_k_pos=0.1, vespo_lambda_pos=0.01, vespo_k_neg=0.1, vespo_lambda_neg=0.01
    ),
}
SEEN: list[Any] = []
"""The needs of every trace of a block since `traced_anew`."""


def _add(config, needs, operands, tokens, residual, kept, upstream, sums):
    SEEN.append(needs)
    found = XLA.gradients(config, needs, operands, tokens, residual, kept, upstream)
    d_hidden = None if found.hidden is None else found.hidden[0]
    return d_hidden, jax.tree.map(jnp.add, sums, (found.weight, found.bias))


def _plan(config, dim, tokens, length, dtype):
    if length == 1:
        return TokenBlocks(ROWS, -(-tokens // ROWS))
    return TokenBlocks(length + 3, tokens // length, length, multiple=4)


OF_BLOCKS = BlockFunctions(
    plan=_plan,
    config=lambda config, dim, tokens: dataclasses.replace(config, is_shard=True),
    start=lambda config, needs, operands: (
        jnp.zeros_like(operands.weight, jnp.float32) if needs.weight else None,
        jnp.zeros(config.vocab_size, jnp.float32) if needs.bias else None,
    ),
    add=_add,
    complete=lambda config, operands, sums: Gradients(None, *sums),
)


@pytest.fixture(autouse=True, scope="module")
def blocks():
    """Give `xla` sums over blocks."""
    functions = partitioned(dataclasses.replace(XLA, of_blocks=OF_BLOCKS))
    rows = [
        dataclasses.replace(x, functions=functions) if x.name == "xla" else x for x in dispatch.TABLE["linear_logp"]
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLE, "linear_logp", tuple(rows))
        yield


@pytest.fixture
def traced_anew():
    """Give every block a trace, whatever was traced before."""
    jax.clear_caches()
    SEEN.clear()


@functools.cache
def batch() -> Batch:
    b = policy_losses.batch(LEAD, DIM, VOCAB)
    return b._replace(bias=jnp.linspace(-1, 1, VOCAB))


def assert_equal_up_to_rounding(found: Any, expected: Any) -> None:
    for actual, gold_value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within_contract(actual, gold_value, "linear_logp", jnp.float32, "gradient")


HEAD = {"temperature": jnp.linspace(0.5, 2, 24).reshape(LEAD), "logit_softcap": 5.0}


def head_of(name: str) -> dict[str, Any]:
    """The options of the head for a loss. One loss has an entropy's threshold."""
    return HEAD | ({"entropy_threshold": 4.5, "return_entropy": True} if name == "dapo" else {})


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients_by(calls: Any, name: str, b: Batch) -> Any:
    def loss(hidden, weight, bias):
        found = calls(b._replace(hidden=hidden, weight=weight, bias=bias), options=LOSSES[name], **head_of(name))
        return found.loss, found

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(b.hidden, b.weight, b.bias)


# The loss is policy_loss's own in every case. In `make test`, that of dapo has all options of the head and an entropy's
# threshold, and that of gspo blocks of whole sequences; both share their programs with test_any_mask.
@helpers.cover("name", [(x,) for x in LOSSES], lambda name: name in ("dapo", "gspo"))
def test_against_all_tokens_at_once(name, traced_anew):
    b = batch()
    b = b._replace(ref_logps=b.ref_logps if LOSSES[name].beta else None)
    found = gradients_by(Batch.loss, name, b)
    assert SEEN and all(needs.hidden and needs.weight and needs.bias for needs in SEEN)
    expected = gradients_by(Batch.in_two_calls, name, b)
    assert np.asarray(expected[1][0]).any()
    assert_same_bits(found[0], expected[0])
    assert_equal_up_to_rounding(found[1], expected[1])


SEQUENCES = st.one_of(
    st.just([False] * LEAD[1]), st.just([True] * LEAD[1]), st.lists(st.booleans(), min_size=LEAD[1], max_size=LEAD[1])
)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@settings(max_examples=10)
@given(active=st.lists(SEQUENCES, min_size=LEAD[0], max_size=LEAD[0]).map(np.array))
def test_any_mask(name, active):
    """Masked tokens hold NaN; there may be none that is active, and blocks that are full, in part or not at all."""
    b = batch()
    b = b._replace(mask=jnp.asarray(active), hidden=jnp.where(active[..., None], b.hidden, jnp.nan))
    found, expected = (gradients_by(calls, name, b) for calls in (Batch.loss, Batch.in_two_calls))
    assert not np.asarray(found[1][0])[~active].any()
    assert_same_bits(found[0], expected[0])
    if active.any():
        assert_equal_up_to_rounding(found[1], expected[1])
    else:
        assert not any(np.asarray(x).any() for x in found[1])


def test_against_float64(traced_anew):
    b = batch()._replace(bias=None, ref_logps=None)
    hidden, weight = (np.asarray(x, np.float64) for x in (b.hidden, b.weight))
    logits, advantages = hidden @ weight.T, np.asarray(b.advantages, np.float64)
    tokens = b.target_ids, b.mask, b.old_logps
    *_, slope = gold.grpo_loss_gold(logits, logits, *tokens, advantages, clip=(0.2, 0.2), beta=0.0)
    (loss, _), (d_hidden, d_weight) = gradients_of_batch(Batch.loss, b)
    assert SEEN and np.isfinite(loss)
    expected = slope @ weight, slope.reshape(-1, VOCAB).T @ hidden.reshape(-1, DIM)
    for gradient, gold_gradient in zip((d_hidden, d_weight), expected, strict=True):
        assert_within_contract(gradient, gold_gradient, "linear_logp", jnp.float32, "gradient")


def loss_of(hidden, weight, bias=None, **options):
    return batch()._replace(hidden=hidden, weight=weight, bias=bias).loss(**options).loss


def test_what_needs_no_gradient_is_not_formed(traced_anew):
    b = batch()
    jax.eval_shape(loss_of, b.hidden, b.weight)
    assert not SEEN
    jax.eval_shape(jax.grad(loss_of), b.hidden, b.weight)
    assert SEEN and all(needs.hidden and not needs.weight and not needs.bias for needs in SEEN)
    SEEN.clear()
    jax.eval_shape(jax.grad(loss_of, 1), b.hidden, b.weight)
    assert SEEN and all(needs.weight and not needs.hidden for needs in SEEN)
    # One jitted function is differentiated by other operands each time.
    jitted = jax.jit(loss_of)
    hidden, weight, both = (jax.grad(jitted, i)(b.hidden, b.weight) for i in (0, 1, (0, 1)))
    assert_same_bits((hidden, weight), both)


def test_metrics_carry_no_gradient():
    gradient = jax.jit(jax.grad(lambda hidden: batch()._replace(hidden=hidden).loss().ratio_mean))
    assert not np.asarray(gradient(batch().hidden)).any()


def test_an_outer_scale():
    """A power of two scales the bits, and a loss that does not count has gradients of 0, whatever its rows hold."""
    b = batch()
    scaled = jax.jit(lambda x, hidden: jax.grad(lambda *y: x * loss_of(*y), (0, 1, 2))(hidden, b.weight, b.bias))
    one, eight = (scaled(x, b.hidden) for x in (1.0, 8.0))
    assert_same_bits(eight, jax.tree.map(lambda x: 8 * x, one))
    nothing = scaled(0.0, b.hidden.at[0].set(jnp.nan))
    assert not any(np.asarray(x).any() for x in nothing)
    masked = scaled(jnp.nan, b.hidden)[0][~b.mask]
    assert len(masked) and not np.asarray(masked).any()


@functools.cache
def gradient_of_loss() -> Any:
    """The jitted value and gradients of hidden and weight, of which JAX keeps a program for each layout."""
    return jax.jit(jax.value_and_grad(loss_of, (0, 1)))


def test_vmap_and_remat_and_scan():
    b = batch()
    gradient = jax.grad(loss_of, (0, 1))
    several = jnp.stack([b.hidden, 2 * b.hidden])

    @jax.jit
    def transformed():
        remat = jax.grad(jax.checkpoint(loss_of), (0, 1))(b.hidden, b.weight)
        _, in_scan = jax.lax.scan(lambda _, hidden: (None, gradient(hidden, b.weight)), None, several)
        return remat, in_scan, jax.vmap(gradient, (0, None))(several, b.weight)

    (remat, in_scan, batched), (_, expected) = transformed(), gradient_of_loss()(b.hidden, b.weight)
    assert_equal_up_to_rounding(remat, expected)
    assert_equal_up_to_rounding(jax.tree.map(lambda x: x[0], in_scan), expected)
    assert_equal_up_to_rounding(batched, in_scan)


def test_no_second_derivative():
    with pytest.raises(ValueError, match="linear_grpo_loss has no second derivative"):
        jax.grad(lambda hidden: jax.grad(loss_of)(hidden, batch().weight).sum())(batch().hidden)


@pytest.mark.parametrize("spec", [("data", None), (None, "data")])
def test_programs_over_devices_take_all_tokens_at_once(spec):
    """Tokens, or the vocabulary, over two devices: XLA may partition no loop over blocks."""
    b = batch()
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    hidden, weight = (
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(axis)))
        for x, axis in zip((b.hidden, b.weight), spec, strict=True)
    )
    gradient = gradient_of_loss()
    program = gradient.lower(hidden, weight)
    # A call by all tokens at once is what XLA partitions; a program of one device has nothing to partition.
    assert "CustomSPMDPartitioning" in program.as_text()
    assert "CustomSPMDPartitioning" not in gradient.lower(b.hidden, b.weight).as_text()
    assert_equal_up_to_rounding(program.compile()(hidden, weight), gradient(b.hidden, b.weight))


def explained(**changes: Any) -> str:
    b = batch()
    return rlk_jax.explain("linear_grpo_loss", *b._replace(**changes.pop("arrays", {})), **changes).plan


def test_explain_says_what_a_gradient_takes():
    assert "takes 5 blocks of 5 tokens, each" in explained()
    assert "  a gradient takes 5 blocks" in str(rlk_jax.explain("linear_grpo_loss", *batch()))
    assert "takes up to 4 blocks of whole sequences, within 9 tokens, each" in explained(options=LOSSES["gspo"])
    reasons = {
        "an entropy bonus needs the logits once more": {"options": LossOptions(entropy_coef=0.1)},
        "a low-rank term has sums of its own": {"low_rank": (jnp.ones((2, DIM)), jnp.ones((VOCAB, 2)), 1.0)},
        "deterministic has no sums over blocks of tokens": {"implementation": "deterministic"},
    }
    for reason, changes in reasons.items():
        assert explained(**changes) == f"a gradient takes all tokens at once: {reason}"
    mesh = jax.make_mesh((2,), ("data",))
    mask = jax.device_put(batch().mask, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        assert explained(arrays={"mask": mask}).endswith(": the arrays lie over a mesh")


@pytest.mark.parametrize("loss", get_args(LossType))
def test_which_losses_are_sums_over_tokens(loss):
    """A log-prob's gradient does not depend on other tokens where the options say so, and else on those of its sequence
    alone.
    """
    options = LossOptions(
        loss_type=loss,
        beta=0.1,
        importance_cap=1.5,
        importance_level="token" if loss == "vespo" else "sequence",
        max_completion_length=6 if loss == "dr_grpo" else None,
    )
    b = batch()

    @jax.jit
    def gradient(logp):
        given = {"ref_logps": b.ref_logps, "rollout_logps": b.old_logps - 0.1, "options": options}
        return jax.grad(lambda x: policy_loss(x, b.old_logps, b.advantages, jnp.ones(LEAD), **given).loss)(logp)

    def is_same(first, other):
        return (helpers.bits(first) == helpers.bits(other)).all()

    logp = b.old_logps + 0.01
    expected = gradient(logp)
    assert is_same(expected[:2], gradient(logp.at[2:].set(-400.0))[:2])
    found = gradient(logp.at[:, 3:].set(-400.0))
    assert is_same(expected[:, :3], found[:, :3]) == options.is_sum_over_tokens


def plan_of(
    tokens: int, dim: int, vocab: int, budget: int | None = None, dtype: Any = jnp.bfloat16, length: int = 1
) -> Any:
    """The plan of `mosaic`."""
    config = head_config(vocab, may_ignore=True, memory_budget=budget)
    of_blocks = hopper.mosaic().of_blocks
    assert of_blocks is not None and hopper.cuda().of_blocks is None
    return of_blocks.plan(config, dim, tokens, length, jnp.dtype(dtype))


def test_blocks_are_taken_where_they_pay():
    """They pay where exponentials exceed the budget by more than the 4·V·D bytes of dW's sums, which they add to."""
    shapes = (4096, 2048, 131072), (4096, 4096, 131072), (8192, 4096, 151936)
    assert all(isinstance(plan_of(*shape, budget), str) for shape in shapes for budget in (None, 2**30))
    assert plan_of(32768, 4096, 151936, 2**30) == TokenBlocks(3328, 10)
    assert plan_of(65536, 2048, 131072, 2**30) == TokenBlocks(3840, 18)
    # 2·N·V − budget is 4·V·D where N is 2·D and some more tokens, whose exponentials the budget holds.
    assert isinstance(plan_of(8192 + 3072, 4096, 151936, 2**30), str)
    assert isinstance(plan_of(8192 + 3584, 4096, 151936, 2**30), TokenBlocks)
    assert "keeps no 1024 tokens' exponentials" in plan_of(65536, 2048, 131072, 2**26)
    assert "cannot be read in place" in plan_of(131072, 2056, 131072, 2**33)
    assert "float16 scales" in plan_of(65536, 2048, 131072, 2**30, jnp.float16)


def test_blocks_hold_whole_sequences():
    """Every block has room for a sequence behind 63 tokens of the one before, and for so many that half of its rows
    repay the sums of dW.
    """
    shape = 32768, 4096, 151936, 2**30
    assert plan_of(*shape, length=1024) == TokenBlocks(3328, 11, 1024, 64)
    assert plan_of(*shape, length=2048) == TokenBlocks(3328, 16, 2048, 64)
    assert "3328 tokens that 1024 MiB keep has no room for a sequence of 4096" in plan_of(*shape, length=4096)
    budget = 2**29  # it keeps 1536 tokens, or a few more
    assert isinstance(plan_of(*shape[:3], budget), TokenBlocks)
    assert "keeps no 2048 tokens' exponentials" in plan_of(*shape[:3], budget, length=128)


@given(
    tokens=st.integers(1, 200_000),
    dim=st.integers(1, 1000),
    vocab=st.integers(1, 300_000),
    budget=st.integers(1, 2**34),
)
@example(tokens=1474, dim=16, vocab=256, budget=4_598_222)  # two equal blocks would have fewer than 1024 tokens
def test_every_plan_keeps_within_the_budget(tokens, dim, vocab, budget):
    plan = plan_of(tokens, 8 * dim, vocab, budget)
    if isinstance(plan, TokenBlocks):
        assert plan.rows % 256 == 0 and 1024 <= plan.rows < tokens
        assert (plan.count - 1) * plan.rows < tokens <= plan.count * plan.rows
        assert 2 * plan.rows * (vocab + 8 * dim) <= budget
        groups = column_groups(vocab)
        places = groups.count * padded(groups.width, 256)
        assert 2 * tokens * places * 1.2 > budget + 4 * vocab * 8 * dim


@given(
    sequences=st.integers(1, 500),
    length=st.integers(2, 4000),
    dim=st.integers(1, 1000),
    vocab=st.integers(1, 300_000),
    budget=st.integers(2**26, 2**34),
)
@example(sequences=16, length=2048, dim=512, vocab=151936, budget=2**30)
def test_every_plan_of_sequences_has_room_for_them(sequences, length, dim, vocab, budget):
    """Each block has room for a sequence behind 63 tokens, and within the same budget as other blocks."""
    call = sequences * length, 8 * dim, vocab, budget
    plan, of_tokens = plan_of(*call, length=length), plan_of(*call)
    if isinstance(of_tokens, str):
        assert isinstance(plan, str)
    if isinstance(plan, TokenBlocks):
        assert (plan.length, plan.multiple) == (length, 64)
        assert max(2048, length + 63) <= plan.rows < sequences * length
        assert 2 * plan.rows * (vocab + 8 * dim) <= budget
        assert -(-sequences // ((plan.rows - 63) // length)) == plan.count >= of_tokens.count
