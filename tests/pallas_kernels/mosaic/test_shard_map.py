"""The Mosaic implementation inside shard_map, lowered for an H200 on a machine without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import attention
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.steps import make_mesh
from tests.support import kl_shards, shards
from tests.support.divergences import KINDS
from tests.support.helpers import cover

LOWERED = [
    (vocab, check_vma, *rest)
    for vocab in (16384, 16000)
    for check_vma in (True, False)
    for rest in ((0, "sum"), (300, "sum"), (300, "canonical"))
]
LOWERED_IN_MAKE_TEST = ((16384, False, 300, "sum"), (16000, True, 300, "canonical"), (16384, False, 0, "sum"))


@pytest.mark.parametrize(
    ("vocab", "check_vma", "tokens", "reduction"),
    [pytest.param(*x, marks=() if x in LOWERED_IN_MAKE_TEST else pytest.mark.full) for x in LOWERED],
)
def test_lowers_in_several_slices(vocab, check_vma, tokens, reduction, for_h200):
    """Slices of whole chunks are read in place, others are copied; the types of what kernels write have to agree.

    In make test each vocabulary, each check and each reduction occurs once with tokens. There,
    test_ranks_keep_exponentials (here) reads slices in place with the check, and the script triton/aot lowers the code
    that all kernels share with each check and each reduction.
    """
    program = shards.lowered("mosaic", vocab, check_vma=check_vma, reduction=reduction, tokens=tokens)
    assert ("mosaic_gpu" in program) == (tokens > 0)


@pytest.mark.parametrize(
    ("changes", "keeps"), [({}, True), pytest.param({"return_entropy": True}, False, marks=pytest.mark.full)]
)
def test_ranks_keep_exponentials(changes, keeps, for_h200):
    """Exponentials are kept inside shard_map too, except where the gradient of an entropy cannot use them.

    In make test, test_gradients_of_an_entropy_recompute (test_interpreter.py) catches a wrong exception: the
    same code decides outside shard_map.
    """
    options = {"return_entropy": False, "memory_budget": 2**28} | changes
    program = shards.lowered("mosaic", 16384, check_vma=True, reduction="sum", tokens=300, **options)
    assert ("linear_logp_dlogits_from_kept_exponentials" in program) == keeps


@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_most_probable_tokens_lower(check_vma, for_h200):
    """The types of what is gathered and of what kernels write have to agree. In make test without the check, under
    which test_shards_in_another_order has what all implementations share.
    """
    options = {"return_top_k": 20, "return_target_rank": True, "return_entropy": False}
    program = shards.lowered("mosaic", 16000, check_vma=check_vma, reduction="sum", tokens=300, **options)
    assert "linear_logp_of_logits" in program


KL_LOWERED = [
    (kind, vocab, check_vma, reduction)
    for kind in KINDS
    for vocab in (16384, 16000)
    for check_vma in (True, False)
    for reduction in ("sum", "canonical")
]
KL_LOWERED_IN_MAKE_TEST = (("reverse", 16384, False, "sum"), ("jsd", 16000, True, "canonical"))


# In make test, each vocabulary, check and reduction occurs once; the forward divergence is that of exchanged heads.
@cover("kind, vocab, check_vma, reduction", KL_LOWERED, lambda *x: x in KL_LOWERED_IN_MAKE_TEST)
def test_linear_kl_lowers(kind, vocab, check_vma, reduction, for_h200):
    """The types of what is gathered and of what kernels write have to agree."""
    program = kl_shards.lowered(kind, vocab, check_vma=check_vma, reduction=reduction)
    assert {"sum": "reduce_scatter", "canonical": "all_to_all"}[reduction] in program
    assert ("linear_kl_mixture" if kind == "jsd" else "linear_kl_partials") in program


LISTS_LOWERED = [x[1:] for x in KL_LOWERED if x[0] == "jsd"]


@cover("vocab, check_vma, reduction", LISTS_LOWERED, lambda *x: x == (16000, True, "sum"))
def test_linear_kl_of_a_list_lowers(vocab, check_vma, reduction, for_h200):
    """In make test the types are checked, of heads that are copied; test_linear_kl_lowers has both orders of sums."""
    program = kl_shards.list_lowered(vocab, check_vma=check_vma, reduction=reduction)
    assert {"sum": "reduce_scatter", "canonical": "all_to_all"}[reduction] in program and "mosaic_gpu" in program


@pytest.mark.parametrize("mesh", ["data=1,tensor=1", "data=2,tensor=2"])
def test_logits_that_are_sampled_from_are_scored_on_a_mesh(mesh, for_h200):
    head = MeshHead(make_mesh(GrpoConfig(mesh=mesh)), 1000, "mosaic", jnp.bfloat16)
    arrays = jax.ShapeDtypeStruct((8, 1000), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    assert "mosaic_gpu" in jax.jit(head.logps_of_logits).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_attention_over_batch_and_heads(check_vma, for_h200):
    """The types of what each kernel reads and writes agree. In make test the check is on, which refuses more."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    lies = jax.P("data", None, "heads")
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(lies,) * 3, out_specs=lies, check_vma=check_vma)
    arrays = [jax.ShapeDtypeStruct((2, 200, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    gradient = jax.jit(jax.grad(lambda *x: sharded(*x).astype(jnp.float32).sum(), (0, 1, 2)))
    program = gradient.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") == 3
