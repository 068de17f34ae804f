"""Shards of both heads of linear_kl without as many devices: ranks one after the other, and programs that are only
lowered.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlk_jax import dispatch, linear_kl
from rlk_jax.core.fixed_order import ascending_sum
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.shard import Shard, real_columns_of_shard
from rlk_jax.ops.linear_kl.checks import check_call, tokens_of_call
from rlk_jax.ops.linear_kl.options import KlInputs, KlOptions, KlTokens, Needs, OneHead, OneHeadConfig, Operands
from tests.support.divergences import Case, Found, Problem
from tests.support.helpers import assert_same_bits


class _Missing(Exception):
    """The groups of a gather for which those of other ranks are not known yet."""

    def __init__(self, groups: Any) -> None:
        super().__init__()
        self.groups = groups


def _forwards(forward: Any, config: Any, ranks: Sequence[tuple[Operands, KlTokens]]) -> list[Any]:
    """What the forward gives on every rank: it begins anew for each gather, up to which all ranks' groups are known."""
    gathered: list[Any] = []
    while True:
        done, missing = [], []
        for own in ranks:
            known = iter(gathered)

            def gather(groups: Any, known: Any = known) -> Any:
                found = next(known, None)
                if found is None:
                    raise _Missing(groups)
                return found

            try:
                done.append(forward(config, *own, gather))
            except _Missing as found:
                missing.append(found.groups)
        if not missing:
            return done
        gathered.append(jax.tree.map(lambda *ranks: jnp.concatenate(ranks), *missing))


def one_rank_after_another(case: Case, problem: Problem, implementation: str, count: int) -> Found:
    """The divergences from a teacher's head of every rank, as `_of_ranks` has them."""
    options = KlOptions(**case.options)
    heads = (
        problem.hidden,
        _as_stored(problem.weight, options.weight_layout),
        problem.teacher_hidden,
        _as_stored(problem.teacher_weight, options.teacher_weight_layout),
    )
    biases, rows = (problem.bias, problem.teacher_bias), (problem.completion_mask, problem.temperature)
    inputs = KlInputs(*heads, *biases, *rows, case.teacher_temperature, None, None)
    return _of_ranks(inputs, options, problem.upstream, implementation, count)


def list_one_rank_after_another(options: KlOptions, problem: Any, implementation: str, count: int) -> Found:
    """The divergences from what a teacher lists (a problem of tests/ops/linear_kl/test_top_k.py) of every rank, as
    `_of_ranks` has them.
    """
    weight = _as_stored(problem.weight, options.weight_layout)
    rows = problem.mask, problem.temperature, None, problem.ids, problem.logps
    inputs = KlInputs(problem.hidden, weight, None, None, problem.bias, None, *rows)
    return _of_ranks(inputs, options, problem.upstream, implementation, count)


def _as_stored(weight: Any, layout: WeightLayout) -> Any:
    """A head `[V, D]` in a layout, or one in that layout as `[V, D]`."""
    return weight if layout == "vd" else weight.T


def _of_ranks(given: KlInputs, options: KlOptions, upstream: Any, implementation: str, count: int) -> Found:
    """The divergences of every rank, which have the same bits, and gradients with dH by the canonical reduction, by an
    implementation whose gathers stand in no loop.
    """
    functions = next(x.functions for x in dispatch.TABLE["linear_kl"] if x.name == implementation)
    inputs, config, _ = check_call(given, options)
    columns = config.student.vocab_size // count
    shard = Shard("tp", count, columns, config.vocabulary, "canonical", reduce_hidden_grad=True)
    whole = tokens_of_call(inputs, config, None)

    def rank(number: int) -> tuple[Operands, KlTokens]:
        start = number * columns

        def cut(config: OneHeadConfig | None, hidden: Any, weight: Any, bias: Any) -> OneHead | None:
            if config is None:
                return None
            own = jax.lax.slice_in_dim(weight, start, start + columns, axis=config.vocab_axis)
            own_bias = None if bias is None else bias[start : start + columns]
            return OneHead(hidden.reshape(-1, hidden.shape[-1]), own, own_bias)

        student = cut(config.student, inputs.hidden, inputs.lm_head_weight, inputs.bias)
        teacher = cut(config.teacher, inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias)
        assert student is not None
        top_k = None if whole.top_k is None else whole.top_k.of_shard(start, columns)
        operands = Operands(student, teacher, real_columns_of_shard(shard, jnp.int32(start)))
        return operands, whole._replace(top_k=top_k)

    @jax.jit
    def run(ranks: Sequence[tuple[Operands, KlTokens]], upstream: Any) -> tuple[Any, Any]:
        own, needs = config.of_shard(shard), Needs(True, True, inputs.bias is not None)
        forwards = _forwards(functions.forward, own, ranks)
        gradients = [
            functions.gradients(own, needs, *mine, residual, upstream)
            for mine, (_, residual) in zip(ranks, forwards, strict=True)
        ]
        return [jnp.where(whole.active, values, 0) for values, _ in forwards], gradients

    values, gradients = run([rank(i) for i in range(count)], upstream.reshape(-1))
    for x in values:
        assert_same_bits(x, values[0])
    d_hidden = ascending_sum(jnp.concatenate([x.hidden for x in gradients])).astype(inputs.hidden.dtype)
    d_weight = jnp.concatenate([x.weight for x in gradients], config.student.vocab_axis)
    return Found(
        values[0].reshape(upstream.shape),
        d_hidden.reshape(inputs.hidden.shape),
        _as_stored(d_weight, options.weight_layout),
        None if inputs.bias is None else jnp.concatenate([x.bias for x in gradients]),
    )


def list_lowered(vocab: int, *, check_vma: bool, reduction: Any, implementation: str = "mosaic") -> str:
    """What `lowered` gives, where the teacher lists eight tokens."""
    options = {"kind": "jsd", "reduction": reduction, "implementation": implementation, "memory_budget": 2**20}
    options |= {"axis_name": "tp", "global_vocab_size": vocab - 3}

    def on_rank(hidden: Any, weight: Any, bias: Any, ids: Any, logps: Any) -> Any:
        return linear_kl(hidden, weight, bias=bias, teacher_ids=ids, teacher_logps=logps, **options)

    mesh, specs = Mesh(jax.devices()[:2], ("tp",)), (P(), P("tp"), P("tp"), P(), P())
    call = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    gradients = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum(), (0, 1, 2)))
    heads = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((300, 1024), (vocab, 1024), (vocab,))]
    listed = [jax.ShapeDtypeStruct((300, 8), dtype) for dtype in (jnp.int32, jnp.float32)]
    return gradients.trace(*heads, *listed).lower(lowering_platforms=("cuda",)).as_text()


def lowered(
    kind: str, vocab: int, *, check_vma: bool, reduction: Any, tokens: int = 300, implementation: str = "mosaic"
) -> str:
    """The program of gradients on two ranks by an implementation's kernels, for CUDA, in several slices of padded
    heads.
    """
    real = {"global_vocab_size": vocab - 3, "teacher_global_vocab_size": vocab - 3}
    options = {"kind": kind, "reduction": reduction, "implementation": implementation, "memory_budget": 2**20, **real}
    on_rank = functools.partial(linear_kl, axis_name="tp", **options)
    specs = (P(), P("tp"), P(), P("tp"), P("tp"))
    mesh = Mesh(jax.devices()[:2], ("tp",))
    call = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    shapes = ((tokens, 1024), (vocab, 1024), (tokens, 512), (vocab, 512), (vocab,))
    gradients = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum(), (0, 1, 4)))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
